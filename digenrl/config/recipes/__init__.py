"""Settings of one training run, and the files that contain them."""
