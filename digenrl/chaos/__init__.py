"""Deterministic simulation testing: the production scheduler and driver in seeded virtual worlds with faults."""
