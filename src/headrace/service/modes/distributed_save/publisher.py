"""Publisher of saves: updates their directories to match the dispatcher's state.

A thread of the dispatcher's process polls the core, after each event about a save and periodically,
does the pending work, and reports it to the core. Each step may be repeated: after a restart, all
steps that the journal does not record as done are done again.

Rule 1. A file is published only when it is committed: files of workers that were lost before they
        reported them are never visible, and are removed in the end.
Rule 2. An operation that fails temporarily is retried for `retry_seconds`; then the save fails. A
        permanent failure fails it at once.
Rule 3. A directory that no longer belongs to this save is left unchanged.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.errors import AbortedError, HeadraceError, UnavailableError
from headrace.saved.directory import SavedDirectory
from headrace.saved.format import ChunkRecord, SaveHeader
from headrace.service.dispatcher import events as dispatcher_events
from headrace.service.dispatcher.events import AnyEvent
from headrace.service.modes.distributed_save.records import (
    CommittedFile,
    FilesCommitted,
    SaveFailed,
    SaveStarted,
)
from headrace.service.modes.distributed_save.requests import (
    ListOpenSaves,
    OpenSave,
    ReportDirectory,
)
from headrace.serving.rpc import TypedRequest
from headrace.transport.channel import Buffer, Request

__all__ = ["SavePublisher", "call_core"]

_log = logging.getLogger(__name__)

A = TypeVar("A")

_POLL_SECONDS = 1.0
_RETRY_SECONDS = 30.0
_SAVE_EVENTS = (
    SaveStarted,
    FilesCommitted,
    SaveFailed,
    dispatcher_events.IterationFinished,
)


class SavePublisher:
    """Updates the directories of saves on its own thread.

    Args:
        call: Sends a request to the core; returns None if the core is closed.
        retry_seconds: Seconds to retry an operation that fails temporarily.
    """

    def __init__(
        self, call: Callable[[TypedRequest[Any]], Any], retry_seconds: float = _RETRY_SECONDS
    ) -> None:
        self._call = call
        self._retry_seconds = retry_seconds
        self._wake_up = threading.Event()
        self._is_closing = False
        #: Save -> its files, and how many of them are published.
        self._files: dict[str, list[ChunkRecord]] = {}
        self._published: dict[str, int] = {}
        #: Save -> since when operations on its directory fail.
        self._failing_since: dict[str, float] = {}
        self._thread = threading.Thread(
            target=self._run, name="headrace-dispatcher-saves", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; unfinished work continues after the next start."""
        self._is_closing = True
        self._wake_up.set()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    def observe(self, events: Sequence[AnyEvent]) -> None:
        """Wake the thread if one of these journaled events is about a save."""
        if any(isinstance(event, _SAVE_EVENTS) for event in events):
            self._wake_up.set()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake_up.clear()
            try:
                num_open = self._poll()
            except UnavailableError:
                num_open = 1  # the journal failed, which is logged elsewhere
            except Exception:
                _log.exception("error while updating the directories of saves; retrying")
                num_open = 1
            self._wake_up.wait(_POLL_SECONDS if num_open else None)

    def _poll(self) -> int:
        """Do the pending work; return the number of open saves."""
        reply = self._call(
            ListOpenSaves({each: len(tracked) for each, tracked in self._files.items()})
        )
        if reply is None:
            return 0
        open_ids = {open_save.save_id for open_save in reply.saves}
        for tracked in (self._files, self._published, self._failing_since):
            for closed_id in set(tracked) - open_ids:
                del tracked[closed_id]
        for open_save in reply.saves:
            if self._is_closing:
                break
            files = self._files.setdefault(open_save.save_id, [])
            files += [
                _chunk_record(each, len(files) + index)
                for index, each in enumerate(open_save.new_files)
            ]
            try:
                self._update_directory(open_save, SavedDirectory(open_save.path))
                self._failing_since.pop(open_save.save_id, None)
            except Exception as error:
                self._handle_error(open_save, error)
        return len(open_ids)

    def _update_directory(self, open_save: OpenSave, directory: SavedDirectory) -> None:
        if not open_save.is_open and not open_save.error:
            directory.begin(_directory_header(open_save))
            self._report(open_save, "opened")
        files, published = self._files[open_save.save_id], self._published.get(open_save.save_id, 0)
        if not open_save.error:
            directory.publish(open_save.save_id, files[published:])
            self._published[open_save.save_id] = len(files)
        if not open_save.is_finished:
            return
        if not open_save.error:
            directory.finish(open_save.save_id, files)
            directory.remove_unpublished(open_save.save_id)
        else:
            self._write_error(open_save, directory)
        self._report(open_save, "closed")

    def _write_error(self, open_save: OpenSave, directory: SavedDirectory) -> None:
        """Record in the directory that the save failed, if the directory belongs to it."""
        try:
            directory.fail(open_save.save_id, open_save.error)
        except AbortedError:
            pass  # it belongs to another save
        except HeadraceError as error:
            _log.warning(
                "the failure of the save into %s could not be recorded there: %s",
                directory.url,
                error,
            )

    def _handle_error(self, open_save: OpenSave, error: Exception) -> None:
        since = self._failing_since.setdefault(open_save.save_id, time.monotonic())
        if not isinstance(error, HeadraceError):
            _log.error("the save into %r failed unexpectedly", open_save.path, exc_info=error)
        if isinstance(error, UnavailableError) and time.monotonic() - since < self._retry_seconds:
            return
        self._report(open_save, "failed", str(error) or type(error).__name__, type(error).__name__)

    def _report(
        self, open_save: OpenSave, outcome: str, error: str = "", error_class: str = ""
    ) -> None:
        self._call(
            ReportDirectory(
                save_id=open_save.save_id, outcome=outcome, error=error, error_class=error_class
            )
        )


def _directory_header(open_save: OpenSave) -> SaveHeader:
    return SaveHeader(
        open_save.save_id,
        open_save.plan_digest,
        json.loads(open_save.spec) if open_save.spec else None,
    )


def _chunk_record(file: CommittedFile, index: int) -> ChunkRecord:
    return ChunkRecord(file.stream, file.number, file.elements, file.bytes, file.schema, index)


def call_core(handle: Callable[[Sequence[Request]], None], request: TypedRequest[A]) -> A | None:
    """Send a request to a core in this process; return None if the core is closed.

    Raises:
        HeadraceError: If the core replies with an error.
    """
    in_process = _InProcessRequest(request)
    handle([in_process])
    if in_process.error is not None:
        raise in_process.error
    return in_process.answer  # type: ignore[return-value]


class _InProcessRequest(Request):
    """A request from within the process."""

    buffers: Sequence[Buffer] = ()
    peer = ""
    role = None

    def __init__(self, message: msgspec.Struct) -> None:
        self.message = message
        self.answer: msgspec.Struct | None = None
        self.error: Exception | None = None

    def reply(
        self, message: msgspec.Struct, buffers: Sequence[Buffer] = (), *, borrowed: bool = False
    ) -> None:
        self.answer = message

    def fail(self, error: Exception) -> None:
        self.error = error
