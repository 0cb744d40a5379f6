"""RL post-training for diffusion models on separate pools of generator, trainer and reward cards."""

__version__ = "0.2.0"
