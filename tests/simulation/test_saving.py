"""Saves in virtual time: hundreds of runs, each from a seed (`saving`)."""

from __future__ import annotations

import dataclasses
import os
import random

import pytest

from headrace.service.messages import SaveFiles
from tests.simulation.production import Plan
from tests.simulation.saving import SaveCast, run_save, save_scenario_of
from tests.simulation.test_simulation import _silence
from tests.simulation.worker import WorkerProcess

__all__ = ["_silence"]

_SEEDS_EACH = 50
_FIXED = 6
_RANDOM = 2 * int(os.environ.get("SIMULATION_ROUNDS", "0"))


@pytest.mark.catalogue("SF11", "SF14", "SF15", "SF17")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", range(_FIXED + _RANDOM))
def test_each_element_is_saved_once(block: int) -> None:
    """The seeds of a soak are not known beforehand; whichever breaks is named in the failure."""
    first = block * _SEEDS_EACH
    if block >= _FIXED:
        first = random.SystemRandom().randrange(1_000_000, 2**40)
    for seed in range(first, first + _SEEDS_EACH):
        run_save(save_scenario_of(seed))


def _begin_again_and_again(cast: SaveCast) -> None:
    for worker in cast.workers:
        if not worker.is_up:
            worker.begin()
    cast.world.at(0.5, lambda: _begin_again_and_again(cast))


def _run_for_a_minute(cast: SaveCast) -> None:
    cast.begin()
    _begin_again_and_again(cast)
    cast.world.run(60.0, stop=lambda: cast.is_over)


@pytest.mark.parametrize(("window", "mixed"), [(1, 30), (30, 1), (3, 1)])
def test_one_that_must_fail_fails_soon_whatever_steps_hold(window: int, mixed: int) -> None:
    plan = Plan(size=400, window=window, mixed=mixed, omits=True, cost=0.01, deadly=frozenset({80}))
    for seed in range(5):
        scenario = dataclasses.replace(
            save_scenario_of(seed), plan=plan, kind="deaths", workers=2, storm_seconds=0.0
        )
        cast = SaveCast(scenario)
        _run_for_a_minute(cast)
        (save,) = cast.dispatcher.state.saves.values()
        assert save.is_closed, f"seed {seed}: not all is dealt"
        assert "given up" in save.error


def test_a_worker_that_dies_after_its_last_files_leaves_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = WorkerProcess._said

    def die_when_files_count(self: WorkerProcess, ticket: int, answer: object, why: object) -> None:
        was_of_files = isinstance(self._asked.get(ticket), SaveFiles)
        heard(self, ticket, answer, why)
        world = self.world
        if was_of_files and self.is_up and world.now < 20.0 and world.chance.random() < 0.3:
            self.die("is killed")
            world.at(0.3, lambda: None if self.is_up else self.begin())

    monkeypatch.setattr(WorkerProcess, "_said", die_when_files_count)
    for seed in range(40):
        chance = random.Random(seed)
        plan = Plan(
            size=60,
            parts=chance.choice((1, 3)),
            window=chance.choice((1, 3)),
            mixed=chance.choice((1, 30)),
            joined=chance.choice((1, 7)),
            omits=True,
        )
        scenario = save_scenario_of(seed)
        run_save(dataclasses.replace(scenario, plan=plan, kind="deaths", storm_seconds=0.0))
