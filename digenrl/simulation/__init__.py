"""Runs the production scheduler on a virtual clock, and reports the cost of a schedule."""
