"""A live run seen from the driver: its folder, its growing files, its numbers, and what the terminal shows."""
