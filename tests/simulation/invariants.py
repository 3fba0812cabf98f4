"""What must hold of every reading, whatever goes wrong.

While it runs
    whoever waits for ten seconds is told for what, and what is said is true;
    what is outstanding is bounded; the journal agrees with the state of the dispatcher.
At the end
    all readings end, for a reason that the scenario gives;
    nothing came twice; what did not come is named, or went with a client;
    no process is declared lost that was only paused, and nothing is kept for longer than it should.

What does not hold today
    Said to be lost, and came: where several clients share units that come in parts (an interleave,
    a shuffle of values, a batch after a filter), units that came whole, but not to one client, may
    be said to be lost when their worker leaves after its task is finished. Nobody misses anything.
    Lost for good, and said: what was on its way to one of several clients when its task was
    finished, if the worker is lost before it was asked for again: it is dealt to nobody else.
    In any order, an error that was sent to one of several clients, which closed or crashed, comes
    to nobody else: errors have no origins there.
    Answers of tasks that are over and lie unread are not counted as outstanding.
    With OFF, a unit that kills its workers is given up only if copies die within `copy_lasts`; else
    they are read again without end, and each time this is said.
    What a client had and never used, that goes when the pass has ended for the others, is missing.
    What a client used after its last acknowledgement may come again when it crashes, or counts as
    gone; a reading that ends does not hear of what is lost afterwards: the dispatcher's log does.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

from headrace.errors import (
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
    UserFunctionError,
)
from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher import events
from headrace.service.messages import LostSplits
from headrace.service.modes.static.records import shard_of
from tests.simulation.client import ClientProcess, Outcome, Portion, Reading
from tests.simulation.kernel import require, require_none
from tests.simulation.production import Atom
from tests.simulation.worker import BOUNDS, WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

__all__ = [
    "atoms_by_task",
    "check_at_end",
    "check_now",
    "check_readings",
    "check_retention",
    "check_told_of_repeats",
    "duplicates",
    "said_to_be_cut_off",
    "says_that_copies_are_gone",
    "tasks_of",
]

T = TypeVar("T")

_MOST_DEATHS = 8
"""By one unit in a pass: twice while it is one of many, then in groups down to it alone, thrice
there; where others die of other causes, some more."""
_HEARD_SECONDS = 7.0
"""After which a client that does not say that the dispatcher is silent has heard of a worker."""

_FIRST_WARNING = 10.0
_NEXT_WARNING = 60.0
_GONE = (events.WorkerLost, events.WorkerLeft)
_CONVERSATIONS = 5000
"""Of how many, about, is seen at one look what the workers keep."""
_SLACK = 3.0
"""Seconds that a warning may be late: a session does not notice a short pause of its process."""


# --- while it runs ----------------------------------------------------------------------------


def check_now(cluster: Cluster, *, thoroughly: bool = False) -> None:
    """Check what must hold at any time."""
    for client in cluster.clients:
        if client.is_running and not client.is_done:
            _check_waiting(cluster, client)
            _check_outstanding(cluster, client)
        _check_truth(cluster, client)
    # In a crowd some of them at each look, in turn: each keeps something for each client.
    stride = 1 + len(cluster.workers) * len(cluster.clients) // _CONVERSATIONS
    for worker in cluster.workers[cluster.next_look() % stride :: stride]:
        if worker.is_running:
            _check_kept(cluster, worker)
    if thoroughly and cluster.dispatcher.is_up:
        cluster.dispatcher.check()


def _check_waiting(cluster: Cluster, client: ClientProcess) -> None:
    if not client.readings or client.reading.waiting_since is None:
        return
    reading = client.reading
    patience = _NEXT_WARNING if reading.warned else _FIRST_WARNING
    waited = cluster.simulation.now - max(reading.waiting_since or 0.0, client.resumed_at)
    require(
        waited <= patience + _SLACK,
        "whoever waits for ten seconds is told for what",
        f"{client.name} has waited for {waited:.1f} s",
        of=[client, cluster.dispatcher],
    )


def _check_kept(cluster: Cluster, worker: WorkerProcess) -> None:
    portion = (1 << 20) + cluster.scenario.plan.bytes
    most = BOUNDS.total_bytes + 2 * len(cluster.clients) * cluster.scenario.passes * portion
    for ready, out in worker.kept():
        # Two more where elements were handed over before units were waited for, others came after
        # that, and then an error: room for all is seen before the first.
        require(
            ready <= BOUNDS.ready_batches + 2 and out <= most,
            "what a worker keeps is bounded",
            f"{worker.name} keeps {ready} portions, and {out} bytes are out, not {most}",
            of=[worker],
        )


def _check_outstanding(cluster: Cluster, client: ClientProcess) -> None:
    most = cluster.scenario.max_outstanding
    if client.consumer.counts_elements and client.most_tasks <= most:
        # Of a task that nobody answers for half a second one more is asked.
        late = client.most_tasks if most < 2 * client.most_tasks else 0
        require(
            client.most_elements <= most + late,
            "where elements are counted, no more are outstanding than may be",
            f"{client.name} had {client.most_elements}, not {most}",
            of=[client],
        )
    limit = max(most, 3 * client.most_tasks)
    require(
        client.most_outstanding <= limit,
        "what is outstanding is bounded",
        f"{client.name} had {client.most_outstanding} requests and answers, not {limit}",
        of=[client],
    )


def _check_truth(cluster: Cluster, client: ClientProcess) -> None:
    """Check that what a client warned of since the last look is the case, where that is known."""
    dispatcher = cluster.dispatcher
    for at, warning in client.unjudged:
        if "no worker is registered" not in warning or "no reply from the dispatcher" in warning:
            continue
        before = at - _HEARD_SECONDS
        if max(dispatcher.resumed_at, client.resumed_at) < before:
            require_none(
                [name for name, since in dispatcher.registered_at.items() if since < before],
                "what a warning says is true",
                f"{client.name} says at {at:.1f} that no worker is registered",
                of=[client, dispatcher],
            )
    client.unjudged.clear()


# --- at the end -------------------------------------------------------------------------------


def check_at_end(cluster: Cluster) -> None:
    """Check what must hold once all clients are done."""
    check_readings(cluster)
    if not cluster.scenario.kind.is_durable:
        check_alone(cluster)
        return
    for iteration_id, readings in cluster.readings_by_iteration().items():
        if cluster.scenario.visitation == "exactly_once":
            _check_exact(cluster, iteration_id, readings)
        elif cluster.scenario.mode == ShardingPolicy.DYNAMIC:
            _check_dealt(cluster, iteration_id, readings)
        else:
            _check_copies(cluster, iteration_id, readings)


def check_readings(cluster: Cluster) -> None:
    """Check what must hold of all readings, of whatever mode."""
    check_now(cluster, thoroughly=True)
    scenario = cluster.scenario
    for client in cluster.clients:
        for reading in client.readings:
            _check_outcome(cluster, client, reading)
            _check_order(client, reading)
    deaths = sum(worker.killed_by_units for worker in cluster.workers)
    if scenario.mode == ShardingPolicy.DYNAMIC and scenario.kind.is_durable:
        most = _MOST_DEATHS * len(scenario.plan.deadly) * scenario.passes
        require(deaths <= most, "a unit that kills is given up", f"after {deaths} deaths")
    if scenario.kind.nobody_is_lost:
        require_none(
            [
                event
                for event in cluster.journaled(events.WorkerLost)
                if _is_there(cluster, event.worker_id) and not _was_cut_off(cluster, event)
            ],
            "no process is declared lost that is only paused",
        )


def _is_there(cluster: Cluster, worker_id: str) -> bool:
    """Whether a worker goes by this name still, and has not left."""
    name, _, number = worker_id.rpartition("-")
    return any(
        each.name == name and each.starts == int(number) and not each.has_left
        for each in cluster.workers
    )


def _was_cut_off(cluster: Cluster, event: events.WorkerLost) -> bool:
    """Whether a client's connection was reset, in the very second whose answers were lost."""
    return "reset_connection" in cluster.scenario.kind.faults and "refused" in event.reason


def _check_outcome(cluster: Cluster, client: ClientProcess, reading: Reading) -> None:
    """Check that a reading ended, for a reason that the scenario gives."""
    of = client, cluster.dispatcher
    require(reading.outcome is not None, "all readings end", reading.client_id, "does not", of=of)
    strange = [each for each in reading.errors if not isinstance(each, UserFunctionError)]
    require_none(strange, "errors are those of the dataset", of=[client])
    if reading.outcome is not Outcome.FAILED:
        return
    failure, kind = reading.failure, cluster.scenario.kind
    allowed = (
        _counts_as_gone(cluster, client, failure)
        or (isinstance(failure, NotFoundError) and not kind.is_durable)
        or (isinstance(failure, UnavailableError) and "did not answer for 60 s" in str(failure))
        or says_that_copies_are_gone(cluster, failure)
        or cluster.may_fail(reading)
    )
    about = f"{reading.client_id}: {failure!r}"
    require(allowed, "reading fails for a reason that the scenario gives", about, of=of)


def _counts_as_gone(cluster: Cluster, client: ClientProcess, failure: Exception | None) -> bool:
    """Whether the dispatcher knows a client no more, and has a reason for that."""
    kind, long = cluster.scenario.kind, 0.9 * cluster.scenario.limits.client_timeout
    nothing_got_through = "part_for_long" in kind.faults and client.longest_silence > long
    return (
        isinstance(failure, FailedPreconditionError)
        and bool(
            re.search(
                "no longer knows this client|does not know this reader|cannot rejoin it",
                str(failure),
            )
        )
        and (not kind.is_durable or client.longest_pause > long or nothing_got_through)
    )


def says_that_copies_are_gone(cluster: Cluster, failure: Exception | None) -> bool:
    """Whether a failure says that no copy is left, where a worker was lost or has left."""
    return (
        isinstance(failure, FailedPreconditionError)
        and "every worker that had a copy" in str(failure)
        and bool(cluster.journaled(*_GONE))
    )


def _check_order(client: ClientProcess, reading: Reading) -> None:
    """Check that the answers of each task were taken in order."""
    last: dict[int, int] = {}
    for portion in reading.yielded:
        task_id = portion.task.task_id
        require(
            last.get(task_id, -1) <= portion.number,
            "answers of a task are taken in order",
            f"{reading.client_id}: {portion.number} of task {task_id} after {last.get(task_id)}",
            of=[client],
        )
        last[task_id] = portion.number


def duplicates(counts: Mapping[T, int]) -> list[T]:
    """Return what was counted more than once, in order."""
    return sorted(each for each, times in counts.items() if times > 1)  # type: ignore[type-var]


def _atoms(readings: Iterable[Reading]) -> Counter[Atom]:
    """Return how often each atom came to any of these readings."""
    return Counter(atom for reading in readings for _, atom in reading.atoms())


def atoms_by_task(readings: Iterable[Reading]) -> dict[int, Counter[Atom]]:
    """Return how often each atom of each task came to any of these readings."""
    found: dict[int, Counter[Atom]] = defaultdict(Counter)
    for reading in readings:
        for task_id, atom in reading.atoms():
            found[task_id][atom] += 1
    return found


def check_alone(cluster: Cluster) -> None:
    """Check readings of a dispatcher that forgets: nothing comes twice to one of them.

    After each restart it numbers its iterations from the same number on, so that only readings by
    themselves can be checked.
    """
    for reading in cluster.readings:
        if cluster.scenario.mode == ShardingPolicy.DYNAMIC:
            twice = duplicates(_atoms([reading]))
        else:
            by_task = atoms_by_task([reading]).values()
            twice = [atom for counts in by_task for atom in duplicates(counts)]
        require_none(twice, "nothing comes twice", reading.client_id)


def _check_dealt(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> None:
    """Check an iteration that dealt units: at most once, whole or said."""
    plan, kind = cluster.scenario.plan, cluster.scenario.kind
    names = [each.client_id for each in readings]
    got = _atoms(readings)
    twice = set(duplicates(got)) - _may_come_again(cluster, readings)
    require_none(sorted(twice), "nothing comes twice", names)
    strange = [atom for atom in got if not 0 <= atom[1] < plan.count(atom[0])]
    require_none(strange, "nothing comes that is not there")
    ended = [each for each in readings if each.outcome is Outcome.ENDED]
    if not ended or plan.broken:
        return
    missing = sorted({unit for unit, _ in plan.everything() - got.keys()})
    lost = [each for reading in ended for each in reading.lost]
    said = _units(lost)
    # A reading that ended before something was lost does not hear of it: the dispatcher's log does.
    logged = _units(cluster.dispatcher.said_lost.get(iteration_id, ()))
    unsaid = [unit for unit in missing if unit not in said | logged]
    require_none(unsaid, "what did not come is named", "said:", sorted(said)[:10], names)
    one_to_one = plan.parts == plan.window == plan.joined == plan.mixed == 1 and not plan.omits
    if not kind.workers_die and not kind.clients_go:
        require_none(missing, "nothing is lost", names)
        if one_to_one or len(readings) == 1:
            require_none(sorted(said), "nothing is said to be lost", names)
    if one_to_one and not kind.clients_go:
        finished = {each.task_id for each in cluster.journaled(events.TaskFinished)}
        too_late = finished if len(readings) > 1 else set()
        excess = said - _units(each for each in lost if each.abandoned or each.task_id in too_late)
        require_none(sorted(excess), "what is one to one loses nothing with its worker")
        came = {unit for unit, _ in got}
        require_none(sorted(said & came), "what came is not said to be lost")


def _check_exact(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> None:
    """Check an iteration of which each element comes once."""
    plan, in_order = cluster.scenario.plan, cluster.scenario.in_order
    names = [each.client_id for each in readings]
    if in_order:
        for reading in readings:
            _check_sequence(cluster, reading)
    got, everything = _atoms(readings), plan.everything()
    require_none(sorted(got.keys() - everything), "nothing comes that is not there")
    twice = set(duplicates(got)) - _may_come_again(cluster, readings)
    if not in_order:  # else errors have origins, too
        twice = {atom for atom in twice if not plan.raises(*atom)}
        twice -= _went_with_worker_and_client(cluster, readings) | _begun_when_closed(readings)
    require_none(sorted(twice), "each element comes once", names)
    ended = [each for each in readings if each.outcome is Outcome.ENDED]
    if not ended or plan.broken:
        return
    lost = [each for reading in ended for each in reading.lost]
    logged = cluster.dispatcher.said_lost.get(iteration_id, ())
    given_up = _units(each for each in (*lost, *logged) if each.abandoned)
    require_none(
        [unit for unit in given_up - plan.deadly if _deaths(cluster, iteration_id, unit) < 5],
        "only what kills is given up",
        names,
    )
    require_none(sorted(_units(lost) - given_up), "nothing else is said to be lost")
    if _left_when_it_was_over(cluster, iteration_id, readings):
        return
    missing = sorted(atom for atom in everything - got.keys() if atom[0] not in given_up)
    if not in_order and len(ended) < len(readings):
        missing = [atom for atom in missing if not plan.raises(*atom)]
    require_none(missing, "each element comes once, and these did not", names)


def _left_when_it_was_over(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> bool:
    """Whether a client went, with what it had not used, when all had come and others had ended."""
    gone = {each.client_id for each in readings if each.outcome is not Outcome.ENDED}
    is_over = False
    for event in cluster.journaled(events.IterationFinished, events.ClientLeft):
        if isinstance(event, events.ClientLeft):
            if event.client_id in gone and is_over:
                return True
        elif event.iteration_id == iteration_id:
            is_over = True
    return False


def _begun_when_closed(readings: list[Reading]) -> set[Atom]:
    """Return what clients that closed had of the answer that they had begun to use."""
    found: set[Atom] = set()
    for reading in readings:
        if reading.outcome is Outcome.CLOSED and reading.yielded:
            last = reading.yielded[-1].key
            found.update(*(each.atoms() for each in reading.yielded if each.key == last))
    return found


def _deaths(cluster: Cluster, iteration_id: int, unit: int) -> int:
    """Return how many tasks that were dealt a unit were lost."""
    of: dict[int, str] = {}
    dealt: set[int] = set()
    lost: set[int] = set()
    for event in cluster.dispatcher.disk.history:
        if isinstance(event, events.TaskCreated) and event.iteration_id == iteration_id:
            of[event.task_id] = event.worker_id
        elif isinstance(event, events.SplitsAssigned) and event.task_id in of:
            dealt.update([event.task_id] if event.start <= unit < event.stop else ())
        elif isinstance(event, _GONE):
            lost.update(task_id for task_id, name in of.items() if name == event.worker_id)
        elif isinstance(event, events.TaskLost):
            lost.add(event.task_id)
    return len(dealt & lost)


def _went_with_worker_and_client(cluster: Cluster, readings: list[Reading]) -> set[Atom]:
    """Return what a client used of a task of which neither it nor the worker could speak again.

    The last requests of one that closed, or was at the end, may be lost, or refused by a full disk.
    """
    gone = {each.worker_id for each in cluster.journaled(*_GONE)}
    lost = {each.task_id for each in cluster.journaled(events.TaskLost)}
    lost |= {
        each.task_id for each in cluster.journaled(events.TaskCreated) if each.worker_id in gone
    }
    heard = {
        (each.task_id, each.client_id)
        for each in cluster.journaled(events.ElementsConsumed, events.ElementsReceived)
    }
    return {
        atom
        for reading in readings
        for task_id, atom in reading.atoms()
        if task_id in lost
        and (reading.outcome is not Outcome.ENDED or (task_id, reading.client_id) not in heard)
    }


def _check_sequence(cluster: Cluster, reading: Reading) -> None:
    """Check that a reading in order got what one process yields, as far as it came."""
    plan = cluster.scenario.plan
    # What died with one worker after the other may count as what kills them (`_check_exact`).
    left_out = plan.deadly.union(*(range(start, stop) for start, stop in reading.given_up))
    got = [atom for atom in reading.sequence if atom[0] not in left_out]
    everything = sorted(atom for atom in plan.everything() if atom[0] not in left_out)
    expected = everything[: len(got)]
    wrong = next((pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1]), None)
    require(
        got == expected,
        "what is read in order comes as in one process",
        reading.client_id,
        f"got {wrong[0]} in place of {wrong[1]}" if wrong else f"got {len(got)} elements",
    )


def _units(lost: Iterable[LostSplits]) -> set[int]:
    return {unit for each in lost for start, stop in each.splits for unit in range(start, stop)}


def _may_come_again(cluster: Cluster, readings: list[Reading]) -> set[Atom]:
    """Return what clients that are gone got last: they may not have said that they used it.

    Nor have those that closed while the dispatcher was away: they say it once.
    """
    unsaid: set[Atom] = set()
    for reading in readings:
        was_unheard = reading.outcome is Outcome.CLOSED and reading.was_unheard
        if was_unheard or reading.outcome in (Outcome.DIED, Outcome.FAILED):
            unsaid.update((unit, 0) for _, unit in reading.raised)
            by_task: dict[int, list[Portion]] = defaultdict(list)
            for portion in reading.yielded:
                by_task[portion.task.task_id].append(portion)
            for portions in by_task.values():
                last = portions[-1].number - cluster.scenario.max_outstanding
                unsaid.update(*(each.atoms() for each in portions if each.number >= last))
    return unsaid


# --- copies -----------------------------------------------------------------------------------


def _check_copies(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> None:
    """Check an iteration in which each worker reads a copy."""
    plan, got = cluster.scenario.plan, atoms_by_task(readings)
    for task_id, copy in got.items():
        require_none(duplicates(copy), "nothing of a copy comes twice", task_id)
    if plan.broken or not all(each.outcome is Outcome.ENDED for each in readings):
        return
    check_told_of_repeats(cluster, iteration_id, readings)
    said = said_to_be_cut_off(readings)
    for task_id in _whole_copies(cluster, iteration_id):
        missing = plan.everything() - got[task_id].keys()
        if task_id not in said:
            require_none(sorted(missing), "each live worker's copy is whole", f"task {task_id}")


def tasks_of(cluster: Cluster, iteration_id: int) -> dict[int, events.TaskCreated]:
    """Return the tasks of an iteration, by number."""
    return {
        event.task_id: event
        for event in cluster.journaled(events.TaskCreated)
        if event.iteration_id == iteration_id
    }


def said_to_be_cut_off(readings: list[Reading]) -> set[int]:
    """Return finished tasks whose last answers, a client said, were lost with their workers."""
    return {
        int(found[1] or found[2])
        for reading in readings
        for warning in reading.warnings
        if (found := re.search(r"finished task (\d+)|shard \d+, task (\d+)", warning))
    }


def check_told_of_repeats(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> None:
    """Check that whoever read a copy or a shard again was told so."""
    tasks = tasks_of(cluster, iteration_id)
    for reading in readings:
        of = [tasks[task_id] for task_id in {task_id for task_id, _ in reading.atoms()}]
        again = {(_shard(each), each.attempt) for each in of if each.attempt}
        told = sum("starts again from the beginning" in each for each in reading.warnings)
        about = f"{reading.client_id}: {sorted(again)}, told {told} times"
        require(told >= len(again), "each repeated reading of a copy or a shard is said", about)


def _shard(task: events.TaskCreated) -> int:
    """Return which shard a task reads; -1: it reads a copy."""
    shard = shard_of(task.mode_state)
    return -1 if shard is None else shard.index


def _whole_copies(cluster: Cluster, iteration_id: int) -> list[int]:
    """Return the tasks of an iteration that finished on workers that were not leaving."""
    tasks = tasks_of(cluster, iteration_id)
    leaving: set[str] = set()
    whole: list[int] = []
    for event in cluster.journaled(events.WorkerDraining, events.TaskFinished):
        if isinstance(event, events.WorkerDraining):
            leaving.add(event.worker_id)
        elif event.task_id in tasks:
            name = tasks[event.task_id].worker_id
            process = next(each for each in cluster.workers if name.startswith(f"{each.name}-"))
            if name not in leaving and not process.has_ever_left:
                whole.append(event.task_id)
    return whole


# --- afterwards -------------------------------------------------------------------------------


def check_retention(cluster: Cluster) -> None:
    """Check that nothing of an iteration is left once its time is over."""
    state = cluster.dispatcher.state
    require(not state.clients, "clients are forgotten", state.clients)
    kept = {
        each.iteration_id: each
        for each in state.iterations.values()
        # To begin a named one again would deal its elements twice.
        if each.finished or not each.assigns_splits or state.jobs[each.job_id].name is None
    }
    require(not kept, "iterations are forgotten", kept)
    for worker in cluster.workers:
        if worker.is_up:
            mine = [each for each in worker.session.tasks.running if each not in state.tasks]
            require_none(mine, "workers forget tasks", worker.name, of=[worker])
