"""One saved directory: begun, filled by several streams, finished or failed, looked at meanwhile.

Rule 1. A directory that is finished is never written to.
Rule 2. Of two that save into one directory the later wins, if it may begin at all: the record says
        whose save counts, and the earlier one finds out before it publishes anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.errors import AbortedError, AlreadyExistsError, NotFoundError
from headrace.saved.format import (
    DONE,
    ERROR,
    METADATA,
    Begun,
    ChunkRecord,
    decode_begun,
    decode_done,
    decode_error,
    encode_begun,
    encode_done,
    encode_error,
    parse_public_name,
    save_of,
)
from headrace.storage.files import open_folder
from headrace.storage.names import FileName

__all__ = ["SavedDirectory", "Standing"]


class Standing(NamedTuple):
    """How far a directory is.

    Attributes:
        begun: What was written first; None: nothing was begun here.
        chunks: The chunk files, once it is finished.
        error: What went wrong, if it failed.
    """

    begun: Begun | None
    chunks: tuple[ChunkRecord, ...] | None = None
    error: str | None = None


class SavedDirectory:
    """A directory by path or URL. Nothing is opened before it is asked for.

    Args:
        path: A local path or an fsspec URL.
    """

    def __init__(self, path: FileName) -> None:
        self.folder = open_folder(path)

    @property
    def url(self) -> str:
        """Its path or URL."""
        return self.folder.url

    # --- looking ----------------------------------------------------------------------------------

    def look(self) -> Standing:
        """Return how far it is.

        Raises:
            DataLossError: A record is damaged.
            FailedPreconditionError: It is of a later version of the format.
        """
        data = self._read(METADATA)
        if data is None:
            return Standing(None)
        begun = decode_begun(data, self.folder.path(METADATA))
        data = self._read(DONE)
        if data is not None:
            save, chunks = decode_done(data, self.folder.path(DONE))
            if save == begun.save:
                return Standing(begun, chunks)
        data = self._read(ERROR)
        if data is not None:
            save, error = decode_error(data, self.folder.path(ERROR))
            if save == begun.save:
                return Standing(begun, None, error)
        return Standing(begun)

    def published(self, save: str) -> list[ChunkRecord]:
        """Return the chunk files of a save that others may read already, in order.

        What they hold is not known before it is finished.
        """
        found = (parse_public_name(name, save) for name in self.folder.names())
        known = {record.order: record for record in found if record is not None}
        return [
            known[order] for order in itertools.takewhile(known.__contains__, itertools.count())
        ]

    # --- writing ----------------------------------------------------------------------------------

    def check_free(self, plan: str) -> None:
        """Check that a save of this plan may begin here.

        It may where there is none, where one failed, and where one of the same plan is unfinished:
        that one is taken to be dead, and what it wrote counts no more.

        Raises:
            AlreadyExistsError: It may not.
        """
        standing = self.look()
        if standing.chunks is not None:
            elements = sum(chunk.elements for chunk in standing.chunks)
            raise AlreadyExistsError(
                f"{self.url!r} holds a saved dataset of {elements} elements already; name another "
                "directory, or remove this one"
            )
        if standing.begun is None or standing.error is not None or standing.begun.plan == plan:
            return
        raise AlreadyExistsError(
            f"{self.url!r} holds the unfinished save of another pipeline; name another directory, "
            "or remove this one if nobody is saving there any more"
        )

    def begin(self, begun: Begun) -> None:
        """Begin a save, and remove what is left of one before.

        May be called again with the same id: a coordinator that was restarted goes on.

        Raises:
            AlreadyExistsError: It may not begin here (`check_free`).
        """
        known = self.look().begun
        if known is not None and known.save == begun.save:
            return
        self.check_free(begun.plan)
        self.folder.write(METADATA, encode_begun(begun))
        for name in {*self.folder.names(), *self.folder.leftovers()}:
            if save_of(name) not in (None, begun.save):
                self.folder.remove(name)
        self.folder.remove(ERROR)

    def publish(self, save: str, chunks: Iterable[ChunkRecord]) -> None:
        """Let others read chunk files that are written. May be called twice.

        Args:
            save: Id of the save.
            chunks: The files, whose order was decided. Those of one stream are in its order.

        Raises:
            AbortedError: Another save was begun here since.
        """
        wanted = list(chunks)
        if not wanted:
            return
        self._check_own(save)
        for chunk in wanted:
            self.folder.publish(chunk.name(save), chunk.public_name(save))

    def finish(self, save: str, chunks: Sequence[ChunkRecord]) -> None:
        """Say that these chunk files, all published and in order, are the dataset.

        Raises:
            AbortedError: Another save was begun here since.
        """
        self._check_own(save)
        self.folder.write(DONE, encode_done(save, chunks))

    def sweep(self, save: str) -> None:
        """Remove files of a save that were never published, once it is finished."""
        kept = {chunk.name(save) for chunk in self.look().chunks or ()}
        for name in self.folder.leftovers():
            if save_of(name) == save and name not in kept:
                self.folder.remove(name)

    def fail(self, save: str, error: str) -> None:
        """Say that the save failed, and why, and remove what it wrote.

        A file that a worker finishes before it has heard of that stays until the next save.
        """
        self._check_own(save)
        self.folder.write(ERROR, encode_error(save, error))
        for name in {*self.folder.names(), *self.folder.leftovers()}:
            if save_of(name) == save:
                self.folder.remove(name)

    def _check_own(self, save: str) -> None:
        data = self._read(METADATA)
        found = None if data is None else decode_begun(data, self.folder.path(METADATA)).save
        if found != save:
            what = "its record is gone" if found is None else "another process began to save there"
            raise AbortedError(f"the save into {self.url!r} was given up: {what}")

    def _read(self, name: str) -> bytes | None:
        try:
            return self.folder.read(name)
        except NotFoundError:
            return None
