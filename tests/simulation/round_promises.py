"""What must hold of rounds, whatever goes wrong.

All consumers of an iteration use the same rounds in the same order, each its own part; where one
stops early, the others stop there, or a little later.
A round is of one task, and the rounds of a task come from the first one on, without a gap.
Nothing comes twice. At the end all have the same number of rounds.
Where nobody dies, each task lacks at most the elements that are too few for a round.

What does not hold today: where there is nothing to deal of a dataset that cannot be opened, some
consumers may hear why, and the others that it is at its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from headrace.errors import DeadlineExceededError, FailedPreconditionError, HeadraceError
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from tests.simulation.cast import Cast
from tests.simulation.client import ClientProcess, Outcome, Reading
from tests.simulation.production import Atom
from tests.simulation.world import BrokenPromiseError

__all__ = ["check_rounds", "may_leave_others_behind"]


def _require(holds: bool, promise: str, *about: object) -> None:
    if not holds:
        raise BrokenPromiseError(f"{promise}: {' '.join(map(str, about))}")


def may_leave_others_behind(
    cast: Cast, client: ClientProcess, failure: HeadraceError | None
) -> bool:
    """Whether a reading may fail so because another consumer is gone, or this one may count so."""
    said = str(failure)
    if not isinstance(failure, FailedPreconditionError | DeadlineExceededError):
        return False
    gone = any(
        isinstance(fact, updates.ClientLeft) for fact in cast.dispatcher.disk.history
    ) or any(each.outcome not in (Outcome.ENDED, None) for each in _readings(cast))
    return gone and any(
        words in said
        for words in (
            "cannot go on with round",
            "did not take part in round",
            "the current round has already reached",
            "counts as gone",
        )
    )


def _readings(cast: Cast) -> list[Reading]:
    return [reading for client in cast.clients for reading in client.readings]


def check_rounds(cast: Cast) -> None:
    """Check all readings of a cast whose clients are consumers."""
    if not cast.scenario.promises.is_durable:
        return
    by_iteration: dict[int, list[Reading]] = defaultdict(list)
    for reading in _readings(cast):
        if reading.iteration_id > 0:
            by_iteration[reading.iteration_id].append(reading)
    for iteration_id, together in by_iteration.items():
        if cast.scenario.plan.size or not cast.scenario.plan.broken:
            _check_agreement(iteration_id, together)
        _check_parts(cast, together)
        if not cast.scenario.plan.broken:
            _check_what_is_missing(cast, iteration_id, together)


def _check_agreement(iteration_id: int, together: Iterable[Reading]) -> None:
    longest: list[tuple[int, int]] = max((each.rounds for each in together), key=len)
    for reading in together:
        used = reading.rounds
        same = len([0 for one, other in zip(used, longest, strict=False) if one == other])
        _require(
            same == len(used),
            "all consumers use the same rounds",
            f"{reading.client_id} has {used[same : same + 3]} as round {same} of iteration "
            f"{iteration_id}, another {longest[same : same + 3]}",
        )
        if reading.outcome is Outcome.ENDED:
            _require(
                len(used) == len(longest),
                "all consumers end after the same round",
                f"{reading.client_id} after {len(used)} of {len(longest)}",
            )
    next_of: Counter[int] = Counter()
    for task_id, number in longest:
        _require(number == next_of[task_id], "the rounds of a task have no gap", task_id, number)
        next_of[task_id] += 1


def _check_parts(cast: Cast, together: Iterable[Reading]) -> None:
    """Check that nothing comes twice: of a copy, or of all that was dealt."""
    dealt = cast.scenario.mode == ShardingPolicy.DYNAMIC
    got: Counter[tuple[int, Atom]] = Counter()
    for reading in together:
        for portion in reading.yielded:
            for element in portion.elements:
                for atom in element:
                    got[0 if dealt else portion.task.task_id, atom] += 1
    twice = [atom for atom, times in got.items() if times > 1]
    _require(not twice, "nothing comes twice", twice[:5])


def _check_what_is_missing(cast: Cast, iteration_id: int, together: list[Reading]) -> None:
    scenario, plan = cast.scenario, cast.scenario.plan
    if scenario.promises.workers_die or not all(each.outcome is Outcome.ENDED for each in together):
        return
    facts = cast.dispatcher.disk.history
    tasks = {
        fact.task_id
        for fact in facts
        if isinstance(fact, updates.TaskCreated) and fact.iteration_id == iteration_id
    }
    everything = sum(
        plan.raises(unit, k) or not plan.omitted(unit, k)
        for unit in range(plan.size)
        for k in range(plan.count(unit))
    )
    joined = plan.joined
    whole = 1 if scenario.mode == ShardingPolicy.DYNAMIC else len(_uncut(cast, tasks))
    # A short batch for each worker, and elements that are too few for a round.
    lacking = len(tasks) * (scenario.clients - 1) * joined
    expected = whole * everything - lacking
    came = sum(
        len(element)
        for reading in together
        for portion in reading.yielded
        for element in portion.elements
    )
    came += sum(len(reading.raised) for reading in together)
    _require(
        came >= expected,
        "no more is lost than makes no round",
        f"{came} of {whole} x {everything}, at most {lacking} may lack in {len(tasks)} tasks",
    )


def _uncut(cast: Cast, tasks: set[int]) -> set[int]:
    """Return the tasks whose copies were read to their end."""
    return {
        fact.task_id
        for fact in cast.dispatcher.disk.history
        if isinstance(fact, updates.TaskFinished) and fact.task_id in tasks and not fact.cut
    }
