"""Turns prompts into samples: noise, denoising, decoding, in slices."""
