"""Fixed shares in virtual time: thousands of runs, each from a seed (`static`)."""

from __future__ import annotations

import os
import random

import pytest

from tests.simulation.static import run_static, static_scenario_of
from tests.simulation.test_simulation import _silence

__all__ = ["_silence"]

_SEEDS_EACH = 50
_FIXED = 6
_RANDOM = 2 * int(os.environ.get("SIMULATION_ROUNDS", "0"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", range(_FIXED + _RANDOM))
def test_every_share_is_read(block: int) -> None:
    """The seeds of a soak are not known beforehand; whichever breaks is named in the failure."""
    first = block * _SEEDS_EACH
    if block >= _FIXED:
        first = random.SystemRandom().randrange(1_000_000, 2**40)
    for seed in range(first, first + _SEEDS_EACH):
        run_static(static_scenario_of(seed))
