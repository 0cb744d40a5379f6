"""Cuts scored groups into packs of (sample, time-step) pairs and runs them."""
