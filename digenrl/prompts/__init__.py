"""Where prompts come from, and in which order they are drawn."""
