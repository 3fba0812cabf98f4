"""Agreement of processes that read different rows on each step, so that they end together.

A step of a JAX program over several processes must be run by all of them or by none. If all read
the same batches, no communication is needed. Otherwise each process sends its row counts before
each step; the first process decides (`decide_step`), and all apply the decision:

    all have ended           end
    some have ended          "error": an error on all. "drop": end. "pad": pad the ended ones
    row counts differ        as `remainder` says (`frameworks.batch_shards`)
    one failed or closed     an error on all that names the process

Messages go through the key-value store of `jax.distributed`, not through devices: a collective
between two collectives of the user's program could meet a different one in another process, and all
would deadlock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headrace.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
)
from headrace.execution.threads import WaitWarning
from headrace.frameworks.batch_shards import rows_per_shard

__all__ = [
    "AgreementStore",
    "InputStepAgreement",
    "StepMessage",
    "decide_step",
    "unique_iterator_name",
]

_TIMEOUT_SECONDS = 3600.0
_iterator_counts: Counter[tuple[int, ...]] = Counter()

StepMessage = dict[str, Any]
"""A process's message about a step: `rows` by shard and the `signatures` of its leaves; or `end`;
or `error` or `closed`, with the reason."""


def decide_step(
    messages: Mapping[int, StepMessage], remainder: str, size: int | None = None
) -> StepMessage:
    """Return the decision for a step, given the messages of all processes.

    Args:
        messages: Messages by process index.
        remainder: Handling of shards with different row counts.
        size: Rows of a shard of a full batch, if known.

    Returns:
        `{"rows_per_shard": rows, "signatures": ...}`, `{"drop": True}` or `{"end": True}`;
        `{"error": reason}` if the inputs of the processes do not match, or `{"aborted": reason}`.
    """
    for process, message in messages.items():
        if "error" in message:
            return {
                "aborted": f"process {process} failed, so all processes stop: {message['error']}"
            }
        if "closed" in message:
            return {"aborted": f"process {process} closed its iterator while others still read"}
    reading = {process: message for process, message in messages.items() if "rows" in message}
    ended = [process for process in messages if process not in reading]
    if not reading or (ended and remainder == "drop"):
        return {"end": True}
    if ended and remainder == "error":
        return {
            "error": f"processes {ended} have no rows left, but processes {list(reading)} have: "
            'split the dataset evenly, or use remainder="drop", which ends with the first '
            'process, or remainder="pad", which ends with the last and adds a mask'
        }
    first, *others = reading
    signatures = reading[first]["signatures"]
    for other in others:
        if reading[other]["signatures"] != signatures:
            return {
                "error": f"without their first axes, the leaves of a batch have shapes and dtypes "
                f"{signatures} in process {first} but {reading[other]['signatures']} in process "
                f"{other}; a global array needs the same everywhere: pad to a fixed length with "
                "padded_batch(padded_shapes=...)"
            }
    rows: dict[str, int] = {}
    for message in reading.values():
        for shard, count in message["rows"].items():
            if rows.setdefault(shard, count) != count:
                return {
                    "error": f"processes that must read the same rows of shard {shard} read "
                    f"{rows[shard]} and {count} rows"
                }
    counts = [*rows.values(), *([0] if ended else [])]
    try:
        num_rows = rows_per_shard(remainder, counts, size)
    except InvalidArgumentError as error:
        return {"error": str(error)}
    if num_rows is None:
        return {"drop": True}
    return {"rows_per_shard": num_rows, "signatures": signatures}


class AgreementStore(Protocol):
    """Key-value store through which processes exchange messages."""

    def set(self, key: str, value: str) -> None:
        """Set a key, replacing its value if it exists."""

    def get(self, key: str) -> str | None:
        """Return the value of a key, or None if it is not set within a second."""

    def delete(self, key: str) -> None:
        """Delete a key if it exists."""


def unique_iterator_name(processes: Sequence[int]) -> str:
    """Return a new name that is the same in all of these processes.

    They run the same program, so the n-th iterators of all processes belong together.
    """
    members = tuple(processes)
    _iterator_counts[members] += 1
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    return f"headrace/iterators/{digest}/{_iterator_counts[members]}"


class InputStepAgreement:
    """One process's part in the agreement on each step.

    Args:
        store: Store for the messages.
        name: Name of the iterator, the same in all processes.
        processes: Indices of all participating processes. The first decides.
        process: Index of this process.
        timeout: Seconds to wait for a message.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        store: AgreementStore,
        name: str,
        processes: Sequence[int],
        process: int,
        timeout: float = _TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._name = store, name
        self._processes, self._process = list(processes), process
        self._timeout, self._clock = timeout, clock
        self._step = self._gather_count = 0
        self._is_finished = False
        #: Why the agreement was aborted; empty if it was not.
        self._abort_reason = ""

    def broadcast_first(self, value: Any) -> Any:
        """Return the value of the first process, a JSON value."""
        key = f"{self._name}/first"
        if self._process == self._processes[0]:
            self._store.set(key, json.dumps(value))
            return value
        return json.loads(self._wait(key, self._processes[0]))

    def all_gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all processes, in order. All of them must call it."""
        self._gather_count += 1
        key = f"{self._name}/all/{self._gather_count}"
        self._store.set(f"{key}/{self._process}", json.dumps(value))
        found = [json.loads(self._wait(f"{key}/{p}", p)) for p in self._processes]
        # A process that has sent this value has read those of the previous call.
        self._store.delete(f"{self._name}/all/{self._gather_count - 1}/{self._process}")
        return found

    def agree(self, message: StepMessage, remainder: str, size: int | None = None) -> StepMessage:
        """Send this process's message about the next step, and return the decision.

        Raises:
            AbortedError: If a process failed, or closed its iterator.
            InvalidArgumentError: If the inputs of the processes cannot form global arrays.
            DeadlineExceededError: If a process sends no message for `timeout` seconds.
        """
        if self._abort_reason:
            raise AbortedError(self._abort_reason)
        key, first = f"{self._name}/{self._step}", self._processes[0]
        self._store.set(f"{key}/{self._process}", json.dumps(message))
        if self._process == first:
            messages = {p: json.loads(self._wait(f"{key}/{p}", p)) for p in self._processes}
            # A process that has sent a message for this step has read the previous decision.
            self._store.delete(f"{self._name}/{self._step - 1}/decision")
            decision = decide_step(messages, remainder, size)
            self._store.set(f"{key}/decision", json.dumps(decision))
        else:
            decision = json.loads(self._wait(f"{key}/decision", first))
        self._store.delete(f"{key}/{self._process}")
        self._step += 1
        self._is_finished = not {"rows_per_shard", "drop"} & decision.keys()
        self._abort_reason = decision.get("aborted", "")
        if self._abort_reason:
            raise AbortedError(self._abort_reason)
        if "error" in decision:
            raise InvalidArgumentError(decision["error"])
        return decision

    def _wait(self, key: str, process: int) -> str:
        start = self._clock()
        wait = WaitWarning(f"process {process}, which has not reached step {self._step}")
        while True:
            found = self._store.get(key)
            if found is not None:
                return found
            wait.warn_if_due()
            if self._clock() - start > self._timeout:
                raise DeadlineExceededError(
                    f"process {process} has not reached step {self._step} for {self._timeout:.0f} "
                    "s: every process must read the same number of steps; check that it is not "
                    "blocked"
                )

    def close(self) -> None:
        """Notify processes that still read, so that they do not wait. Idempotent."""
        if self._is_finished:
            return
        self._is_finished = True
        message = {"closed": True}
        with contextlib.suppress(UnavailableError):
            key = f"{self._name}/{self._step}"
            self._store.set(f"{key}/{self._process}", json.dumps(message))
            if self._process == self._processes[0]:
                decision = decide_step({self._process: message}, "error")
                self._store.set(f"{key}/decision", json.dumps(decision))
