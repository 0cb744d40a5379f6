"""RL algorithms, one file each: advantages and a loss over (sample, time-step) pairs."""
