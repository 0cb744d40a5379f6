"""LoRA adapters: adding them, writing them, and starting from existing ones."""
