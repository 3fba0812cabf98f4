"""Rate-limited logging of failed requests on a server."""

from __future__ import annotations

import logging
import math
import time

from headrace.errors import HeadraceError
from headrace.process_metrics import count_request_too_large

__all__ = ["RequestErrorLog"]

_log = logging.getLogger(__name__)

_WARNING_INTERVAL_SECONDS = 60.0


class RequestErrorLog:
    """Keeps a peer whose requests fail repeatedly from filling the log."""

    def __init__(self) -> None:
        self._next_failure = -math.inf
        self._has_refused = False

    def log_failure(self, address: str, error: BaseException) -> None:
        """Log a handler's exception: Headrace errors at DEBUG level, others once a minute."""
        now = time.monotonic()
        if isinstance(error, HeadraceError) or now < self._next_failure:
            _log.debug("the handler of %s failed", address, exc_info=error)
            return
        self._next_failure = now + _WARNING_INTERVAL_SECONDS
        _log.error("the handler of %s failed", address, exc_info=error)

    def log_refusal(self, message: str) -> None:
        """Count a rejected request, and log the first."""
        count_request_too_large()
        if not self._has_refused:
            self._has_refused = True
            _log.warning("refused %s; further refusals are counted but not logged", message)
