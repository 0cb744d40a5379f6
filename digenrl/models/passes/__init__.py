"""How forward passes run: attention kernels, compiled blocks, CUDA graphs, and what they cost."""
