"""A worker that looks for its coordinator, instead of being named by a strategy."""

from __future__ import annotations

import logging
import threading
import time
import uuid

from headrace.coordinator.reception import Announce, ReceptionReply
from headrace.errors import FailedPreconditionError, HeadraceError
from headrace.threads import start_thread
from headrace.transport import zeromq
from headrace.transport.security import Security
from headrace.waiting import WaitWarnings

__all__ = ["Announcing"]

_log = logging.getLogger(__name__)

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
