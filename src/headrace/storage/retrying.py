"""Repetition of remote reads after transient errors: timeouts, lost connections, busy servers."""

from __future__ import annotations

import errno
import itertools
import logging
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.errors import HeadraceError, UnavailableError
from headrace.waiting import Backoff, WaitWarningLimiter

__all__ = ["find_status", "is_transient", "retry_read", "shorten_message"]

T = TypeVar("T")

_logger = logging.getLogger(__name__)

DEADLINE_SECONDS = 120.0
"""Seconds after the first attempt during which another may start."""

_PERMANENT = (
    HeadraceError,
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
    NotImplementedError,
)
#: Errors of the libraries of file systems, which need not be installed, by name of the class.
_TRANSIENT_NAMES = frozenset(
    {
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",
        "ConnectionError",  # requests
        "ChunkedEncodingError",
        "HTTPClientError",  # botocore
        "IncompleteRead",  # http.client
        "ProtocolError",  # urllib3
        "ServiceRequestError",  # azure
        "ServiceResponseError",
        "TransportError",  # google.auth
    }
)
_MALFORMED_REPLIES = frozenset(
    {"BadHttpMessage", "BadStatusLine", "HttpProcessingError", "InvalidHeader", "LineTooLong"}
)
"""Errors of aiohttp for replies that are no HTTP, by name of the class."""
_MAX_MESSAGE_LENGTH = 500
_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ETIMEDOUT,
    }
)
_STATUS_ATTRIBUTES = ("status", "status_code", "code")
#: Messages of obstore, which has one class for all other errors.
_STATUS_TEXT = re.compile(r"\bstatus:? (?:code:? )?(\d{3})\b")
_WRONG_REGION = "redirect without LOCATION"


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later.

    An HTTP status decides if there is one: 408, 429 and 5xx are transient.
    """
    if isinstance(error, _PERMANENT):
        return False
    if type(error.__cause__).__name__ in _MALFORMED_REPLIES:
        return True  # aiohttp reports it with status 400
    status = find_status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    names = {cls.__name__ for cls in type(error).__mro__}
    if "BaseError" in names and type(error).__module__.partition(".")[0] == "obstore":
        return "GenericError" in names and _WRONG_REGION not in str(error)
    if names & _TRANSIENT_NAMES:
        return True
    return isinstance(error, OSError) and (error.errno is None or error.errno in _TRANSIENT_ERRNOS)


def shorten_message(error: BaseException) -> str:
    """Return the first line of a message, or the name of the error's class if it has none."""
    # The other lines of messages of obstore repeat the first one in another form. A message of
    # aiohttp may contain a whole reply.
    message = str(error).partition("\n")[0] or type(error).__name__
    is_long = len(message) > _MAX_MESSAGE_LENGTH
    return f"{message[:_MAX_MESSAGE_LENGTH]}..." if is_long else message


def find_status(error: BaseException) -> int | None:
    """Return the HTTP status of a failed request, if the error has one."""
    sources: list[Any] = [error, getattr(error, "response", None)]
    for source in sources:
        for name in _STATUS_ATTRIBUTES:
            value = getattr(source, name, None)
            if isinstance(value, int | str) and str(value).isdigit() and 300 <= int(value) < 600:
                return int(value)
        if isinstance(source, dict):  # botocore
            value = source.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(value, int) and value >= 300:
                return value
    found = _STATUS_TEXT.search(str(error))
    return int(found.group(1)) if found else None


def retry_read(
    call: Callable[[], T],
    url: str,
    offset: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Call a function that reads from a remote file, and repeat it after transient errors.

    Pauses grow from 0.1 to 10 seconds and are random. A warning is logged after ten seconds without
    success, then once a minute.

    Args:
        call: Makes one attempt.
        url: URL of the file, for messages.
        offset: Offset to read from, for messages.
        clock: Returns the time in seconds.
        sleep: Sleeps for a number of seconds.

    Raises:
        UnavailableError: If the last attempt before the deadline failed. The message has the URL,
            the offset, the number of attempts and the last error.
        Exception: Any other error of `call`, which is not repeated.
    """
    began = clock()
    backoff = Backoff(0.1, longest=10.0, jitter=0.5)
    warnings = WaitWarningLimiter()
    for attempts in itertools.count(1):
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            pause = next(backoff)
            waited = clock() - began
            reason = shorten_message(error)
            if waited + pause >= DEADLINE_SECONDS:
                raise UnavailableError(
                    f"{url!r} cannot be read at byte {offset}: {attempts} attempts failed in "
                    f"{waited:.0f} s; last error: {reason}"
                ) from error
            if warnings.should_warn(waited):
                _logger.warning(
                    "%r at byte %d: no data for %.0f s (%d attempts), retrying for %.0f s in "
                    "total; last error: %s",
                    url,
                    offset,
                    waited,
                    attempts,
                    DEADLINE_SECONDS,
                    reason,
                )
        sleep(pause)
    raise AssertionError("unreachable")
