"""The examples of docs/extending.md work."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from doc_pages import DOCS, ROOT

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.files import read_recipe
from digenrl.config.rewards import table as reward_settings
from digenrl.config.rewards.table import parse_rewards
from digenrl.models.adapters.lora import adapter_parameters, add_lora
from digenrl.models.objective import StepPairs
from digenrl.models.registry import find_family
from digenrl.rewards.building import build_rewards
from digenrl.testing.tiny_models import make_tiny_pipeline

BLOCK = re.compile(r"^ *```python\n *# (\S+)\n(.*?)^ *```", re.M | re.S)
SOURCES = {
    name: textwrap.dedent(body)
    for name, body in BLOCK.findall((DOCS / "extending.md").read_text(encoding="utf-8"))
}
Importer = Callable[[str], ModuleType]


@pytest.fixture
def import_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Importer:
    """Imports an example by its file name, as a user's package does."""
    monkeypatch.syspath_prepend(tmp_path)

    def imported(name: str) -> ModuleType:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SOURCES[name], encoding="utf-8")
        module = ".".join(path.relative_to(tmp_path).with_suffix("").parts)
        for known in (module, module.partition(".")[0]):
            monkeypatch.delitem(sys.modules, known, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module(module)

    return imported


def red_and_blue() -> torch.Tensor:
    pixels = torch.zeros(2, 1, 3, 8, 8)
    pixels[0, :, 0] = 1
    pixels[1, :, 2] = 1
    return pixels


def test_the_function_is_a_reward(import_example: Importer) -> None:
    import_example("my_package/rewards.py")
    recipe = read_recipe("demo", ["rewards=my_package.rewards:redness"])
    scores = build_rewards(recipe.rewards).score(red_and_blue(), ["", ""], [{}, {}])
    assert scores.values == pytest.approx((1.0, -0.5))


def test_the_registered_reward_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _executed("digenrl/config/rewards/table.py", reward_settings).BrightnessSettings
    monkeypatch.setitem(reward_settings.REWARDS, "brightness", settings)
    monkeypatch.setitem(sys.modules, "digenrl.rewards.brightness", _executed("digenrl/rewards/brightness.py"))
    reward = build_rewards(parse_rewards("brightness"))
    assert reward.score(red_and_blue(), ["", ""], [{}, {}]).values == pytest.approx((1 / 3, 1 / 3))


def test_the_loss_from_scratch_has_a_gradient(import_example: Importer) -> None:
    import_example("my_package/reinforce.py")
    pairs = step_pairs()
    build_algorithm("my_package.reinforce:Reinforce").loss(pairs).total_M().sum().backward()
    assert pairs.log_prob_R.grad is not None
    torch.testing.assert_close(pairs.log_prob_R.grad, -pairs.advantage_R)


def test_the_noise_weighted_algorithm_weights_flow_grpo_by_its_power(import_example: Importer) -> None:
    import_example("my_package/algorithms.py")
    pairs = step_pairs()
    plain_M = build_algorithm("flow_grpo", {"kl_weight": 0}).loss(pairs).total_M()
    overrides = [
        "algorithm.name=my_package.algorithms:NoiseWeighted",
        "algorithm.options={kl_weight: 0, power: 2}",
    ]
    chosen = read_recipe("sd3_flow_grpo", ["prompts.path=prompts.txt", *overrides]).algorithm
    weighted_M = build_algorithm(chosen.name, chosen.options).loss(pairs).total_M()
    torch.testing.assert_close(weighted_M, plain_M * pairs.std_R**2)


def step_pairs() -> StepPairs:
    """Three rows without optional inputs, on-policy."""
    latents_RL, log_prob_R = torch.zeros(3, 4), torch.tensor([-1.0, -2.0, -3.0])
    return StepPairs(
        advantage_R=torch.tensor([1.0, -1.0, 0.5]),
        log_prob_R=log_prob_R.clone().requires_grad_(),
        old_log_prob_R=log_prob_R,
        rollout_log_prob_R=log_prob_R,
        fresh_R=torch.ones(3, dtype=torch.bool),
        std_R=torch.tensor([0.1, 0.2, 0.4]),
        sigma_R=torch.tensor([0.9, 0.5, 0.2]),
        step_size_R=torch.full((3,), 0.1),
        noise_time_R=torch.full((3,), 0.1),
        mean_RL=latents_RL,
        velocity_RL=latents_RL,
    )


def test_the_model_family_adds_adapters_to_the_mlps(import_example: Importer, tmp_path: Path) -> None:
    import_example("my_package/families.py")
    page = (DOCS / "extending.md").read_text(encoding="utf-8")
    command = re.search(r"^digenrl train (\S+) (model\.family=.*)$", page, re.M)
    assert command is not None
    recipe = read_recipe(command[1], shlex.split(command[2]))
    make_tiny_pipeline("sd3", tmp_path / "tiny")
    model = find_family(recipe.model.family).load(tmp_path / "tiny", text_encoders=False)
    assert recipe.training.lora is not None
    add_lora(model, rank=2, alpha=4, seed=0, targets=recipe.training.lora.targets)
    adapted = {name.partition(".lora_")[0] for name in adapter_parameters(model)}
    for layer in ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "attn.to_q"):
        assert any(name.endswith(layer) for name in adapted), layer


def test_the_help_rule_is_evaluated_as_the_page_says() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SOURCES["try_rule.py"]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    page = (DOCS / "extending.md").read_text(encoding="utf-8")
    printed = dict(line.split(": ") for line in done.stdout.splitlines())
    assert "two rounds" in printed
    for rule in ("wait", "greedy", "one round"):
        assert f"`{rule}: {printed[rule].partition(',')[0]}`" in page


def _executed(name: str, appended_to: ModuleType | None = None) -> ModuleType:
    """An example that would be part of DigenRL, as a new module or as an addition to a copy of an existing one."""
    module = ModuleType(name)
    vars(module).update(vars(appended_to) if appended_to else {})
    exec(compile(SOURCES[name], name, "exec", dont_inherit=True), vars(module))
    return module
