"""Frozen linear layers with quantized weights: the base model under LoRA adapters, and text encoders."""
