"""What families share, and attention in an order that a compiler can fuse."""
