"""Sizes the pools: what a card does in a second, what a model asks of it, and which split of cards is fastest."""
