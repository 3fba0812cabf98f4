"""The dispatcher's shell: a port, a clock, a journal, and one lock around the state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import msgspec

from headrace.errors import UnavailableError
from headrace.metrics import count_split_granted
from headrace.service import messages
from headrace.service.config import DispatcherConfig
from headrace.service.dispatcher.decision import Decision, Limits
from headrace.service.dispatcher.dispatcher import Dispatcher
from headrace.service.dispatcher.journal import Journal, MemoryJournal, SqliteJournal
from headrace.service.dispatcher.updates import SplitProduced, Update
from headrace.transport import zeromq
from headrace.transport.channel import Request, Server

__all__ = ["DispatchServer"]

_log = logging.getLogger(__name__)


class DispatchServer:
    """Coordinates the workers and clients of a data service.

    Args:
        config: Where to listen, what to keep; None for a free port of 127.0.0.1 and nothing kept.
        start: Start now; else `start()` does.
    """

    def __init__(self, config: DispatcherConfig | None = None, start: bool = True) -> None:
        self._config = config or DispatcherConfig()
        self._desk: _Desk | None = None
        self._server: Server | None = None
        self._maintenance: threading.Thread | None = None
        self._stopping = False
        self._stopped = threading.Event()
        if start:
            self.start()

    @property
    def target(self) -> str:
        """Where it listens, as "tcp://host:port".

        Raises:
            RuntimeError: The server was not started.
        """
        if self._server is None:
            raise RuntimeError("the server has no target before it is started")
        return f"tcp://{self._server.address}"

    def num_workers(self) -> int:
        """Return the number of workers that are registered and not lost."""
        return 0 if self._desk is None else self._desk.num_workers()

    def start(self) -> None:
        """Read the journal and listen. Does nothing when it was started before.

        Raises:
            RuntimeError: The server was stopped.
            OSError: The port is in use.
            FailedPreconditionError: Another dispatcher uses the work directory.
            DataLossError: The journal is damaged.
        """
        if self._stopping:
            raise RuntimeError("Server cannot be started after it has been stopped")
        if self._server is not None:
            return
        config = self._config
        journal: Journal
        if config.fault_tolerant_mode and config.work_dir is not None:
            journal = SqliteJournal(Path(config.work_dir))
        else:
            journal = MemoryJournal()
        # The threads hold the desk and not the server, so that a server that is dropped without
        # `stop` is collected, and stops.
        try:
            desk = _Desk(journal, Limits.of(config))
            self._server = zeromq.serve(
                desk.handle,
                request_type=messages.DispatcherRequest,
                host=config.host,
                port=config.port,
                security=config.security,
            )
        except BaseException:
            journal.close()
            raise
        self._desk = desk
        self._maintenance = threading.Thread(
            target=desk.maintain, name="headrace-dispatcher-maintenance", daemon=True
        )
        self._maintenance.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the server is stopped, or `timeout` seconds have passed."""
        self._stopped.wait(timeout)

    def stop(self) -> None:
        """Stop listening; what was answered is kept. May be called twice."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
        if self._desk is not None:
            self._desk.close()
        if self._maintenance is not None:
            self._maintenance.join()
        self._stopped.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __del__(self) -> None:
        # The constructor may have failed before anything was there to stop.
        if getattr(self, "_server", None) is not None and not self._stopped.is_set():
            self.stop()


class _Desk:
    """Where requests are decided, one after another, and kept before they are answered."""

    def __init__(self, journal: Journal, limits: Limits) -> None:
        self._journal = journal
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = threading.Event()
        #: None after what was decided could not be kept: the next one reads the journal again.
        self._dispatcher: Dispatcher | None = None
        self._open()

    def num_workers(self) -> int:
        with self._lock:
            return 0 if self._dispatcher is None else len(self._dispatcher.state.workers)

    def handle(self, requests: Sequence[Request]) -> None:
        """Decide all requests in hand, keep their facts in one transaction, then answer."""
        with self._lock:
            if self._closed.is_set():
                return
            answers = self._decide(requests)
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Exception):
                request.fail(answer)
            else:
                request.reply(answer)

    def _decide(self, requests: Sequence[Request]) -> list[msgspec.Struct | Exception]:
        dispatcher = self._open()
        now = time.monotonic()
        decided: list[Decision | Exception] = []
        facts: list[Update] = []
        plans: list[bytes] = []
        try:
            for request in requests:
                try:
                    message = cast(messages.DispatcherRequest, request.message)
                    decision = dispatcher.decide(message, now)
                except Exception as error:
                    # It changed nothing, and is the business of the one who asked.
                    decided.append(error)
                    continue
                dispatcher.apply(decision, now)
                decided.append(decision)
                facts += decision.updates
                if decision.plan_to_store is not None:
                    plans.append(decision.plan_to_store)
            self._journal.append(facts, plans)
        except BaseException:
            # What was not kept did not happen: go on from what was.
            self._dispatcher = None
            raise
        for fact in facts:
            if isinstance(fact, SplitProduced):
                count_split_granted()
        self._compact(dispatcher)
        return [self._answer(each) for each in decided]

    def _answer(self, decided: Decision | Exception) -> msgspec.Struct | Exception:
        if isinstance(decided, Exception):
            return decided
        if decided.plan_to_send is None:
            return decided.reply
        try:
            return messages.PlanBytes(plan=self._journal.read_plan(decided.plan_to_send))
        except Exception as error:
            return error

    def maintain(self) -> None:
        """Look after what time alone brings about, until `close`."""
        limits = self._limits
        interval = min(limits.check_interval, limits.worker_timeout / 4, limits.suspect_timeout / 4)
        while not self._closed.wait(interval):
            try:
                with self._lock:
                    if not self._closed.is_set():
                        self._tick()
            except Exception:
                _log.exception("maintenance failed; trying again in %.1f s", interval)

    def _tick(self) -> None:
        dispatcher = self._open()
        try:
            self._journal.append(dispatcher.tick(time.monotonic()))
        except BaseException:
            self._dispatcher = None
            raise
        self._compact(dispatcher)

    def _open(self) -> Dispatcher:
        if self._dispatcher is None:
            state = self._journal.replay()
            self._dispatcher = Dispatcher(state, self._limits, time.monotonic())
        return self._dispatcher

    def _compact(self, dispatcher: Dispatcher) -> None:
        try:
            self._journal.compact(dispatcher.state)
        except UnavailableError:
            # The facts are kept all the same; it is tried again with the next ones.
            _log.exception("the journal stays long")

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._journal.close()
