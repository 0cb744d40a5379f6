"""The metrics of a run, computed per step and written to files, TensorBoard and Weights & Biases."""
