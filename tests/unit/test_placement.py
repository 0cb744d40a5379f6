"""Placement of workers: devices, duties and cores, and one-line errors about missing hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_workers import fake_recipe

from digenrl.config.reading import ConfigError
from digenrl.driver.placement import place
from digenrl.worker.assignment import Machine, Workers, rank_names, threads_per_worker

CPU = Machine(tuple(range(8)))
CARDS = Machine(tuple(range(8)), cuda_devices=4)


def workers_on(machine: Machine, mode: str = "local", tag: str = "auto", **lanes: Any) -> Workers:
    recipe = fake_recipe(mode=mode, techniques={"tag": tag}, lanes={"generators": 1, **lanes})
    return place(recipe, machine, Path("exchange"), Path("checkpoint"))


def complaint(machine: Machine, **lanes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        workers_on(machine, **lanes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def devices(of: Workers) -> dict[str, str]:
    return {each.name: each.device for each in of.initial()}


def test_without_gpus_all_workers_are_on_the_cpu() -> None:
    assert devices(workers_on(CPU, generators=2, rewards=2)) == dict.fromkeys(
        ("trainer", "generator-0", "generator-1", "reward-0", "reward-1", "encoder"), "cpu"
    )


def test_the_trainer_gets_the_first_gpu_and_rewards_the_one_left_by_generators() -> None:
    found = devices(workers_on(CARDS, generators=2, rewards=2))
    assert found == {
        "trainer": "cuda:0",
        "generator-0": "cuda:1",
        "generator-1": "cuda:2",
        "reward-0": "cuda:3",
        "reward-1": "cuda:3",
        "encoder": "cuda:0",
    }


def test_a_generator_of_several_cards_gets_consecutive_ones() -> None:
    eight = Machine(tuple(range(8)), cuda_devices=8)
    lanes = {"ranks": 2, "cards_per_replica": 2, "generators": 2, "cards_per_generator": 2}
    found = workers_on(eight, **lanes)
    assert devices(found) == {
        "trainer": "cuda:0",
        "generator-0": "cuda:2",
        "generator-1": "cuda:4",
        "reward-0": "cuda:6",
        "encoder": "cuda:0",
    }
    assert found.trainer.duties == {"train"}, "no card of the trainer generates alone"
    assert rank_names(found.generators[0]) == ["generator-0/0", "generator-0/1"]
    assert [each.cores for each in workers_on(CPU, **lanes, threads=1).generators] == [(2, 3), (4, 5)]
    assert "of 2 cards each and 2 trainer ranks need 6 CUDA devices" in complaint(CARDS, **lanes)
    message = complaint(CARDS, generators=("cuda:3",), cards_per_generator=2)
    assert "card 1 of generator 0" in message and "'cuda:4'" in message


def test_devices_can_be_named() -> None:
    found = devices(
        workers_on(CARDS, trainer="cuda:3", generators=("cuda:1", "cuda"), rewards=("cpu",), encoder="cuda:2")
    )
    assert found == {
        "trainer": "cuda:3",
        "generator-0": "cuda:1",
        "generator-1": "cuda",
        "reward-0": "cpu",
        "encoder": "cuda:2",
    }


def test_the_cpu_can_be_chosen_on_a_machine_with_gpus() -> None:
    assert set(devices(workers_on(CARDS, device="cpu")).values()) == {"cpu"}


@pytest.mark.parametrize("machine", [CPU, CARDS])
def test_colocated_one_worker_does_everything_but_what_reward_lanes_do(machine: Machine) -> None:
    found = workers_on(machine, mode="colocated", rewards=0)
    assert found.initial() == (found.trainer,)
    assert found.trainer.duties == {"encode", "generate", "score", "train"}
    assert found.trainer.device == ("cuda:0" if machine.cuda_devices else "cpu")
    assert found.trainer.checkpoint == Path("checkpoint")
    found = workers_on(machine, mode="colocated", rewards=2)
    assert found.trainer.duties == {"encode", "generate", "train"}
    assert [(each.name, each.duties) for each in found.rewards] == [
        ("reward-0", {"score"}),
        ("reward-1", {"score"}),
    ]
    assert {each.device for each in found.rewards} == {found.trainer.device}


def test_duties_follow_the_techniques_and_the_reward_lanes() -> None:
    duties = {each.name: each.duties for each in workers_on(CPU).initial()}
    assert duties == {
        "trainer": {"train", "generate"},
        "generator-0": {"generate"},
        "reward-0": {"score"},
        "encoder": {"encode"},
    }
    duties = {each.name: each.duties for each in workers_on(CPU, tag="none", rewards=0).initial()}
    assert duties == {"trainer": {"train"}, "generator-0": {"generate", "score"}, "encoder": {"encode"}}
    duties = {each.name: each.duties for each in workers_on(CPU, rewards=0).initial()}
    assert duties["trainer"] == {"train", "generate", "score"}


def test_only_the_trainer_begins_from_a_checkpoint() -> None:
    found = workers_on(CPU)
    assert {each.name for each in found.initial() if each.checkpoint is not None} == {"trainer"}
    assert {each.exchange for each in found.initial()} == {Path("exchange")}


def test_generators_and_trainer_have_separate_cores() -> None:
    found = workers_on(CPU, generators=3)
    assert [each.cores for each in (found.trainer, *found.generators)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert all(each.cores is None for each in (*found.rewards, found.encoder) if each is not None)


def test_lanes_that_share_cores_or_are_on_cards_are_not_pinned() -> None:
    assert workers_on(CPU, generators=("cpu",) * 8).trainer.cores is None
    assert workers_on(CARDS).trainer.cores is None


def test_threads_are_the_share_of_the_cores() -> None:
    def threads(machine: Machine, mode: str = "local", **lanes: Any) -> int:
        return threads_per_worker(fake_recipe(mode=mode, lanes={"generators": 1, **lanes}), machine)

    assert threads(CPU) == 4
    assert threads(CPU, generators=("cpu", "cpu")) == 2
    assert threads(CPU, generators=("cpu",) * 20) == 1
    assert threads(CPU, mode="colocated") == 8
    assert threads(CPU, threads=3) == 3
    assert threads(CARDS) == 4


def test_more_lanes_than_cores_are_refused_with_a_way_out() -> None:
    message = complaint(Machine((0, 1)), generators=2, threads=1)
    assert message.startswith("lanes.generators: 2 generators and the trainer with 1 thread each need 3 cores")
    assert "this machine has 2" in message and "lanes.generators=[cpu,cpu]" in message
    assert "with 4 threads each need 12 cores" in complaint(CPU, generators=2, threads=4)


def test_more_lanes_than_cards_are_refused_with_a_way_out() -> None:
    message = complaint(CARDS, generators=4)
    assert "4 generators and the trainer need 5 CUDA devices, this machine has 4" in message
    assert "colocated" in message


def test_devices_that_are_not_there_are_refused() -> None:
    assert complaint(CPU, device="cuda").startswith("lanes.device: cuda, but no CUDA device is here")
    for machine, lanes, nouns in (
        (CARDS, {"generators": ("cuda:1", "cuda:4")}, ("generator-1", "'cuda:4'", "cuda:3")),
        (CARDS, {"trainer": "cuda:4"}, ("trainer", "'cuda:4'")),
        (CPU, {"encoder": "cuda"}, ("encoder", "'cuda'")),
        (CPU, {"rewards": ("cuda:0",)}, ("reward-0", "'cuda:0'")),
    ):
        message = complaint(machine, **lanes)
        assert all(noun in message for noun in nouns), message
