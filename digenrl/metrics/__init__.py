"""Numbers of a run: one row per step, written to files, TensorBoard and Weights & Biases."""
