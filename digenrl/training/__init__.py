"""Packed replay, optimizer, adapters and checkpoints; blind to which algorithm it serves."""
