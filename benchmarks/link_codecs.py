"""What codecs on the links between stages do to learning: ResNet-101 and GPT-2, trained from random weights.

    python benchmarks/link_codecs.py [--model resnet101 gpt2] [--codecs none int8] [--steps 300] [--seeds 3]
                                     [--json rows.json]

A model is cut into three stages. They are computed in one process: what would cross a link is coded and decoded in
its place, which gives the numbers of real links. All 101 layers of the ResNet have an eighth of their width, and
classify noisy 32 x 32 pictures, of which a tenth has a wrong label. GPT-2 has 6 layers of width 64 and reads the
source of Python's argparse, character by character. Every codec starts from the same weights and sees the same
batches. The learning rate falls linearly to zero. The loss is that of 1,024 other samples, or 512 pieces of text,
after the last step, computed with the codecs. A run without codecs whose initial weights have a relative noise of
1e-4 shows how much of a difference is chance.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from digenrl.stages.codec_choice import Codec, LinkCodecs
from digenrl.stages.codecs import decode, encode
from digenrl.stages.partition import even_bounds

STAGES = 3
HELD_OUT_BATCHES, HELD_OUT_SEED = {"resnet101": 64, "gpt2": 32}, 1_000
CLASSES, WRONG_LABELS, NOISE = 10, 0.1, 0.5
BATCH, CONTEXT = 16, 32  # samples, characters

NOISY = "none, noise of 1e-4 on the initial weights"
CODECS = {
    "none": LinkCodecs(),
    NOISY: LinkCodecs(),
    "int8": LinkCodecs(Codec("int8"), Codec("int8")),
    "gradients int4": LinkCodecs(gradients=Codec("int4")),
    "gradients sampled 1/10": LinkCodecs(gradients=Codec("sampled", 10)),
    "gradients top 1/10": LinkCodecs(gradients=Codec("top_k", 10)),
    "activations top 1/100": LinkCodecs(activations=Codec("top_k", 100)),
}

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """The loss after training with a codec."""

    model: str
    codecs: str
    seed: int
    loss: float
    seconds: float


class Link(torch.autograd.Function):
    """What arrives at the other end: of activations, and backwards of their gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, codecs: LinkCodecs) -> Tensor:
        ctx.codec = codecs.gradients
        return arrived(value, codecs.activations)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return arrived(gradients[0], ctx.codec), None


def arrived(value: Tensor, codec: Codec) -> Tensor:
    """Coded and decoded."""
    return decode(encode(value.contiguous(), codec), tuple(value.shape), value.dtype, codec)


class Embedding(nn.Module):
    """The first module of GPT-2's chain."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe = model.transformer.wte, model.transformer.wpe

    def forward(self, tokens_BT: Tensor) -> Tensor:
        embedded: Tensor = self.wte(tokens_BT) + self.wpe(torch.arange(tokens_BT.shape[1])[None])
        return embedded


def resnet101() -> list[nn.Module]:
    """The chain of its modules."""
    config = ResNetConfig(
        depths=[3, 4, 23, 3], embedding_size=8, hidden_sizes=[32, 64, 128, 256], num_labels=CLASSES
    )
    model: Any = ResNetForImageClassification(config).train()
    blocks = [layer for stage in model.resnet.encoder.stages for layer in stage.layers]
    return [model.resnet.embedder, *blocks, nn.Sequential(model.resnet.pooler, model.classifier)]


def gpt2() -> list[nn.Module]:
    """The chain of its modules; the first and the last have a weight in common."""
    config = GPT2Config(
        vocab_size=128,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=6,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        embd_pdrop=0,
        attn_pdrop=0,
        resid_pdrop=0,
    )
    model: Any = GPT2LMHeadModel(config).train()
    return [Embedding(model), *model.transformer.h, nn.Sequential(model.transformer.ln_f, model.lm_head)]


def pictures(seed: int) -> Iterator[Batch]:
    """A pattern for each class, with noise."""
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = functional.interpolate(coarse, size=(32, 32), mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        noise = torch.randn(BATCH, 3, 32, 32, generator=generator)
        is_wrong = torch.rand(BATCH, generator=generator) < WRONG_LABELS
        others = torch.randint(CLASSES, (BATCH,), generator=generator)
        yield patterns[labels] + NOISE * noise, torch.where(is_wrong, others, labels)


def characters(seed: int) -> Iterator[Batch]:
    """Pieces of a text, and the characters that follow."""
    text = inspect.getsource(argparse).encode("ascii", errors="ignore")
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(codes) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
        pieces = torch.stack([codes[start : start + CONTEXT + 1] for start in starts])
        yield pieces[:, :-1], pieces[:, 1:]


MODELS = {"resnet101": (resnet101, pictures, 3e-3), "gpt2": (gpt2, characters, 1e-3)}


def train(model: str, codecs: str, steps: int, seed: int) -> Row:
    """Trains with the codecs of a name on both links."""
    make_chain, batches, learning_rate = MODELS[model]
    torch.manual_seed(seed)
    chain = make_chain()
    cuts = even_bounds(len(chain), STAGES)[1:-1]
    parameters = list(dict.fromkeys(p for module in chain for p in module.parameters()))
    if codecs == NOISY:
        for parameter in parameters:
            parameter.data.mul_(1 + 1e-4 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    def loss_of(batch: Batch) -> Tensor:
        value, target = batch
        for index, module in enumerate(chain):
            value = Link.apply(value, CODECS[codecs]) if index in cuts else value  # type: ignore[no-untyped-call]
            value = module(value)
        return functional.cross_entropy(value.flatten(0, -2), target.flatten())

    began = perf_counter()
    for batch in islice(batches(seed), steps):
        loss_of(batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    for module in chain:
        module.eval()
    with torch.no_grad():
        losses = [float(loss_of(batch)) for batch in islice(batches(HELD_OUT_SEED), HELD_OUT_BATCHES[model])]
    return Row(model, codecs, seed, fmean(losses), perf_counter() - began)


def print_table(rows: Sequence[Row]) -> None:
    """The mean over seeds, and the mean difference from the same seed without a codec, with its standard error."""
    console, table = Console(), Table()
    for title in ("model", "codecs", "loss of each seed", "loss", "difference", "seconds"):
        table.add_column(title, justify="left" if title in ("model", "codecs") else "right")
    for model, codecs in dict.fromkeys((row.model, row.codecs) for row in rows):
        found, plain = (
            [row for row in rows if (row.model, row.codecs) == (model, name)] for name in (codecs, "none")
        )
        loss, seconds = fmean(row.loss for row in found), fmean(row.seconds for row in found)
        difference = ""
        if plain and codecs != "none":
            without = {row.seed: row.loss for row in plain}
            percent = [100 * (row.loss / without[row.seed] - 1) for row in found if row.seed in without]
            error = f" +- {stdev(percent) / sqrt(len(percent)):.2f}" if len(percent) > 1 else ""
            difference = f"{fmean(percent):+.2f}{error} %"
        each = ", ".join(f"{row.loss:.3f}" for row in found)
        table.add_row(model, codecs, each, f"{loss:.4f}", difference, f"{seconds:.0f}")
    console.print(table)


def main() -> None:
    """Trains all models with all codecs, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.model:
        for seed in range(arguments.seeds):
            for codecs in arguments.codecs:
                rows.append(train(model, codecs, arguments.steps, seed))
                print(rows[-1], flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print_table(rows)


if __name__ == "__main__":
    main()
