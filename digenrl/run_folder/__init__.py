"""The files of a run: their names and formats, read and written here and nowhere else."""
