"""Saved positions: the split to resume the client stage at, and the splits already read."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from headrace.execution.delivered_elements import DeliveredElements
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.traverse import walk
from headrace.rewrites.partition import PlanPartition
from headrace.service.messages import OpenIteration
from headrace.service.ranges import Ranges, subtract, union

__all__ = ["find_read_splits", "position_digest", "resume_iteration"]


def resume_iteration(
    open_request: OpenIteration, position: dict[str, Any]
) -> tuple[OpenIteration, DeliveredElements]:
    """Return the request to resume at an unordered position, and the elements before it.

    Args:
        open_request: Request that would start from the beginning.
        position: Saved position: {"positions", "seed"}.
    """
    base = DeliveredElements.from_json(position["positions"])
    first = base.watermark
    resumed = msgspec.structs.replace(
        open_request,
        seed=position["seed"],
        first_split=first,
        delivered=tuple(
            (start, stop) for start, stop in base.complete_splits if start >= first and stop > first
        ),
        partial_splits=base.partial_splits,
        start_position_id=position_digest([base.to_json(), position["seed"]]),
    )
    return resumed, base


def position_digest(position: Any) -> str:
    """Return a digest that identifies a position given as JSON."""
    text = json.dumps(position, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def find_read_splits(partition: PlanPartition, state: Any) -> tuple[int, Ranges]:
    """Return the first split that must be read, and later splits that need not be.

    The client stage is at `state`. The slots of an interleave may hold splits that are older than
    others read to their ends.

    If there are several streams of splits, 0 is returned: the progress in each is not evaluated.
    """
    streams = [node for node in walk(partition.client_stage) if isinstance(node, ReadSplits)]
    if len(streams) != 1 or state is None:
        return 0, ()
    (stream,) = streams
    epoch: list[int] = []
    while True:
        found = _read_indices(stream, state)
        if found is not None:
            break
        if not isinstance(state, dict) or "input" not in state:
            return 0, ()
        if "epoch" in state:
            epoch.append(int(state["epoch"]))
        state = state["input"]
    if len(epoch) != len(stream.strides):
        return 0, ()
    index, read = found
    first = stream.split_at(tuple(epoch), index)
    return first, tuple((first + start - index, first + stop - index) for start, stop in read)


def _read_indices(stream: ReadSplits, state: Any) -> tuple[int, Ranges] | None:
    """Return the result of `find_read_splits` for one epoch; None if the state has none."""
    if not isinstance(state, dict):
        return None
    if "split" in state:
        return int(state["split"]), ()
    if "slots" in state and isinstance(state["input"], int):
        open_indices = sorted(slot["outer"] for slot in state["slots"] if slot is not None)
        first = min([state["input"], *open_indices])
        unread = union((index, index + 1) for index in open_indices)
        return first, subtract(((first, state["input"]),), unread)
    converted = stream.convert_state(state)
    return None if converted is None else (int(converted["split"]), ())
