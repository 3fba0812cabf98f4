"""Thousands of runs in virtual time, each from a seed; a failure reports how to repeat it.

The invariants are in `invariants.py` and in the modules of the modes, with known exceptions.
`make soak` sets SIMULATION_ROUNDS, for new random seeds, and SIMULATION_CROWDS, for runs with a
thousand workers or clients.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.simulation.__main__ import MODES
from tests.simulation.cluster import Cluster
from tests.simulation.scenario import KINDS, many_processes_scenario

SEEDS_PER_TEST = 50
"""Number of seeds of each case of `test_all_invariants_hold`."""
_BLOCKS = {
    "default": 30,
    "coordinated_reads": 6,
    "distributed_save": 6,
    "cross_trainer_cache": 4,
    "static_sharding": 6,
}
"""Number of blocks with fixed seeds, by mode."""
_QUICK = {"default": 10, "coordinated_reads": 2}
"""Number of these not marked slow; other modes have no slow ones."""
_RANDOM = {
    "default": 10,
    "coordinated_reads": 5,
    "distributed_save": 2,
    "cross_trainer_cache": 4,
    "static_sharding": 2,
}
"""Number of additional blocks per round of a soak test."""
_ROUNDS = int(os.environ.get("SIMULATION_ROUNDS", "0"))
_CROWDS = int(os.environ.get("SIMULATION_CROWDS", "0"))
_CROWD_SIZES = ((1000, 20), (20, 1000), (140, 140))
"""(workers, clients); 20,000 pairs of a worker and a client take about a minute."""


def _blocks() -> list[Any]:
    """Return (mode, number of a block of seeds; None for random seeds)."""
    blocks = []
    for mode, count in _BLOCKS.items():
        for block in range(count):
            is_slow = block >= _QUICK.get(mode, count)
            marks = [pytest.mark.slow] if is_slow else []
            blocks.append(pytest.param(mode, block, marks=marks))
        for number in range(_ROUNDS * _RANDOM[mode]):
            blocks.append(pytest.param(mode, None, id=f"{mode}-random-{number}"))
    return blocks


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "block"), _blocks())
def test_all_invariants_hold(mode: str, block: int | None) -> None:
    unknown = random.SystemRandom().randrange(1_000_000, 2**40)
    first = unknown if block is None else block * SEEDS_PER_TEST
    for seed in range(first, first + SEEDS_PER_TEST):
        MODES[mode].of_seed(seed).run()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(max(1, _CROWDS)))
def test_all_invariants_hold_with_many_processes(seed: int) -> None:
    """Soak tests use a thousand workers, a thousand clients, or 140 of both; others use 30."""
    workers, clients = _CROWD_SIZES[seed % len(_CROWD_SIZES)] if _CROWDS else (30, 30)
    Cluster(many_processes_scenario(seed, workers=workers, clients=clients)).run()


@pytest.mark.parametrize("mode", ["default", "cross_trainer_cache"])
def test_the_fixed_seeds_cover_all_kinds(mode: str) -> None:
    scenarios = [MODES[mode].scenario_of(seed) for seed in range(_BLOCKS[mode] * SEEDS_PER_TEST)]
    assert {each.kind_name for each in scenarios} == KINDS.keys()
    assert {each.mode.name for each in scenarios} == {"OFF", "DYNAMIC"}
    assert mode == "cross_trainer_cache" or any(each.plan.poison for each in scenarios)
