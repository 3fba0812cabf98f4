"""Client of the collective server: contributions, retries, warnings and timeouts of one worker.

Rule 1. Collectives are numbered in the order in which this worker starts them. All workers must
        start the same ones in the same order, so two threads of one worker must not start them
        concurrently.
Rule 2. A contribution is kept until its result has arrived, and resent after a lost connection. The
        server answers a repetition like the original.
Rule 3. After ten seconds of waiting, a warning names the missing workers. After `timeout` seconds
        the session fails for all workers, with an UnavailableError that names them.
Rule 4. An interruption (Ctrl-C) at any instruction leaves a collective started or not started.
        Pending contributions are then resent, since a reply may have been lost.
Rule 5. Once a session has failed, every later wait raises the same error. A worker learns it at
        once, even if it is busy elsewhere, so it knows the cause when the first worker exits, too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from headrace.distribute.collective_server.messages import (
    AwaitSessionFailure,
    CollectiveFailed,
    CollectiveResult,
    Contribute,
    GetMissingWorkers,
    LeaveSession,
    MissingWorkers,
    RetryContribution,
    decode_arrays,
    decode_error,
    encode_arrays,
)
from headrace.distribute.collective_server.state import CollectiveValue
from headrace.errors import FailedPreconditionError, HeadraceError, UnavailableError
from headrace.transport.channel import Buffer, Channel, Reply
from headrace.waiting import WaitWarningLimiter

__all__ = [
    "ClientCloser",
    "CollectiveClient",
]

_log = logging.getLogger(__name__)

_MAX_OVERRUN_SECONDS = 1.0
"""Maximum overrun of a wait; more means that this process was paused."""
_REPLY_SECONDS = 5.0
"""Seconds for the server's answer to a request to end the session."""
_MISSING_REPLY_SECONDS = 1.0
"""Seconds without an answer about missing workers after which that is logged."""
_MAX_REFUSED = 2
"""Consecutive refused connections after which the first worker counts as lost."""
_FIRST_DELAY, _MAX_DELAY = 0.05, 1.0
"""Seconds between attempts to reach a first worker that has not started yet."""
_SMALL_BYTES = 64 << 10
"""Maximum size of a result that is kept after it was taken, such as a flag or a spec."""
_NO_RESULT = -1, CollectiveValue()


class CollectiveClient:
    """Member of a session for one worker, until `closer.close()`.

    Args:
        channel: Channel to the collective server.
        rank: Rank of this worker.
        names: Names of all workers by rank, for errors and the log.
        timeout: Seconds to wait for other workers.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int,
        names: Sequence[str],
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._names = tuple(names)
        self._timeout = timeout
        self._clock = clock
        self._process_id = secrets.token_hex(8)
        #: Leaves the session; outlives this client.
        self.closer: ClientCloser = ClientCloser(channel, rank, self._process_id)
        #: Guards the fields below. `wait` holds it while waiting, so `poll` and `discard` of
        #: another thread wait for it too.
        self._lock = self.closer.lock
        #: Number of the next collective.
        self._next_number = 0
        #: Number of contributions sent, including repetitions.
        self._num_sent = 0
        #: Contributions without a result and their buffers, by ascending number.
        self._contributions: dict[int, tuple[dict[str, Any], Sequence[Buffer]]] = {}
        #: Results not taken yet, and numbers whose results were discarded.
        self._results: dict[int, CollectiveValue | HeadraceError] = {}
        self._unwanted: set[int] = set()
        #: Number and result of the last collective taken, if the result was small.
        self._last_result: tuple[int, CollectiveValue | HeadraceError] = _NO_RESULT
        #: Collectives of requests in flight, by request id; None for a query of missing workers.
        self._tickets: dict[int, int | None] = {}
        #: Id of the request that reports the session's failure at any time.
        self._failure_ticket: int | None = None
        #: Collectives to contribute to again, and when.
        self._retry_at: dict[int, float] = {}
        self._num_refused, self._retry_delay = 0, _FIRST_DELAY
        #: Last error of the connection to the first worker.
        self._last_loss: UnavailableError | None = None
        self._failure: HeadraceError | None = None
        #: Rank that waits and its waiting time, for the log.
        self._waiting_description = ""
        #: Whether an operation is in progress; if set at the start of one, it was interrupted.
        self._is_busy = False

    def start(
        self,
        description: str,
        kind: str,
        flag: bool = False,
        arrays: Sequence[NDArray[Any]] = (),
        *,
        is_retry: bool = False,
    ) -> int:
        """Contribute to the next collective without waiting; return its number for `wait`.

        Args:
            description: Description of the collective; the same on all workers.
            kind: How the contributions are combined (`state.combine`).
            flag: Flag that this worker contributes.
            arrays: Arrays that it contributes. They must not change until the result has arrived.
            is_retry: Whether an interrupted call may have started this collective, which then
                counts. No two consecutive collectives may have this description.
        """
        heads, buffers = encode_arrays(arrays)
        fields = {"description": description, "kind": kind, "flag": flag, "arrays": heads}
        with self._lock:
            self._check()
            self._mark_busy()
            last = self._contributions.get(self._next_number - 1) if is_retry else None
            if last is not None and last[0]["description"] == description:
                self._is_busy = False
                return self._next_number - 1
            number = self._next_number
            # No call between these two statements, so that an interruption cannot separate them.
            self._contributions[number] = fields, buffers
            self._next_number = number + 1
            self._send(number)
            self._is_busy = False
            return number

    def wait(self, number: int, timeout: float | None = None) -> CollectiveValue:
        """Wait for the result of a collective and take it.

        A result can be taken once; the last one can be taken again, after an interruption, if it is
        small.

        Args:
            number: Number that `start` returned.
            timeout: Seconds to wait if less than the timeout of this client.

        Raises:
            UnavailableError: If a worker is missing; the error names it.
            FailedPreconditionError: If the workers run different operations.
            InvalidArgumentError: If the contributions do not match.
        """
        with self._lock:
            self._mark_busy()
            timeout_seconds = min(self._timeout, math.inf if timeout is None else timeout)
            waited, warnings, end_deadline, reply_deadline = (
                0.0,
                WaitWarningLimiter(),
                math.inf,
                math.inf,
            )
            while number not in self._results and number != self._last_result[0]:
                self._check()
                if warnings.should_warn(waited):
                    reply_deadline = waited + self._query_missing(number, waited)
                if None not in self._tickets.values():
                    reply_deadline = math.inf
                elif waited >= reply_deadline:
                    reply_deadline = math.inf
                    self._log_missing([f"{self._names[0]} has not replied"])
                if waited >= timeout_seconds and end_deadline == math.inf:
                    end_deadline = waited + self._request_session_end(number, waited)
                if waited >= end_deadline:
                    self._fail(self._silence_error(number, waited))
                    continue
                started = self._clock()
                limit = end_deadline if waited >= timeout_seconds else timeout_seconds
                wait_seconds = min(warnings.next_warning_after, limit, reply_deadline) - waited
                self._receive(started + wait_seconds)
                # Time in which this process was paused does not count.
                waited += min(self._clock() - started, wait_seconds + _MAX_OVERRUN_SECONDS)
            result = self._results.get(number, self._last_result[1])
            arrays = result.arrays if isinstance(result, CollectiveValue) else ()
            is_small = sum(array.nbytes for array in arrays) <= _SMALL_BYTES
            self._last_result = (number, result) if is_small else _NO_RESULT
            self._results.pop(number, None)
            self._is_busy = False
        if isinstance(result, HeadraceError):
            raise result
        return result

    def run(
        self,
        description: str,
        kind: str,
        flag: bool = False,
        arrays: Sequence[NDArray[Any]] = (),
        timeout: float | None = None,
    ) -> CollectiveValue:
        """Contribute to the next collective and return its result; see `start` and `wait`."""
        return self.wait(self.start(description, kind, flag, arrays), timeout)

    def poll(self) -> None:
        """Receive pending replies without blocking, for a caller that waits for something else.

        Raises:
            HeadraceError: If the session has failed; the session's error.
        """
        with self._lock:
            self._mark_busy()
            self._receive(self._clock())
            self._is_busy = False
            self._check()

    def discard(self, numbers: Sequence[int]) -> None:
        """Discard results that will not be taken."""
        with self._lock:
            for number in numbers:
                if self._results.pop(number, None) is None and number in self._contributions:
                    self._unwanted.add(number)

    # --- sending ------------------------------------------------------------------------------

    def _mark_busy(self) -> None:
        """Mark an operation as in progress; after an interruption, resend all contributions."""
        if self._is_busy:
            for number in self._results.keys() & self._contributions.keys():
                del self._contributions[number]
            self._resend_all()
        self._is_busy = True

    def _resend_all(self) -> None:
        self._clear_in_flight()
        for number in self._contributions:
            self._send(number)

    def _clear_in_flight(self) -> None:
        self._tickets.clear()
        self._retry_at.clear()
        self._failure_ticket = None

    def _send(self, number: int) -> None:
        fields, buffers = self._contributions[number]
        self._num_sent += 1
        message = Contribute(
            session_id=self.closer.session_id,
            rank=self._rank,
            process_id=self._process_id,
            number=number,
            acknowledged=next(iter(self._contributions)),
            attempt=self._num_sent,
            **fields,
        )
        self._tickets[self._channel.send(message, buffers)] = number

    def _receive(self, until: float) -> None:
        """Receive one reply, or send what is due, until the given time at the latest."""
        now = self._clock()
        for number in [each for each, at in self._retry_at.items() if at <= now]:
            del self._retry_at[number]
            self._send(number)
        until = min([until, *self._retry_at.values()])
        try:
            reply = self._channel.receive(max(0.0, until - now))
        except UnavailableError as error:
            self._on_connection_lost(error)
        except HeadraceError as error:
            self._fail(error)
        else:
            if reply is not None:
                self._on_reply(reply)

    def _on_connection_lost(self, error: UnavailableError) -> None:
        """Schedule contributions to be resent; fail if the first worker refuses connections."""
        self._clear_in_flight()
        self._last_loss = error
        self._num_refused += error.refused
        delay = 0.0
        if not self.closer.session_id:  # it may not have started
            delay, self._retry_delay = self._retry_delay, min(2 * self._retry_delay, _MAX_DELAY)
        elif self._num_refused >= _MAX_REFUSED:
            self._fail(
                UnavailableError(
                    f"{self._names[0]}, which runs the collective server, is lost: its process "
                    f"has ended ({error}). Workers cannot continue without each other: restart "
                    "all of them from a saved state"
                )
            )
        self._retry_at = dict.fromkeys(self._contributions, self._clock() + delay)

    # --- receiving ----------------------------------------------------------------------------

    def _on_reply(self, reply: Reply) -> None:
        self._num_refused, self._last_loss = 0, None
        number = self._tickets.pop(reply.request_id, None)
        message = reply.message
        if isinstance(message, CollectiveFailed) and reply.request_id == self._failure_ticket:
            self._fail(decode_error(message))
            return
        if isinstance(message, MissingWorkers):
            self._log_missing(message.descriptions)
            if not message.descriptions:  # the first worker was interrupted while it answered
                self._resend_all()
        elif isinstance(message, RetryContribution):
            if number is not None:
                self._retry_at[number] = self._clock() + message.seconds
        elif isinstance(message, Exception):
            error = message if isinstance(message, HeadraceError) else HeadraceError(str(message))
            self._fail(error)
        elif number is not None:
            assert isinstance(message, CollectiveResult | CollectiveFailed)
            self._store_result(number, message, reply.buffers)

    def _store_result(
        self, number: int, message: CollectiveResult | CollectiveFailed, buffers: Sequence[Buffer]
    ) -> None:
        if number not in self._contributions:
            return
        result: CollectiveValue | HeadraceError
        if isinstance(message, CollectiveResult):
            self.closer.session_id = message.session_id
            if self._failure_ticket is None:
                request = AwaitSessionFailure(
                    session_id=message.session_id, rank=self._rank, process_id=self._process_id
                )
                self._failure_ticket = self._channel.send(request)
            result = CollectiveValue(message.flag, decode_arrays(message.arrays, buffers))
        else:
            error = decode_error(message)
            result = error
            if message.is_permanent:
                self._fail(error)
        if number not in self._unwanted:
            self._results[number] = result
        del self._contributions[number]
        self._unwanted.discard(number)

    # --- warnings and timeouts ----------------------------------------------------------------

    def _query_missing(self, number: int, waited: float) -> float:
        """Request the names of missing workers for the log; return the seconds to allow."""
        self._waiting_description = f"{self._names[self._rank]} has been waiting for {waited:.0f} s"
        if self._last_loss is not None:
            self._log_missing([f"cannot connect to {self._names[0]} ({self._last_loss})"])
            return math.inf
        if None in self._tickets.values():
            return 0.0
        self._send_missing_query(number, waited, ends_session=False)
        return _MISSING_REPLY_SECONDS

    def _log_missing(self, missing: Sequence[str]) -> None:
        if missing and self._waiting_description:
            _log.warning(
                "%s (timeout %g s): %s",
                self._waiting_description,
                self._timeout,
                "; ".join(missing),
            )

    def _request_session_end(self, number: int, waited: float) -> float:
        """Ask the server to fail the session; return the seconds to allow."""
        self._waiting_description = ""
        if self._last_loss is not None:
            return 0.0
        self._send_missing_query(number, waited, ends_session=True)
        return _REPLY_SECONDS

    def _send_missing_query(self, number: int, waited: float, ends_session: bool) -> None:
        request = GetMissingWorkers(
            session_id=self.closer.session_id,
            rank=self._rank,
            process_id=self._process_id,
            number=number,
            waited=waited,
            ends_session=ends_session,
        )
        self._tickets[self._channel.send(request)] = None

    def _silence_error(self, number: int, waited: float) -> HeadraceError:
        description = self._contributions[number][0]["description"]
        cause = f" ({self._last_loss})" if self._last_loss is not None else ""
        return UnavailableError(
            f"{self._names[0]}, which runs the collective server, has not replied for "
            f"{waited:.0f} s{cause}, while {self._names[self._rank]} waits in {description} (is it "
            "running, and is this its address?)"
        )

    def _fail(self, error: HeadraceError) -> None:
        if self._failure is None:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            # A copy: the traceback of an error that is raised repeatedly would grow.
            raise type(self._failure)(str(self._failure))
        if self.closer.is_closed:
            raise FailedPreconditionError(
                "this strategy is closed; create a new one on all workers"
            )


# --- Leaving a session: outlives the client -------------------------------------------------------

_LOCK_SECONDS = 1.0


class ClientCloser:
    """Leaves the session; pending collectives of the other workers fail.

    Args:
        channel: Channel to the collective server.
        rank: Rank of the worker.
        process_id: Process id of its client.
    """

    def __init__(self, channel: Channel, rank: int, process_id: str) -> None:
        self._channel, self._rank, self._process_id = channel, rank, process_id
        #: Id of the session, once known.
        self.session_id = ""
        #: Guards the channel. Reentrant, since a finalizer may call `close` while the same thread
        #: holds it.
        self.lock: threading.RLock = threading.RLock()
        self.is_closed: bool = False

    def close(self) -> None:
        """Leave the session and notify waiting workers. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        # A waiting thread may hold the lock, and the program must end nevertheless.
        if not self.lock.acquire(timeout=_LOCK_SECONDS):
            return
        try:
            # If the server has stopped, there is no worker to notify.
            with contextlib.suppress(HeadraceError, OSError):
                self._channel.send(
                    LeaveSession(
                        session_id=self.session_id, rank=self._rank, process_id=self._process_id
                    )
                )
            self._channel.close()
        finally:
            self.lock.release()
