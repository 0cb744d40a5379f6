"""The files of a run: the only place that knows their names and formats."""
