"""In order, a slow worker's units are dealt to another one: the fast ones bound the time."""

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
from tests.simulation.world import BrokenPromiseError

_SEEDS = 10


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def scenario_of(seed: int, *, ordered: bool = True, ahead: int = 1000) -> Scenario:
    chance = random.Random(f"backups {seed}")
    return Scenario(
        seed=seed,
        kind="deaths",
        plan=Plan(size=60, parts=chance.choice((1, 9)), cost=0.02),
        mode=ShardingPolicy.DYNAMIC,
        visitation="exactly_once",
        is_named=False,
        workers=chance.choice((2, 3, 4)),
        clients=1,
        passes=1,
        limits=Limits(),
        max_outstanding=16,
        think=0.0,
        storm_seconds=0.0,
        calm_seconds=1.0,
        in_order=ordered,
        ahead=ahead,
    )


def read(
    seed: int,
    slowness: float,
    *,
    dies_at: float | None = None,
    ordered: bool = True,
    ahead: int = 1000,
) -> Cast:
    """Read with one worker that takes so many times as long, and may die; return who did."""
    cast = Cast(scenario_of(seed, ordered=ordered, ahead=ahead))
    world = cast.world

    def slow_down() -> None:
        cast.workers[0].slowness = slowness

    try:
        cast.begin()
        world.at(1.001, slow_down)
        if dies_at is not None:
            world.at(dies_at, lambda: cast.workers[0].die("is killed"))
        world.run(600.0, stop=lambda: cast.is_over)
        check_now(cast, thoroughly=True)
        if not cast.is_over:
            raise BrokenPromiseError("all is read")
        check_at_end(cast)
    except Exception as error:
        tell(cast, error, last=40)
        raise
    return cast


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ahead", [1000, 20, 4])
def test_the_time_of_an_ordered_reading_is_bounded_by_the_fast_workers(ahead: int) -> None:
    """Also where so little fits before its turn that the fast ones wait for room."""
    for seed in range(_SEEDS):
        scenario = scenario_of(seed)
        alone = read(seed, 1.0, ahead=ahead).world.now * scenario.workers / (scenario.workers - 1)
        took = read(seed, 2000.0, ahead=ahead).world.now
        assert took < 2 * alone + 5.0, (seed, alone, took)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ahead", [1000, 4])
def test_a_slow_worker_that_dies_has_nothing_dealt_a_third_time(ahead: int) -> None:
    for seed in range(_SEEDS):
        for dies_at in (1.5, 3.0, 4.5):
            read(seed, 2000.0, dies_at=dies_at, ahead=ahead)
