"""What workers agree on: steps of a dataset, calls of programs over all of them, large sums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import numpy as np

from headrace.distribute.meeting.hall import ALL, ANY
from headrace.distribute.meeting.member import Member
from headrace.element.spec import Spec, decode_spec, encode_spec
from headrace.errors import InvalidArgumentError, UnavailableError
from headrace.frameworks.framework import Framework
from headrace.transport import address as addresses

__all__ = [
    "AHEAD",
    "Calls",
    "DirectSums",
    "RowsOfArguments",
    "StepAgreement",
    "naming_the_missing",
    "rows_of_all",
    "said_by_all",
]

# --- Steps of a distributed dataset ---------------------------------------------------------------
#
# At each step a worker says whether it has data; all end at the first step at which nobody has. A
# worker with data knows the answer, so it goes on at once, and takes the others' word for a step a
# few steps later, for several steps at once: nobody waits for a message that is on its way. So a
# worker is at most `AHEAD` steps ahead of the slowest one, whatever else they do.

AHEAD = 8
"""Steps that a worker with data may be ahead of the slowest."""


def said_by_all(member: Member, what: str, value: Any) -> list[Any]:
    """Return what all workers say, JSON, in the order of their ranks."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    found = member.meet(what, ALL, arrays=[text])
    return [json.loads(array.tobytes()) for array in found.arrays]


class StepAgreement:
    """How one iterator speaks with those of the other workers.

    Args:
        member: This worker.
        name: Of the iterator, the same on all workers.
    """

    def __init__(self, member: Member, name: str) -> None:
        self._member = member
        self._name = name
        self._step = 0
        #: The meeting of the step that comes next, where it was come to already.
        self._asked: int | None = None
        #: Meetings about steps that had data here, whose results were not taken.
        self._pending: list[int] = []
        #: Whether all said what their data is like, and what those with data said, if it was heard.
        self._specs_said = False
        self._spec: Spec | None = None

    @property
    def wants_spec(self) -> bool:
        """Whether those who have data say at the next step what it is like: it is the first."""
        return not self._specs_said

    @property
    def spec(self) -> Spec | None:
        """What the others' data is like, where there was none here when they said it."""
        return self._spec

    def has_data(self, here: bool, spec: Spec | None = None) -> bool:
        """Return whether any worker has data for the next step. All workers ask at each step.

        Args:
            here: Whether there is some here.
            spec: What it is like, if the others want to know.
        """
        number = self._asked
        if number is None:
            words = f"step {self._step + 1} of {self._name}"
            said = [] if spec is None else [np.frombuffer(encode_spec(spec), np.uint8)]
            number = self._asked = self._member.come(words, ANY, here, said, again=True)
        if here:
            if len(self._pending) >= AHEAD:
                self._hear_half()
            if number not in self._pending:  # else an interruption came after that
                self._pending.append(number)
            flag = True
        else:
            flag, heard = self._member.result(number)
            if heard:
                self._spec = decode_spec(heard[0].tobytes())
            self._forget_pending()
        self._step, self._asked, self._specs_said = self._step + 1, None, True
        return flag

    def of_all(self, value: Any) -> list[Any]:
        """Return the workers' values, JSON, in the order of their ranks. All workers ask."""
        what = f"the state of {self._name} after step {self._step}"
        return said_by_all(self._member, what, value)

    def begin_again(self) -> None:
        """Forget what was said and not heard: the iterator was moved, as on all workers."""
        self._forget_pending()
        self._asked, self._specs_said = None, False

    def _hear_half(self) -> None:
        """Wait for the answers to half of what was said: one wait for several steps."""
        self._member.result(self._pending[AHEAD // 2 - 1])
        heard, self._pending = self._pending[: AHEAD // 2], self._pending[AHEAD // 2 :]
        self._member.forget(heard)

    def _forget_pending(self) -> None:
        self._member.forget(self._pending)
        self._pending.clear()


# --- Before a program runs on all workers, and when it failed -------------------------------------
#
# A program over several processes is called by all of them alike, or those that do wait for the
# others without a word. So each call is a meeting first: whoever is missing there is named as ever,
# and what they bring says whether they mean the same.

RowsOfArguments: TypeAlias = Sequence[Sequence[int] | None]
"""For each argument how many rows each replica has; None: it has none."""

_NAMING_SECONDS = 10.0
"""How long a worker whose program failed waits for those who are left, to hear who is not."""


class Calls:
    """The calls of one program.

    Args:
        member: This worker.
        names: Of all workers, by rank, for errors.
        name: Of the program, the same on all workers.
        is_loss: Says whether an error is that of a program for which a worker was missing.
    """

    def __init__(
        self,
        member: Member,
        names: Sequence[str],
        name: str,
        is_loss: Callable[[BaseException], bool],
    ) -> None:
        self._member, self._names, self._name = member, names, name
        self._is_loss = is_loss
        #: Raises if the workers' session is over.
        self.look = member.look
        self._number = 0

    def begin(self, rows: RowsOfArguments, form: str) -> list[list[int] | None]:
        """Wait for all workers; return the rows that all replicas have in each argument.

        Args:
            rows: Those of the replicas here.
            form: What has to be the same on all workers, in words.

        Raises:
            InvalidArgumentError: The workers call it with arguments of other forms.
        """
        self._number += 1
        what = f"call {self._number} of {self._name}"
        digest = hashlib.blake2b(form.encode(), digest_size=7).digest()
        head = [int.from_bytes(digest), *(len(each or ()) for each in rows)]
        flat = [count for each in rows for count in each or ()]
        said = self._member.meet(what, ALL, arrays=[np.array(head), np.array(flat, np.int64)])
        heads, counts = said.arrays[::2], said.arrays[1::2]
        if any(not np.array_equal(each, heads[0]) for each in heads):
            self._refuse(what, form)
        found: list[list[int] | None] = []
        start = 0
        for each in rows:
            stop = start + len(each or ())
            of_all = [int(n) for of_one in counts for n in of_one[start:stop]]
            found.append(None if each is None else of_all)
            start = stop
        return found

    def _refuse(self, what: str, form: str) -> NoReturn:
        first, *others = said_by_all(self._member, f"the arguments of {what}", form)
        pairs = zip(others, self._names[1:], strict=True)
        other, name = next(each for each in pairs if each[0] != first)
        raise InvalidArgumentError(
            "all workers must call a compiled step with arguments of the same structure, shapes "
            f"and dtypes, but in {what} {self._names[0]} has {first or 'none'}, and {name} has "
            f"{other or 'none'}"
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Name whoever is missing if the program fails for that reason.

        Raises:
            UnavailableError: A worker is gone, or stands still.
        """
        try:
            yield
        except Exception as error:
            if not self._is_loss(error):
                raise
            naming_the_missing(self._member, f"{self._name}, which failed", error)


def rows_of_all(member: Member, rows: Sequence[int]) -> list[int]:
    """Return how many rows all replicas have in a step, given how many those here have."""
    said = member.meet("the rows of a step", ALL, arrays=[np.array(rows, np.int64)])
    return [int(count) for array in said.arrays for count in array]


def naming_the_missing(member: Member, what: str, error: BaseException) -> NoReturn:
    """Raise for what failed since a worker is missing, which is named.

    Raises:
        UnavailableError: Always.
    """
    # Who is missing is found out where all that are left meet.
    member.meet(what, ANY, timeout=_NAMING_SECONDS)
    raise UnavailableError(f"{what}, though all workers are there: {error}") from error


# --- Large arrays, added up by the framework's own means ------------------------------------------

_LARGE_BYTES = 1 << 20
"""From here on the framework's own way is worth a message more."""


class DirectSums:
    """Adds up what is large, where the framework can.

    All workers are to be there by then: the framework does not say who is missing.

    Args:
        member: This worker.
        framework: Whose arrays they are.
        rank: Of this worker.
        size: How many there are.
        at: Where the first worker listens.
        timeout: Seconds that others are waited for.
        is_allowed: Whether the framework's ways, which have no keys, may be used.
    """

    def __init__(
        self,
        member: Member,
        framework: Framework,
        rank: int,
        size: int,
        at: str,
        timeout: float,
        is_allowed: bool,
    ) -> None:
        self._member, self._framework = member, framework
        self._rank, self._size = rank, size
        self._at, self._timeout = at, timeout
        self._is_allowed = is_allowed
        #: What adds them up, once there was one.
        self._sums: Any = None

    def takes(self, total: Any, device: Any) -> bool:
        """Whether workers add up such arrays so; all ask for the same ones.

        Args:
            total: What this worker has.
            device: Where such arrays are.
        """
        if not self._is_allowed or total.nbytes < _LARGE_BYTES:
            return False
        if self._sums is None:
            self._sums = self._framework.sums_of_workers(
                self._rank,
                self._size,
                addresses.local_address_for(self._at),
                self._timeout,
                lambda own: said_by_all(self._member, "where each listens for large arrays", own),
                device,
            )
            self._is_allowed = self._sums is not None
        return self._is_allowed and bool(self._sums.adds(total))

    def sums(self, totals: Sequence[Any]) -> list[Any]:
        """Return the sums over all workers.

        Raises:
            UnavailableError: A worker is gone.
        """
        if not totals:
            return []
        try:
            found: list[Any] = self._sums.sums(totals, self._member.look)
        except RuntimeError as error:
            naming_the_missing(self._member, "an exchange of large arrays, which failed", error)
        return found
