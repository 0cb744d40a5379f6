"""What the planner knows: cards, clusters, models and workloads."""
