"""Thousands of runs in virtual time, each from a seed; a failure says how to run it again.

What must hold is in `promises.py`, with what does not hold today. `make soak` sets
SIMULATION_ROUNDS, for seeds that nobody has seen yet, and SIMULATION_CROWDS: runs with a thousand
workers or clients.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.simulation.run import run
from tests.simulation.scenario import KINDS, crowd_of, rounds_of, scenario_of

_SEEDS_EACH = 50
_FIXED, _QUICK = 30, 10
_FIXED_ROUNDS, _QUICK_ROUNDS = 6, 2
_RANDOM = 10 * int(os.environ.get("SIMULATION_ROUNDS", "0"))
_CROWDS = int(os.environ.get("SIMULATION_CROWDS", "0"))
_CROWDS_OF = ((1000, 20), (20, 1000), (140, 140))
"""Workers and clients; each pair of them is a conversation, 20,000 of which take about a minute."""


def blocks(quick: int, count: int) -> list[Any]:
    """Return numbers of blocks of seeds; those after the first ones are slow."""
    return [
        block if block < quick else pytest.param(block, marks=pytest.mark.slow)
        for block in range(count)
    ]


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Keep what the dispatcher logs of each loss out of the report: the story says it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", blocks(_QUICK, _FIXED + _RANDOM))
def test_every_promise_holds(block: int) -> None:
    """The seeds of a soak are not known beforehand; whichever breaks is named in the failure."""
    first = block * _SEEDS_EACH
    if block >= _FIXED:
        first = random.SystemRandom().randrange(1_000_000, 2**40)
    for seed in range(first, first + _SEEDS_EACH):
        run(scenario_of(seed))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", blocks(_QUICK_ROUNDS, _FIXED_ROUNDS + _RANDOM // 2))
def test_every_promise_holds_for_consumers_who_read_in_rounds(block: int) -> None:
    first = block * _SEEDS_EACH
    if block >= _FIXED_ROUNDS:
        first = random.SystemRandom().randrange(1_000_000, 2**40)
    for seed in range(first, first + _SEEDS_EACH):
        run(rounds_of(seed))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(max(1, _CROWDS)))
def test_every_promise_holds_for_a_crowd(seed: int) -> None:
    """In a soak a thousand workers, a thousand clients, or many of both; otherwise some dozens."""
    workers, clients = _CROWDS_OF[seed % len(_CROWDS_OF)] if _CROWDS else (30, 30)
    run(crowd_of(seed, workers=workers, clients=clients))


def test_the_seeds_that_are_always_the_same_are_of_all_kinds() -> None:
    scenarios = [scenario_of(seed) for seed in range(_FIXED * _SEEDS_EACH)]
    assert {each.kind for each in scenarios} == KINDS.keys()
    assert {each.mode.name for each in scenarios} == {"OFF", "DYNAMIC"}
    assert any(each.plan.deadly for each in scenarios)
