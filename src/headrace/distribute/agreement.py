"""Agreement between workers on dataset steps, program calls and large sums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import numpy as np

from headrace.distribute.collective_server.client import CollectiveClient
from headrace.distribute.collective_server.state import ALL, ANY
from headrace.element.spec import Spec, decode_spec, encode_spec
from headrace.errors import InvalidArgumentError, UnavailableError
from headrace.frameworks.framework import Framework
from headrace.transport import address as addresses

__all__ = [
    "MAX_STEPS_AHEAD",
    "ArgumentRowCounts",
    "DirectAllReduce",
    "ProgramCalls",
    "StepAgreement",
    "gather_json",
    "gather_row_counts",
    "raise_missing_workers",
]

# --- Steps of a distributed dataset ---------------------------------------------------------------
#
# At each step every worker reports whether it has data; all workers end at the first step at which
# none has. A worker with data knows the result, so it continues at once and receives the results of
# several earlier steps together, without waiting for messages in flight. So a worker is at most
# `MAX_STEPS_AHEAD` steps ahead of the slowest one, whatever other collectives they run.

MAX_STEPS_AHEAD = 8
"""Maximum number of steps that a worker with data may be ahead of the slowest worker."""


def gather_json(client: CollectiveClient, description: str, value: Any) -> list[Any]:
    """Return the JSON values of all workers, in rank order."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    gathered = client.run(description, ALL, arrays=[text])
    return [json.loads(array.tobytes()) for array in gathered.arrays]


class StepAgreement:
    """Agreement of one iterator with the same iterator on the other workers.

    Args:
        client: Client of this worker.
        name: Name of the iterator, the same on all workers.
    """

    def __init__(self, client: CollectiveClient, name: str) -> None:
        self._client = client
        self._name = name
        self._step = 0
        #: Collective of the next step if it was already started.
        self._current_number: int | None = None
        #: Collectives of steps with local data whose results were not received.
        self._pending: list[int] = []
        #: Whether specs were exchanged, and the spec of the workers with data if it was received.
        self._specs_exchanged = False
        self._spec: Spec | None = None

    @property
    def wants_spec(self) -> bool:
        """Whether workers with data send its spec at the next step, which is the first."""
        return not self._specs_exchanged

    @property
    def spec(self) -> Spec | None:
        """Spec of the other workers' data, if this worker had none when specs were exchanged."""
        return self._spec

    def any_has_data(self, has_local_data: bool, spec: Spec | None = None) -> bool:
        """Return whether any worker has data for the next step. All workers must call it.

        Args:
            has_local_data: Whether this worker has data.
            spec: Spec of the local data if `wants_spec`.
        """
        number = self._current_number
        if number is None:
            description = f"step {self._step + 1} of {self._name}"
            spec_arrays = [] if spec is None else [np.frombuffer(encode_spec(spec), np.uint8)]
            number = self._current_number = self._client.start(
                description, ANY, has_local_data, spec_arrays, is_retry=True
            )
        if has_local_data:
            if len(self._pending) >= MAX_STEPS_AHEAD:
                self._receive_half()
            if number not in self._pending:  # otherwise an interruption came after the append
                self._pending.append(number)
            flag = True
        else:
            flag, received = self._client.wait(number)
            if received:
                self._spec = decode_spec(received[0].tobytes())
            self._discard_pending()
        self._step, self._current_number, self._specs_exchanged = self._step + 1, None, True
        return flag

    def gather_values(self, value: Any) -> list[Any]:
        """Return the JSON values of all workers, in rank order. All workers must call it."""
        description = f"get_state of {self._name} after step {self._step}"
        return gather_json(self._client, description, value)

    def reset(self) -> None:
        """Drop pending results, after the iterators of all workers were moved."""
        self._discard_pending()
        self._current_number, self._specs_exchanged = None, False

    def _receive_half(self) -> None:
        """Receive the older half of the pending results: one wait for several steps."""
        self._client.wait(self._pending[MAX_STEPS_AHEAD // 2 - 1])
        received, self._pending = (
            self._pending[: MAX_STEPS_AHEAD // 2],
            self._pending[MAX_STEPS_AHEAD // 2 :],
        )
        self._client.discard(received)

    def _discard_pending(self) -> None:
        self._client.discard(self._pending)
        self._pending.clear()


# --- Checks before a program runs on all workers, and after it failed -----------------------------
#
# If only some workers call a program over all workers, or their arguments differ, the callers hang
# without a message. So each call starts with a collective that names missing workers and compares
# the arguments of all workers.

ArgumentRowCounts: TypeAlias = Sequence[Sequence[int] | None]
"""Number of rows of each replica, for each argument; None for an argument without rows."""

_MISSING_QUERY_SECONDS = 10.0
"""Seconds that a worker whose program failed waits for the others, to find out who is missing."""


class ProgramCalls:
    """Calls of one program.

    Args:
        client: Client of this worker.
        names: Names of all workers by rank, for errors.
        name: Name of the program, the same on all workers.
        is_peer_loss: Returns whether an error means that a worker was missing.
    """

    def __init__(
        self,
        client: CollectiveClient,
        names: Sequence[str],
        name: str,
        is_peer_loss: Callable[[BaseException], bool],
    ) -> None:
        self._client, self._names, self._name = client, names, name
        self._is_peer_loss = is_peer_loss
        #: Raises if the session has failed.
        self.poll = client.poll
        self._number = 0

    def start_call(self, rows: ArgumentRowCounts, arguments: str) -> list[list[int] | None]:
        """Wait for all workers; return the row counts of all replicas for each argument.

        Args:
            rows: Row counts of the local replicas.
            arguments: Description of the arguments that must be the same on all workers.

        Raises:
            InvalidArgumentError: If the workers' argument descriptions differ.
        """
        self._number += 1
        call_name = f"call {self._number} of {self._name}"
        digest = hashlib.blake2b(arguments.encode(), digest_size=7).digest()
        head = [int.from_bytes(digest), *(len(each or ()) for each in rows)]
        flat = [count for each in rows for count in each or ()]
        gathered = self._client.run(
            call_name, ALL, arrays=[np.array(head), np.array(flat, np.int64)]
        )
        heads, counts = gathered.arrays[::2], gathered.arrays[1::2]
        if any(not np.array_equal(each, heads[0]) for each in heads):
            self._refuse(call_name, arguments)
        all_counts: list[list[int] | None] = []
        start = 0
        for each in rows:
            stop = start + len(each or ())
            replica_counts = [int(n) for worker_counts in counts for n in worker_counts[start:stop]]
            all_counts.append(None if each is None else replica_counts)
            start = stop
        return all_counts

    def _refuse(self, call_name: str, arguments: str) -> NoReturn:
        first, *others = gather_json(self._client, f"the arguments of {call_name}", arguments)
        pairs = zip(others, self._names[1:], strict=True)
        other, name = next(each for each in pairs if each[0] != first)
        raise InvalidArgumentError(
            "all workers must call a compiled step with arguments of the same structure, shapes "
            f"and dtypes, but in {call_name} {self._names[0]} has {first or 'none'}, and {name} "
            f"has {other or 'none'}"
        )

    @contextmanager
    def report_missing(self) -> Iterator[None]:
        """Name the missing workers if the program fails because of them.

        Raises:
            UnavailableError: If a worker is lost or hangs.
        """
        try:
            yield
        except Exception as error:
            if not self._is_peer_loss(error):
                raise
            raise_missing_workers(self._client, self._name, error)


def gather_row_counts(client: CollectiveClient, rows: Sequence[int]) -> list[int]:
    """Return the row counts of all replicas in a step, given those of the local replicas."""
    gathered = client.run("row counts of a step", ALL, arrays=[np.array(rows, np.int64)])
    return [int(count) for array in gathered.arrays for count in array]


def raise_missing_workers(
    client: CollectiveClient, operation: str, error: BaseException
) -> NoReturn:
    """Raise an error that names the missing workers, after an operation failed.

    Raises:
        UnavailableError: Always.
    """
    # The remaining workers contribute to this collective, whose error names the missing ones.
    client.run(f"the check after a failure of {operation}", ANY, timeout=_MISSING_QUERY_SECONDS)
    raise UnavailableError(
        f"{operation} failed, although all workers are connected: {error}"
    ) from error


# --- Large arrays, reduced by the framework's own collectives -------------------------------------

_LARGE_BYTES = 1 << 20
"""Minimum size for the framework's all-reduce; smaller arrays do not justify its extra message."""


class DirectAllReduce:
    """All-reduce of large arrays by the framework, where it supports that.

    All workers must have joined: the framework does not name missing workers.

    Args:
        client: Client of this worker.
        framework: Framework of the arrays.
        rank: Rank of this worker.
        size: Number of workers.
        address: Address of the first worker.
        timeout: Seconds to wait for other workers.
        is_allowed: Whether the framework's collectives, which do not authenticate, may be used.
    """

    def __init__(
        self,
        client: CollectiveClient,
        framework: Framework,
        rank: int,
        size: int,
        address: str,
        timeout: float,
        is_allowed: bool,
    ) -> None:
        self._client, self._framework = client, framework
        self._rank, self._size = rank, size
        self._address, self._timeout = address, timeout
        self._is_allowed = is_allowed
        #: The framework's all-reduce, once it was used.
        self._all_reduce: Any = None

    def is_used_for(self, total: Any, device: Any) -> bool:
        """Return whether workers sum such arrays this way; all must ask for the same ones.

        Args:
            total: Local total of this worker.
            device: Device of such arrays.
        """
        if not self._is_allowed or total.nbytes < _LARGE_BYTES:
            return False
        if self._all_reduce is None:
            self._all_reduce = self._framework.worker_all_reduce(
                self._rank,
                self._size,
                addresses.local_address_for(self._address),
                self._timeout,
                lambda own: gather_json(
                    self._client, "addresses for the all-reduce of large arrays", own
                ),
                device,
            )
            self._is_allowed = self._all_reduce is not None
        return self._is_allowed and bool(self._all_reduce.supports(total))

    def sum_totals(self, totals: Sequence[Any]) -> list[Any]:
        """Return the sums over all workers.

        Raises:
            UnavailableError: If a worker is lost.
        """
        if not totals:
            return []
        try:
            sums: list[Any] = self._all_reduce.all_reduce(totals, self._client.poll)
        except RuntimeError as error:
            raise_missing_workers(self._client, "an all-reduce of large arrays", error)
        return sums
