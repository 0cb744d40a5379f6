"""Scorers behind one contract: images or frames, prompts and metadata in, one number per sample out."""
