"""Plans a run on a cluster: the costs of cards and models, and the fastest split into generators and a trainer."""
