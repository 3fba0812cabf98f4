"""Saving of a dataset in one epoch, and loading of finished or unfinished saved datasets."""

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
from headrace.data.unfinished_source import (
    WAIT_SECONDS,
    DirectoryPoller,
    DirectoryWatcher,
    UnfinishedSource,
    save_failed_error,
)
from headrace.element.chunk import Chunk
from headrace.element.spec import Spec, describe_spec, parse_spec, relax_lengths, spec_of
from headrace.element.wire import frame_bytes
from headrace.errors import FailedPreconditionError, HeadraceError, NotFoundError, describe_error
from headrace.execution.build import build_iterator, draw_seed
from headrace.execution.context import PlanIteration
from headrace.execution.iterator import ElementIterator
from headrace.plan.determinism import collect_fixed_seeds
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
from headrace.saved.directory import DirectoryStatus, SavedDirectory
from headrace.saved.format import ChunkRecord, SaveHeader, assign_order
from headrace.sources.saved_chunks import chunk_files_source
from headrace.storage.names import FileName

__all__ = [
    "FinishedStreamsSource",
    "UnfinishedStreamsSource",
    "load_source",
    "load_streams",
    "save_dataset",
]


#: Largest number of elements to read at once.
_MAX_CHUNK_SIZE = 1 << 16


def save_dataset(plan: Node, epoch: int, path: FileName, chunk_bytes: int | None = None) -> None:
    """Save the elements of a plan.

    Args:
        plan: The plan as written.
        epoch: Number of the epoch.
        path: Directory, by path or URL.
        chunk_bytes: Approximate size of chunk files in bytes; None uses the default.

    Raises:
        ValueError: If the plan is infinite.
        AlreadyExistsError: If the directory contains a saved dataset, or an unfinished one of
            another plan.
        InvalidElementError: If an element cannot be saved; the message names the component.
        AbortedError: If another process started to save there.
        FailedPreconditionError: If pyarrow is not installed.
    """
    if cardinality(plan) == INFINITE:
        raise ValueError("the dataset is infinite and cannot be saved: limit it with take(n)")
    saved.arrow.pyarrow()  # fail before the first user function is called if it is missing
    digest = identity_digest(plan)
    directory = SavedDirectory(path)
    directory.check_available(digest)
    save_id = secrets.token_hex(8)
    header = SaveHeader(save_id, digest, None)
    is_started = False
    iterator = _start_iterator(plan, epoch)
    try:
        chunk = iterator.next_chunk(1)
        known_spec = _static_spec(plan)
        spec = known_spec
        if spec is None and chunk is not None:
            # As in `Dataset.element_spec`: other elements may have other lengths.
            spec = relax_lengths(spec_of(chunk.rows()[0]))
        if spec is not None:
            header = header._replace(spec=describe_spec(spec))
        directory.begin(header)
        is_started = True
        chunks = _write(iterator, chunk, directory, save_id, known_spec, chunk_bytes)
        directory.finish(save_id, chunks)
    except BaseException as error:
        # Report the failure to readers that wait for the dataset.
        with contextlib.suppress(HeadraceError):
            if not is_started:
                directory.begin(header)
            directory.fail(save_id, describe_error(error))
        raise
    finally:
        iterator.close()


def _start_iterator(plan: Node, epoch: int) -> ElementIterator:
    seed = merged_options(plan).seed
    return build_iterator(
        plan,
        seed=draw_seed() if seed is None else seed,
        step_seeds=collect_fixed_seeds(plan),
        epochs=(PlanIteration(plan, epoch).number,),
    )


def _static_spec(plan: Node) -> Spec | None:
    spec = element_spec(plan)
    return element_spec(prepare(plan).plan) if spec is None else spec


def _write(
    iterator: ElementIterator,
    chunk: Chunk | None,
    directory: SavedDirectory,
    save_id: str,
    spec: Spec | None,
    chunk_bytes: int | None,
) -> list[ChunkRecord]:
    """Write all elements, starting with `chunk`; return the published files."""
    written: list[ChunkRecord] = []
    writer = saved.writer.StreamWriter(
        directory,
        save_id,
        0,
        spec=spec,
        chunk_bytes=saved.writer.CHUNK_BYTES if chunk_bytes is None else chunk_bytes,
    )
    try:
        limit = 1
        while chunk is not None:
            writer.append(chunk)
            written += _publish(writer, directory, save_id, len(written))
            # Read the elements of one batch at once, so that they are written without a copy.
            max_chunk_bytes = writer.batch_bytes * chunk.size // (frame_bytes(chunk) + 1) + 1
            limit = min(2 * limit, max_chunk_bytes, _MAX_CHUNK_SIZE)
            chunk = iterator.next_chunk(limit)
        writer.finish_file()
        written += _publish(writer, directory, save_id, len(written))
    finally:
        writer.close()
    return written


def _publish(
    writer: saved.writer.StreamWriter, directory: SavedDirectory, save_id: str, order: int
) -> list[ChunkRecord]:
    whole = assign_order(writer.take_finished_files(), order)
    directory.publish(save_id, whole)
    return whole


MakeDataset = Callable[[FromSource], Any]
"""Creates a dataset from a plan; passed in, because datasets are defined above this module."""


def load_source(path: FileName, wait: bool, wait_timeout: float = WAIT_SECONDS) -> Source:
    """Return the source of a saved dataset.

    Args:
        path: Directory, by path or URL.
        wait: Whether to read an unfinished dataset, and wait for the rest.
        wait_timeout: Seconds to wait for new data.

    Raises:
        DeadlineExceededError: If no save started within the timeout.
        NotFoundError: If nothing was saved there and `wait` is False.
        FailedPreconditionError: If it is unfinished and `wait` is False, or if the save failed.
        DataLossError: If a record is damaged.
    """
    directory = _open_directory(path)
    if wait:
        header = _wait_for_save(directory, wait_timeout)
        return UnfinishedSource(
            directory.url, header.save_id, None, _decode_spec(header), wait_timeout
        )
    header, chunks = _read_finished(directory)
    return chunk_files_source(directory.url, header.save_id, None, chunks, _decode_spec(header))


def load_streams(
    path: FileName, wait: bool, wait_timeout: float, make_dataset: MakeDataset
) -> Source:
    """Return a source whose elements are datasets, one for each stream."""
    directory = _open_directory(path)
    if wait:
        header = _wait_for_save(directory, wait_timeout)
        return UnfinishedStreamsSource(
            directory.url, header.save_id, _decode_spec(header), make_dataset, wait_timeout
        )
    header, chunks = _read_finished(directory)
    return FinishedStreamsSource(
        directory.url, header.save_id, chunks, _decode_spec(header), make_dataset
    )


def _open_directory(path: FileName) -> SavedDirectory:
    saved.arrow.pyarrow()  # fail here, not on a worker, if it is missing
    return SavedDirectory(path)


def _read_finished(directory: SavedDirectory) -> tuple[SaveHeader, tuple[ChunkRecord, ...]]:
    status = directory.read_status()
    if status.header is None:
        raise NotFoundError(
            f"there is no saved dataset in {directory.url!r}; create one with Dataset.save"
        )
    if status.error is not None:
        raise save_failed_error(directory.url, status)
    directory.check_header(status)
    if status.chunks is None:
        count = len(directory.list_published(status.header.save_id))
        done = "no DONE file" if status.other_done is None else "a DONE file of another save"
        raise FailedPreconditionError(
            f"the dataset in {directory.url!r} is not finished: it has {count} chunk files "
            f"and {done}; load it with wait=True while it is being saved, or save it again if the "
            "saving process has ended"
        )
    return status.header, status.chunks


def _wait_for_save(directory: SavedDirectory, timeout: float) -> SaveHeader:
    """Wait until a save has started."""
    poller = DirectoryPoller(directory, threading.Event(), timeout)
    while True:
        status: DirectoryStatus = directory.read_status()
        if status.header is not None:
            if status.error is not None:
                raise save_failed_error(directory.url, status)
            directory.check_header(status)
            return status.header
        poller.wait(f"a dataset to be saved in {directory.url!r}")


def _decode_spec(header: SaveHeader) -> Spec | None:
    return None if header.spec is None else parse_spec(header.spec)


# --- Datasets of streams --------------------------------------------------------------------------


def _stream_numbers(chunks: Sequence[ChunkRecord]) -> list[int]:
    """Return the numbers of the streams that have files, in the order of their first files.

    The order is stable while more streams appear; the numbers themselves have no meaning.
    """
    return list(dict.fromkeys(chunk.stream for chunk in chunks))


@dataclass(frozen=True, eq=False)
class FinishedStreamsSource(IndexedSource):
    """Datasets, one for each stream of a finished directory, in the order of their first files.

    Args:
        path: The directory.
        save_id: ID of the save.
        chunks: The chunk files, in order.
        spec: Spec of the elements of the datasets.
        make_dataset: Function that creates a dataset from a plan.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("path", "chunks", "spec", "make_dataset")

    path: str
    save_id: str
    chunks: tuple[ChunkRecord, ...]
    spec: Spec | None
    make_dataset: MakeDataset

    @property
    def size(self) -> int:
        """Number of streams that have files."""
        return len(_stream_numbers(self.chunks))

    def gather(self, indices: NDArray[np.int64]) -> Any:
        """Return an object array of datasets with the shape of `indices`."""
        result, streams = np.empty(np.shape(indices), object), _stream_numbers(self.chunks)
        for stream_index in np.ndindex(result.shape):
            result[stream_index] = self._open_stream(streams[int(indices[stream_index])])
        return result

    def _open_stream(self, stream: int) -> Any:
        chunks = tuple(chunk for chunk in self.chunks if chunk.stream == stream)
        source = chunk_files_source(self.path, self.save_id, stream, chunks, self.spec)
        return self.make_dataset(FromSource(source=source))


@dataclass(frozen=True, eq=False)
class UnfinishedStreamsSource(Source):
    """Datasets, one for each stream of a directory that is being written, as they appear.

    Args:
        path: The directory.
        save_id: ID of the save.
        spec: Spec of the elements of the datasets.
        make_dataset: Function that creates a dataset from a plan.
        wait_timeout: Seconds to wait for new data.
    """

    performance_fields: ClassVar[tuple[str, ...]] = ("path", "spec", "make_dataset", "wait_timeout")

    path: str
    save_id: str
    spec: Spec | None
    make_dataset: MakeDataset
    wait_timeout: float = WAIT_SECONDS

    @property
    def size(self) -> int:
        """Always 1, since the number of streams is not known yet."""
        return 1

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        """Return a reader that waits for streams; its position is the number of the next stream."""
        check_range(start, stop, self.size)
        return _StreamsReader(self, stop - start, 0 if position is None else position)


class _StreamsReader:
    """Reads the dataset of each stream; its position is the number of streams read."""

    def __init__(self, source: UnfinishedStreamsSource, indices: int, position: Position) -> None:
        if type(position) is not int or position < 0:
            raise ValueError(f"position must be a number of streams, got {position!r}")
        self._source = source
        self._next = position
        self._is_at_end = not indices
        self._watcher = DirectoryWatcher(SavedDirectory(source.path), source.save_id)
        self._closing = threading.Event()

    def read(self, limit: int) -> Chunk | None:
        check_limit(limit)
        poller = DirectoryPoller(self._watcher.directory, self._closing, self._source.wait_timeout)
        while not self._is_at_end:
            source = self._source
            known = _stream_numbers(self._watcher.chunks())
            if self._next < len(known):
                number = known[self._next]
                stream = UnfinishedSource(
                    source.path, source.save_id, number, source.spec, source.wait_timeout
                )
                self._next += 1
                return Chunk.of_rows([source.make_dataset(FromSource(source=stream))])
            if self._watcher.is_finished:
                break
            try:
                poller.wait(f"another stream of the saved dataset {source.path!r}")
                self._watcher.refresh()
            except HeadraceError:
                self._is_at_end = True
                raise
        return None

    def get_position(self) -> Position:
        return self._next

    def close(self) -> None:
        self._closing.set()
