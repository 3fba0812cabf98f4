"""What must hold, whatever goes wrong.

While it runs
    everybody who waits for ten seconds is told for what, and what is said is true;
    what is outstanding is bounded; the journal says what the dispatcher knows.
At the end
    all readings end, for a reason that the scenario gives;
    nothing came twice; what did not come is named, or went with a client;
    nobody is declared lost who was only paused, and nothing is kept for longer than it should be.

What does not hold today
    Said to be lost, and came: where several clients share units that come in parts (an interleave,
    a shuffle of values, a batch after a filter), units that came whole, but not to one client, may
    be said to be lost when their worker leaves after its task is finished. Nobody misses anything.
    Lost for good, and said: what was on its way to one of several clients when its task was
    finished, if the worker is lost before it was asked for again: it is dealt to nobody else.
    In any order, an error that was sent to one of several clients, which closed or died, comes to
    nobody else: errors have no origins there.
    Answers of tasks that are over and lie unread are not counted as outstanding.
    With OFF, a unit that kills its workers is given up only if copies die within `copy_lasts`; else
    they are read again without end, and each time this is said.
    What a client had and never used, that goes when the pass has ended for the others, is missing.
    What a client used after its last acknowledgement may come again when it dies, or counts as
    gone; a reading that ends does not hear of what is lost afterwards: the dispatcher's log does.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from headrace.errors import (
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
    UserFunctionError,
)
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import updates
from headrace.service.messages import LostUnits
from tests.simulation.cast import BOUNDS, Cast
from tests.simulation.client import ClientProcess, Outcome, Portion, Reading
from tests.simulation.production import Atom
from tests.simulation.round_promises import may_leave_others_behind
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import BrokenPromiseError, Process

__all__ = [
    "atoms_of",
    "check_at_end",
    "check_now",
    "check_order",
    "check_outcome",
    "check_retention",
    "is_there",
    "said_to_be_cut_off",
    "says_that_copies_are_gone",
]

_MOST_DEATHS = 8
"""By one unit in a pass: twice while it is one of many, then in groups down to it alone, thrice
there; where others die of other causes, some more."""
_HEARD_SECONDS = 7.0
"""After which a client that does not say that the dispatcher is silent has heard of a worker."""

_FIRST_WARNING = 10.0
_NEXT_WARNING = 60.0
_GONE = (updates.WorkerLost, updates.WorkerLeft)
_CONVERSATIONS = 5000
"""Of how many, about, is seen at one look what the workers keep."""
_SLACK = 3.0
"""Seconds that a warning may be late: a session does not notice a short pause of its process."""


def _require(holds: bool, promise: str, *about: object, of: Iterable[Process] = ()) -> None:
    if not holds:
        error = BrokenPromiseError(f"{promise}: {' '.join(map(str, about))}")
        error.add_note(" ".join(each.name for each in of))
        raise error


# --- while it runs ----------------------------------------------------------------------------


def check_now(cast: Cast, *, thoroughly: bool = False) -> None:
    """Check what must hold at any time."""
    for client in cast.clients:
        if client.is_running and not client.is_done:
            _check_waiting(cast, client)
            _check_outstanding(cast, client)
        _check_truth(cast, client)
    # In a crowd some of them at each look, in turn: each keeps something for each client.
    stride = 1 + len(cast.workers) * len(cast.clients) // _CONVERSATIONS
    for worker in cast.workers[cast.next_look() % stride :: stride]:
        if worker.is_running:
            _check_kept(cast, worker)
    if thoroughly and cast.dispatcher.is_up:
        cast.dispatcher.check()


def _check_waiting(cast: Cast, client: ClientProcess) -> None:
    if not client.readings or client.reading.waiting_since is None:
        return
    reading = client.reading
    patience = _NEXT_WARNING if reading.warned else _FIRST_WARNING
    waited = cast.world.now - max(reading.waiting_since or 0.0, client.went_on_at)
    _require(
        waited <= patience + _SLACK,
        "everybody who waits for ten seconds is told for what",
        f"{client.name} has waited for {waited:.1f} s",
        of=[client, cast.dispatcher],
    )


def _check_kept(cast: Cast, worker: WorkerProcess) -> None:
    portion = (1 << 20) + cast.scenario.plan.bytes
    most = BOUNDS.total_bytes + 2 * len(cast.clients) * cast.scenario.passes * portion
    for ready, out in worker.kept():
        # Two more where elements were handed over before units were waited for, others came after
        # that, and then an error: room for all is seen before the first.
        _require(
            ready <= BOUNDS.ready_portions + 2 and out <= most,
            "what a worker keeps is bounded",
            f"{worker.name} keeps {ready} portions, and {out} bytes are out, not {most}",
            of=[worker],
        )


def _check_outstanding(cast: Cast, client: ClientProcess) -> None:
    most = cast.scenario.max_outstanding
    if client.counts_elements and client.most_tasks <= most:
        # Of a task that nobody answers for half a second one more is asked.
        late = client.most_tasks if most < 2 * client.most_tasks else 0
        _require(
            client.most_elements <= most + late,
            "where elements are counted, no more are outstanding than may be",
            f"{client.name} had {client.most_elements}, not {most}",
            of=[client],
        )
    limit = max(most, 3 * client.most_tasks)
    _require(
        client.most_outstanding <= limit,
        "what is outstanding is bounded",
        f"{client.name} had {client.most_outstanding} requests and answers, not {limit}",
        of=[client],
    )


def _was_cut_off(cast: Cast, fact: updates.WorkerLost) -> bool:
    """Whether a client's connection was reset, in the very second whose answers were lost."""
    return "reset" in cast.scenario.promises.troubles and "refuses" in fact.reason


# --- at the end -------------------------------------------------------------------------------


def check_at_end(cast: Cast) -> None:
    """Check what must hold once all clients are done."""
    check_now(cast, thoroughly=True)
    promises = cast.scenario.promises
    readings = [reading for client in cast.clients for reading in client.readings]
    for client in cast.clients:
        for reading in client.readings:
            check_outcome(cast, client, reading)
            check_order(client, reading)
    deaths = sum(worker.killed_by_units for worker in cast.workers)
    if cast.scenario.mode == ShardingPolicy.DYNAMIC and promises.is_durable:
        _require(
            deaths <= _MOST_DEATHS * len(cast.scenario.plan.deadly) * cast.scenario.passes,
            "a unit that kills is given up",
            f"after {deaths} deaths",
        )
    if promises.nobody_is_lost:
        declared = [
            fact
            for fact in cast.dispatcher.disk.history
            if isinstance(fact, updates.WorkerLost)
            and is_there(cast, fact.worker_id)
            and not _was_cut_off(cast, fact)
        ]
        _require(not declared, "nobody is declared lost who is only paused", *declared)
    if not promises.is_durable:
        # Each incarnation numbers its iterations from the same number on: only readings by
        # themselves can be compared.
        for reading in readings:
            _check_alone(cast, reading)
        return
    if cast.scenario.in_rounds:
        return
    by_iteration: dict[int, list[Reading]] = defaultdict(list)
    for reading in readings:
        by_iteration[reading.iteration_id].append(reading)
    for not_opened in (-1, 0):
        by_iteration.pop(not_opened, None)
    for iteration_id, shared in by_iteration.items():
        if cast.scenario.visitation == "exactly_once":
            _check_exact(cast, iteration_id, shared)
        elif cast.scenario.mode == ShardingPolicy.DYNAMIC:
            _check_dealt(cast, iteration_id, shared)
        else:
            _check_copies(cast, iteration_id, shared)


def is_there(cast: Cast, worker_id: str) -> bool:
    """Whether a worker goes by this name still, and has not left."""
    name, _, number = worker_id.rpartition("-")
    return any(
        each.name == name and each.starts == int(number) and not each.has_left
        for each in cast.workers
    )


def check_outcome(cast: Cast, client: ClientProcess, reading: Reading) -> None:
    """Check that a reading ended, for a reason that the scenario gives."""
    promises = cast.scenario.promises
    _require(
        reading.outcome is not None,
        "all readings end",
        f"{reading.client_id} does not",
        of=[client, cast.dispatcher],
    )
    strange = [each for each in reading.errors if not isinstance(each, UserFunctionError)]
    _require(not strange, "errors are those of the dataset", strange[:3], of=[client])
    if reading.outcome is not Outcome.FAILED:
        return
    failure = reading.failure
    allowed = (
        (
            isinstance(failure, FailedPreconditionError)
            and "does not know this reader" in str(failure)
            and (
                not promises.is_durable
                or client.longest_pause > 0.9 * _client_timeout(cast)
                # Between them, for long, nothing got through.
                or (
                    "part for long" in promises.troubles
                    and client.longest_silence > 0.9 * _client_timeout(cast)
                )
            )
        )
        or (isinstance(failure, NotFoundError) and not promises.is_durable)
        or (isinstance(failure, UnavailableError) and "did not answer for 60 s" in str(failure))
        or says_that_copies_are_gone(cast, failure)
        or (cast.scenario.in_rounds and may_leave_others_behind(cast, client, failure))
    )
    _require(
        allowed,
        "reading fails for a reason that the scenario gives",
        f"{reading.client_id}: {failure!r}",
        of=[client, cast.dispatcher],
    )


def says_that_copies_are_gone(cast: Cast, failure: Exception | None) -> bool:
    """Whether a failure says that no copy is left, where a worker was lost or has left."""
    return (
        isinstance(failure, FailedPreconditionError)
        and "every worker that had a copy" in str(failure)
        and any(isinstance(each, _GONE) for each in cast.dispatcher.disk.history)
    )


def _client_timeout(cast: Cast) -> float:
    return cast.scenario.limits.client_timeout


def check_order(client: ClientProcess, reading: Reading) -> None:
    """Check that the answers of each task were taken in order."""
    last: dict[int, int] = {}
    for portion in reading.yielded:
        task_id = portion.task.task_id
        _require(
            last.get(task_id, -1) <= portion.number,
            "answers of a task are taken in order",
            f"{reading.client_id}: {portion.number} of task {task_id} after {last.get(task_id)}",
            of=[client],
        )
        last[task_id] = portion.number


def atoms_of(reading: Reading) -> list[tuple[int, Atom]]:
    """Return (task, atom) of all that a consumer got; an element that raised is there, too."""
    return [
        (portion.task.task_id, atom)
        for portion in reading.yielded
        for element in portion.elements
        for atom in element
    ] + [(task_id, (unit, 0)) for task_id, unit in reading.raised]


def _check_alone(cast: Cast, reading: Reading) -> None:
    """Check a reading of a dispatcher that forgets: nothing comes twice to it."""
    got = Counter(atoms_of(reading))
    if cast.scenario.mode == ShardingPolicy.DYNAMIC:
        got = Counter((0, atom) for _, atom in got.elements())
    twice = [atom for atom, times in got.items() if times > 1]
    _require(not twice, "nothing comes twice", twice[:5], reading.client_id)


def _check_dealt(cast: Cast, iteration_id: int, shared: list[Reading]) -> None:
    """Check an iteration that dealt units: at most once, whole or said."""
    scenario, plan = cast.scenario, cast.scenario.plan
    promises = scenario.promises
    names = [each.client_id for each in shared]
    got = Counter(atom for reading in shared for _, atom in atoms_of(reading))
    twice = {atom for atom, times in got.items() if times > 1}
    twice -= _may_come_again(cast, shared)
    _require(not twice, "nothing comes twice", sorted(twice)[:5], names)
    strange = [atom for atom in got if not 0 <= atom[1] < plan.count(atom[0])]
    _require(not strange, "nothing comes that is not there", strange[:5])
    ended = [each for each in shared if each.outcome is Outcome.ENDED]
    if not ended or plan.broken:
        return
    everything = plan.everything()
    missing = sorted({unit for unit, _ in everything - got.keys()})
    lost = [each for reading in ended for each in reading.lost]
    said = _units(lost)
    # Who has ended before something was lost does not hear of it: the dispatcher's log does.
    logged = _units(cast.dispatcher.said_lost.get(iteration_id, ()))
    unsaid = [unit for unit in missing if unit not in said | logged]
    _require(
        not unsaid,
        "what did not come is named",
        f"units {unsaid[:10]} of {len(missing)} missing; said {sorted(said)[:10]}",
        names,
    )
    one_to_one = plan.parts == plan.window == plan.joined == plan.mixed == 1 and not plan.omits
    if not promises.workers_die and not promises.clients_go:
        _require(not missing, "nothing is lost", missing[:10], names)
        if one_to_one or len(shared) == 1:
            _require(not said, "nothing is said to be lost", sorted(said)[:10], names)
    if one_to_one and not promises.clients_go:
        history = cast.dispatcher.disk.history
        finished = {each.task_id for each in history if isinstance(each, updates.TaskFinished)}
        too_late = finished if len(shared) > 1 else set()
        excess = said - _units(each for each in lost if each.given_up or each.task_id in too_late)
        _require(
            not excess, "what is one to one loses nothing with its worker", sorted(excess)[:10]
        )
        came = {unit for unit, _ in got}
        _require(not said & came, "what came is not said to be lost", sorted(said & came)[:10])


def _check_exact(cast: Cast, iteration_id: int, shared: list[Reading]) -> None:
    """Check an iteration of which each element comes once."""
    plan = cast.scenario.plan
    names = [each.client_id for each in shared]
    if cast.scenario.in_order:
        for reading in shared:
            _check_sequence(cast, reading)
    got = Counter(atom for reading in shared for _, atom in atoms_of(reading))
    everything = plan.everything()
    strange = got.keys() - everything
    _require(not strange, "nothing comes that is not there", sorted(strange)[:5])
    in_order = cast.scenario.in_order  # then errors have origins, too
    twice = {
        atom for atom, times in got.items() if times > 1 and (in_order or not plan.raises(*atom))
    }
    twice -= _may_come_again(cast, shared)
    if not in_order:
        twice -= _went_with_worker_and_client(cast, shared) | _begun_when_closed(shared)
    _require(not twice, "each element comes once", "twice:", sorted(twice)[:5], names)
    ended = [each for each in shared if each.outcome is Outcome.ENDED]
    if not ended or plan.broken:
        return
    given_up = {
        unit
        for lost in (
            *(each.lost for each in ended),
            cast.dispatcher.said_lost.get(iteration_id, ()),
        )
        for unit in _units(each for each in lost if each.given_up)
    }
    _require(
        all(_deaths(cast, iteration_id, unit) >= 5 for unit in given_up - plan.deadly),
        "only what kills is given up",
        sorted(given_up)[:5],
        names,
    )
    said = _units(each for reading in ended for each in reading.lost)
    _require(said <= given_up, "nothing else is said to be lost", sorted(said - given_up)[:5])
    if _left_when_it_was_over(cast, iteration_id, shared):
        return
    missing = sorted(atom for atom in everything - got.keys() if atom[0] not in given_up)
    if not in_order and len(ended) < len(shared):
        missing = [atom for atom in missing if not plan.raises(*atom)]
    _require(
        not missing,
        "each element comes once",
        f"{len(missing)} are missing: {missing[:5]}",
        names,
    )


def _left_when_it_was_over(cast: Cast, iteration_id: int, shared: list[Reading]) -> bool:
    """Whether a client went, with what it had not used, when all had come and others had ended."""
    gone = {each.client_id for each in shared if each.outcome is not Outcome.ENDED}
    is_over = False
    for fact in cast.dispatcher.disk.history:
        if isinstance(fact, updates.IterationFinished) and fact.iteration_id == iteration_id:
            is_over = True
        elif isinstance(fact, updates.ClientLeft) and fact.client_id in gone and is_over:
            return True
    return False


def _begun_when_closed(shared: list[Reading]) -> set[Atom]:
    """Return what clients that closed had of the answer that they had begun to use."""
    found: set[Atom] = set()
    for reading in shared:
        if reading.outcome is Outcome.CLOSED and reading.yielded:
            last = reading.yielded[-1]
            found.update(
                atom
                for portion in reading.yielded
                if (portion.task.task_id, portion.number) == (last.task.task_id, last.number)
                for element in portion.elements
                for atom in element
            )
    return found


def _deaths(cast: Cast, iteration_id: int, unit: int) -> int:
    """Return how many tasks that were dealt a unit were lost."""
    of: dict[int, str] = {}
    dealt: set[int] = set()
    lost: set[int] = set()
    for fact in cast.dispatcher.disk.history:
        if isinstance(fact, updates.TaskCreated) and fact.iteration_id == iteration_id:
            of[fact.task_id] = fact.worker_id
        elif isinstance(fact, updates.UnitsDealt) and fact.task_id in of:
            dealt.update([fact.task_id] if fact.start <= unit < fact.stop else ())
        elif isinstance(fact, _GONE):
            lost.update(task_id for task_id, name in of.items() if name == fact.worker_id)
        elif isinstance(fact, updates.TaskLost):
            lost.add(fact.task_id)
    return len(dealt & lost)


def _went_with_worker_and_client(cast: Cast, shared: list[Reading]) -> set[Atom]:
    """Return what a client used of a task of which neither it nor the worker could speak again.

    The last words of one that closed, or was at the end, may be lost, or refused by a full disk.
    """
    history = cast.dispatcher.disk.history
    worker_of = {
        each.task_id: each.worker_id for each in history if isinstance(each, updates.TaskCreated)
    }
    gone = {each.worker_id for each in history if isinstance(each, _GONE)}
    lost = {each.task_id for each in history if isinstance(each, updates.TaskLost)}
    heard = {
        (each.task_id, each.client_id)
        for each in history
        if isinstance(each, updates.ElementsUsed | updates.ElementsReceived)
    }
    return {
        atom
        for reading in shared
        for task_id, atom in atoms_of(reading)
        if (task_id in lost or worker_of[task_id] in gone)
        and (reading.outcome is not Outcome.ENDED or (task_id, reading.client_id) not in heard)
    }


def _check_sequence(cast: Cast, reading: Reading) -> None:
    """Check that a reading in order got what one process yields, as far as it came."""
    plan = cast.scenario.plan
    # What died with one worker after the other may count as what kills them (`_check_exact`).
    left_out = plan.deadly.union(*(range(start, stop) for start, stop in reading.given_up))
    got = [atom for atom in reading.sequence if atom[0] not in left_out]
    everything = sorted(atom for atom in plan.everything() if atom[0] not in left_out)
    expected = everything[: len(got)]
    wrong = next((pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1]), None)
    _require(
        got == expected,
        "what is read in order comes as in one process",
        reading.client_id,
        f"got {wrong[0]} in place of {wrong[1]}" if wrong else f"got {len(got)} elements",
    )


def _units(lost: Iterable[LostUnits]) -> set[int]:
    return {unit for each in lost for start, stop in each.units for unit in range(start, stop)}


def _may_come_again(cast: Cast, shared: list[Reading]) -> set[Atom]:
    """Return what clients that are gone got last: they may not have said that they used it.

    Nor have those that closed while the dispatcher was away: they say it once.
    """
    unsaid: set[Atom] = set()
    for reading in shared:
        was_unheard = reading.outcome is Outcome.CLOSED and reading.was_unheard
        if was_unheard or reading.outcome in (Outcome.DIED, Outcome.FAILED):
            unsaid.update((unit, 0) for _, unit in reading.raised)
            by_task: dict[int, list[Portion]] = defaultdict(list)
            for portion in reading.yielded:
                by_task[portion.task.task_id].append(portion)
            for portions in by_task.values():
                last = portions[-1].number - cast.scenario.max_outstanding
                unsaid.update(
                    atom
                    for portion in portions
                    if portion.number >= last
                    for element in portion.elements
                    for atom in element
                )
    return unsaid


def _check_copies(cast: Cast, iteration_id: int, shared: list[Reading]) -> None:
    """Check an iteration in which each worker reads a copy."""
    plan = cast.scenario.plan
    got: dict[int, Counter[Atom]] = defaultdict(Counter)
    for reading in shared:
        for task_id, atom in atoms_of(reading):
            got[task_id][atom] += 1
    for task_id, copy in got.items():
        twice = [atom for atom, times in copy.items() if times > 1]
        _require(not twice, "nothing of a copy comes twice", task_id, twice[:5])
    if plan.broken or not all(each.outcome is Outcome.ENDED for each in shared):
        return
    everything = plan.everything()
    _check_attempts(cast, iteration_id, shared)
    said = said_to_be_cut_off(shared)
    for task_id in _whole_copies(cast, iteration_id):
        missing = sorted(everything - got[task_id].keys())
        _require(
            not missing or task_id in said,
            "each live worker's copy is whole",
            f"task {task_id} lacks {missing[:5]} and more, {len(missing)} in all",
        )


def said_to_be_cut_off(shared: list[Reading]) -> set[int]:
    """Return finished tasks whose last answers, a client said, were lost with their workers."""
    return {
        int(found[1] or found[2])
        for reading in shared
        for warning in reading.warnings
        if (found := re.search(r"whose task (\d+) was finished|share \d+ \(task (\d+)\)", warning))
    }


def _check_attempts(cast: Cast, iteration_id: int, shared: list[Reading]) -> None:
    """Check that whoever read a copy again was told so."""
    attempt_of = {
        fact.task_id: fact.attempt
        for fact in cast.dispatcher.disk.history
        if isinstance(fact, updates.TaskCreated) and fact.iteration_id == iteration_id
    }
    for reading in shared:
        attempts = {attempt_of[task_id] for task_id, _ in atoms_of(reading)}
        told = sum("reads it again from the start" in each for each in reading.warnings)
        _require(
            told >= len(attempts - {0}),
            "each attempt at a copy is said",
            f"{reading.client_id}: {sorted(attempts)}, told {told} times",
        )


def _whole_copies(cast: Cast, iteration_id: int) -> list[int]:
    """Return the tasks of an iteration that finished on workers that were not leaving."""
    worker_of: dict[int, str] = {}
    leaving: set[str] = set()
    whole: list[int] = []
    for fact in cast.dispatcher.disk.history:
        if isinstance(fact, updates.TaskCreated) and fact.iteration_id == iteration_id:
            worker_of[fact.task_id] = fact.worker_id
        elif isinstance(fact, updates.WorkerLeaving):
            leaving.add(fact.worker_id)
        elif isinstance(fact, updates.TaskFinished) and fact.task_id in worker_of:
            name = worker_of[fact.task_id]
            process = next(each for each in cast.workers if name.startswith(f"{each.name}-"))
            if name not in leaving and not process.has_ever_left:
                whole.append(fact.task_id)
    return whole


# --- afterwards -------------------------------------------------------------------------------


def check_retention(cast: Cast) -> None:
    """Check that nothing of an iteration is left once its time is over."""
    state = cast.dispatcher.state
    _require(not state.clients, "clients are forgotten", state.clients)
    kept = {
        each.iteration_id: each
        for each in state.iterations.values()
        # To begin a named one again would deal its elements twice.
        if each.finished or not each.is_dealt or state.jobs[each.job_id].name is None
    }
    _require(not kept, "iterations are forgotten", kept)
    for worker in cast.workers:
        if worker.is_up:
            mine = [each for each in worker.session.tasks.running if each not in state.tasks]
            _require(not mine, "workers forget tasks", worker.name, mine, of=[worker])


def _check_truth(cast: Cast, client: ClientProcess) -> None:
    """Check that what a client warned of since the last look is the case, where that is known."""
    while client.unjudged:
        at, warning = client.unjudged.pop(0)
        if "no worker is registered" in warning and "has not answered" not in warning:
            long_there = [
                worker_id
                for worker_id, since in cast.dispatcher.registered_at.items()
                if since < at - _HEARD_SECONDS
            ]
            quiet = max(cast.dispatcher.went_on_at, client.went_on_at) < at - _HEARD_SECONDS
            _require(
                not (long_there and quiet),
                "what a warning says is true",
                f"{client.name} says at {at:.1f} that no worker is registered: {long_there}",
                of=[client, cast.dispatcher],
            )
