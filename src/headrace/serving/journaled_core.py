"""Journaled core: a deterministic state machine with its journal and clock, under one lock.

    pending requests -> for each: decide, apply -> journal all events, one transaction -> reply

Rule 1. Pending requests are decided one after another. Their events are journaled in one
        transaction, and only then are the replies sent.
Rule 2. Events that were not journaled did not happen: after any error the state is replayed from
        the journal.
Rule 3. An internal error concerns only the request that caused it, and is logged; all other
        requests are executed.
Rule 4. An unusable journal is logged at once, and then from time to time: clients only retry.
Rule 5. Time comes from the clock alone. With one thread and a simulated clock, a core is as
        deterministic as its state machine: a simulation calls `handle` and `tick`, but not
        `maintain`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from headrace.errors import HeadraceError, UnavailableError
from headrace.serving.blobs import BlobPart, BlobPosition
from headrace.serving.journal import Journal
from headrace.transport.channel import Request

__all__ = ["JournaledCore", "JournaledDecision", "StateMachine", "StateMachineFactory"]

_log = logging.getLogger(__name__)

_LOG_INTERVAL_SECONDS = 60.0

F = TypeVar("F")
S = TypeVar("S")
D = TypeVar("D", bound="JournaledDecision")
F_co = TypeVar("F_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)


class JournaledDecision(Protocol):
    """Decision about one request."""

    @property
    def blobs(self) -> Sequence[BlobPart]:
        """Parts of blobs to store with the events."""

    def make_reply(self, read_blob: Callable[[BlobPosition], bytes]) -> msgspec.Struct:
        """Return the reply; called once the events are journaled."""


class StateMachine(Protocol[F_co, S_co, D]):
    """State and the decisions about requests, without lock, clock, thread or file."""

    @property
    def state(self) -> S_co:
        """State that results from the events."""

    @property
    def blobs(self) -> Collection[bytes]:
        """Keys of the blobs in use; others may be deleted."""

    def decide(self, request: Any, now: float) -> D:
        """Decide a request without changing the state.

        Raises:
            HeadraceError: If the request is rejected.
            ValueError: If the request is rejected.
        """

    def apply(self, decision: D, now: float) -> Sequence[F_co]:
        """Apply a decision before any other input; return all its events."""

    def tick(self, now: float) -> Sequence[F_co]:
        """Make the decisions that depend on time alone; return their events, already applied."""


class StateMachineFactory(Protocol[F_co, S, D]):
    """Creates a state machine from the state of a journal."""

    def __call__(self, state: S, now: float) -> tuple[StateMachine[F_co, S, D], Sequence[F_co]]:
        """Return the state machine and its first events, already applied."""


class JournaledCore(Generic[F, S, D]):
    """Decides requests, journals their events, then replies.

    Args:
        journal: Journal for the events; closed by `close`.
        create_state_machine: Creates the state machine from the journaled state, at the start and
            after events that could not be journaled.
        owner: Kind of server, for errors and the log: "dispatcher".
        clock: Returns the time in seconds; must be monotonic.
        on_journaled: Called with journaled events, to count them.
    """

    def __init__(
        self,
        journal: Journal[F, S],
        create_state_machine: StateMachineFactory[F, S, D],
        *,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        on_journaled: Callable[[Sequence[F]], object] = len,
    ) -> None:
        self._journal = journal
        self._create_state_machine = create_state_machine
        self._owner = owner
        self._clock = clock
        self._on_journaled = on_journaled
        self._lock = threading.Lock()
        self._closed = threading.Event()
        #: Time of the last log message about the journal's failure; None if it has not failed.
        self._last_logged: float | None = None
        self._journal_problem = ""
        #: None if events could not be journaled: the next call replays the journal.
        self._state_machine: StateMachine[F, S, D] | None = None
        journal.drop_blobs(except_for=self._open().blobs)

    @property
    def state_machine(self) -> StateMachine[F, S, D] | None:
        """Current state machine, for reading; None while the journal is unusable."""
        with self._lock:
            return self._state_machine

    def handle(self, requests: Sequence[Request]) -> None:
        """Decide all pending requests, journal their events in one transaction, then reply."""
        with self._lock:
            if self._closed.is_set():
                return
            replies = self._decide([request.message for request in requests])
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(reply, Exception):
                request.fail(reply)
            else:
                request.reply(reply)

    def _decide(self, requests: Sequence[msgspec.Struct]) -> list[msgspec.Struct | Exception]:
        decisions: list[D | Exception] = []
        events: list[F] = []
        blobs: list[BlobPart] = []
        journaled: list[F] = []
        try:
            for request in requests:
                state_machine, now = self._open(), self._clock()
                try:
                    decision = state_machine.decide(request, now)
                except (HeadraceError, ValueError) as error:
                    # It changed nothing, and concerns only this request.
                    decisions.append(error)
                    continue
                except Exception as error:
                    decisions.append(self._internal_error(request, error))
                    continue
                try:
                    applied = state_machine.apply(decision, now)
                except Exception as error:
                    decisions.append(self._internal_error(request, error))
                    # The state is inconsistent now; the events of earlier requests are complete.
                    self._state_machine = None
                    self._journal.append(events, blobs)
                    journaled += events
                    events, blobs = [], []
                    continue
                decisions.append(decision)
                events += applied
                blobs += decision.blobs
            self._journal.append(events, blobs)
            journaled += events
            if journaled:
                self._journal_problem = ""
        except BaseException as error:
            self._state_machine = None
            self._log_problem(error)
            raise
        self._on_journaled(journaled)
        self._compact(self._open())
        return [self._make_reply(each) for each in decisions]

    def _make_reply(self, decisions: D | Exception) -> msgspec.Struct | Exception:
        if isinstance(decisions, Exception):
            return decisions
        try:
            return decisions.make_reply(self._journal.read_blob)
        except Exception as error:
            return error

    def tick(self) -> None:
        """Run the decisions that depend on time. Must be called periodically.

        Raises:
            UnavailableError: If the journal is unusable, which is logged; nothing was changed.
        """
        with self._lock:
            if self._closed.is_set():
                return
            try:
                state_machine = self._open()
                before = set(state_machine.blobs)
                events = state_machine.tick(self._clock())
                self._journal.append(events)
                if events:
                    self._journal_problem = ""
                after = state_machine.blobs
                if any(key not in after for key in before):
                    self._journal.drop_blobs(except_for=after)
            except BaseException as error:
                self._state_machine = None
                self._log_problem(error)
                raise
            self._on_journaled(events)
            self._compact(state_machine)

    def maintain(self, interval: float) -> None:
        """Call `tick` each `interval` seconds until `close`, on a separate thread."""
        while not self._closed.wait(interval):
            try:
                self.tick()
            except UnavailableError:
                pass  # an unusable journal, already logged
            except Exception:
                _log.exception("maintenance failed; retrying in %.1f s", interval)

    def _log_problem(self, error: BaseException) -> None:
        """Log that the journal is unusable, unless that was logged recently."""
        now = self._clock()
        if isinstance(error, UnavailableError):
            self._journal_problem = str(error)
        recently = self._last_logged is not None and now - self._last_logged < _LOG_INTERVAL_SECONDS
        if isinstance(error, UnavailableError) and not recently:
            self._last_logged = now
            _log.error("requests that change state fail: %s", error)

    def _open(self) -> StateMachine[F, S, D]:
        if self._state_machine is None:
            state_machine, events = self._create_state_machine(
                self._journal.replay(), self._clock()
            )
            self._journal.append(events)
            self._state_machine = state_machine
        return self._state_machine

    def _compact(self, state_machine: StateMachine[F, S, D]) -> None:
        try:
            self._journal.compact(state_machine.state)
        except UnavailableError:
            # The events are durable nevertheless; compaction is retried with the next ones.
            _log.exception("cannot compact the journal; retrying with the next events")

    def _internal_error(self, request: msgspec.Struct, error: Exception) -> HeadraceError:
        _log.error(
            "the %s failed at %s; its changes were discarded", self._owner, request, exc_info=error
        )
        return HeadraceError(
            f"internal error in the {self._owner}: {type(error).__name__} during "
            f"{type(request).__name__}; this is a bug in Headrace, not in the caller. "
            f"Nothing was changed; see the {self._owner}'s log for the traceback"
        )

    def close(self) -> None:
        """Stop replying, and close the journal."""
        self._closed.set()
        with self._lock:
            self._journal.close()
