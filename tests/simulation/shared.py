"""Runs in which trainers share what workers make, and what must hold of them.

Clients read for trainers, some of them two for one, through small windows, and close after a while:
the data has no end that anybody comes to. Whatever goes wrong,

    every client gets what it came for, or ends for a reason that the scenario gives;
    no trainer gets an element of a task twice, and of a copy each client gets them in order;
    of what a trainer did not get of a copy, between two elements that it got, it was told;
    where elements are counted, no more are outstanding than may be;
    windows are no larger than they may be, and nothing is left where nobody reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections import defaultdict

from headrace.errors import FailedPreconditionError, NotFoundError, UnavailableError
from headrace.service.config import ShardingPolicy
from headrace.service.messages import OpenIteration, PutPlan, RegisterDataset, Terms
from headrace.service.modes.cross_trainer_cache.delivery import Shared
from headrace.service.worker.hand_out import Bounds
from tests.simulation.cast import Cast
from tests.simulation.client import ClientProcess, Outcome, Reading
from tests.simulation.production import Plan
from tests.simulation.promises import check_now, check_retention, says_that_copies_are_gone
from tests.simulation.run import pass_away, tell
from tests.simulation.scenario import Scenario, scenario_of
from tests.simulation.storm import Storm
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import BrokenPromiseError

__all__ = ["run_shared", "shared_scenario_of"]

_DISPATCHER = "dispatcher:1"
_PLAN = b"a pickled plan"
_DIGEST = hashlib.sha256(_PLAN).digest()
_UNITS = 20_000
"""More than anybody reads."""
_ELEMENT = 1 << 18
_PORTIONS = 25
_LOOK_SECONDS = 0.5


class _Worker(WorkerProcess):
    """Keeps windows."""

    def kept(self) -> list[tuple[int, int]]:
        for task in self.session.tasks._tasks.values():
            hand_out = task._hand_out
            assert isinstance(hand_out, Shared)
            assert self._bounds is not None
            _require(hand_out.kept[1] <= self._bounds.window_bytes, "windows are bounded", self)
        return []


class SharedCast(Cast):
    """Workers with small windows, and clients that read for trainers."""

    option = "--shared"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        chance = random.Random(f"shared {scenario.seed}")
        self.window = chance.choice((_ELEMENT, 4 * _ELEMENT, 1 << 30))
        self.trainers = [f"trainer{chance.randrange(1 + n)}" for n in range(scenario.clients)]
        self.fast = chance.random() < 0.5
        self.counts_elements = chance.random() < 0.4

    def add_worker(self) -> WorkerProcess:
        worker = _Worker(
            self.network,
            f"worker{len(self.workers) + 1}",
            _DISPATCHER,
            lambda _: self.scenario.plan,
            Bounds(window_bytes=self.window),
        )
        self.workers.append(worker)
        worker.begin()
        return worker

    def add_client(self) -> ClientProcess:
        number, scenario = len(self.clients), self.scenario
        client = ClientProcess(
            self.network,
            f"client{number + 1}",
            _DISPATCHER,
            before=(
                PutPlan(digest=_DIGEST, offset=0, total=len(_PLAN), part=_PLAN),
                RegisterDataset(
                    token="token",
                    digest=_DIGEST,
                    fingerprint="fingerprint",
                    element_spec=b"spec",
                    cardinality=-1,
                    positions=-1,
                ),
            ),
            opening=OpenIteration(
                client_id="",
                dataset_id="",
                job_name="job",
                pass_number=(),
                seed=7,
                terms=Terms(processing_mode=int(scenario.mode), cross_trainer_cache=True),
            ),
            max_outstanding=scenario.max_outstanding,
            think=scenario.think * (1 + 3 * number * self.fast),
            close_after=_PORTIONS,
            trainer_id=self.trainers[number],
            counts_elements=self.counts_elements,
        )
        self.clients.append(client)
        client.begin()
        return client


def shared_scenario_of(seed: int) -> Scenario:
    """Return what a seed stands for."""
    scenario = scenario_of(seed)
    chance = random.Random(f"shared scenario {seed}")
    return dataclasses.replace(
        scenario,
        in_order=False,
        plan=Plan(size=_UNITS, cost=chance.choice((0.0, 0.001, 0.02)), bytes=_ELEMENT),
        is_named=True,
        clients=chance.choice((1, 2, 3, 4)),
        passes=1,
    )


def run_shared(scenario: Scenario, *, last: int = 60) -> SharedCast:
    """Run a scenario; check what must hold.

    Raises:
        AssertionError: Something does not; its notes tell the seed and the story.
    """
    cast = SharedCast(scenario)
    try:
        _run(cast)
    except Exception as error:
        tell(cast, error, last=last)
        raise
    return cast


def _run(cast: SharedCast) -> None:
    world, scenario = cast.world, cast.scenario
    cast.begin()
    storm = Storm(cast)
    storm.begin()

    def look() -> None:
        check_now(cast, thoroughly=world.chance.random() < 0.02)
        world.at(_LOOK_SECONDS, look)

    look()
    limits = scenario.limits
    waits = 3 * limits.worker_timeout + 2 * limits.client_timeout + 2 * limits.settle_patience
    world.run(scenario.storm_seconds + 600.0 + waits, stop=lambda: cast.is_over)
    check_now(cast, thoroughly=True)
    for client in cast.clients:
        _check_client(cast, client)
    if not scenario.promises.is_durable:
        return  # each incarnation of the dispatcher begins with the same numbers
    _check_trainers(cast)
    world.run(math.inf, stop=lambda: storm.is_over and cast.dispatcher.is_running)
    pass_away(cast)
    check_retention(cast)


def _require(holds: bool, promise: str, *about: object) -> None:
    if not holds:
        raise BrokenPromiseError(f"{promise}: {' '.join(map(str, about))}")


def _check_client(cast: SharedCast, client: ClientProcess) -> None:
    promises = cast.scenario.promises
    _require(client.is_done, "every client gets what it came for", client.name, "still reads")
    if cast.counts_elements and client.most_tasks <= cast.scenario.max_outstanding:
        most = cast.scenario.max_outstanding
        _require(client.most_elements <= most, "elements are counted", client.most_elements, most)
    for reading in client.readings:
        about = client.name, reading.outcome, reading.failure, reading.errors
        if reading.outcome in (Outcome.DIED, Outcome.CLOSED):
            fits = promises.clients_go or len(reading.yielded) + 1 >= _PORTIONS
        elif reading.outcome is Outcome.FAILED:
            fits = isinstance(reading.failure, FailedPreconditionError | NotFoundError) and not (
                promises.nobody_is_lost and promises.is_durable
            )
            # A dispatcher that is away for a minute while an iteration is opened.
            fits = fits or isinstance(reading.failure, UnavailableError)
            fits = fits or says_that_copies_are_gone(cast, reading.failure)
        else:
            fits = False
        _require(fits, "each reading ends for a reason that the scenario gives", *about)


def _check_trainers(cast: SharedCast) -> None:
    is_copied = cast.scenario.mode == ShardingPolicy.OFF
    alone = {each for each in cast.trainers if cast.trainers.count(each) == 1}
    got: dict[tuple[str, int], list[int]] = defaultdict(list)
    for client in cast.clients:
        for reading in client.readings:
            by_task = _units_by_task(reading)
            for task_id, units in by_task.items():
                got[client.trainer_id, task_id] += units
                in_order = not is_copied or units == sorted(units)
                _require(in_order, "elements of a copy come in order", client.name, units)
            if by_task and is_copied and client.trainer_id in alone:
                gaps = sum(units[-1] - units[0] + 1 - len(units) for units in by_task.values())
                told = client.session._behind.total
                _require(gaps <= told, "each gap is told", client.name, gaps, told)
                keeps_all = cast.window == 1 << 30
                _require(not (keeps_all and told), "a large window keeps all", client.name, told)
    for (trainer, task_id), units in got.items():
        twice = len(units) - len(set(units))
        _require(not twice, "no trainer gets an element twice", trainer, task_id, twice)


def _units_by_task(reading: Reading) -> dict[int, list[int]]:
    units: dict[int, list[int]] = defaultdict(list)
    for portion in reading.yielded:
        for element in portion.elements:
            units[portion.task.task_id] += [unit for unit, _ in element]
    return units
