"""Workers on the machines of a Ray cluster. Ray is imported here and nowhere else."""
