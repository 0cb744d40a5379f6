"""How a run tells that it failed."""


class RunFailedError(RuntimeError):
    """A run that cannot go on; the message says why, and what is kept."""
