"""A directory of a saved dataset: started, filled by several streams, finished or failed, read.

Rule 1. A finished directory is never written to.
Rule 2. If two processes save to one directory, the later one wins if it may start at all: the
header
        says whose save is valid, and the earlier one detects it before it publishes anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.errors import AbortedError, AlreadyExistsError, DataLossError, NotFoundError
from headrace.saved.format import (
    DONE,
    ERROR,
    METADATA,
    ChunkRecord,
    SaveHeader,
    decode_done,
    decode_error,
    decode_header,
    encode_done,
    encode_error,
    encode_header,
    parse_public_name,
    save_id_of,
)
from headrace.storage.files import open_folder
from headrace.storage.names import FileName

__all__ = ["DirectoryStatus", "SavedDirectory"]


class DirectoryStatus(NamedTuple):
    """State of a directory.

    Attributes:
        header: Header of the save; None if none was started.
        chunks: The chunk files, if it is finished.
        error: Error message, if the save failed.
        other_done: ID of the save that wrote DONE, if it is not the one of the header.
    """

    header: SaveHeader | None
    chunks: tuple[ChunkRecord, ...] | None = None
    error: str | None = None
    other_done: str | None = None


class SavedDirectory:
    """A directory by path or URL. Nothing is opened before it is needed.

    Args:
        path: A local path or an fsspec URL.
    """

    def __init__(self, path: FileName) -> None:
        self.folder = open_folder(path)

    @property
    def url(self) -> str:
        """Path or URL of the directory."""
        return self.folder.url

    # --- Reading ----------------------------------------------------------------------------------

    def read_status(self) -> DirectoryStatus:
        """Return the state of the directory.

        Raises:
            DataLossError: If a record is damaged.
            FailedPreconditionError: If it has a later version of the format.
        """
        data = self._read(METADATA)
        if data is None:
            return DirectoryStatus(None)
        begun = decode_header(data, self.folder.path(METADATA))
        other_done = None
        data = self._read(DONE)
        if data is not None:
            save, chunks = decode_done(data, self.folder.path(DONE))
            if save == begun.save_id:
                return DirectoryStatus(begun, chunks)
            other_done = save
        data = self._read(ERROR)
        if data is not None:
            save, error = decode_error(data, self.folder.path(ERROR))
            if save == begun.save_id:
                return DirectoryStatus(begun, None, error)
        return DirectoryStatus(begun, other_done=other_done)

    def check_header(self, status: DirectoryStatus) -> None:
        """Check that the header is not damaged, if DONE is of another save.

        That is legitimate while a save replaces another one that wrote DONE late: the files of the
        other one are then removed. It is not if they exist, and none of the header's save.

        Raises:
            DataLossError: If the header names a save that wrote nothing, and another is complete.
        """
        if status.header is None or status.other_done is None:
            return
        ids = {save_id_of(name) for name in self.folder.list_published()}
        if status.other_done in ids and status.header.save_id not in ids:
            raise DataLossError(
                f"{self.folder.path(METADATA)!r} is damaged: it names the save "
                f"{status.header.save_id!r}, but DONE and the chunk files are of the save "
                f"{status.other_done!r}; save the dataset again"
            )

    def list_published(self, save_id: str) -> list[ChunkRecord]:
        """Return the published chunk files of a save, in order.

        Their contents are unknown until the save is finished.
        """
        found = (parse_public_name(name, save_id) for name in self.folder.list_published())
        known = {record.order: record for record in found if record is not None}
        return [
            known[order] for order in itertools.takewhile(known.__contains__, itertools.count())
        ]

    # --- Writing ----------------------------------------------------------------------------------

    def check_available(self, plan: str) -> None:
        """Check that a save of this plan may start here.

        It may if there is no save, if one failed, and if one of the same plan is unfinished: that
        one is assumed to be dead, and its files are discarded.

        Raises:
            AlreadyExistsError: If it may not.
        """
        status = self.read_status()
        if status.chunks is not None:
            elements = sum(chunk.elements for chunk in status.chunks)
            raise AlreadyExistsError(
                f"{self.url!r} already contains a saved dataset of {elements} elements; "
                "choose another directory, or remove this one"
            )
        if status.header is None or status.error is not None or status.header.plan == plan:
            return
        raise AlreadyExistsError(
            f"{self.url!r} contains an unfinished save of another pipeline; choose "
            "another directory, or remove this one if no process is saving to it"
        )

    def begin(self, header: SaveHeader) -> None:
        """Start a save, and remove the files of an earlier one.

        Idempotent for the same ID, so that a restarted coordinator can continue.

        Raises:
            AlreadyExistsError: If it may not start here (`check_available`).
        """
        known = self.read_status().header
        if known is not None and known.save_id == header.save_id:
            return
        self.check_available(header.plan)
        self.folder.write(METADATA, encode_header(header))
        for name in {*self.folder.list_published(), *self.folder.list_unpublished()}:
            if save_id_of(name) not in (None, header.save_id):
                self.folder.remove(name)
        self.folder.remove(ERROR)

    def publish(self, save_id: str, chunks: Iterable[ChunkRecord]) -> None:
        """Publish complete chunk files to readers. Idempotent.

        Args:
            save_id: ID of the save.
            chunks: The files, with their order. Files of one stream are in the stream's order.

        Raises:
            AbortedError: If another save has started since.
        """
        wanted = list(chunks)
        if not wanted:
            return
        self._check_not_replaced(save_id)
        for chunk in wanted:
            self.folder.publish(chunk.name(save_id), chunk.public_name(save_id))

    def finish(self, save_id: str, chunks: Sequence[ChunkRecord]) -> None:
        """Mark the dataset as finished.

        Args:
            save_id: ID of the save.
            chunks: The chunk files of the dataset, all published and in order.

        Raises:
            AbortedError: If another save has started since.
        """
        self._check_not_replaced(save_id)
        self.folder.write(DONE, encode_done(save_id, chunks))

    def remove_unpublished(self, save_id: str) -> None:
        """Remove files that were never published, once the save is finished."""
        kept = {chunk.name(save_id) for chunk in self.read_status().chunks or ()}
        for name in self.folder.list_unpublished():
            if save_id_of(name) == save_id and name not in kept:
                self.folder.remove(name)

    def fail(self, save_id: str, error: str) -> None:
        """Mark the save as failed with an error message, and remove its files.

        A file that a worker completes before it learns of the failure remains until the next save.
        """
        self._check_not_replaced(save_id)
        self.folder.write(ERROR, encode_error(save_id, error))
        for name in {*self.folder.list_published(), *self.folder.list_unpublished()}:
            if save_id_of(name) == save_id:
                self.folder.remove(name)

    def _check_not_replaced(self, save_id: str) -> None:
        data = self._read(METADATA)
        found = None if data is None else decode_header(data, self.folder.path(METADATA)).save_id
        if found != save_id:
            reason = (
                "its metadata file is missing"
                if found is None
                else "another process started a save there"
            )
            raise AbortedError(f"the save to {self.url!r} was aborted: {reason}")

    def _read(self, name: str) -> bytes | None:
        try:
            return self.folder.read(name)
        except NotFoundError:
            return None
