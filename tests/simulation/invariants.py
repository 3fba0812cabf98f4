"""Invariants of every reading, whatever faults are injected.

During the run
    A consumer that waits for ten seconds receives a warning with the reason, and warnings are true.
    Outstanding requests and elements are bounded.
    The journal agrees with the dispatcher's state.
At the end
    Every reading ends, for a reason that the scenario permits.
    No element is duplicated; missing elements are reported, or were lost with a client.
    No process that was only paused is declared lost, and state is removed after its timeouts.

Known exceptions
    Reported as lost although delivered: if several clients share splits that are delivered in parts
    (an interleave, a shuffle of values, a batch after a filter), completely delivered splits may be
    reported as lost when their worker leaves after its task is finished. No element is missing.
    Lost and reported: elements in transit to one of several clients when their task finished, if
    the worker is lost before they are requested again; they are not reassigned.
    In unordered reading, an error sent to one of several clients that closed or crashed is not
    redelivered, because errors have no element ids there.
    Unread replies of finished tasks are not counted as outstanding.
    With OFF, a poison split is abandoned only if copies end within `stable_copy_seconds`; otherwise
    they restart forever, with a report each time.
    Elements that a client received but did not consume before it left are missing if the epoch had
    ended for the others.
    Elements that a client consumed after its last acknowledgement may be redelivered if it crashes
    or its lease expires. A reading that has ended does not receive later losses; the dispatcher
    logs them.
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
from tests.simulation.client import ClientProcess, Outcome, Reading, YieldedBatch
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
    "check_repeats_reported",
    "check_retention",
    "duplicates",
    "reported_truncated_tasks",
    "reports_lost_copies",
    "tasks_of",
]

T = TypeVar("T")

_MAX_DEATHS = 8
"""Maximum worker crashes per poison split and epoch: two while it is one of many, then in groups
down to the split alone, three for it alone; some more if workers crash for other reasons."""
_KNOWN_AFTER_SECONDS = 7.0
"""Seconds after which a client that reaches the dispatcher knows of a new worker."""

_FIRST_WARNING = 10.0
_NEXT_WARNING = 60.0
_WORKER_ENDED = (events.WorkerLost, events.WorkerLeft)
_MAX_PAIRS = 5000
"""Approximate number of (worker, client) pairs whose buffers one check covers."""
_SLACK = 3.0
"""Seconds by which a warning may be late: a session does not notice short pauses."""


# --- during the run ---------------------------------------------------------------------------


def check_now(cluster: Cluster, *, thoroughly: bool = False) -> None:
    """Check the invariants that hold at any time."""
    for client in cluster.clients:
        if client.is_running and not client.is_done:
            _check_waiting(cluster, client)
            _check_outstanding(cluster, client)
        _check_warnings_are_true(cluster, client)
    # With many processes, each check covers some workers, because each has state per client.
    stride = 1 + len(cluster.workers) * len(cluster.clients) // _MAX_PAIRS
    for worker in cluster.workers[cluster.next_check_number() % stride :: stride]:
        if worker.is_running:
            _check_buffers(cluster, worker)
    if thoroughly and cluster.dispatcher.is_up:
        cluster.dispatcher.check()


def _check_waiting(cluster: Cluster, client: ClientProcess) -> None:
    if not client.readings or client.reading.waiting_since is None:
        return
    reading = client.reading
    timeout = _NEXT_WARNING if reading.warned else _FIRST_WARNING
    waited = cluster.simulation.now - max(reading.waiting_since or 0.0, client.resumed_at)
    require(
        waited <= timeout + _SLACK,
        "a warning gives the reason of a wait of ten seconds",
        f"{client.name} has waited for {waited:.1f} s",
        of=[client, cluster.dispatcher],
    )


def _check_buffers(cluster: Cluster, worker: WorkerProcess) -> None:
    batch = (1 << 20) + cluster.scenario.plan.bytes
    most = BOUNDS.total_bytes + 2 * len(cluster.clients) * cluster.scenario.epochs * batch
    for ready, unacknowledged in worker.buffered_output():
        # Two more if elements were flushed before a wait for splits, others followed, and then an
        # error: room for all of them is checked before the first.
        require(
            ready <= BOUNDS.ready_batches + 2 and unacknowledged <= most,
            "the buffers of a worker are bounded",
            f"{worker.name}: {ready} ready batches, {unacknowledged} of {most} bytes out",
            of=[worker],
        )


def _check_outstanding(cluster: Cluster, client: ClientProcess) -> None:
    most = cluster.scenario.max_outstanding
    if client.consumer.counts_elements and client.most_tasks <= most:
        # One more element is requested of a task that does not reply for half a second.
        late = client.most_tasks if most < 2 * client.most_tasks else 0
        require(
            client.most_elements <= most + late,
            "counted elements are bounded",
            f"{client.name} had {client.most_elements}, not {most}",
            of=[client],
        )
    limit = max(most, 3 * client.most_tasks)
    require(
        client.most_outstanding <= limit,
        "outstanding requests are bounded",
        f"{client.name} had {client.most_outstanding} requests and answers, not {limit}",
        of=[client],
    )


def _check_warnings_are_true(cluster: Cluster, client: ClientProcess) -> None:
    """Check that the warnings of a client since the last check are true, if that is known."""
    dispatcher = cluster.dispatcher
    for at, warning in client.unchecked_warnings:
        if "no worker is registered" not in warning or "no reply from the dispatcher" in warning:
            continue
        before = at - _KNOWN_AFTER_SECONDS
        if max(dispatcher.resumed_at, client.resumed_at) < before:
            require_none(
                [name for name, since in dispatcher.registered_at.items() if since < before],
                "a warning is true",
                f"{client.name} says at {at:.1f} that no worker is registered",
                of=[client, dispatcher],
            )
    client.unchecked_warnings.clear()


# --- at the end -------------------------------------------------------------------------------


def check_at_end(cluster: Cluster) -> None:
    """Check the invariants that hold once all clients are done."""
    check_readings(cluster)
    if not cluster.scenario.kind.is_durable:
        check_separately(cluster)
        return
    for iteration_id, readings in cluster.readings_by_iteration().items():
        if cluster.scenario.visitation == "exactly_once":
            _check_exactly_once(cluster, iteration_id, readings)
        elif cluster.scenario.mode == ShardingPolicy.DYNAMIC:
            _check_dynamic_sharding(cluster, iteration_id, readings)
        else:
            _check_copies(cluster, iteration_id, readings)


def check_readings(cluster: Cluster) -> None:
    """Check the invariants of all readings, in any mode."""
    check_now(cluster, thoroughly=True)
    scenario = cluster.scenario
    for client in cluster.clients:
        for reading in client.readings:
            _check_outcome(cluster, client, reading)
            _check_order(client, reading)
    deaths = sum(worker.split_kills for worker in cluster.workers)
    if scenario.mode == ShardingPolicy.DYNAMIC and scenario.kind.is_durable:
        most = _MAX_DEATHS * len(scenario.plan.poison) * scenario.epochs
        require(deaths <= most, "a poison split is abandoned", f"after {deaths} deaths")
    if scenario.kind.no_losses:
        require_none(
            [
                event
                for event in cluster.journaled(events.WorkerLost)
                if _is_registered(cluster, event.worker_id) and not _was_reset(cluster, event)
            ],
            "no paused process is declared lost",
        )


def _is_registered(cluster: Cluster, worker_id: str) -> bool:
    """Return whether a worker has this id and has not stopped."""
    name, _, number = worker_id.rpartition("-")
    return any(
        each.name == name and each.starts == int(number) and not each.has_stopped
        for each in cluster.workers
    )


def _was_reset(cluster: Cluster, event: events.WorkerLost) -> bool:
    """Return whether the loss may be due to a connection reset while replies were lost."""
    return "reset_connection" in cluster.scenario.kind.faults and "refused" in event.reason


def _check_outcome(cluster: Cluster, client: ClientProcess, reading: Reading) -> None:
    """Check that a reading ended for a reason that the scenario permits."""
    processes = client, cluster.dispatcher
    require(
        reading.outcome is not None,
        "all readings end",
        reading.client_id,
        "does not",
        of=processes,
    )
    unexpected = [each for each in reading.errors if not isinstance(each, UserFunctionError)]
    require_none(unexpected, "errors are those of the dataset", of=[client])
    if reading.outcome is not Outcome.FAILED:
        return
    failure, kind = reading.failure, cluster.scenario.kind
    allowed = (
        _lease_expired(cluster, client, failure)
        or (isinstance(failure, NotFoundError) and not kind.is_durable)
        or (isinstance(failure, UnavailableError) and "did not answer for 60 s" in str(failure))
        or reports_lost_copies(cluster, failure)
        or cluster.may_fail(reading)
    )
    about = f"{reading.client_id}: {failure!r}"
    require(
        allowed,
        "a reading fails for a reason that the scenario permits",
        about,
        of=processes,
    )


def _lease_expired(cluster: Cluster, client: ClientProcess, failure: Exception | None) -> bool:
    """Return whether the dispatcher rightly removed a client whose lease expired."""
    kind, long = cluster.scenario.kind, 0.9 * cluster.scenario.limits.client_timeout
    was_partitioned = "partition_for_long" in kind.faults and client.longest_silence > long
    return (
        isinstance(failure, FailedPreconditionError)
        and bool(re.search("no longer knows this client|cannot rejoin it", str(failure)))
        and (not kind.is_durable or client.longest_pause > long or was_partitioned)
    )


def reports_lost_copies(cluster: Cluster, failure: Exception | None) -> bool:
    """Return whether a failure reports that all copies are lost, and workers were lost."""
    return (
        isinstance(failure, FailedPreconditionError)
        and "workers with a copy of the dataset were lost" in str(failure)
        and bool(cluster.journaled(*_WORKER_ENDED))
    )


def _check_order(client: ClientProcess, reading: Reading) -> None:
    """Check that the replies of each task were consumed in order."""
    last: dict[int, int] = {}
    for batch in reading.yielded:
        task_id = batch.task.task_id
        require(
            last.get(task_id, -1) <= batch.number,
            "replies of a task are consumed in order",
            f"{reading.client_id}: {batch.number} of task {task_id} after {last.get(task_id)}",
            of=[client],
        )
        last[task_id] = batch.number


def duplicates(counts: Mapping[T, int]) -> list[T]:
    """Return the keys that were counted more than once, in order."""
    return sorted(each for each, times in counts.items() if times > 1)  # type: ignore[type-var]


def _atoms(readings: Iterable[Reading]) -> Counter[Atom]:
    """Return how often these readings received each atom."""
    return Counter(atom for reading in readings for _, atom in reading.atoms())


def atoms_by_task(readings: Iterable[Reading]) -> dict[int, Counter[Atom]]:
    """Return how often these readings received each atom of each task."""
    found: dict[int, Counter[Atom]] = defaultdict(Counter)
    for reading in readings:
        for task_id, atom in reading.atoms():
            found[task_id][atom] += 1
    return found


def check_separately(cluster: Cluster) -> None:
    """Check the readings of a dispatcher without a journal: no duplicates within a reading.

    After each restart it numbers its iterations from the same number, so readings can only be
    checked separately.
    """
    for reading in cluster.readings:
        if cluster.scenario.mode == ShardingPolicy.DYNAMIC:
            repeated = duplicates(_atoms([reading]))
        else:
            by_task = atoms_by_task([reading]).values()
            repeated = [atom for counts in by_task for atom in duplicates(counts)]
        require_none(repeated, "no element is duplicated", reading.client_id)


def _check_dynamic_sharding(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> None:
    """Check at-most-once delivery: missing elements are reported."""
    plan, kind = cluster.scenario.plan, cluster.scenario.kind
    names = [each.client_id for each in readings]
    got = _atoms(readings)
    repeated = set(duplicates(got)) - _may_be_redelivered(cluster, readings)
    require_none(sorted(repeated), "no element is duplicated", names)
    unexpected = [atom for atom in got if not 0 <= atom[1] < plan.count(atom[0])]
    require_none(unexpected, "only existing elements are delivered")
    ended = [each for each in readings if each.outcome is Outcome.ENDED]
    if not ended or plan.broken:
        return
    missing = sorted({split for split, _ in plan.everything() - got.keys()})
    lost = [each for reading in ended for each in reading.lost]
    reported = _split_set(lost)
    # A reading that ended before a loss does not receive it; the dispatcher logs it.
    logged = _split_set(cluster.dispatcher.reported_losses.get(iteration_id, ()))
    unreported = [split for split in missing if split not in reported | logged]
    require_none(
        unreported, "missing splits are reported", "reported:", sorted(reported)[:10], names
    )
    one_to_one = (
        plan.max_split_elements == plan.cycle_length == plan.batch_size == plan.shuffle_buffer == 1
        and not plan.filters
    )
    if not kind.workers_crash and not kind.clients_leave:
        require_none(missing, "nothing is lost", names)
        if one_to_one or len(readings) == 1:
            require_none(sorted(reported), "no loss is reported", names)
    if one_to_one and not kind.clients_leave:
        finished = {each.task_id for each in cluster.journaled(events.TaskFinished)}
        too_late = finished if len(readings) > 1 else set()
        excess = reported - _split_set(
            each for each in lost if each.abandoned or each.task_id in too_late
        )
        require_none(sorted(excess), "one-to-one plans lose no split with a worker")
        received = {split for split, _ in got}
        require_none(sorted(reported & received), "delivered splits are not reported as lost")


def _check_exactly_once(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> None:
    """Check exactly-once delivery."""
    plan, in_order = cluster.scenario.plan, cluster.scenario.in_order
    names = [each.client_id for each in readings]
    if in_order:
        for reading in readings:
            _check_sequence(cluster, reading)
    got, everything = _atoms(readings), plan.everything()
    require_none(sorted(got.keys() - everything), "only existing elements are delivered")
    repeated = set(duplicates(got)) - _may_be_redelivered(cluster, readings)
    if not in_order:  # in order, errors have element ids
        repeated = {atom for atom in repeated if not plan.raises(*atom)}
        repeated -= _lost_with_worker_and_client(cluster, readings) | _partly_consumed_at_close(
            readings
        )
    require_none(sorted(repeated), "each element is delivered once", names)
    ended = [each for each in readings if each.outcome is Outcome.ENDED]
    if not ended or plan.broken:
        return
    lost = [each for reading in ended for each in reading.lost]
    logged = cluster.dispatcher.reported_losses.get(iteration_id, ())
    abandoned = _split_set(each for each in (*lost, *logged) if each.abandoned)
    require_none(
        [split for split in abandoned - plan.poison if _deaths(cluster, iteration_id, split) < 5],
        "only poison splits are abandoned",
        names,
    )
    require_none(sorted(_split_set(lost) - abandoned), "no other split is reported as lost")
    if _left_after_end(cluster, iteration_id, readings):
        return
    missing = sorted(atom for atom in everything - got.keys() if atom[0] not in abandoned)
    if not in_order and len(ended) < len(readings):
        missing = [atom for atom in missing if not plan.raises(*atom)]
    require_none(missing, "no element is missing", names)


def _left_after_end(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> bool:
    """Return whether a client left with unconsumed elements after the iteration had finished."""
    ended_early = {each.client_id for each in readings if each.outcome is not Outcome.ENDED}
    is_over = False
    for event in cluster.journaled(events.IterationFinished, events.ClientLeft):
        if isinstance(event, events.ClientLeft):
            if event.client_id in ended_early and is_over:
                return True
        elif event.iteration_id == iteration_id:
            is_over = True
    return False


def _partly_consumed_at_close(readings: list[Reading]) -> set[Atom]:
    """Return elements of the replies that closed clients had consumed in part."""
    found: set[Atom] = set()
    for reading in readings:
        if reading.outcome is Outcome.CLOSED and reading.yielded:
            last = reading.yielded[-1].key
            found.update(*(each.atoms() for each in reading.yielded if each.key == last))
    return found


def _deaths(cluster: Cluster, iteration_id: int, split: int) -> int:
    """Return the number of lost tasks that had a split."""
    worker_by_task: dict[int, str] = {}
    assigned: set[int] = set()
    lost: set[int] = set()
    for event in cluster.dispatcher.disk.history:
        if isinstance(event, events.TaskCreated) and event.iteration_id == iteration_id:
            worker_by_task[event.task_id] = event.worker_id
        elif isinstance(event, events.SplitsAssigned) and event.task_id in worker_by_task:
            assigned.update([event.task_id] if event.start <= split < event.stop else ())
        elif isinstance(event, _WORKER_ENDED):
            lost.update(
                task_id for task_id, name in worker_by_task.items() if name == event.worker_id
            )
        elif isinstance(event, events.TaskLost):
            lost.add(event.task_id)
    return len(assigned & lost)


def _lost_with_worker_and_client(cluster: Cluster, readings: list[Reading]) -> set[Atom]:
    """Return elements consumed from a task that neither client nor worker could report.

    The last requests of a client that closed or ended may be lost, or rejected by a full disk.
    """
    ended_early = {each.worker_id for each in cluster.journaled(*_WORKER_ENDED)}
    lost = {each.task_id for each in cluster.journaled(events.TaskLost)}
    lost |= {
        each.task_id
        for each in cluster.journaled(events.TaskCreated)
        if each.worker_id in ended_early
    }
    known_deliveries = {
        (each.task_id, each.client_id)
        for each in cluster.journaled(events.ElementsConsumed, events.ElementsReceived)
    }
    return {
        atom
        for reading in readings
        for task_id, atom in reading.atoms()
        if task_id in lost
        and (
            reading.outcome is not Outcome.ENDED
            or (task_id, reading.client_id) not in known_deliveries
        )
    }


def _check_sequence(cluster: Cluster, reading: Reading) -> None:
    """Check that an ordered reading received the elements of one process, up to its end."""
    plan = cluster.scenario.plan
    # Splits lost with several workers may count as poison (`_check_exactly_once`).
    left_out = plan.poison.union(*(range(start, stop) for start, stop in reading.abandoned))
    got = [atom for atom in reading.sequence if atom[0] not in left_out]
    everything = sorted(atom for atom in plan.everything() if atom[0] not in left_out)
    expected = everything[: len(got)]
    wrong = next((pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1]), None)
    require(
        got == expected,
        "ordered reading yields the order of one process",
        reading.client_id,
        f"got {wrong[0]} instead of {wrong[1]}" if wrong else f"got {len(got)} elements",
    )


def _split_set(lost: Iterable[LostSplits]) -> set[int]:
    return {split for each in lost for start, stop in each.splits for split in range(start, stop)}


def _may_be_redelivered(cluster: Cluster, readings: list[Reading]) -> set[Atom]:
    """Return the last elements of ended clients, which may not have reported their use.

    Includes clients that closed while the dispatcher was down: they report only once.
    """
    unreported: set[Atom] = set()
    for reading in readings:
        may_have_unreported = reading.outcome is Outcome.CLOSED and reading.may_have_unreported
        if may_have_unreported or reading.outcome in (Outcome.DIED, Outcome.FAILED):
            unreported.update((split, 0) for _, split in reading.raised)
            by_task: dict[int, list[YieldedBatch]] = defaultdict(list)
            for batch in reading.yielded:
                by_task[batch.task.task_id].append(batch)
            for batches in by_task.values():
                last = batches[-1].number - cluster.scenario.max_outstanding
                unreported.update(*(each.atoms() for each in batches if each.number >= last))
    return unreported


# --- copies -----------------------------------------------------------------------------------


def _check_copies(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> None:
    """Check an iteration in which each worker reads a copy."""
    plan, got = cluster.scenario.plan, atoms_by_task(readings)
    for task_id, copy in got.items():
        require_none(duplicates(copy), "no element of a copy is duplicated", task_id)
    if plan.broken or not all(each.outcome is Outcome.ENDED for each in readings):
        return
    check_repeats_reported(cluster, iteration_id, readings)
    reported = reported_truncated_tasks(readings)
    for task_id in _whole_copies(cluster, iteration_id):
        missing = plan.everything() - got[task_id].keys()
        if task_id not in reported:
            require_none(
                sorted(missing), "the copy of each live worker is complete", f"task {task_id}"
            )


def tasks_of(cluster: Cluster, iteration_id: int) -> dict[int, events.TaskCreated]:
    """Return the tasks of an iteration by id."""
    return {
        event.task_id: event
        for event in cluster.journaled(events.TaskCreated)
        if event.iteration_id == iteration_id
    }


def reported_truncated_tasks(readings: list[Reading]) -> set[int]:
    """Return finished tasks whose last replies were reported as lost with their workers."""
    return {
        int(found[1] or found[2])
        for reading in readings
        for warning in reading.warnings
        if (found := re.search(r"finished task (\d+)|shard \d+, task (\d+)", warning))
    }


def check_repeats_reported(cluster: Cluster, iteration_id: int, readings: list[Reading]) -> None:
    """Check that each repeated reading of a copy or shard was reported to the client."""
    tasks = tasks_of(cluster, iteration_id)
    for reading in readings:
        read_tasks = [tasks[task_id] for task_id in {task_id for task_id, _ in reading.atoms()}]
        again = {(_shard(each), each.attempt) for each in read_tasks if each.attempt}
        num_reported = sum("starts again from the beginning" in each for each in reading.warnings)
        about = f"{reading.client_id}: {sorted(again)}, reported {num_reported} times"
        require(
            num_reported >= len(again),
            "each repeated reading of a copy or shard is reported",
            about,
        )


def _shard(task: events.TaskCreated) -> int:
    """Return the index of a task's shard; -1 for a copy."""
    shard = shard_of(task.mode_state)
    return -1 if shard is None else shard.index


def _whole_copies(cluster: Cluster, iteration_id: int) -> list[int]:
    """Return the tasks of an iteration that finished on workers that were not shutting down."""
    tasks = tasks_of(cluster, iteration_id)
    draining_ids: set[str] = set()
    whole: list[int] = []
    for event in cluster.journaled(events.WorkerDraining, events.TaskFinished):
        if isinstance(event, events.WorkerDraining):
            draining_ids.add(event.worker_id)
        elif event.task_id in tasks:
            name = tasks[event.task_id].worker_id
            process = next(each for each in cluster.workers if name.startswith(f"{each.name}-"))
            if name not in draining_ids and not process.was_ever_shut_down:
                whole.append(event.task_id)
    return whole


# --- garbage collection -----------------------------------------------------------------------


def check_retention(cluster: Cluster) -> None:
    """Check that state of iterations and clients is removed after its timeouts."""
    state = cluster.dispatcher.state
    require(not state.clients, "clients are removed", state.clients)
    remaining = {
        each.iteration_id: each
        for each in state.iterations.values()
        # Restarting a named one would assign its elements again.
        if each.finished or not each.assigns_splits or state.jobs[each.job_id].name is None
    }
    require(not remaining, "iterations are removed", remaining)
    for worker in cluster.workers:
        if worker.is_up:
            mine = [each for each in worker.session.tasks.running if each not in state.tasks]
            require_none(mine, "workers remove tasks", worker.name, of=[worker])
