"""Places: from which unit on the client's half of a plan is to be read, and what is left of one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from headrace.execution.delivered import Delivered
from headrace.plan.traverse import walk
from headrace.plan.units import Units
from headrace.rewrites.cut import Cut
from headrace.service.messages import OpenIteration
from headrace.service.ranges import Ranges, subtracted, united

__all__ = ["going_on", "named_place", "units_read"]


def going_on(opening: OpenIteration, position: dict[str, Any]) -> tuple[OpenIteration, Delivered]:
    """Return what is to be opened to go on from a place in no order, and what it says.

    Args:
        opening: What would be opened from the start.
        position: The place: {"positions", "seed"}.
    """
    base = Delivered.from_json(position["positions"])
    first = base.frontier
    began = msgspec.structs.replace(
        opening,
        seed=position["seed"],
        first_split=first,
        delivered=tuple(each for each in base.whole if each[0] >= first and each[1] > first),
        partial_splits=base.parts,
        start_position_id=named_place([base.to_json(), position["seed"]]),
    )
    return began, base


def named_place(place: Any) -> str:
    """Return what tells a place, as JSON, from others."""
    words = json.dumps(place, separators=(",", ":"), sort_keys=True)
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def units_read(made: Cut, state: Any) -> tuple[int, Ranges]:
    """Return a unit before which nothing is read, and those after it of which nothing is.

    Where the upper half stands at `state`. An interleave has units in its slots that are older than
    many that it has read to their ends.

    Where several streams of units are read, 0: what was read of each is looked at again.
    """
    streams = [node for node in walk(made.above) if isinstance(node, Units)]
    if len(streams) != 1 or state is None:
        return 0, ()
    (stream,) = streams
    passes: list[int] = []
    while True:
        found = _indices(stream, state)
        if found is not None:
            break
        if not isinstance(state, dict) or "input" not in state:
            return 0, ()
        if "pass" in state:
            passes.append(int(state["pass"]))
        state = state["input"]
    if len(passes) != len(stream.strides):
        return 0, ()
    index, read = found
    first = stream.unit_at(tuple(passes), index)
    return first, tuple((first + start - index, first + stop - index) for start, stop in read)


def _indices(stream: Units, state: Any) -> tuple[int, Ranges] | None:
    """Return what `units_read` does, in one pass of a stream; None: this is no state of one."""
    if not isinstance(state, dict):
        return None
    if "unit" in state:
        return int(state["unit"]), ()
    if "slots" in state and isinstance(state["input"], int):
        origins = sorted(slot["origin"] for slot in state["slots"] if slot is not None)
        first = min([state["input"], *origins])
        opened = united((each, each + 1) for each in origins)
        return first, subtracted(((first, state["input"]),), opened)
    taken = stream.taken_over(state)
    return None if taken is None else (int(taken["unit"]), ())
