"""Reads prompts from files and chooses the prompt of each group."""
