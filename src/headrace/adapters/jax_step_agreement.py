"""How processes that read rows of their own end together, and make arrays of one shape.

A step of a program over several processes is run by all of them or by none. Where all read the same
batches they know without a word. Else each says, before each step, how many rows it has; the first
process decides (`decide_step`), and all do the same:

    all have ended          they end
    some have ended         error: an error on all. drop: they end. pad: those have padding alone
    shares differ           as `remainder` says (`frameworks.shares`)
    one failed, or closed   an error on all that names it

Words go through the store of `jax.distributed`, not through devices: a collective in one process
between two of the program's own would meet another one elsewhere, and all would wait for ever.
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
"""What a process says of a step: `rows` by share and the `forms` of its leaves; or `end`; or
`error` or `closed`, with the reason."""


def decide_step(
    messages: Mapping[int, StepMessage], remainder: str, size: int | None = None
) -> StepMessage:
    """Return what all do, given each process's word.

    Args:
        messages: By process.
        remainder: What becomes of shares that differ.
        size: Rows of a share of a full batch, where they are known.

    Returns:
        `{"use": rows, "forms": ...}`, `{"drop": True}`, `{"end": True}`; `{"error": why}` where
        what they have does not fit, or `{"aborted": why}`.
    """
    for process, word in messages.items():
        if "error" in word:
            return {"aborted": f"process {process} failed, so that all end here: {word['error']}"}
        if "closed" in word:
            return {"aborted": f"process {process} closed its iterator, and others read on"}
    having = {process: word for process, word in messages.items() if "rows" in word}
    ended = [process for process in messages if process not in having]
    if not having or (ended and remainder == "drop"):
        return {"end": True}
    if ended and remainder == "error":
        return {
            "error": f"processes {ended} have no rows left, and processes {list(having)} have: "
            'share the dataset evenly, or use remainder="drop", which ends with the first, or '
            '"pad", which ends with the last and adds a mask'
        }
    first, *others = having
    forms = having[first]["forms"]
    for other in others:
        if having[other]["forms"] != forms:
            return {
                "error": f"a batch has leaves of {forms} without their first axes in process "
                f"{first} and of {having[other]['forms']} in process {other}, and one array has "
                "one shape everywhere: pad to one length with padded_batch(padded_shapes=...)"
            }
    rows: dict[str, int] = {}
    for word in having.values():
        for share, count in word["rows"].items():
            if rows.setdefault(share, count) != count:
                return {"error": f"processes that read the same rows have other numbers of {share}"}
    counts = [*rows.values(), *([0] if ended else [])]
    try:
        used = rows_per_shard(remainder, counts, size)
    except InvalidArgumentError as error:
        return {"error": str(error)}
    return {"drop": True} if used is None else {"use": used, "forms": forms}


class AgreementStore(Protocol):
    """Where processes leave words for each other."""

    def set(self, key: str, value: str) -> None:
        """Leave a word; one that is there is replaced."""

    def get(self, key: str) -> str | None:
        """Return a word; None: after a second there is none."""

    def delete(self, key: str) -> None:
        """Take a word away, if it is there."""


def unique_iterator_name(processes: Sequence[int]) -> str:
    """Return a name that is the same in all of these processes, and another each time.

    They run one program, so each makes its n-th iterator with the others' n-th.
    """
    members = tuple(processes)
    _iterator_counts[members] += 1
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    return f"headrace/iterators/{digest}/{_iterator_counts[members]}"


class InputStepAgreement:
    """One process's part in agreeing on each step.

    Args:
        store: Where words are left.
        name: Of the iterator, the same in all processes.
        processes: Those that take part. The first decides.
        process: This one.
        timeout: Seconds to wait for a word.
        clock: Gives the time in seconds.
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
        #: Why nothing is agreed any more: somebody is gone. "": they all go on.
        self._abort_reason = ""

    def broadcast_first(self, value: Any) -> Any:
        """Return the value of the first process: a JSON value."""
        key = f"{self._name}/first"
        if self._process == self._processes[0]:
            self._store.set(key, json.dumps(value))
            return value
        return json.loads(self._wait(key, self._processes[0]))

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, JSON, in their order. All of them ask."""
        self._gather_count += 1
        key = f"{self._name}/all/{self._gather_count}"
        self._store.set(f"{key}/{self._process}", json.dumps(value))
        found = [json.loads(self._wait(f"{key}/{p}", p)) for p in self._processes]
        # Who has spoken now has read what was said the time before.
        self._store.delete(f"{self._name}/all/{self._gather_count - 1}/{self._process}")
        return found

    def agree(self, message: StepMessage, remainder: str, size: int | None = None) -> StepMessage:
        """Say what this process has for the next step, and return what all do.

        Raises:
            AbortedError: A process failed, or closed its iterator.
            InvalidArgumentError: They cannot make arrays together of what they have.
            DeadlineExceededError: Another process said nothing for an hour.
        """
        if self._abort_reason:
            raise AbortedError(self._abort_reason)
        key, first = f"{self._name}/{self._step}", self._processes[0]
        self._store.set(f"{key}/{self._process}", json.dumps(message))
        if self._process == first:
            words = {p: json.loads(self._wait(f"{key}/{p}", p)) for p in self._processes}
            # Who has spoken of this step has read what was decided of the one before.
            self._store.delete(f"{self._name}/{self._step - 1}/decided")
            decided = decide_step(words, remainder, size)
            self._store.set(f"{key}/decided", json.dumps(decided))
        else:
            decided = json.loads(self._wait(f"{key}/decided", first))
        self._store.delete(f"{key}/{self._process}")
        self._step += 1
        self._is_finished = not {"use", "drop"} & decided.keys()
        self._abort_reason = decided.get("aborted", "")
        if self._abort_reason:
            raise AbortedError(self._abort_reason)
        if "error" in decided:
            raise InvalidArgumentError(decided["error"])
        return decided

    def _wait(self, key: str, process: int) -> str:
        start = self._clock()
        wait = WaitWarning(f"process {process}, which has not come to step {self._step}")
        while True:
            found = self._store.get(key)
            if found is not None:
                return found
            wait.warn_if_due()
            if self._clock() - start > self._timeout:
                raise DeadlineExceededError(
                    f"process {process} has not come to step {self._step} for "
                    f"{self._timeout:.0f} s: every process must read as many steps; see what it "
                    "does"
                )

    def close(self) -> None:
        """Tell those that read on, so that they do not wait. May be called twice."""
        if self._is_finished:
            return
        self._is_finished = True
        word = {"closed": True}
        with contextlib.suppress(UnavailableError):
            key = f"{self._name}/{self._step}"
            self._store.set(f"{key}/{self._process}", json.dumps(word))
            if self._process == self._processes[0]:
                decided = decide_step({self._process: word}, "error")
                self._store.set(f"{key}/decided", json.dumps(decided))
