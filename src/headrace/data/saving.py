"""Save a dataset in one pass, and load one that is finished or still being saved."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace import saved
from headrace.data.unfinished import WAIT_SECONDS, Patience, UnfinishedSource, Watch, failed
from headrace.element.chunk import Chunk
from headrace.element.spec import Spec, describe_spec, described_spec, loosened, spec_of
from headrace.element.wire import frame_bytes
from headrace.errors import FailedPreconditionError, HeadraceError, NotFoundError, describe_error
from headrace.execution.build import draw_seed, start
from headrace.execution.context import Iteration
from headrace.execution.iterator import ElementIterator
from headrace.plan.determinism import fixed_seeds
from headrace.plan.elements import FromSource
from headrace.plan.identity import identity_digest
from headrace.plan.node import Node
from headrace.plan.source import (
    INFINITE,
    IndexedSource,
    Position,
    Reader,
    Source,
    check_limit,
    check_range,
)
from headrace.plan.traverse import cardinality, element_spec, merged_options
from headrace.rewrites.optimize import prepare
from headrace.saved.directory import SavedDirectory, Standing
from headrace.saved.format import Begun, ChunkRecord, ordered
from headrace.sources.saved import saved_source
from headrace.storage.names import FileName

__all__ = ["FinishedStreams", "UnfinishedStreams", "load_source", "load_streams", "save_dataset"]


#: The most elements that are read at once.
_MOST = 1 << 16


def save_dataset(
    plan: Node, pass_number: int, path: FileName, chunk_bytes: int | None = None
) -> None:
    """Save the elements of a plan.

    Args:
        plan: The plan as written.
        pass_number: Which pass over it this is.
        path: A directory, by path or URL.
        chunk_bytes: How large chunk files are to be; None for a good size.

    Raises:
        ValueError: The plan is infinite.
        AlreadyExistsError: The directory holds a saved dataset, or an unfinished one of another
            plan.
        InvalidElementError: An element cannot be saved; the message names the component.
        AbortedError: Another process began to save there.
        FailedPreconditionError: The package pyarrow is not installed.
    """
    if cardinality(plan) == INFINITE:
        raise ValueError(
            "the dataset is infinite and cannot be saved: choose how many elements with take(n)"
        )
    saved.arrow.pyarrow()  # or its absence would be found after the first function was called
    digest = identity_digest(plan)
    directory = SavedDirectory(path)
    directory.check_free(digest)
    save = secrets.token_hex(8)
    begun = Begun(save, digest, None)
    has_begun = False
    iterator = _started(plan, pass_number)
    try:
        chunk = iterator.next_chunk(1)
        proven = _proven_spec(plan)
        spec = proven
        if spec is None and chunk is not None:
            # As `Dataset.element_spec` does: other elements may have other lengths.
            spec = loosened(spec_of(chunk.rows()[0]))
        if spec is not None:
            begun = begun._replace(spec=describe_spec(spec))
        directory.begin(begun)
        has_begun = True
        chunks = _write(iterator, chunk, directory, save, proven, chunk_bytes)
        directory.finish(save, chunks)
    except BaseException as error:
        # Whoever waits for it, or for the rest, must hear of it.
        with contextlib.suppress(HeadraceError):
            if not has_begun:
                directory.begin(begun)
            directory.fail(save, describe_error(error))
        raise
    finally:
        iterator.close()


def _started(plan: Node, pass_number: int) -> ElementIterator:
    seed = merged_options(plan).seed
    return start(
        plan,
        seed=draw_seed() if seed is None else seed,
        fixed=fixed_seeds(plan),
        pass_number=(Iteration(plan, pass_number).number,),
    )


def _proven_spec(plan: Node) -> Spec | None:
    spec = element_spec(plan)
    return element_spec(prepare(plan).plan) if spec is None else spec


def _write(
    iterator: ElementIterator,
    chunk: Chunk | None,
    directory: SavedDirectory,
    save: str,
    spec: Spec | None,
    chunk_bytes: int | None,
) -> list[ChunkRecord]:
    """Write all elements, of which the first ones are at hand; return the files, published."""
    written: list[ChunkRecord] = []
    writer = saved.writer.StreamWriter(
        directory,
        save,
        0,
        spec=spec,
        chunk_bytes=saved.writer.CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
    )
    try:
        limit = 1
        while chunk is not None:
            writer.append(chunk)
            written += _publish(writer, directory, save, len(written))
            # As many as make a batch, so that they are written from where they lie.
            affordable = writer.batch_bytes * chunk.size // (frame_bytes(chunk) + 1) + 1
            limit = min(2 * limit, affordable, _MOST)
            chunk = iterator.next_chunk(limit)
        writer.cut()
        written += _publish(writer, directory, save, len(written))
    finally:
        writer.close()
    return written


def _publish(
    writer: saved.writer.StreamWriter, directory: SavedDirectory, save: str, order: int
) -> list[ChunkRecord]:
    whole = ordered(writer.take_whole(), order)
    directory.publish(save, whole)
    return whole


MakeDataset = Callable[[FromSource], Any]
"""Makes a dataset of a plan: what stands above this file."""


def load_source(path: FileName, wait: bool, wait_timeout: float = WAIT_SECONDS) -> Source:
    """Return the source of a saved dataset.

    Args:
        path: The directory, by path or URL.
        wait: Whether to read what is there already, and wait for the rest.
        wait_timeout: Seconds without anything new after which it is waited for no more.

    Raises:
        DeadlineExceededError: Nobody began to save it for so long.
        NotFoundError: Nothing was saved there; with `wait`, it is waited for.
        FailedPreconditionError: It is not finished, and `wait` is False; or the save failed.
    """
    directory = _directory(path)
    if wait:
        begun = _wait_for(directory, wait_timeout)
        return UnfinishedSource(directory.url, begun.save, None, _spec(begun), wait_timeout)
    begun, chunks = _finished(directory)
    return saved_source(directory.url, begun.save, None, chunks, _spec(begun))


def load_streams(path: FileName, wait: bool, wait_timeout: float, make: MakeDataset) -> Source:
    """Return a source whose elements are datasets: one for each stream."""
    directory = _directory(path)
    if wait:
        begun = _wait_for(directory, wait_timeout)
        return UnfinishedStreams(directory.url, begun.save, _spec(begun), make, wait_timeout)
    begun, chunks = _finished(directory)
    return FinishedStreams(directory.url, begun.save, chunks, _spec(begun), make)


def _directory(path: FileName) -> SavedDirectory:
    saved.arrow.pyarrow()  # or its absence would be found by a worker
    return SavedDirectory(path)


def _finished(directory: SavedDirectory) -> tuple[Begun, tuple[ChunkRecord, ...]]:
    standing = directory.look()
    if standing.begun is None:
        raise NotFoundError(
            f"there is no saved dataset in {directory.url!r}; Dataset.save makes one"
        )
    if standing.error is not None:
        raise failed(directory.url, standing)
    if standing.chunks is None:
        count = len(directory.published(standing.begun.save))
        raise FailedPreconditionError(
            f"the dataset in {directory.url!r} is not finished: {count} chunk files are there so "
            "far, and DONE is not; load it with wait=True while it is being saved, or save it "
            "again if nobody is saving it any more"
        )
    return standing.begun, standing.chunks


def _wait_for(directory: SavedDirectory, timeout: float) -> Begun:
    """Wait until a save was begun."""
    patience = Patience(directory, threading.Event(), timeout)
    while True:
        standing: Standing = directory.look()
        if standing.begun is not None:
            if standing.error is not None:
                raise failed(directory.url, standing)
            return standing.begun
        patience.wait(f"a dataset to be saved in {directory.url!r}")


def _spec(begun: Begun) -> Spec | None:
    return None if begun.spec is None else described_spec(begun.spec)


# --- datasets of streams --------------------------------------------------------------------------


def _streams(chunks: Sequence[ChunkRecord]) -> list[int]:
    """Return the numbers of the streams that have files, in the order of their first ones.

    That order does not change while others appear; their numbers say nothing.
    """
    return list(dict.fromkeys(chunk.stream for chunk in chunks))


@dataclass(frozen=True, eq=False)
class FinishedStreams(IndexedSource):
    """Datasets, one for each stream of a finished directory, in the order of their first files.

    Args:
        path: The directory.
        save: Id of the save.
        chunks: The chunk files, in order.
        spec: Spec of the elements of the datasets.
        make: Makes a dataset of a plan.
    """

    speed_only: ClassVar[tuple[str, ...]] = ("path", "chunks", "spec", "make")

    path: str
    save: str
    chunks: tuple[ChunkRecord, ...]
    spec: Spec | None
    make: MakeDataset

    @property
    def size(self) -> int:
        """Number of streams that hold something."""
        return len(_streams(self.chunks))

    def gather(self, indices: NDArray[np.int64]) -> Any:
        """Return an object array of datasets with the shape of `indices`."""
        made, streams = np.empty(np.shape(indices), object), _streams(self.chunks)
        for place in np.ndindex(made.shape):
            made[place] = self._stream(streams[int(indices[place])])
        return made

    def _stream(self, stream: int) -> Any:
        chunks = tuple(chunk for chunk in self.chunks if chunk.stream == stream)
        source = saved_source(self.path, self.save, stream, chunks, self.spec)
        return self.make(FromSource(source=source))


@dataclass(frozen=True, eq=False)
class UnfinishedStreams(Source):
    """Datasets, one for each stream of a directory that is being filled, as they appear.

    Args:
        path: The directory.
        save: Id of the save.
        spec: Spec of the elements of the datasets.
        make: Makes a dataset of a plan.
        wait_timeout: Seconds without anything new after which it is waited for no more.
    """

    speed_only: ClassVar[tuple[str, ...]] = ("path", "spec", "make", "wait_timeout")

    path: str
    save: str
    spec: Spec | None
    make: MakeDataset
    wait_timeout: float = WAIT_SECONDS

    @property
    def size(self) -> int:
        """1: how many streams there will be is not known yet."""
        return 1

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        """Return a reader that waits for streams; its position is the number of the next."""
        check_range(start, stop, self.size)
        return _StreamsReader(self, stop - start, 0 if position is None else position)


class _StreamsReader:
    """Gives the dataset of each stream; its position is how many it gave."""

    def __init__(self, source: UnfinishedStreams, indices: int, position: Position) -> None:
        if type(position) is not int or position < 0:
            raise ValueError(f"position must be a number of streams, got {position!r}")
        self._source = source
        self._next = position
        self._is_at_end = not indices
        self._watch = Watch(SavedDirectory(source.path), source.save)
        self._closing = threading.Event()

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        patience = Patience(self._watch.directory, self._closing, self._source.wait_timeout)
        while not self._is_at_end:
            source = self._source
            known = _streams(self._watch.chunks())
            if self._next < len(known):
                number = known[self._next]
                stream = UnfinishedSource(
                    source.path, source.save, number, source.spec, source.wait_timeout
                )
                self._next += 1
                return Chunk.of_rows([source.make(FromSource(source=stream))])
            if self._watch.is_finished:
                break
            try:
                patience.wait(f"another stream of the saved dataset {source.path!r}")
                self._watch.look()
            except HeadraceError:
                self._is_at_end = True
                raise
        return None

    def get_position(self) -> Position:
        return self._next

    def close(self) -> None:
        self._closing.set()
