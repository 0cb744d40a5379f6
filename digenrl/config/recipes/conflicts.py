"""Settings of a recipe that contradict each other, as functions of a Recipe that raise ConfigError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from digenrl.config.generator_pools import check_pool_slice, check_slice
from digenrl.config.reading import ConfigError, errors_about
from digenrl.config.recipes.base_precision import UNQUANTIZED
from digenrl.config.recipes.cluster import ClusterSettings
from digenrl.config.recipes.training import StageLinkSettings
from digenrl.config.rewards.table import PreferenceSettings

if TYPE_CHECKING:
    from digenrl.config.recipes.recipe import Recipe

LANES_OF_ONE_MACHINE = ("generators", "rewards", "trainer", "encoder", "exchange")


def check_conflicts(recipe: Recipe) -> None:
    """Raises ConfigError for the first settings that contradict each other."""
    _check_mode(recipe)
    if recipe.techniques.assist == "both":
        _check_shared_work(recipe)
    if recipe.model.base != UNQUANTIZED and recipe.training.lora is None:
        why = f"{recipe.model.base}, but without training.lora all weights are trained, and these cannot be"
        raise _conflict("model.base", f"{why} quantized; add training.lora={{rank: 32}}, or leave it out")
    if recipe.sample.precision is not None:
        _check_sampler(recipe)
    ranks, techniques = recipe.lanes.ranks, recipe.techniques
    if recipe.topology.shares_cards and techniques.tcss > 0:
        why = f"{techniques.tcss} in mode {recipe.mode}, where generation and training take turns and no sample"
        raise _conflict("techniques.tcss", f"{why} is stale; set it to 0, or mode to local")
    if recipe.topology.one_process and ranks > 1:
        why = f"{ranks} in mode {recipe.mode}, which is one process"
        raise _conflict("lanes.ranks", f"{why}; set it to 1, or mode to local")
    _check_shard_base(recipe)
    _check_stages(recipe)
    _check_rounded_adapters(recipe)
    if recipe.shards_model and techniques.tag not in ("none", "auto"):
        why = f"{techniques.tag}, but with lanes.ranks = {ranks} no rank holds all weights to generate with"
        divided = "leave out training.stages" if recipe.training.stages else "set lanes.shard_base to false"
        whole = "train adapters (training.lora)" if recipe.sharded else divided
        raise _conflict("techniques.tag", f"{why}; set it to none, or {whole}")
    if recipe.sharded and recipe.training.offload is True:
        why = f"true, but the weights are sharded over lanes.ranks = {ranks}, none of which generates"
        raise _conflict("training.offload", f"{why}; set it to auto")
    _check_context_parallelism(recipe)
    if recipe.evaluation is not None and recipe.evaluation.weights == "ema" and recipe.training.ema is None:
        why = "ema, but the run keeps no moving average; add training.ema={decay: 0.9}, or set it to trained"
        raise _conflict("evaluation.weights", why)
    _check_group_rewards(recipe)
    _check_video_rewards(recipe)
    _check_pairs(recipe)
    if recipe.training.job_samples != "auto":
        with errors_about("training.job_samples"):
            check_slice(recipe.training.job_samples, recipe.batch.samples_per_prompt)
    unit = 1 if recipe.batch.slice == "auto" else recipe.batch.slice
    for index, pool in enumerate(recipe.cluster.generators):
        if pool.slice is not None:
            with errors_about(f"cluster.generators[{index}].slice"):
                check_pool_slice(pool.slice, unit, recipe.batch.samples_per_prompt)


def _check_mode(recipe: Recipe) -> None:
    """Lanes on devices of this machine are for the modes of one machine, `cluster` is for mode ray."""
    if recipe.topology.uses_ray:
        _check_lanes_on_a_cluster(recipe)
        return
    for key, default in ClusterSettings():
        if getattr(recipe.cluster, key) != default:
            why = f"describes a Ray cluster, which mode {recipe.mode} does not use"
            raise _conflict(f"cluster.{key}", f"{why}; set mode to ray, or leave it out")


def lanes_of_one_machine(recipe: Recipe) -> list[str]:
    """The keys of `lanes` with which the recipe names devices or folders of one machine."""
    given: dict[str, Any] = {key: getattr(recipe.lanes, key) for key in LANES_OF_ONE_MACHINE}
    return [key for key, value in given.items() if not isinstance(value, int) and value not in ("auto", None)]


def _check_lanes_on_a_cluster(recipe: Recipe) -> None:
    for key in lanes_of_one_machine(recipe):
        given: Any = getattr(recipe.lanes, key)
        named = f"[{', '.join(given)}]" if isinstance(given, tuple) else given
        instead = "give a number of lanes" if isinstance(given, tuple) else "leave it out"
        why = f"{named} is on one machine, and mode ray places workers by the keys of cluster"
        raise _conflict(f"lanes.{key}", f"{why}; {instead}, or set mode to local")


def _check_sampler(recipe: Recipe) -> None:
    """Raises ConfigError if generators cannot have frozen weights in a format of their own."""
    where, own = "sample.precision", recipe.sample.precision
    if recipe.training.lora is None:
        raise _conflict(where, f"{own}, but without training.lora no weights are frozen; leave it out")
    if recipe.model.base != UNQUANTIZED:
        why = f"{own}, which is for training with an unquantized base, but model.base is {recipe.model.base}"
        raise _conflict(where, f"{why}; leave one of them out")
    if recipe.topology.one_process or recipe.techniques.assist == "both":
        which = "in mode colocated" if recipe.topology.one_process else "with techniques.assist=both"
        why = f"{own}, but {which} a card trains with the weights that it generates with"
        raise _conflict(where, f"{why}; set model.base={own} instead")
    tag = recipe.techniques.tag
    if recipe.techniques.assist != "none" and tag not in ("none", "auto"):
        why = f"{tag}, but the trainer has no weights in the format that generates (sample.precision: {own})"
        raise _conflict("techniques.tag", f"{why}; set it to none, or model.base={own} instead")


def _check_shard_base(recipe: Recipe) -> None:
    """Raises ConfigError if there is no frozen base to shard, or nothing to shard it over."""
    if not recipe.lanes.shard_base:
        return
    if recipe.training.lora is None:
        why = "true, but without training.lora nothing is frozen, and lanes.ranks shards all weights anyway"
        raise _conflict("lanes.shard_base", f"{why}; leave it out")
    if recipe.lanes.ranks == 1:
        why = "true, but lanes.ranks is 1; set that to the number of cards that hold the base together"
        raise _conflict("lanes.shard_base", why)
    if recipe.model.base != UNQUANTIZED:
        why = f"true, but model.base is {recipe.model.base}, and quantized weights cannot be sharded"
        raise _conflict("lanes.shard_base", f"{why}; leave one of them out")


def _check_stages(recipe: Recipe) -> None:
    """Raises ConfigError if the trainer's ranks cannot be the stages of a model."""
    stages, where = recipe.training.stages, "training.stages"
    if stages is None and recipe.training.links != StageLinkSettings():
        why = "links are those between the stages of a model, and training.stages is not set"
        raise _conflict("training.links", f"{why}; set that, or leave links out")
    if stages is None:
        return
    count, ranks = len(stages) if stages != "auto" else None, recipe.lanes.ranks
    if count is not None and count < 2:
        raise _conflict(where, f"{_shown(stages)}, but a model has two stages or more; give them, or leave it out")
    if ranks == 1 or count not in (None, ranks):
        wanted = "the number of stages" if count is None else str(count)
        raise _conflict(where, f"{_shown(stages)}, but lanes.ranks is {ranks}; set that to {wanted}")
    if recipe.lanes.shard_base or recipe.lanes.cards_per_replica > 1:
        other = "lanes.shard_base" if recipe.lanes.shard_base else "lanes.cards_per_replica"
        raise _conflict(where, f"{_shown(stages)} together with {other}; leave one of them out")


def _check_rounded_adapters(recipe: Recipe) -> None:
    """Raises ConfigError if trainer and generators could not use adapters of different precision."""
    where, dtype = "publish.dtype", recipe.publish.dtype
    if dtype != "bfloat16":
        return
    if recipe.training.lora is None:
        why = f"{dtype}, which rounds adapters; add training.lora={{rank: 32}}, or leave it out"
        raise _conflict(where, why)
    if not recipe.topology.publishes:
        raise _conflict(where, f"{dtype} in mode {recipe.mode}, which publishes nothing; leave it out")
    if recipe.trainer_helps:
        why = f"{dtype}, but the trainer helps to generate, with adapters that are not rounded"
        raise _conflict(where, f"{why}; set techniques.tag=none, or leave it out")
    own = ":" in recipe.algorithm.name  # its settings are read later
    steps = own or recipe.algorithm.settings().replays == "steps"
    if steps and recipe.training.old_log_probs != "recomputed":
        why = f"{dtype}, but old log-probs of the rollout belong to the rounded adapters"
        raise _conflict(where, f"{why}; set training.old_log_probs=recomputed, or leave it out")


def _check_context_parallelism(recipe: Recipe) -> None:
    """Raises ConfigError if the cards of a replica or of a generator cannot compute samples together."""
    lanes, tag = recipe.lanes, recipe.techniques.tag
    if lanes.ranks % lanes.cards_per_replica:
        why = f"{lanes.cards_per_replica} does not divide lanes.ranks = {lanes.ranks}, all cards of the trainer"
        raise _conflict("lanes.cards_per_replica", f"{why}; change one of them")
    if lanes.cards_per_replica > 1 and tag not in ("none", "auto"):
        why = f"{tag}, but no card of the trainer computes a sample alone (lanes.cards_per_replica)"
        raise _conflict("techniques.tag", f"{why}; set it to none")
    if recipe.model.compile is True and max(lanes.cards_per_replica, lanes.cards_per_generator) > 1:
        why = "true, but models of several cards per sample (lanes.cards_per_...) are not compiled"
        raise _conflict("model.compile", f"{why}; set it to auto")
    if lanes.cards_per_generator > 1 and (recipe.mode != "local" or recipe.shares_work):
        work = " where generators also train (techniques.assist: both)" if recipe.shares_work else ""
        why = f"{lanes.cards_per_generator} in mode {recipe.mode}{work}"
        raise _conflict("lanes.cards_per_generator", f"{why}; set it to 1, or mode to local")


def _check_group_rewards(recipe: Recipe) -> None:
    """Raises ConfigError if a reward of whole groups would get parts of them, or single held-out samples."""
    size, slice_size = recipe.batch.samples_per_prompt, recipe.batch.slice
    for reward in recipe.rewards:
        if reward.needs_whole_groups and slice_size != size:
            why = f"{slice_size}, but the reward '{reward.shown_as}' compares all {size} samples of a prompt"
            raise _conflict("batch.slice", f"{why}, so that they are scored together; set it to {size}")
    for reward in recipe.held_out_rewards if recipe.evaluation is not None else ():
        if reward.needs_whole_groups:
            why = f"'{reward.shown_as}' compares the samples of a group, and held-out prompts have one sample"
            raise _conflict("evaluation.rewards", f"{why} each; give evaluations other rewards")


def _check_video_rewards(recipe: Recipe) -> None:
    """Raises ConfigError if a reward of videos would get images."""
    scored = [("rewards", recipe.rewards, recipe.sample.frames)]
    if recipe.evaluation is not None:
        scored.append(("evaluation.rewards", recipe.held_out_rewards, recipe.held_out_size[2]))
    for where, rewards, frames in scored:
        for reward in rewards:
            if frames < reward.least_frames:
                why = f"'{reward.shown_as}' scores videos of at least {reward.least_frames} frames, got {frames}"
                raise _conflict(where, f"{why}; use another reward, or generate videos (sample.frames)")


def _check_pairs(recipe: Recipe) -> None:
    """Raises ConfigError if samples that are pairs of images do not fit the batch, or a reward needs them."""
    held_out = recipe.held_out_rewards if recipe.evaluation is not None else ()
    if any(isinstance(reward, PreferenceSettings) for reward in held_out):
        why = "'preference' is for pairs, and held-out samples are generated; give evaluations other rewards"
        raise _conflict("evaluation.rewards", why)
    if not recipe.trains_on_pairs:
        if any(isinstance(reward, PreferenceSettings) for reward in recipe.rewards):
            why = "'preference' is for pairs in a file; set prompts.pair_columns, or use another reward"
            raise _conflict("rewards", why)
        return
    for key, given, wanted in (
        ("batch.samples_per_prompt", recipe.batch.samples_per_prompt, 2),
        ("sample.frames", recipe.sample.frames, 1),
    ):
        if given != wanted:
            why = f"{given}, but with prompts.pair_columns a group is a chosen and a rejected image"
            raise _conflict(key, f"{why}; set it to {wanted}, or leave pair_columns out")


def _check_shared_work(recipe: Recipe) -> None:
    """Raises ConfigError if generators cannot train as well."""
    if recipe.topology.one_process:
        why = "both, but mode colocated is one card; set lanes.cards to their number, or mode to local"
        raise _conflict("techniques.assist", why)
    if recipe.lanes.ranks > 1:
        why = f"both, where every card trains alone, but lanes.ranks is {recipe.lanes.ranks}"
        raise _conflict("techniques.assist", f"{why}; set it to 1 and add the other cards to lanes.generators")
    if recipe.shares_work and not recipe.techniques.gap:
        why = "off, but with techniques.assist=both groups are trained as they complete"
        raise _conflict("techniques.gap", f"{why}; leave it out, or set techniques.assist to trainer")
    if ":" not in recipe.algorithm.name:  # the settings of others are read where something is trained
        check_shared_gradients(recipe)


def check_shared_gradients(recipe: Recipe) -> None:
    """Raises ConfigError if the gradients of all weights would be sent over the network after every update."""
    sends_all = recipe.shares_work and recipe.topology.uses_ray and recipe.training.lora is None
    if sends_all and recipe.algorithm.settings().updates_per_batch > 1:
        why = "both, but in mode ray the gradients of all weights are too large to be sent after every update"
        raise _conflict("techniques.assist", f"{why}; train adapters (training.lora), or set it to trainer")


def _shown(stages: tuple[int, ...] | str) -> str:
    return stages if isinstance(stages, str) else str(list(stages))


def _conflict(where: str, why: str) -> ConfigError:
    return ConfigError(f"{where}: {why}", where)
