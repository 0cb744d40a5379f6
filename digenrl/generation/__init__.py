"""Generates samples from encoded prompts: noise, denoising, decoding."""
