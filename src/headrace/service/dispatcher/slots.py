"""Slots: the fixed list of workers that static policies divide a dataset among, in shard order.

`DispatcherConfig.worker_addresses` defines them. A slot "host:port" is for the worker at this
address; "host", "host:%port%" or "host:%port_name%" for one on this host, at any port. A worker
that restarts at its address takes its slot again. A lost worker leaves its slot to the next one
that fits, at any port.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.errors import FailedPreconditionError
from headrace.service.dispatcher.state import DispatcherState, Worker, WorkerSlot
from headrace.service.modes.static.records import shard_of

__all__ = [
    "assign_slots",
    "check_slots_may_change",
    "iterations_reading_shards",
    "matches",
    "matching_slots",
]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def matches(pattern: str, address: str) -> bool:
    """Return whether a worker at an address may take a slot."""
    if pattern == address:
        return True
    host, port = _split_address(address)
    pattern_host, pattern_port = _split_address(pattern)
    if not (pattern_host == host or (pattern_host in _LOOPBACK and host in _LOOPBACK)):
        return False
    return _matches_any_port(pattern_port) or pattern_port == port


def _split_address(pattern: str) -> tuple[str, str]:
    """Return the host and port of an address or a pattern; "" for a missing part."""
    if pattern.startswith("["):  # IPv6
        host, _, port = pattern[1:].partition("]")
        return host, port.removeprefix(":")
    host, colon, port = pattern.rpartition(":")
    return (host, port) if colon else (pattern, "")


def _matches_any_port(port: str) -> bool:
    return not port or (port.startswith("%port") and port.endswith("%"))


def matching_slots(slots: Sequence[WorkerSlot], address: str) -> list[int]:
    """Return the slots that a worker at an address may take, best first."""
    found = [index for index, slot in enumerate(slots) if matches(slot.pattern, address)]
    # Its previous slot, then one that was never taken, then one that another worker left.
    return sorted(
        found,
        key=lambda index: (
            slots[index].address != address,
            slots[index].pattern != address,
            bool(slots[index].address),
        ),
    )


def assign_slots(patterns: Iterable[str], workers: Iterable[Worker]) -> list[WorkerSlot]:
    """Return the slots of a configuration, assigned to the registered workers in this order."""
    slots = [WorkerSlot(pattern=pattern) for pattern in patterns]
    for worker in workers:
        for index in matching_slots(slots, worker.address):
            if not slots[index].worker_id:
                slots[index].worker_id, slots[index].address = worker.worker_id, worker.address
                break
    return slots


def iterations_reading_shards(state: DispatcherState) -> list[int]:
    """Return the unfinished iterations whose tasks read shards."""
    return [
        iteration.iteration_id
        for iteration in state.iterations.values()
        if not iteration.finished
        and any(shard_of(task.mode_state) for task in state.tasks_of(iteration))
    ]


def check_slots_may_change(state: DispatcherState, patterns: Sequence[str]) -> None:
    """Reject another list of workers while shards of the current list are read.

    Raises:
        FailedPreconditionError: If an unfinished iteration reads shards.
    """
    unfinished = iterations_reading_shards(state)
    if unfinished:
        raise FailedPreconditionError(
            f"got worker_addresses={list(patterns)}, but the journal in `work_dir` has unfinished "
            f"iterations {unfinished} whose shards belong to the workers of "
            f"{[slot.pattern for slot in state.slots]}. Start the dispatcher with that list, or "
            "with another `work_dir`"
        )
