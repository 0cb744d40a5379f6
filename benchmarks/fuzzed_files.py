"""Random recipes and prompt files: each is accepted, or refused in one line. Nothing here needs a model.

    python benchmarks/fuzzed_files.py --files 500

Prints how many were refused, and the slowest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe, write_recipe
from digenrl.config.recipes.overrides import all_keys
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.config.recipes.recipe import Recipe
from digenrl.prompts.sources import read_prompts

DEEP = 2_000
LONGEST_MESSAGE = 3_000
GOOD: dict[str, Any] = {
    "steps": 3,
    "model": {"family": "sd3", "source": "model"},
    "prompts": {"path": "prompts.txt"},
    "rewards": "jpeg_compressibility",
    "sample": {"height": 16, "width": 16, "denoising_steps": 4},
    "batch": {"prompts": 2, "samples_per_prompt": 4, "slice": 2},
    "algorithm": {"name": "flow_grpo", "options": {"kl_weight": 0}},
    "training": {"lora": {"rank": 2}},
    "lanes": {"generators": ["cpu"], "threads": 1},
}
NASTY: list[Any] = [
    *(None, True, False, -1, 0, 1, 10**12, -(10**12), 10**400, 0.5, 1e308, -1e308, float("inf"), float("nan")),
    *("", " ", "x" * 10_000, "\ud800", "${seed}", "${nowhere}", "???", "../..", "a\nb", "\x00", "1e9", "off"),
    *("=", "[", [], {}, [[]], {"": ""}, {"a": {"b": [1, 2, {}]}}, [None] * 100, {str(n): n for n in range(50)}),
]
FRAGMENTS = [  # of prompt files
    *(b"a cat", b'{"prompt": "a dog"}', b'{"prompt": "a", "tag": 3}', b"{", b"[]", b"null", b'{"prompt": 3}', b""),
    *(b"\xff\xfe", b"\x00", b"\\ud800", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b'{"prompt": ""}', b"\r"),
    *(b"[" * DEEP, b'{"a":' * DEEP, b"x" * 200_000, b'{"prompt": "a", "prompt": "b"}', b"\xef\xbb\xbf", b" "),
    *(b'{"prompt": "a", "n": 1e999}', b'{"prompt": "a", "n": ' + b"9" * 5_000 + b"}", b"PAR1", b"\xed\xa0\x80"),
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """What became of a file: the message, or None if it was accepted, and the CPU time it took."""

    seed: int
    message: str | None
    seconds: float


def fuzzed_recipe(seed: int) -> tuple[str, bytes]:
    """The suffix and the content of a random recipe: some settings are strange, or the file is damaged."""
    dice = Random(f"recipe {seed}")
    content = json.loads(json.dumps(GOOD))
    keys = [key.split(".") for key in all_keys(Recipe)]
    for _ in range(dice.randint(0, 3)):
        at, path = content, dice.choice(keys)
        for part in path[:-1]:
            if not isinstance(at.get(part), dict):
                at[part] = {}
            at = at[part]
        at[path[-1]] = dice.choice(NASTY)
    suffix = dice.choice((".yaml", ".yaml", ".json"))
    text = json.dumps(content) if suffix == ".json" else yaml.safe_dump(content)
    raw = bytearray(text.encode(errors="surrogatepass"))
    for _ in range(dice.choice((0, 0, 1, 5))):
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    if dice.random() < 0.1:
        raw = raw[: dice.randrange(len(raw))] + dice.choice((b"[", b"{a: ", b"- ", b"a: &a [*a, ")) * DEEP
    return suffix, bytes(raw)


def fuzzed_prompts(seed: int) -> tuple[str, bytes]:
    """The suffix and the content of a random prompt file."""
    dice = Random(f"prompts {seed}")
    lines = []
    for _ in range(dice.randint(0, 6)):
        line = bytearray(dice.choice(FRAGMENTS[:3] if dice.random() < 0.5 else FRAGMENTS))
        if line and dice.random() < 0.3:
            line[dice.randrange(len(line))] = dice.randrange(256)
        lines.append(bytes(line))
    return dice.choice((".txt", ".jsonl", ".jsonl", ".parquet")), b"\n".join(lines)


def read_fuzzed_recipe(seed: int, folder: Path) -> Refusal:
    """Reads a random recipe, and writes it again if it is accepted."""
    suffix, content = fuzzed_recipe(seed)
    path = folder / f"fuzzed{suffix}"
    path.write_bytes(content)
    return _read(seed, lambda: write_recipe(read_recipe(str(path))).encode())


def read_fuzzed_prompts(seed: int, folder: Path) -> Refusal:
    """Reads a random prompt file."""
    suffix, content = fuzzed_prompts(seed)
    path = folder / f"prompts{suffix}"
    path.write_bytes(content)
    return _read(seed, lambda: read_prompts(PromptSettings(path=path)))


def _read(seed: int, read: Callable[[], object]) -> Refusal:
    """Raises AssertionError unless an error is one line, or another exception if it is not even a ConfigError."""
    message, began_s = None, time.process_time()
    try:
        read()
    except ConfigError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < LONGEST_MESSAGE, f"seed {seed}: {message[:300]}"
    return Refusal(seed, message, time.process_time() - began_s)


def main() -> None:
    """Reads random files of both kinds; exits with 1 if one is refused badly or slowly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=500, help="of each kind")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind, read in (("recipes", read_fuzzed_recipe), ("prompt files", read_fuzzed_prompts)):
            found = []
            for seed in range(options.first_seed, options.first_seed + options.files):
                try:
                    found.append(read(seed, Path(folder)))
                except Exception as error:
                    bad += 1
                    print(f"{kind}, seed {seed}: {type(error).__name__}: {str(error)[:200]}")
            slowest = max(found, key=lambda each: each.seconds)
            bad += sum(each.seconds > 1 for each in found)
            refused = sum(each.message is not None for each in found)
            print(f"{len(found)} {kind}: {refused} refused in one line; slowest {slowest}", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
