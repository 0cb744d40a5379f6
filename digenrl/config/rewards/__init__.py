"""Settings of rewards."""
