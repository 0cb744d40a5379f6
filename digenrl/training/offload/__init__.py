"""Moves trainer state between device and host memory."""
