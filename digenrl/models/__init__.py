"""Model families behind one interface, and the stochastic step."""

import os

# Packs of different sizes fragment memory in fixed segments, and several threads pin host memory several times as
# fast as one. torch reads these settings before its first allocation; a user's own take precedence.
_SETTINGS = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
for _name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # since torch 2.10, and before
    os.environ.setdefault(_name, _SETTINGS)
