"""What the workers that read one distributed dataset tell each other.

At each step a worker says whether it has data; all end at the first step at which nobody has. A
worker with data knows the answer, so it goes on at once, and takes the others' word for a step a
few steps later, for several steps at once: nobody waits for a message that is on its way. So a
worker is at most `AHEAD` steps ahead of the slowest one, whatever else they do.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import numpy as np

from headrace.distribute.meeting.combining import ALL, ANY
from headrace.distribute.meeting.member import Member
from headrace.element.spec import Spec, decode_spec, encode_spec

__all__ = ["AHEAD", "Agreement", "StepAgreement", "said_by_all"]

AHEAD = 8
"""Steps that a worker with data may be ahead of the slowest."""


class Agreement(Protocol):
    """How one iterator speaks with those of the other workers."""

    @property
    def wants_spec(self) -> bool:
        """Whether the next step is one at which those who have data say what it is like."""

    @property
    def spec(self) -> Spec | None:
        """What the others' data is like, where there was none here when they said it."""

    def has_data(self, here: bool, spec: Spec | None = None) -> bool:
        """Return whether any worker has data for the next step. All workers ask at each step.

        Args:
            here: Whether there is some here.
            spec: What it is like, if the others want to know.
        """

    def of_all(self, value: Any) -> list[Any]:
        """Return the workers' values, JSON, in the order of their ranks. All workers ask."""

    def begin_again(self) -> None:
        """Take note that the iterator was moved, as on all workers."""


def said_by_all(member: Member, what: str, value: Any) -> list[Any]:
    """Return what all workers say, JSON, in the order of their ranks."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    found = member.meet(what, ALL, arrays=[text])
    return [json.loads(array.tobytes()) for array in found.arrays]


class StepAgreement:
    """The agreement of one iterator.

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
        """Whether the next step is the first (`Agreement`)."""
        return not self._specs_said

    @property
    def spec(self) -> Spec | None:
        """What the others' data is like (`Agreement`)."""
        return self._spec

    def has_data(self, here: bool, spec: Spec | None = None) -> bool:
        """Say whether there is data here; return whether there is any (`Agreement`)."""
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
        """Return the values of all workers (`Agreement`)."""
        what = f"the state of {self._name} after step {self._step}"
        return said_by_all(self._member, what, value)

    def begin_again(self) -> None:
        """Forget what was said and not heard (`Agreement`)."""
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
