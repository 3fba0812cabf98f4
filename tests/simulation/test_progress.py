"""Reading comes to its end although workers die again and again, whatever holds elements there."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.limits import Limits
from tests.simulation.cast import Cast
from tests.simulation.production import Plan
from tests.simulation.promises import check_at_end, check_now
from tests.simulation.run import tell
from tests.simulation.scenario import Scenario
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import BrokenPromiseError

_SEEDS = 15
_SECONDS = 60.0
"""By when all must be read; with workers that live, two would do."""


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _scenario(seed: int) -> Scenario:
    chance = random.Random(f"progress {seed}")
    plan = Plan(
        size=480,
        parts=chance.choice((1, 3)),
        window=chance.choice((1, 3)),
        mixed=chance.choice((30, 64, 1000)),
        joined=chance.choice((1, 1, 7)),
        cost=0.01,
    )
    return Scenario(
        seed=seed,
        kind="deaths",
        plan=plan,
        mode=ShardingPolicy.DYNAMIC,
        visitation="exactly_once",
        is_named=False,
        workers=3,
        clients=1,
        passes=1,
        limits=Limits(),
        max_outstanding=chance.choice((1, 4, 16)),
        think=chance.choice((0.0, 0.001)),
        storm_seconds=0.0,
        calm_seconds=1.0,
    )


def _kill_again_and_again(cast: Cast, until: float) -> None:
    """Kill a worker about once a second; another process takes its place within a second."""
    world, chance = cast.world, cast.world.chance

    def begin(worker: WorkerProcess) -> None:
        if not worker.is_up:
            worker.begin()

    def kill() -> None:
        there = [each for each in cast.workers if each.is_running]
        if there and world.now < until:
            worker = chance.choice(there)
            worker.die("is killed")
            world.at(0.1 + chance.random(), lambda: begin(worker))
        world.at(0.5 + chance.random(), kill)

    world.at(1.5, kill)


def _read(seed: int, kills_until: float) -> Cast:
    cast = Cast(_scenario(seed))
    try:
        cast.begin()
        _kill_again_and_again(cast, kills_until)
        cast.world.run(_SECONDS, stop=lambda: cast.is_over)
        check_now(cast, thoroughly=True)
        if not cast.is_over:
            raise BrokenPromiseError("all is read in time")
        check_at_end(cast)
    except Exception as error:
        tell(cast, error, last=40)
        raise
    return cast


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kills_until", [6.0, _SECONDS], ids=["for a while", "all the time"])
def test_a_shuffle_of_values_ends_although_a_worker_is_killed_each_second(
    kills_until: float,
) -> None:
    for seed in range(_SEEDS):
        _read(seed, kills_until)
