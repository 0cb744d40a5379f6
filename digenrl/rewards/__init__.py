"""Rewards, one file each, behind one contract: pixels, prompts and metadata in, one number per sample out."""
