"""How workers leave tensors for each other: files in memory, an object store, or a broadcast of full weights."""
