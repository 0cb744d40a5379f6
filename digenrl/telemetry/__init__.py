"""The trace of a run, simulated or live, and its views."""
