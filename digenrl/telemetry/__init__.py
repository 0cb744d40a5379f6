"""One trace of a run, simulated or real, and the ways to look at it."""
