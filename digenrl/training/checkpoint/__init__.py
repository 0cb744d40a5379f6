"""Checkpoints and exported weights on disk."""
