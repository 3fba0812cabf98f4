"""Hundreds of runs in which trainers share what workers make; a failure names its seed."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator

import pytest

from tests.simulation.scenario import KINDS
from tests.simulation.shared import run_shared, shared_scenario_of

_SEEDS_EACH = 50
_FIXED = 4
_RANDOM = 4 * int(os.environ.get("SIMULATION_ROUNDS", "0"))


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", range(_FIXED + _RANDOM))
def test_trainers_share_whatever_goes_wrong(block: int) -> None:
    first = block * _SEEDS_EACH
    if block >= _FIXED:
        first = random.SystemRandom().randrange(1_000_000, 2**40)
    for seed in range(first, first + _SEEDS_EACH):
        run_shared(shared_scenario_of(seed))


def test_the_seeds_are_of_all_kinds() -> None:
    scenarios = [shared_scenario_of(seed) for seed in range(_FIXED * _SEEDS_EACH)]
    assert {each.kind for each in scenarios} == KINDS.keys()
    assert {each.mode.name for each in scenarios} == {"OFF", "DYNAMIC"}
