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

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.distribute.feeds import Feed, Step
from headrace.distribute.input_context import InputContext
from headrace.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from headrace.execution.build import opens_files
from headrace.plan.node import Node
from headrace.plan.options import AutoShardPolicy
from headrace.plan.traverse import merged_options
from headrace.rewrites.read_alike import differs_by_reader, sources
from headrace.rewrites.shard import shard_files, shard_hints

__all__ = [
    "Part",
    "Share",
    "Streams",
    "auto_shard",
    "has_form_of_state",
    "is_read_whole",
    "merged_states",
    "parts_of",
]


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


# --- Which part of a dataset each worker reads, as the dataset's `auto_shard_policy` says ---------

_log = logging.getLogger(__name__)

_SHARING = (AutoShardPolicy.AUTO, AutoShardPolicy.FILE, AutoShardPolicy.DATA)
"""Policies that share by themselves what is not shared yet."""


@dataclass(frozen=True)
class Share:
    """What one worker reads.

    Attributes:
        plan: The dataset.
        policy: By what it was shared: never AUTO.
    """

    plan: Node
    policy: AutoShardPolicy

    @property
    def is_of_each_batch(self) -> bool:
        """Whether all workers read the same batches, and each uses a part of each."""
        return self.policy is AutoShardPolicy.DATA


def auto_shard(plan: Node, context: InputContext) -> Share:
    """Return one worker's share of a dataset.

    Raises:
        InvalidArgumentError: There are fewer files than workers, or workers would read other
            batches, of which each is to use a part.
        NotFoundError: It is to be shared by files, and is not read from files.
    """
    policy = _policy(plan)
    workers, worker = context.num_input_pipelines, context.input_pipeline_id
    if workers == 1 or is_read_whole(plan):
        return Share(plan, AutoShardPolicy.OFF)
    try:
        if policy is AutoShardPolicy.HINT:
            return Share(shard_hints(plan, workers, worker), policy)
        if policy in (AutoShardPolicy.FILE, AutoShardPolicy.AUTO):
            share = shard_files(plan, workers, worker, opens_files)
            return Share(share, AutoShardPolicy.FILE)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"AutoShardPolicy.{policy.name} cannot share the dataset among {workers} workers: "
            f"{error}. With options.auto_shard_policy: AutoShardPolicy.DATA, or OFF for all of it "
            "on every worker"
        ) from error
    except NotFoundError as error:
        if policy is not AutoShardPolicy.AUTO:
            raise NotFoundError(
                f"AutoShardPolicy.FILE cannot share the dataset among {workers} workers: {error}. "
                "With options.auto_shard_policy: AutoShardPolicy.DATA, AUTO or OFF"
            ) from error
        _log.info("AutoShardPolicy.AUTO shares the dataset by DATA, not by FILE: %s", error)
        policy = AutoShardPolicy.DATA
    if policy is AutoShardPolicy.DATA:
        _check_is_read_alike(plan, workers)
    return Share(plan, policy)


def is_read_whole(plan: Node) -> bool:
    """Say whether each worker is to read all of a dataset, however many there are."""
    policy = _policy(plan)
    served = [source for source in sources(plan) if source.keeper is not None]
    is_shared = any(getattr(source, "job_name", None) is not None for source in served)
    # A service's jobs share it among their clients, or give each all of it, as the user chose.
    return (
        policy is AutoShardPolicy.OFF
        or (bool(served) and policy is AutoShardPolicy.AUTO)
        or (is_shared and policy in _SHARING)
    )


def _policy(plan: Node) -> AutoShardPolicy:
    return merged_options(plan).auto_shard_policy or AutoShardPolicy.AUTO


def _check_is_read_alike(plan: Node, workers: int) -> None:
    why = differs_by_reader(plan)
    if why:
        raise InvalidArgumentError(
            f"AutoShardPolicy.DATA cannot share the dataset among {workers} workers, each of which "
            f"reads all batches and uses its part of each: {why}. With options.auto_shard_policy: "
            "AutoShardPolicy.OFF, for all of it on every worker; or FILE, if it is read from files"
        )
