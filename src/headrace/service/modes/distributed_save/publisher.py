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
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.updates import Update
from headrace.service.modes.distributed_save.records import (
    FilesSaved,
    SaveBegun,
    SaveFailed,
    Stored,
)
from headrace.service.modes.distributed_save.saves import LookAtSaves, NoteSave, SaveWork
from headrace.serving.call import Question
from headrace.transport.channel import Buffer, Request

__all__ = ["Publisher", "ask_core"]

_log = logging.getLogger(__name__)

A = TypeVar("A")

_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 30.0
_ABOUT_SAVES = (
    SaveBegun,
    FilesSaved,
    SaveFailed,
    updates.IterationFinished,
)


class Publisher:
    """Looks after the directories of saves, on a thread of its own.

    Args:
        ask: Puts a question to the core; None: it is closed.
        patience: How long what cannot be done now is tried again, in seconds.
    """

    def __init__(
        self, ask: Callable[[Question[Any]], Any], patience: float = _PATIENCE_SECONDS
    ) -> None:
        self._ask = ask
        self._patience = patience
        self._bell = threading.Event()
        self._is_closing = False
        #: Save -> its files, of which so many are published.
        self._files: dict[str, list[ChunkRecord]] = {}
        self._published: dict[str, int] = {}
        #: Save -> since when nothing can be done with its directory.
        self._stuck: dict[str, float] = {}
        self._thread = threading.Thread(
            target=self._run, name="headrace-dispatcher-saves", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; what is not done is done after the next start."""
        self._is_closing = True
        self._bell.set()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    def heard(self, facts: Sequence[Update]) -> None:
        """Look soon, if one of these facts, which are kept, is about a save."""
        if any(isinstance(fact, _ABOUT_SAVES) for fact in facts):
            self._bell.set()

    def _run(self) -> None:
        while not self._is_closing:
            self._bell.clear()
            try:
                works = self._look()
            except UnavailableError:
                works = 1  # the journal's, and in the log by now
            except Exception:
                _log.exception("the directories of saves cannot be looked after now")
                works = 1
            self._bell.wait(_LOOK_SECONDS if works else None)

    def _look(self) -> int:
        """Do what there is to do; return how many saves are not closed."""
        found = self._ask(LookAtSaves({each: len(known) for each, known in self._files.items()}))
        if found is None:
            return 0
        at_work = {work.save for work in found.saves}
        for known in (self._files, self._published, self._stuck):
            for gone in set(known) - at_work:
                del known[gone]
        for work in found.saves:
            if self._is_closing:
                break
            files = self._files.setdefault(work.save, [])
            files += [_record(each, len(files) + place) for place, each in enumerate(work.stored)]
            try:
                self._do(work, SavedDirectory(work.path))
                self._stuck.pop(work.save, None)
            except Exception as error:
                self._failed(work, error)
        return len(at_work)

    def _do(self, work: SaveWork, directory: SavedDirectory) -> None:
        if not work.is_open and not work.error:
            directory.begin(_begun(work))
            self._note(work, "opened")
        files, published = self._files[work.save], self._published.get(work.save, 0)
        if not work.error:
            directory.publish(work.save, files[published:])
            self._published[work.save] = len(files)
        if not work.is_over:
            return
        if not work.error:
            directory.finish(work.save, files)
            directory.sweep(work.save)
        else:
            self._say_error(work, directory)
        self._note(work, "closed")

    def _say_error(self, work: SaveWork, directory: SavedDirectory) -> None:
        """Let those who wait for the directory hear that the save failed, if it is its own."""
        try:
            directory.fail(work.save, work.error)
        except AbortedError:
            pass  # another save's by now, or it never was this one's
        except HeadraceError as error:
            _log.warning("%s cannot say that its save failed: %s", directory.url, error)

    def _failed(self, work: SaveWork, error: Exception) -> None:
        since = self._stuck.setdefault(work.save, time.monotonic())
        if not isinstance(error, HeadraceError):
            _log.error("the save into %r cannot go on", work.path, exc_info=error)
        if isinstance(error, UnavailableError) and time.monotonic() - since < self._patience:
            return
        self._note(work, "failed", str(error) or type(error).__name__, type(error).__name__)

    def _note(self, work: SaveWork, what: str, error: str = "", kind: str = "") -> None:
        self._ask(NoteSave(save=work.save, what=what, error=error, kind=kind))


def _begun(work: SaveWork) -> Begun:
    return Begun(work.save, work.plan, json.loads(work.spec) if work.spec else None)


def _record(stored: Stored, order: int) -> ChunkRecord:
    return ChunkRecord(
        stored.stream, stored.number, stored.elements, stored.bytes, stored.form, order
    )


def ask_core(handle: Callable[[Sequence[Request]], None], question: Question[A]) -> A | None:
    """Ask a core in this process; None: it is closed.

    Raises:
        HeadraceError: What it answers with.
    """
    own = _Own(question)
    handle([own])
    if own.error is not None:
        raise own.error
    return own.answer  # type: ignore[return-value]


class _Own(Request):
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
