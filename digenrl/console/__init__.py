"""Terminal output of a training run."""
