"""Trains on scored groups: packed replay, optimizer, offloading, checkpoints. Knows no algorithm by name."""
