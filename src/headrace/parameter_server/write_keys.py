"""Which writes were carried out, and whose are refused.

Rule 1: a key is carried out once; a repetition gets the first answer.
Rule 2: of two incarnations the higher one rules; what the lower still sends is refused.
Rule 3: a worker that was fenced writes no more.
Rule 4: a closure that has settled writes no more, and its keys are forgotten.

So what is remembered is bounded by the closures that are at work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headrace.errors import AbortedError
from headrace.parameter_server.operations import Counted
from headrace.parameter_server.specs import WriteKey
from headrace.serving.call import Done

__all__ = ["KeyState", "Remembered", "WriteKeys"]

Remembered = Counted | Done
"""What answers a write: a record without arrays."""


class KeyState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a server knows of keys, as it is saved.

    Attributes:
        incarnation: The highest that was seen; 0: none.
        fenced: Workers that write no more.
        settled: Closures that have settled, from `below` on.
        below: All closures from 0 to below it have settled.
        answers: What was answered, by closure: target, number, answer.
    """

    incarnation: int = 0
    fenced: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
    below: int = 0
    answers: dict[int, tuple[tuple[str, int, Remembered], ...]] = {}


class WriteKeys:
    """The keys that one server knows."""

    def __init__(self, state: KeyState | None = None) -> None:
        state = state or KeyState()
        self.incarnation = state.incarnation
        self._fenced = set(state.fenced)
        self._settled = set(state.settled)
        self._below = state.below
        self._answers: dict[int, dict[tuple[str, int], Remembered]] = {
            closure: {(target, number): answer for target, number, answer in answers}
            for closure, answers in state.answers.items()
        }

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def state(self) -> KeyState:
        """Return all of it as a plain value."""
        return KeyState(
            incarnation=self.incarnation,
            fenced=tuple(sorted(self._fenced)),
            settled=tuple(sorted(self._settled)),
            below=self._below,
            answers={
                closure: tuple((*key, answer) for key, answer in answers.items())
                for closure, answers in self._answers.items()
            },
        )

    def known(self, key: WriteKey, target: str) -> Remembered | None:
        """Return what a write was answered, or None if it is to be carried out now.

        Raises:
            AbortedError: It is not to be carried out at all.
        """
        self._adopt(key.incarnation)
        refusal = self._refusal(key)
        if refusal:
            raise AbortedError(f"a write to {target} is refused: {refusal}")
        return self._answers.get(key.closure, {}).get((target, key.number))

    def remember(self, key: WriteKey, target: str, answer: Remembered) -> None:
        """Note that a write was carried out."""
        self._answers.setdefault(key.closure, {})[target, key.number] = answer

    def answers_of(self, target: str) -> tuple[tuple[int, int, Remembered], ...]:
        """Return closure, number and answer of all writes to one target."""
        return tuple(
            (closure, number, answer)
            for closure, answers in self._answers.items()
            for (found, number), answer in answers.items()
            if found == target
        )

    def restore(
        self, incarnation: int, answers: Mapping[str, Sequence[tuple[int, int, Remembered]]]
    ) -> None:
        """Know again which writes were carried out; those of another coordinator mean nothing."""
        if incarnation < self.incarnation:
            return
        self._adopt(incarnation)
        for target, each in answers.items():
            for closure, number, answer in each:
                self._answers.setdefault(closure, {})[target, number] = answer

    def settle(self, incarnation: int, closures: tuple[int, ...], below: int) -> None:
        """Forget the keys of closures, and refuse what still comes from them."""
        self._adopt(incarnation)
        if incarnation < self.incarnation:
            return
        self._settled.update(closures)
        self._below = max(self._below, below)
        for closure in [known for known in self._answers if self._has_settled(known)]:
            del self._answers[closure]
        while self._below in self._settled:
            self._below += 1
        self._settled = {one for one in self._settled if not 0 <= one < self._below}

    def fence(self, incarnation: int, worker: int | None) -> None:
        """Refuse older incarnations from now on, and this worker."""
        self._adopt(incarnation)
        if worker is not None and incarnation == self.incarnation:
            self._fenced.add(worker)

    def _adopt(self, incarnation: int) -> None:
        if incarnation > self.incarnation:
            # Closures and workers of another coordinator: numbers mean others now.
            self.incarnation = incarnation
            self._fenced.clear()
            self._settled.clear()
            self._below = 0
            self._answers.clear()

    def _refusal(self, key: WriteKey) -> str | None:
        if key.incarnation < self.incarnation:
            return (
                f"it is of incarnation {key.incarnation} of the coordinator, and there is "
                f"incarnation {self.incarnation} now"
            )
        if key.worker in self._fenced:
            return f"worker {key.worker} was given up, and its closures run elsewhere"
        if self._has_settled(key.closure):
            return f"closure {key.closure} has settled or was cancelled; this write comes late"
        return None

    def _has_settled(self, closure: int) -> bool:
        # What one worker does for itself alone has negative numbers, which are in no order.
        return 0 <= closure < self._below or closure in self._settled
