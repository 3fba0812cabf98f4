"""Save a dataset: one pass over it, into one stream of chunk files."""

from __future__ import annotations

import contextlib
import secrets

from headrace import saved
from headrace.element.chunk import Chunk
from headrace.element.spec import Spec, describe_spec, loosened, spec_of
from headrace.element.wire import frame_bytes
from headrace.errors import HeadraceError, describe_error
from headrace.execution.build import draw_seed, start
from headrace.execution.iteration import Iteration
from headrace.execution.iterator import ElementIterator
from headrace.plan.fixed_order import fixed_seeds
from headrace.plan.identity import identity_digest
from headrace.plan.node import Node
from headrace.plan.source import INFINITE
from headrace.plan.traverse import cardinality, element_spec, merged_options
from headrace.rewrites.optimize import prepare
from headrace.saved.directory import SavedDirectory
from headrace.saved.format import Begun, ChunkRecord, ordered
from headrace.storage.names import FileName

__all__ = ["save_dataset"]

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
