"""Models over several processes: divided tokens, sharded parameters, and blocks in stages."""
