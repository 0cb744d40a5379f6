"""Models with two transformers: which of them a recipe trains."""

from __future__ import annotations

from typing import Literal

Expert = Literal["high", "low", "both"]
"""The transformer for high noise levels, the one for low ones, or both."""
