"""How jobs reach workers and results come back: inline, processes, or Ray."""
