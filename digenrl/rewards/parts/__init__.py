"""What several rewards share, and the longer parts of some."""
