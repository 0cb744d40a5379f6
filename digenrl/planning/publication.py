"""How long a new weight version takes to the generators of each pool."""

from __future__ import annotations

from digenrl.planning.costs import GB, GBIT, network_bytes_s, publish_seconds
from digenrl.planning.facts.constants import CONSTANTS
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import GeneratorLayout, Layout
from digenrl.planning.sites.groups import site_gbit_s


def publication_seconds(workload: Workload, layout: Layout) -> float:
    """The time until all generators in the trainer's site have a version: the slowest pool's; 0 without any."""
    local = [generator for generator in layout.generators if not is_remote(layout, generator)]
    measured = [generator.pool.measured.publish_seconds for generator in local]
    known = [seconds for seconds in measured if seconds is not None]
    if len(known) == len(measured) or not workload.has_cost_model:
        return max(known, default=0.0)
    return max([*known, publish_seconds(workload, _local_link(layout, local))])


def remote_publication_seconds(workload: Workload, layout: Layout, generator: GeneratorLayout) -> float | None:
    """The time until generators of a pool in another site have a version; None if the pool is in the trainer's.

    Versions cross sites once, as patches if that is faster than whole ones.
    """
    if not is_remote(layout, generator):
        return None
    if generator.pool.measured.publish_seconds is not None:
        return generator.pool.measured.publish_seconds
    if not workload.has_cost_model:
        return 0.0
    whole_bytes, link = workload.published_bytes, _site_link(layout, generator)
    saved_s = whole_bytes * (1 - _patch_share(workload)) / link
    patching_s = whole_bytes / CONSTANTS.patch_bytes_s
    return publish_seconds(workload, link) - max(0.0, saved_s - patching_s)


def earliest_publication_seconds(workload: Workload, layout: Layout) -> float:
    """The time until the generators of the first pool have a version."""
    seconds = [remote_publication_seconds(workload, layout, each) for each in layout.generators]
    remote = [each for each in seconds if each is not None]
    local = [publication_seconds(workload, layout)] if len(remote) < len(seconds) else []
    return min([*remote, *local], default=0.0)


def is_remote(layout: Layout, generator: GeneratorLayout) -> bool:
    """Whether the pool is in another site than the trainer."""
    return generator.pool.site != layout.trainer.pool.site


def slowest_link(layout: Layout) -> float:
    """The bandwidth between the trainer and the generators that it reaches most slowly."""
    remote = [generator for generator in layout.generators if is_remote(layout, generator)]
    local = [generator for generator in layout.generators if not is_remote(layout, generator)]
    links = [_site_link(layout, generator) for generator in remote]
    return min([*links, *([_local_link(layout, local)] if local or not links else [])])


def _site_link(layout: Layout, generator: GeneratorLayout) -> float:
    between = site_gbit_s(layout.site_links, layout.trainer.pool.site, generator.pool.site)
    return GBIT * min(between, layout.trainer.pool.network_gbit_s, generator.pool.network_gbit_s)


def _local_link(layout: Layout, generators: list[GeneratorLayout]) -> float:
    """Inside a site: the slowest network, or the links of the node if there is only one."""
    pools = {layout.trainer.pool, *(generator.pool for generator in generators)}
    trainer_pool = layout.trainer.pool
    if len(pools) == 1 and trainer_pool.nodes == 1:
        return trainer_pool.card.card_link_gb_s * GB * CONSTANTS.collective_share
    return min(network_bytes_s(pool) for pool in pools)


def _patch_share(workload: Workload) -> float:
    rounded = workload.published_in_bf16
    if workload.tuning == "lora":
        return CONSTANTS.bfloat16_adapter_patch_share if rounded else CONSTANTS.adapter_patch_share
    return CONSTANTS.bfloat16_patch_share if rounded else CONSTANTS.float32_patch_share
