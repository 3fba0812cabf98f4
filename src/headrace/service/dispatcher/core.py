"""The journaled core: a dispatcher, its journal and its clock, with one lock around them.

Rule 1. Requests in hand are decided one after another; their facts are kept in one transaction, and
        only then are the answers sent.
Rule 2. What was not kept did not happen: after any error the state is read from the journal again.
Rule 3. An error of the dispatcher's own is the business of the request that met it, and of the log;
        all other requests are carried out.
Rule 4. A journal that cannot be used is said in the log at once, and then from time to time: those
        who asked only try again.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from headrace.errors import HeadraceError, UnavailableError
from headrace.metrics import count_split_granted
from headrace.service import messages
from headrace.service.dispatcher.apply import apply
from headrace.service.dispatcher.decision import Decision, PlanPart
from headrace.service.dispatcher.dispatcher import Dispatcher
from headrace.service.dispatcher.journal import Journal
from headrace.service.dispatcher.limits import Limits
from headrace.service.dispatcher.updates import DispatcherStarted, UnitsDealt, Update
from headrace.transport.channel import Request

__all__ = ["JournaledCore"]

_log = logging.getLogger(__name__)

_COMPLAINT_SECONDS = 60.0


class JournaledCore:
    """Decides requests, keeps what follows, then answers.

    Args:
        journal: Where facts are kept; closed by `close`.
        limits: How long what is waited for.
    """

    def __init__(self, journal: Journal, limits: Limits) -> None:
        self._journal = journal
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = threading.Event()
        #: When the journal's failure was last logged; None: it has not failed.
        self._complained: float | None = None
        #: None after what was decided could not be kept: the next one reads the journal again.
        self._dispatcher: Dispatcher | None = None
        journal.drop_plans(except_for=self._open().state.plans)

    def num_workers(self) -> int:
        """Return the number of workers that are registered and not lost."""
        with self._lock:
            return 0 if self._dispatcher is None else len(self._dispatcher.state.workers)

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
        decided: list[Decision | Exception] = []
        facts: list[Update] = []
        parts: list[PlanPart] = []
        try:
            for message in requests:
                request = cast(messages.DispatcherRequest, message)
                dispatcher, now = self._open(), time.monotonic()
                try:
                    decision = dispatcher.decide(request, now)
                except (HeadraceError, ValueError) as error:
                    # It changed nothing, and is the business of the one who asked.
                    decided.append(error)
                    continue
                except Exception as error:
                    decided.append(_own_error(request, error))
                    continue
                try:
                    found = dispatcher.apply(decision, now)
                except Exception as error:
                    decided.append(_own_error(request, error))
                    # The state is half changed, but what the requests before this one did is whole.
                    self._dispatcher = None
                    self._journal.append(facts, parts)
                    facts, parts = [], []
                    continue
                decided.append(decision)
                facts += found
                if decision.plan_to_store is not None:
                    parts.append(decision.plan_to_store)
            self._journal.append(facts, parts)
        except BaseException as error:
            self._dispatcher = None
            self._complain(error)
            raise
        for fact in facts:
            if isinstance(fact, UnitsDealt):
                count_split_granted()
        self._compact(self._open())
        return [self._answer(each) for each in decided]

    def _answer(self, decided: Decision | Exception) -> msgspec.Struct | Exception:
        if isinstance(decided, Exception):
            return decided
        if decided.plan_to_send is None:
            return decided.reply
        try:
            part = self._journal.read_plan(decided.plan_to_send)
        except Exception as error:
            return error
        return msgspec.structs.replace(decided.reply, part=part)

    def maintain(self) -> None:
        """Look after what time alone brings about, until `close`."""
        interval = self._limits.tick_interval
        while not self._closed.wait(interval):
            try:
                with self._lock:
                    if not self._closed.is_set():
                        self._tick()
            except UnavailableError:
                pass  # the journal's, and in the log by now
            except Exception:
                _log.exception("maintenance failed; trying again in %.1f s", interval)

    def _tick(self) -> None:
        now = time.monotonic()
        try:
            dispatcher = self._open()
            self._journal.append(dispatcher.tick(now))
            if dispatcher.presence.abandon_uploads(now - self._limits.client_timeout):
                kept = dispatcher.state.plans.keys() | dispatcher.presence.uploads.keys()
                self._journal.drop_plans(except_for=kept)
        except BaseException as error:
            self._dispatcher = None
            self._complain(error)
            raise
        self._compact(dispatcher)

    def _complain(self, error: BaseException) -> None:
        """Log that the journal cannot be used, unless that was done a moment ago."""
        now = time.monotonic()
        recently = self._complained is not None and now - self._complained < _COMPLAINT_SECONDS
        if isinstance(error, UnavailableError) and not recently:
            self._complained = now
            _log.error("no request that changes anything is carried out: %s", error)

    def _open(self) -> Dispatcher:
        if self._dispatcher is None:
            state = self._journal.replay()
            if not state.incarnation:
                started = DispatcherStarted(
                    incarnation=secrets.token_hex(8), secret=secrets.token_bytes(32)
                )
                self._journal.append([started])
                apply(state, started)
            self._dispatcher = Dispatcher(state, self._limits, time.monotonic())
        return self._dispatcher

    def _compact(self, dispatcher: Dispatcher) -> None:
        try:
            self._journal.compact(dispatcher.state)
        except UnavailableError:
            # The facts are kept all the same; it is tried again with the next ones.
            _log.exception("the journal stays long")

    def close(self) -> None:
        """Answer nobody any more; close the journal."""
        self._closed.set()
        with self._lock:
            self._journal.close()


def _own_error(request: messages.DispatcherRequest, error: Exception) -> HeadraceError:
    name = type(request).__name__
    _log.error("the dispatcher failed at %s; nothing of it was kept", request, exc_info=error)
    return HeadraceError(
        f"the dispatcher could not carry out {name}: {type(error).__name__} inside it, which is an "
        "error of Headrace and not of the one who asked. Nothing was changed; the dispatcher's log "
        "has the story"
    )
