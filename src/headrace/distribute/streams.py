"""Streams: the parts of a dataset that workers read side by side, and who reads which.

A dataset that N workers share by files, or by a hint, is N streams, one for each. One that they
share by batches is one stream, which all of them read; so is that of a single worker.

    as many workers      worker w reads stream w
    more workers         worker w reads stream w mod N, and those who read one share its batches
    fewer workers        worker w reads streams w, w + M, w + 2M, ..., one after another

Rule 1. A state has a place for each stream, whoever reads it. So M workers go on where N workers
        stopped: nothing is lost, and nothing comes twice.
Rule 2. Workers that read a stream together are at the same place of it at each step.
Rule 3. Copies (each worker reads all) are no streams: a worker goes on from one of the places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.distribute.feeds import Feed, Step
from headrace.errors import FailedPreconditionError

__all__ = ["Part", "Streams", "has_form_of_state", "merged_states", "parts_of"]


@dataclass(frozen=True)
class Part:
    """One worker's part in a stream.

    Attributes:
        stream: Its number.
        of: How many streams there are.
        readers: How many workers read it together.
        reader: Which of them this is.
        before: How many workers read the streams before it.
    """

    stream: int
    of: int
    readers: int = 1
    reader: int = 0
    before: int = 0


def parts_of(worker: int, workers: int, streams: int) -> list[Part]:
    """Return what one worker reads of so many streams.

    >>> [(part.stream, part.readers, part.reader) for part in parts_of(2, 3, 2)]
    [(0, 2, 1)]
    >>> [part.stream for part in parts_of(0, 2, 5)]
    [0, 2, 4]
    """
    if workers < streams:
        return [Part(each, streams, before=worker) for each in range(worker, streams, workers)]
    counts = [len(range(each, workers, streams)) for each in range(streams)]
    stream, reader = worker % streams, worker // streams
    return [Part(stream, streams, counts[stream], reader, sum(counts[:stream]))]


class Streams(Feed):
    """Reads a worker's parts, one after another.

    Args:
        open_part: Returns what reads a part, at its beginning.
        worker: Which worker this is.
        workers: How many there are.
        streams: How many streams there are at the beginning.
        kind: "shared": states with another number of streams are those of other workers, and what
            they left is shared. "copies": each worker has one of its own. "own": so it has, and
            nobody goes on from another's.
    """

    def __init__(
        self,
        open_part: Callable[[Part], Feed],
        worker: int = 0,
        workers: int = 1,
        streams: int = 1,
        kind: str = "shared",
    ) -> None:
        self._open_part = open_part
        self._worker, self._workers = worker, workers
        self._kind = kind
        self._begin(streams)

    def _begin(self, streams: int) -> None:
        self._streams = streams
        self._parts = parts_of(self._worker, self._workers, streams)
        self._feeds = [self._open_part(part) for part in self._parts]
        self._at = 0

    def next_step(self) -> Step | None:
        while self._at < len(self._feeds):
            step = self._feeds[self._at].next_step()
            if step is not None:
                return step
            self._at += 1
        return None

    def get_state(self) -> dict[str, Any]:
        places = [
            [part.stream, feed.get_state()]
            for part, feed in zip(self._parts, self._feeds, strict=True)
            if part.reader == 0
        ]
        return {"streams": self._streams, "places": places}

    def set_state(self, state: dict[str, Any]) -> None:
        places = state["streams"]
        if self._kind == "own" and len(places) != self._workers:
            raise FailedPreconditionError(
                f"the state has places of {len(places)} datasets that a function made, and there "
                f"are {self._workers} workers, for each of which it made one here; go on with as "
                "many workers, or distribute the dataset with distribute_dataset"
            )
        streams = self._workers if self._kind == "copies" else len(places)
        if streams != self._streams:
            self.close()
            self._begin(streams)
        self._at = 0
        for part, feed in zip(self._parts, self._feeds, strict=True):
            place = places[part.stream % len(places)]
            if place is None:
                raise FailedPreconditionError(
                    f"the state lacks the place of part {part.stream} of {len(places)}: it was "
                    "taken by one worker, without the others"
                )
            feed.set_state(place)

    def close(self) -> None:
        for feed in self._feeds:
            feed.close()


def merged_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all workers, of those that `Streams.get_state` returned on each."""
    places = dict(place for state in states for place in state["places"])
    return {"streams": [places.get(number) for number in range(states[0]["streams"])]}


def has_form_of_state(state: Any) -> bool:
    """Say whether a value looks like what `merged_states` returns."""
    streams = state.get("streams") if isinstance(state, dict) else None
    return (
        isinstance(streams, list)
        and bool(streams)
        and all(
            place is None or (isinstance(place, dict) and {"inputs", "rows"} <= place.keys())
            for place in streams
        )
    )
