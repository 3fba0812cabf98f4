"""Coordinated reads: all clients are consumers, who read in rounds.

What must hold beside the invariants of all runs
    all consumers of an iteration use the same rounds in the same order, each its own part; where
    one stops early, the others stop there, or a little later;
    a round is of one task, and the rounds of a task come from the first one on, without a gap;
    nothing comes twice, and at the end all have the same number of rounds;
    where nobody dies, each task lacks at most the elements that are too few for a round.

What does not hold today: where there is nothing to deal of a dataset that cannot be opened, some
consumers may hear why, and the others that it is at its end.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from headrace.errors import DeadlineExceededError, FailedPreconditionError
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import events
from headrace.service.messages import JobOptions
from tests.simulation.client import GROUP_SECONDS, ClientProcess, Outcome, Reading
from tests.simulation.cluster import Cluster
from tests.simulation.invariants import check_alone, check_readings, duplicates, tasks_of
from tests.simulation.kernel import require, require_none
from tests.simulation.production import Atom
from tests.simulation.scenario import DYNAMIC, OFF, Scenario, scenario_of

__all__ = ["CoordinatedReads"]

_LEFT_BEHIND = (
    "cannot go on with round",
    "did not take part in round",
    "the current round has already reached",
    "counts as gone",
    "cannot rejoin it",
)
"""What a consumer says that cannot go on because another one is gone, or that counts as gone."""


class CoordinatedReads(Cluster):
    """A cluster whose clients read in rounds."""

    mode = "rounds"

    @staticmethod
    def scenario_of(seed: int) -> Scenario:
        """Return what a seed stands for where all clients read in rounds."""
        chance = random.Random(f"rounds {seed}")
        scenario = scenario_of(seed)
        plan = dataclasses.replace(scenario.plan, size=chance.choice((0, 3, 20, 60, 150)))
        return dataclasses.replace(
            scenario,
            plan=plan,
            mode=chance.choice((OFF, DYNAMIC)),
            clients=chance.choice((1, 2, 2, 3, 5)),
            limits=dataclasses.replace(scenario.limits, stable_copy_seconds=1e9),
            is_named=True,
            visitation=None,
            in_order=False,
        )

    def terms(self) -> JobOptions:
        scenario = self.scenario
        return JobOptions(processing_mode=int(scenario.mode), num_consumers=scenario.clients)

    def new_client(self, number: int, **options: Any) -> ClientProcess:
        return super().new_client(number, consumer_index=number - 1, **options)

    def deadline(self) -> float:
        return super().deadline() + self.scenario.passes * 2 * GROUP_SECONDS

    def may_fail(self, reading: Reading) -> bool:
        """Whether it failed because another consumer is gone, or it may count so itself."""
        failure = reading.failure
        if not isinstance(failure, FailedPreconditionError | DeadlineExceededError):
            return False
        ended = (Outcome.ENDED, None)
        gone = any(each.outcome not in ended for each in self.readings)
        gone = gone or bool(self.journaled(events.ClientLeft))
        return gone and any(words in str(failure) for words in _LEFT_BEHIND)

    def check_at_end(self) -> None:
        check_readings(self)
        if not self.scenario.kind.is_durable:
            check_alone(self)
            return
        plan = self.scenario.plan
        for iteration_id, readings in self.readings_by_iteration().items():
            if plan.size or not plan.broken:
                _check_agreement(iteration_id, readings)
            self._check_parts(readings)
            if not plan.broken:
                self._check_what_is_missing(iteration_id, readings)

    def _check_parts(self, readings: Iterable[Reading]) -> None:
        """Check that nothing comes twice: of a copy, or of all that was dealt."""
        dealt = self.scenario.mode == ShardingPolicy.DYNAMIC
        got: Counter[tuple[int, Atom]] = Counter(
            (0 if dealt else portion.task.task_id, atom)
            for reading in readings
            for portion in reading.yielded
            for atom in portion.atoms()
        )
        require_none(duplicates(got), "nothing comes twice")

    def _check_what_is_missing(self, iteration_id: int, readings: list[Reading]) -> None:
        scenario, plan = self.scenario, self.scenario.plan
        all_ended = all(each.outcome is Outcome.ENDED for each in readings)
        if scenario.kind.workers_die or not all_ended:
            return
        tasks = tasks_of(self, iteration_id)
        whole = 1
        if scenario.mode != ShardingPolicy.DYNAMIC:
            finished = self.journaled(events.TaskFinished)
            whole = len({e.task_id for e in finished if e.task_id in tasks and not e.cut_short})
        everything = len(plan.everything())
        # A short batch for each worker, and elements that are too few for a round.
        lacking = len(tasks) * (scenario.clients - 1) * plan.joined
        came = sum(len(each.atoms()) for each in readings)
        require(
            came >= whole * everything - lacking,
            "no more is lost than makes no round",
            f"{came} of {whole} x {everything}, at most {lacking} may lack in {len(tasks)} tasks",
        )


def _check_agreement(iteration_id: int, readings: Iterable[Reading]) -> None:
    longest: list[tuple[int, int]] = max((each.rounds for each in readings), key=len)
    for reading in readings:
        used = reading.rounds
        same = len([0 for one, other in zip(used, longest, strict=False) if one == other])
        require(
            same == len(used),
            "all consumers use the same rounds",
            f"{reading.client_id} has {used[same : same + 3]} as round {same} of iteration "
            f"{iteration_id}, another {longest[same : same + 3]}",
        )
        if reading.outcome is Outcome.ENDED:
            require(
                len(used) == len(longest),
                "all consumers end after the same round",
                f"{reading.client_id} after {len(used)} of {len(longest)}",
            )
    next_of: Counter[int] = Counter()
    for task_id, number in longest:
        require(number == next_of[task_id], "the rounds of a task have no gap", task_id, number)
        next_of[task_id] += 1
