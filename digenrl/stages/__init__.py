"""Training one model in stages: each process computes some of its blocks, over links of any speed."""
