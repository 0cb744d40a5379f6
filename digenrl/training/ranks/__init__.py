"""Several trainer processes that act as one."""
