"""What an algorithm asks of a trainer, as far as costs go. Numbers: catalogue/algorithms.yaml."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from digenrl.config.reading import ConfigError, Frozen, parse_model
from digenrl.planning.cards import find_entry, read_catalogue
from digenrl.planning.model_facts import Whole

Share = Annotated[float, Field(gt=0, le=1)]


class AlgorithmFacts(Frozen):
    """One algorithm. The comments on top of catalogue/algorithms.yaml say what each entry means."""

    name: str
    aliases: tuple[str, ...] = ()
    window: dict[str, Any]
    renoised: bool = False
    reference: Literal["with_kl", "always"] = "with_kl"
    old_policy: bool = False
    trained_per_prompt: Whole | None = None
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    updates_per_batch: Whole = 1
    trained_fraction: Share = 0.99


class BestOfN(Frozen):
    """How many of the best and of the worst samples of a group are trained."""

    top: Whole
    bottom: Whole


class CountedOptions(Frozen):
    """The options that bear on costs; the algorithm itself checks all of them when a run starts."""

    model_config = ConfigDict(extra="ignore")

    kl_weight: Annotated[float, Field(ge=0)]
    updates_per_batch: Whole
    trained_fraction: Share
    best_of_n: BestOfN | None = None


@cache
def known_algorithms() -> tuple[AlgorithmFacts, ...]:
    """Every algorithm of the catalogue, in its order."""
    return tuple(parse_model(AlgorithmFacts, entry) for entry in read_catalogue("algorithms.yaml"))


def find_algorithm(name: str) -> AlgorithmFacts:
    """The catalogue's algorithm of that name; raises ConfigError naming the nearest one."""
    return find_entry("algorithm", name, known_algorithms())


def counted_options(facts: AlgorithmFacts, options: dict[str, Any]) -> CountedOptions:
    """The algorithm's own defaults with a recipe's options over them."""
    defaults = facts.model_dump(include={"kl_weight", "updates_per_batch", "trained_fraction"})
    try:
        return parse_model(CountedOptions, {**defaults, **options})
    except ConfigError as error:
        raise ConfigError(f"algorithm.options.{error}") from None


def trained_steps(
    facts: AlgorithmFacts, options: CountedOptions, window: dict[str, Any] | None, steps: int
) -> int:
    """How many of a sample's denoising steps are trained; never the last one."""
    if facts.renoised:
        kept = int(options.trained_fraction * steps)
    else:
        kept = _kept_by_window({**facts.window} if window is None else window, steps)
    if kept < 1:
        raise ConfigError(f"sample.window: leaves none of {steps} steps to train; use more steps or a wider one")
    return min(kept, steps - 1)


def _kept_by_window(window: dict[str, Any], steps: int) -> int:
    kind = window.get("kind")
    if kind == "all":
        return int(float(window.get("fraction", 0.99)) * steps)
    if kind == "random_subset":
        return int(float(window.get("fraction", 0.6)) * (steps - 1))
    if kind in ("sliding", "fast"):
        return int(window.get("width", 4 if kind == "sliding" else 2))
    if kind == "none":
        return 0
    raise ConfigError(f"sample.window: unknown kind '{kind}'; known: none, all, random_subset, sliding, fast")
