"""The publisher: brings the directories of saves to what the facts say of them.

A thread of the dispatcher's process looks, after each fact about a save and from time to time, what
is to be done, does it, and says so to the core. Each step may be done twice: after a restart all is
done again that the journal does not know to be done.

Rule 1. A file is published only when it counts: files of workers that were lost before they said
        so are never seen, and are removed in the end.
Rule 2. What cannot be done now is tried again for `patience` seconds; then the save fails. What
        can never be done fails at once.
Rule 3. A directory that is not this save's any more is left alone.
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
from headrace.saved.format import Begun, ChunkRecord
from headrace.service.dispatcher import events as updates
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
from headrace.serving.call import Question
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
    updates.IterationFinished,
)


class SavePublisher:
    """Looks after the directories of saves, on a thread of its own.

    Args:
        call: Puts a question to the core; None: it is closed.
        retry_seconds: How long what cannot be done now is tried again, in seconds.
    """

    def __init__(
        self, call: Callable[[Question[Any]], Any], retry_seconds: float = _RETRY_SECONDS
    ) -> None:
        self._call = call
        self._retry_seconds = retry_seconds
        self._wake_up = threading.Event()
        self._is_closing = False
        #: Save -> its files, of which so many are published.
        self._files: dict[str, list[ChunkRecord]] = {}
        self._published: dict[str, int] = {}
        #: Save -> since when nothing can be done with its directory.
        self._failing_since: dict[str, float] = {}
        self._thread = threading.Thread(
            target=self._run, name="headrace-dispatcher-saves", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; what is not done is done after the next start."""
        self._is_closing = True
        self._wake_up.set()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    def observe(self, events: Sequence[AnyEvent]) -> None:
        """Look soon, if one of these facts, which are kept, is about a save."""
        if any(isinstance(fact, _SAVE_EVENTS) for fact in events):
            self._wake_up.set()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake_up.clear()
            try:
                works = self._poll()
            except UnavailableError:
                works = 1  # the journal's, and in the log by now
            except Exception:
                _log.exception("the directories of saves cannot be looked after now")
                works = 1
            self._wake_up.wait(_POLL_SECONDS if works else None)

    def _poll(self) -> int:
        """Do what there is to do; return how many saves are not closed."""
        found = self._call(ListOpenSaves({each: len(known) for each, known in self._files.items()}))
        if found is None:
            return 0
        at_work = {work.save_id for work in found.saves}
        for known in (self._files, self._published, self._failing_since):
            for gone in set(known) - at_work:
                del known[gone]
        for work in found.saves:
            if self._is_closing:
                break
            files = self._files.setdefault(work.save_id, [])
            files += [
                _chunk_record(each, len(files) + place) for place, each in enumerate(work.new_files)
            ]
            try:
                self._update_directory(work, SavedDirectory(work.path))
                self._failing_since.pop(work.save_id, None)
            except Exception as error:
                self._handle_error(work, error)
        return len(at_work)

    def _update_directory(self, work: OpenSave, directory: SavedDirectory) -> None:
        if not work.is_open and not work.error:
            directory.begin(_directory_header(work))
            self._report(work, "opened")
        files, published = self._files[work.save_id], self._published.get(work.save_id, 0)
        if not work.error:
            directory.publish(work.save_id, files[published:])
            self._published[work.save_id] = len(files)
        if not work.is_finished:
            return
        if not work.error:
            directory.finish(work.save_id, files)
            directory.sweep(work.save_id)
        else:
            self._write_error(work, directory)
        self._report(work, "closed")

    def _write_error(self, work: OpenSave, directory: SavedDirectory) -> None:
        """Let those who wait for the directory hear that the save failed, if it is its own."""
        try:
            directory.fail(work.save_id, work.error)
        except AbortedError:
            pass  # another save's by now, or it never was this one's
        except HeadraceError as error:
            _log.warning("%s cannot say that its save failed: %s", directory.url, error)

    def _handle_error(self, work: OpenSave, error: Exception) -> None:
        since = self._failing_since.setdefault(work.save_id, time.monotonic())
        if not isinstance(error, HeadraceError):
            _log.error("the save into %r cannot go on", work.path, exc_info=error)
        if isinstance(error, UnavailableError) and time.monotonic() - since < self._retry_seconds:
            return
        self._report(work, "failed", str(error) or type(error).__name__, type(error).__name__)

    def _report(self, work: OpenSave, outcome: str, error: str = "", error_class: str = "") -> None:
        self._call(
            ReportDirectory(
                save_id=work.save_id, outcome=outcome, error=error, error_class=error_class
            )
        )


def _directory_header(work: OpenSave) -> Begun:
    return Begun(work.save_id, work.plan_digest, json.loads(work.spec) if work.spec else None)


def _chunk_record(stored: CommittedFile, order: int) -> ChunkRecord:
    return ChunkRecord(
        stored.stream, stored.number, stored.elements, stored.bytes, stored.form, order
    )


def call_core(handle: Callable[[Sequence[Request]], None], question: Question[A]) -> A | None:
    """Ask a core in this process; None: it is closed.

    Raises:
        HeadraceError: What it answers with.
    """
    own = _InProcessRequest(question)
    handle([own])
    if own.error is not None:
        raise own.error
    return own.answer  # type: ignore[return-value]


class _InProcessRequest(Request):
    """A request of the process's own."""

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
