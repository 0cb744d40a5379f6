"""Test settings: hypothesis runs the same examples every time, without a deadline on shared machines.

One thread per process, as `make` sets it, also where pytest is called by itself: sums of several threads round
differently, and tests compare bits. It is read when torch is imported, which is later than this.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from digenrl.transports import processes
from digenrl.transports.process_setup import TORCH_ENVIRONMENT

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_CBWR", TORCH_ENVIRONMENT["MKL_CBWR"])
gc.disable()  # while tests are collected: what is imported then is not garbage

# A shell that starts the tests in the background lets them ignore these signals, and so would runs in the tests.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("repeatable")

# The processes of all tests come from one fork server, which the first test to need one starts: it loads what any
# of them needs. Otherwise each process imports that by itself. Python 3.11 does not give it pytest's search path.
TESTS = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS), str(TESTS / "unit")]
)
processes.PRELOADED_MODULES += [
    "fork_server_modules",
    "test_context_parallel",
    "test_link_control",
    "test_sharded_loading",
    "test_training_full_stages",
    "test_training_rank_checkpoints",
    "test_training_several_ranks",
    "test_training_sharded_base",
    "test_training_stages",
]


# Unit and contract tests that start processes, compile models or take seconds: `make test-fast` omits them.
SLOW = {
    "test_attention_kernels",
    "test_broadcast",
    "test_broadcast_deaths",
    "test_catalog",
    "test_command_output",
    "test_compiled_models",
    "test_context_parallel",
    "test_damaged_runs",
    "test_demo_model",
    "test_evaluated_weights",
    "test_experts",
    "test_export",
    "test_exported_loras",
    "test_fp8_feed_forward",
    "test_fused_layers",
    "test_generation",
    "test_image_to_video",
    "test_isolated_rewards",
    "test_joined_heads",
    "test_judge",
    "test_link_control",
    "test_lora",
    "test_model_families",
    "test_model_sources",
    "test_no_synchronization",
    "test_patches",
    "test_planning_both_directions",
    "test_planning_docs",
    "test_planning_ladder",
    "test_planning_measured",
    "test_planning_planner",
    "test_planning_recipes",
    "test_planning_sites",
    "test_published_layouts",
    "test_published_precision",
    "test_published_settings",
    "test_quantized_base",
    "test_quantized_layers",
    "test_rewards_models",
    "test_runs_metrics",
    "test_sharded_loading",
    "test_site_transfers",
    "test_stage_bounds",
    "test_stage_chains",
    "test_stage_links",
    "test_staged_families",
    "test_tensor_files",
    "test_tiled_decoding",
    "test_training_families",
    "test_training_full_stages",
    "test_training_gradients",
    "test_training_jobs",
    "test_training_memory",
    "test_training_order",
    "test_training_rank_checkpoints",
    "test_training_several_ranks",
    "test_training_sharded_base",
    "test_training_shared_updates",
    "test_training_shares",
    "test_training_stages",
    "test_training_switching",
    "test_training_trainer",
    "test_training_versions",
    "test_unet_families",
    "test_video_families",
}


RAY_FILES = "tests/end_to_end/test_ray_"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Where a CPU has no bf16 instructions, torch stops using oneDNN in a process after its first bf16 product.

    Products of other dtypes then have other last bits than in processes that a test starts.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].backends.mkldnn.set_flags(True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not even import the slow files if they are not wanted."""
    return True if config.option.markexpr == "not slow" and collection_path.stem in SLOW else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the slow tests. Those with a Ray cluster come first: one worker runs them, for minutes."""
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.nodeid.startswith(RAY_FILES))


def pytest_collection_finish() -> None:
    """Collecting imports all modules that tests need; the garbage collector then need not visit them."""
    gc.collect()
    gc.freeze()
    gc.enable()


class SchedulingByFile(LoadScopeScheduling):
    """Gives the tests of a file to one worker, since they share what they start.

    Those with a Ray cluster go to one worker, too: two clusters that start at a time are slow to.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "ray" if path.startswith(RAY_FILES) else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Groups of pytest-xdist 3.8 (`--dist loadgroup`) have no effect with pytest 9.2, hence a scheduler."""
    return SchedulingByFile(config, log)
