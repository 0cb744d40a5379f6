"""The model families behind one contract, and the stochastic step."""

import os

# Packs of different sizes leave gaps in memory that is handed out in fixed pieces; torch reads this before its
# first allocation on a card, and a user's own setting stays.
for _name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # since torch 2.10, and before
    os.environ.setdefault(_name, "expandable_segments:True")
