"""What workers say to each other before a program runs on all of them, and when it failed.

A program over several processes is called by all of them alike, or those that do wait for the
others without a word. So each call is a meeting first: whoever is missing there is named as ever,
and what they bring says whether they mean the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeAlias

import numpy as np

from headrace.distribute.agreement import said_by_all
from headrace.distribute.meeting.combining import ALL, ANY
from headrace.distribute.meeting.member import Member
from headrace.errors import InvalidArgumentError, UnavailableError

__all__ = ["Calls", "RowsOfArguments", "naming_the_missing", "rows_of_all"]

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
