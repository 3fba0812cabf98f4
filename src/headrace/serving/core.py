"""The journaled core: what decides, its journal and its clock, with one lock around them.

    requests in hand -> for each: decide, apply -> keep all facts, one transaction -> answer

Rule 1. Requests in hand are decided one after another; their facts are kept in one transaction, and
        only then are the answers sent.
Rule 2. What was not kept did not happen: after any error the state is read from the journal again.
Rule 3. An error of the server's own is the business of the request that met it, and of the log;
        all other requests are carried out.
Rule 4. A journal that cannot be used is said in the log at once, and then from time to time: those
        who asked only try again.
Rule 5. Time is what the clock says. On one thread, with a clock of its own, a core is as
        deterministic as what decides: a simulation calls `handle` and `tick`, and no `maintain`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from headrace.errors import HeadraceError, UnavailableError
from headrace.serving.blobs import BlobPart, BlobPlace
from headrace.serving.journal import Journal
from headrace.transport.channel import Request

__all__ = ["Begin", "Decider", "Decision", "JournaledCore"]

_log = logging.getLogger(__name__)

_COMPLAINT_SECONDS = 60.0

F = TypeVar("F")
S = TypeVar("S")
D = TypeVar("D", bound="Decision")
F_co = TypeVar("F_co", covariant=True)
S_co = TypeVar("S_co", covariant=True)


class Decision(Protocol):
    """What follows from one request."""

    @property
    def blobs(self) -> Sequence[BlobPart]:
        """What is to be kept beside the facts."""

    def answer(self, read_blob: Callable[[BlobPlace], bytes]) -> msgspec.Struct:
        """Return the reply; asked for once the facts are kept."""


class Decider(Protocol[F_co, S_co, D]):
    """One state, and what decides about it. It has no lock, clock, thread or file."""

    @property
    def state(self) -> S_co:
        """What the facts add up to."""

    @property
    def blobs(self) -> Collection[bytes]:
        """Keys of the blobs that are needed; others may be forgotten."""

    def decide(self, request: Any, now: float) -> D:
        """Say what follows from a request, and change nothing of the state.

        Raises:
            HeadraceError: The request is refused.
            ValueError: As well.
        """

    def apply(self, decision: D, now: float) -> Sequence[F_co]:
        """Apply what `decide` found, before anything else happens; return all facts of it."""

    def tick(self, now: float) -> Sequence[F_co]:
        """Do what time alone asks for; return the facts, which are applied already."""


class Begin(Protocol[F_co, S, D]):
    """Begins with what a journal holds."""

    def __call__(self, state: S, now: float) -> tuple[Decider[F_co, S, D], Sequence[F_co]]:
        """Return what decides from now on, and first facts, which are applied already."""


class JournaledCore(Generic[F, S, D]):
    """Decides requests, keeps what follows, then answers.

    Args:
        journal: Where facts are kept; closed by `close`.
        begin: Makes what decides from the state that the journal holds: at once, and again after
            anything that could not be kept.
        owner: Whose core it is, for errors and the log: "dispatcher".
        clock: Tells the time, in seconds that ascend steadily.
        kept: Called with facts when they are kept, to count them.
    """

    def __init__(
        self,
        journal: Journal[F, S],
        begin: Begin[F, S, D],
        *,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        kept: Callable[[Sequence[F]], object] = len,
    ) -> None:
        self._journal = journal
        self._begin = begin
        self._owner = owner
        self._clock = clock
        self._kept = kept
        self._lock = threading.Lock()
        self._closed = threading.Event()
        #: When the journal's failure was last logged; None: it has not failed.
        self._complained: float | None = None
        self._journal_problem = ""
        #: None after what was decided could not be kept: the next one reads the journal again.
        self._decider: Decider[F, S, D] | None = None
        journal.drop_blobs(except_for=self._open().blobs)

    @property
    def decider(self) -> Decider[F, S, D] | None:
        """What decides now, to be looked at; None while the journal cannot be used."""
        with self._lock:
            return self._decider

    def handle(self, requests: Sequence[Request]) -> None:
        """Decide all requests in hand, keep their facts in one transaction, then answer."""
        with self._lock:
            if self._closed.is_set():
                return
            answers = self._decide([request.message for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Exception):
                request.fail(answer)
            else:
                request.reply(answer)

    def _decide(self, requests: Sequence[msgspec.Struct]) -> list[msgspec.Struct | Exception]:
        decided: list[D | Exception] = []
        facts: list[F] = []
        blobs: list[BlobPart] = []
        kept: list[F] = []
        try:
            for request in requests:
                decider, now = self._open(), self._clock()
                try:
                    decision = decider.decide(request, now)
                except (HeadraceError, ValueError) as error:
                    # It changed nothing, and is the business of the one who asked.
                    decided.append(error)
                    continue
                except Exception as error:
                    decided.append(self._own_error(request, error))
                    continue
                try:
                    found = decider.apply(decision, now)
                except Exception as error:
                    decided.append(self._own_error(request, error))
                    # The state is half changed, but what the requests before this one did is whole.
                    self._decider = None
                    self._journal.append(facts, blobs)
                    kept += facts
                    facts, blobs = [], []
                    continue
                decided.append(decision)
                facts += found
                blobs += decision.blobs
            self._journal.append(facts, blobs)
            kept += facts
            if kept:
                self._journal_problem = ""
        except BaseException as error:
            self._decider = None
            self._complain(error)
            raise
        self._kept(kept)
        self._compact(self._open())
        return [self._answer(each) for each in decided]

    def _answer(self, decided: D | Exception) -> msgspec.Struct | Exception:
        if isinstance(decided, Exception):
            return decided
        try:
            return decided.answer(self._journal.read_blob)
        except Exception as error:
            return error

    def tick(self) -> None:
        """Look after what time alone brings about. To be called again and again, in rhythm.

        Raises:
            UnavailableError: The journal cannot be used, which is in the log; nothing was changed.
        """
        with self._lock:
            if self._closed.is_set():
                return
            try:
                decider = self._open()
                before = set(decider.blobs)
                facts = decider.tick(self._clock())
                self._journal.append(facts)
                if facts:
                    self._journal_problem = ""
                after = decider.blobs
                if any(key not in after for key in before):
                    self._journal.drop_blobs(except_for=after)
            except BaseException as error:
                self._decider = None
                self._complain(error)
                raise
            self._kept(facts)
            self._compact(decider)

    def maintain(self, interval: float) -> None:
        """Call `tick` each `interval` seconds until `close`, on a thread of its own."""
        while not self._closed.wait(interval):
            try:
                self.tick()
            except UnavailableError:
                pass  # the journal's, and in the log by now
            except Exception:
                _log.exception("maintenance failed; trying again in %.1f s", interval)

    def _complain(self, error: BaseException) -> None:
        """Log that the journal cannot be used, unless that was done a moment ago."""
        now = self._clock()
        if isinstance(error, UnavailableError):
            self._journal_problem = str(error)
        recently = self._complained is not None and now - self._complained < _COMPLAINT_SECONDS
        if isinstance(error, UnavailableError) and not recently:
            self._complained = now
            _log.error("no request that changes anything is carried out: %s", error)

    def _open(self) -> Decider[F, S, D]:
        if self._decider is None:
            decider, facts = self._begin(self._journal.replay(), self._clock())
            self._journal.append(facts)
            self._decider = decider
        return self._decider

    def _compact(self, decider: Decider[F, S, D]) -> None:
        try:
            self._journal.compact(decider.state)
        except UnavailableError:
            # The facts are kept all the same; it is tried again with the next ones.
            _log.exception("the journal stays long")

    def _own_error(self, request: msgspec.Struct, error: Exception) -> HeadraceError:
        _log.error(
            "the %s failed at %s; nothing of it was kept", self._owner, request, exc_info=error
        )
        return HeadraceError(
            f"the {self._owner} could not carry out {type(request).__name__}: "
            f"{type(error).__name__} inside it, which is an error of Headrace and not of the one "
            f"who asked. Nothing was changed; the {self._owner}'s log has the story"
        )

    def close(self) -> None:
        """Answer nobody any more; close the journal."""
        self._closed.set()
        with self._lock:
            self._journal.close()
