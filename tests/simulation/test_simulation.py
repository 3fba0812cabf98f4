"""Thousands of runs in virtual time, each from a seed; a failure says how to run it again.

What must hold is in `invariants.py` and in the modules of the modes, with what does not hold today.
`make soak` sets SIMULATION_ROUNDS, for seeds that nobody has seen yet, and SIMULATION_CROWDS: runs
with a thousand workers or clients.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.simulation.__main__ import MODES
from tests.simulation.cluster import Cluster
from tests.simulation.scenario import KINDS, crowd_of

_BLOCK = 50
"""Seeds of one test."""
_BLOCKS = {"usual": 30, "rounds": 6, "save": 6, "shared": 4, "static": 6}
"""How many blocks have seeds that are always the same, by mode."""
_QUICK = {"usual": 10, "rounds": 2}
"""How many of these are not slow; of other modes none is."""
_RANDOM = {"usual": 10, "rounds": 5, "save": 2, "shared": 4, "static": 2}
"""How many more blocks a soak runs, for each of its rounds."""
_ROUNDS = int(os.environ.get("SIMULATION_ROUNDS", "0"))
_CROWDS = int(os.environ.get("SIMULATION_CROWDS", "0"))
_CROWDS_OF = ((1000, 20), (20, 1000), (140, 140))
"""Workers and clients; each pair of them is a conversation, 20,000 of which take about a minute."""


def _blocks() -> list[Any]:
    """Return (mode, number of a block of seeds, or None for seeds that nobody knows before)."""
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
    first = unknown if block is None else block * _BLOCK
    for seed in range(first, first + _BLOCK):
        MODES[mode].of_seed(seed).run()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(max(1, _CROWDS)))
def test_all_invariants_hold_with_many_processes(seed: int) -> None:
    """In a soak a thousand workers, a thousand clients, or many of both; otherwise some dozens."""
    workers, clients = _CROWDS_OF[seed % len(_CROWDS_OF)] if _CROWDS else (30, 30)
    Cluster(crowd_of(seed, workers=workers, clients=clients)).run()


@pytest.mark.parametrize("mode", ["usual", "shared"])
def test_the_fixed_seeds_cover_all_kinds(mode: str) -> None:
    scenarios = [MODES[mode].scenario_of(seed) for seed in range(_BLOCKS[mode] * _BLOCK)]
    assert {each.kind_name for each in scenarios} == KINDS.keys()
    assert {each.mode.name for each in scenarios} == {"OFF", "DYNAMIC"}
    assert mode == "shared" or any(each.plan.deadly for each in scenarios)
