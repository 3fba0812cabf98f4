"""Where a coordinator listens: workers announce themselves, and whoever watches asks how it is.

Nothing of users' comes this way: no function, no value.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeAlias

import msgspec

from headrace.arguments import check_metrics
from headrace.coordinator.gauges import metrics_of
from headrace.coordinator.shell import Shell
from headrace.coordinator.status import AskStatus, CoordinatorStatus, status_of
from headrace.errors import FailedPreconditionError, HeadraceError, InvalidArgumentError
from headrace.serving.call import Done, Message, Ping, Question
from headrace.serving.endpoint import Endpoint
from headrace.threads import start_thread
from headrace.transport import address as addresses
from headrace.transport import zeromq
from headrace.transport.channel import Request
from headrace.transport.security import Security
from headrace.versions import Versions, own_versions, python_mismatch
from headrace.waiting import WaitWarnings

__all__ = ["Announce", "Announced", "Announcing", "Reception", "ReceptionReply"]


_log = logging.getLogger(__name__)


class Announced(Message, frozen=True):
    """The worker is taken in, under this number; -1: it was removed."""

    worker: int


class Announce(Question[Announced], frozen=True):
    """A worker is there. Said again and again: the coordinator may be a new one.

    Attributes:
        address: Where it listens.
        life: Names its process: one that was removed stays so, another one at its address does not.
        versions: Of that process.
    """

    address: str
    life: str
    versions: Versions = msgspec.field(default_factory=own_versions)


_ReceptionRequest: TypeAlias = Announce | AskStatus | Ping

ReceptionReply: TypeAlias = Announced | CoordinatorStatus | Done


class Reception:
    """Answers workers and watchers for one coordinator.

    Args:
        shell: Of the coordinator.
        staleness: What closures are held to; None: to nothing.
    """

    def __init__(self, shell: Shell, staleness: int | None) -> None:
        self._shell = shell
        self._staleness = staleness
        #: Lives of workers that were refused.
        self._refused: set[str] = set()
        #: Lives of workers that were removed.
        self._removed: set[str] = set()
        #: Who announced itself last, by address.
        self._lives: dict[str, str] = {}
        self.address = ""
        """Where it listened last, as "host:port"; empty: nowhere."""
        self.metrics_address = ""
        """Where metrics are served, as "host:port"; empty: nowhere."""

    def listen(
        self,
        host: str,
        port: int,
        security: Security | None,
        metrics_host: str,
        metrics_port: int | None,
    ) -> ExitStack:
        """Begin to answer, and to serve metrics if there is a port for them; return what ends it.

        Raises:
            ValueError: The place for metrics makes no sense, or `security` is missing.
            OSError: A port is in use.
        """
        check_metrics(metrics_port, metrics_host)
        with ExitStack() as made:
            server = zeromq.serve(
                self._handle,
                request_type=_ReceptionRequest,
                host=host,
                port=port,
                security=security,
            )
            made.callback(server.close)
            if metrics_port is not None:
                endpoint = Endpoint(
                    metrics_host,
                    metrics_port,
                    metrics=lambda: metrics_of(self.status()),
                    why_not_ready=lambda: "",
                )
                made.callback(endpoint.close)
                self.metrics_address = endpoint.address
            self.address = server.address
            return made.pop_all()

    def status(self) -> CoordinatorStatus:
        """Return how the coordinator is."""
        with self._shell.lock:
            return status_of(self._shell.core, time.monotonic(), self._staleness)

    def remove(self, address: str) -> None:
        """Take note that a worker was removed: what it announces later changes nothing."""
        life = self._lives.get(address)
        if life is not None:
            self._removed.add(life)

    def _handle(self, requests: Sequence[Request]) -> None:
        for request in requests:
            message = request.message
            if isinstance(message, Announce):
                try:
                    self._check_versions(message)
                    request.reply(Announced(worker=self._take_in(message)))
                except FailedPreconditionError as error:
                    request.fail(error)
                except ValueError as error:
                    request.fail(InvalidArgumentError(str(error)))
            elif isinstance(message, AskStatus):
                request.reply(self.status())
            else:
                request.reply(Done())

    def _check_versions(self, message: Announce) -> None:
        """Refuse a worker of another Python version before it is waited for."""
        mine, theirs = own_versions(), message.versions
        if not python_mismatch(mine.python, theirs.python):
            return
        words = (
            f"the training worker at {message.address} runs {theirs}, and the coordinator at "
            f"{self.address} runs {mine}: functions travel as bytecode, which is different in each "
            "minor version of Python, so run both on the same one"
        )
        if message.life not in self._refused:
            self._refused.add(message.life)
            _log.warning("a worker is not taken in: %s", words)
        raise FailedPreconditionError(words)

    def _take_in(self, message: Announce) -> int:
        addresses.split(message.address)
        with self._shell.lock:
            if message.life in self._removed:
                return -1
            self._lives[message.address] = message.life
            now = time.monotonic()
            worker = self._shell.core.add_worker(message.address, now, announced=now)
        self._shell.wake()
        return worker


# --- a worker that looks for its coordinator, instead of being named by a strategy ----------------

_EVERY_SECONDS = 2.0
_PATIENCE = 5.0


class Announcing:
    """Says every two seconds that a worker is there, until it is closed.

    Args:
        coordinator: Where the coordinator listens, as "host:port".
        address: Where the worker listens.
        security: Keys of a client.
    """

    def __init__(self, coordinator: str, address: str, security: Security | None) -> None:
        self._coordinator = coordinator
        self._message = Announce(address=address, life=uuid.uuid4().hex)
        self._security = security
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-announcing", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        channel = zeromq.connect(
            self._coordinator,
            reply_type=ReceptionReply,
            security=self._security,
            shared_memory=False,
        )
        since, warnings = time.monotonic(), WaitWarnings()
        refusal = ""
        try:
            while True:
                try:
                    channel.call(self._message, timeout=_PATIENCE)
                except FailedPreconditionError as error:
                    # Another coordinator may listen there later, so it is asked again.
                    if str(error) != refusal:
                        refusal = str(error)
                        _log.error("refused by the coordinator: %s", error)
                except HeadraceError as error:
                    # A coordinator that stands still takes all of the patience at each try.
                    if warnings.is_due(time.monotonic() - since):
                        _log.warning("no coordinator answers at %s: %s", self._coordinator, error)
                else:
                    since = time.monotonic()
                    warnings.reset()
                if self._ended.wait(_EVERY_SECONDS):
                    return
        finally:
            channel.close()

    def close(self) -> None:
        """End it, after the call that is under way."""
        self._ended.set()
        self._thread.join(_EVERY_SECONDS)
