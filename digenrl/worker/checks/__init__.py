"""Checks of a recipe and of this machine, before anything is loaded."""
