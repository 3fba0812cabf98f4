"""Coordinated reads: all clients are consumers that read in rounds.

Invariants in addition to those of all runs
    All consumers of an iteration use the same rounds in the same order, each its own part. If one
    stops early, the others stop at the same round or slightly later.
    A round belongs to one task, and the rounds of a task are consecutive, from the first one.
    No element is duplicated, and at the end all consumers have the same number of rounds.
    If no process crashes, each task lacks at most the elements that are too few for a round.

Known exception: if a dataset that cannot be opened has no splits, some consumers may receive the
error and others the end.
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
from tests.simulation.invariants import check_readings, check_separately, duplicates, tasks_of
from tests.simulation.kernel import require, require_none
from tests.simulation.production import Atom
from tests.simulation.scenario import DYNAMIC, OFF, Scenario, scenario_of

__all__ = ["CoordinatedReads"]

_CONSUMER_LOST_MESSAGES = (
    "cannot read round",
    "did not read round",
    "the current round has already reached",
    "its group of consumers cannot continue",
    "cannot rejoin it",
)
"""Parts of errors of a consumer that cannot continue, because one was lost or its lease expired."""


class CoordinatedReads(Cluster):
    """Cluster whose clients read in rounds."""

    mode = "coordinated_reads"

    @staticmethod
    def scenario_of(seed: int) -> Scenario:
        """Return the scenario of a seed in which all clients read in rounds."""
        rng = random.Random(f"rounds {seed}")
        scenario = scenario_of(seed)
        plan = dataclasses.replace(scenario.plan, size=rng.choice((0, 3, 20, 60, 150)))
        return dataclasses.replace(
            scenario,
            plan=plan,
            mode=rng.choice((OFF, DYNAMIC)),
            clients=rng.choice((1, 2, 2, 3, 5)),
            limits=dataclasses.replace(scenario.limits, stable_copy_seconds=1e9),
            is_named=True,
            visitation=None,
            in_order=False,
        )

    def job_options(self) -> JobOptions:
        scenario = self.scenario
        return JobOptions(processing_mode=int(scenario.mode), num_consumers=scenario.clients)

    def new_client(self, number: int, **options: Any) -> ClientProcess:
        return super().new_client(number, consumer_index=number - 1, **options)

    def deadline(self) -> float:
        return super().deadline() + self.scenario.epochs * 2 * GROUP_SECONDS

    def may_fail(self, reading: Reading) -> bool:
        """Return whether it may have failed because a consumer ended or its lease expired."""
        failure = reading.failure
        if not isinstance(failure, FailedPreconditionError | DeadlineExceededError):
            return False
        ended = (Outcome.ENDED, None)
        others_ended = any(each.outcome not in ended for each in self.readings)
        others_ended = others_ended or bool(self.journaled(events.ClientLeft))
        return others_ended and any(words in str(failure) for words in _CONSUMER_LOST_MESSAGES)

    def check_at_end(self) -> None:
        check_readings(self)
        if not self.scenario.kind.is_durable:
            check_separately(self)
            return
        plan = self.scenario.plan
        for iteration_id, readings in self.readings_by_iteration().items():
            if plan.size or not plan.broken:
                _check_agreement(iteration_id, readings)
            self._check_parts(readings)
            if not plan.broken:
                self._check_missing(iteration_id, readings)

    def _check_parts(self, readings: Iterable[Reading]) -> None:
        """Check that no element of a copy, or of all splits, is duplicated."""
        is_dynamic = self.scenario.mode == ShardingPolicy.DYNAMIC
        got: Counter[tuple[int, Atom]] = Counter(
            (0 if is_dynamic else batch.task.task_id, atom)
            for reading in readings
            for batch in reading.yielded
            for atom in batch.atoms()
        )
        require_none(duplicates(got), "no element is duplicated")

    def _check_missing(self, iteration_id: int, readings: list[Reading]) -> None:
        scenario, plan = self.scenario, self.scenario.plan
        all_ended = all(each.outcome is Outcome.ENDED for each in readings)
        if scenario.kind.workers_crash or not all_ended:
            return
        tasks = tasks_of(self, iteration_id)
        num_complete = 1
        if scenario.mode != ShardingPolicy.DYNAMIC:
            finished = self.journaled(events.TaskFinished)
            num_complete = len(
                {e.task_id for e in finished if e.task_id in tasks and not e.cut_short}
            )
        everything = len(plan.everything())
        # A short batch per worker, and elements that are too few for a round.
        max_missing = len(tasks) * (scenario.clients - 1) * plan.batch_size
        received = sum(len(each.atoms()) for each in readings)
        require(
            received >= num_complete * everything - max_missing,
            "only elements that are too few for a round are missing",
            f"{received} of {num_complete} x {everything}, at most {max_missing} may be missing",
            f"in {len(tasks)} tasks",
        )


def _check_agreement(iteration_id: int, readings: Iterable[Reading]) -> None:
    longest: list[tuple[int, int]] = max((each.rounds for each in readings), key=len)
    for reading in readings:
        rounds = reading.rounds
        num_equal = len([0 for one, other in zip(rounds, longest, strict=False) if one == other])
        require(
            num_equal == len(rounds),
            "all consumers use the same rounds",
            f"{reading.client_id} has {rounds[num_equal : num_equal + 3]} as round {num_equal}",
            f"of iteration {iteration_id}, another {longest[num_equal : num_equal + 3]}",
        )
        if reading.outcome is Outcome.ENDED:
            require(
                len(rounds) == len(longest),
                "all consumers end after the same round",
                f"{reading.client_id} after {len(rounds)} of {len(longest)}",
            )
    next_of: Counter[int] = Counter()
    for task_id, number in longest:
        require(number == next_of[task_id], "the rounds of a task are consecutive", task_id, number)
        next_of[task_id] += 1
