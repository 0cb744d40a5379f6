"""Splits scored groups into packs of terms and runs them through the model."""
