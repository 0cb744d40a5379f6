"""The devices of a trainer's ranks: how fast they are, and how much memory is free."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from digenrl.models.passes.matrix_rate import matrix_tflops
from digenrl.training.packing.pack_size import free_bytes

SPEED_STEP = 0.05  # of the fastest card; smaller differences are noise


@dataclass(frozen=True, slots=True)
class CardFacts:
    """A device: its name, the measured rate of matrix products, and free memory; None if it is not limited."""

    name: str
    tflops: float
    free_bytes: int | None


def measure_card(device: torch.device) -> CardFacts:
    """Takes less than a second. Processes on a CPU share its memory, so that none has a limit of its own."""
    if device.type == "cuda":
        return CardFacts(torch.cuda.get_device_name(device), matrix_tflops(device), free_bytes(device))
    name = f"{platform.processor() or platform.machine()} with {torch.get_num_threads()} threads"
    return CardFacts(name, matrix_tflops(device), None)


def with_recorded_rates(cards: Sequence[CardFacts], file: Path) -> list[CardFacts]:
    """The cards with the rates in a file, if it has those of the same cards; else writes the file.

    A measured rate varies, and a run that starts again must cut the model as before.
    """
    names = [card.name for card in cards]
    with suppress(OSError, ValueError, TypeError, KeyError):
        recorded = json.loads(file.read_text(encoding="utf-8"))
        if [each["name"] for each in recorded] == names:
            rates = [float(each["tflops"]) for each in recorded]
            return [replace(card, tflops=rate) for card, rate in zip(cards, rates, strict=True)]
    content = [{"name": card.name, "tflops": card.tflops} for card in cards]
    file.write_text(json.dumps(content), encoding="utf-8")
    return list(cards)


def relative_speeds(cards: Sequence[CardFacts]) -> tuple[float, ...]:
    """Speeds relative to the fastest card. Cards of one name are equally fast."""
    rates = [fmean(other.tflops for other in cards if other.name == card.name) for card in cards]
    return tuple(max(1, round(rate / max(rates) / SPEED_STEP)) * SPEED_STEP for rate in rates)
