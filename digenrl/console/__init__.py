"""What a training run shows in the terminal."""
