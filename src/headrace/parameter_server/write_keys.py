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

__all__ = ["KeyState", "RecordedAnswer", "WriteKeys"]

RecordedAnswer = Counted | Done
"""What answers a write: a record without arrays."""


class KeyState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a server knows of keys, as it is saved.

    Attributes:
        coordinator_term: The highest that was seen; 0: none.
        fenced_sessions: Workers that write no more.
        forgotten_closures: Closures that have settled, from `forgotten_below` on.
        forgotten_below: All closures from 0 to below it have settled.
        answers: What was answered, by closure: target, number, answer.
    """

    coordinator_term: int = 0
    fenced_sessions: tuple[int, ...] = ()
    forgotten_closures: tuple[int, ...] = ()
    forgotten_below: int = 0
    answers: dict[int, tuple[tuple[str, int, RecordedAnswer], ...]] = {}


class WriteKeys:
    """The keys that one server knows."""

    def __init__(self, state: KeyState | None = None) -> None:
        state = state or KeyState()
        self.coordinator_term = state.coordinator_term
        self._fenced_sessions = set(state.fenced_sessions)
        self._forgotten_closures = set(state.forgotten_closures)
        self._forgotten_below = state.forgotten_below
        self._answers: dict[int, dict[tuple[str, int], RecordedAnswer]] = {
            closure: {(target, number): answer for target, number, answer in answers}
            for closure, answers in state.answers.items()
        }

    def __len__(self) -> int:
        return sum(map(len, self._answers.values()))

    def state(self) -> KeyState:
        """Return all of it as a plain value."""
        return KeyState(
            coordinator_term=self.coordinator_term,
            fenced_sessions=tuple(sorted(self._fenced_sessions)),
            forgotten_closures=tuple(sorted(self._forgotten_closures)),
            forgotten_below=self._forgotten_below,
            answers={
                closure: tuple((*key, answer) for key, answer in answers.items())
                for closure, answers in self._answers.items()
            },
        )

    def find_answer(self, key: WriteKey, target: str) -> RecordedAnswer | None:
        """Return what a write was answered, or None if it is to be carried out now.

        Raises:
            AbortedError: It is not to be carried out at all.
        """
        self._adopt_term(key.coordinator_term)
        refusal = self._rejection_reason(key)
        if refusal:
            raise AbortedError(f"a write to {target} is refused: {refusal}")
        return self._answers.get(key.closure, {}).get((target, key.number))

    def record(self, key: WriteKey, target: str, answer: RecordedAnswer) -> None:
        """Note that a write was carried out."""
        self._answers.setdefault(key.closure, {})[target, key.number] = answer

    def answers_for(self, target: str) -> tuple[tuple[int, int, RecordedAnswer], ...]:
        """Return closure, number and answer of all writes to one target."""
        return tuple(
            (closure, number, answer)
            for closure, answers in self._answers.items()
            for (found, number), answer in answers.items()
            if found == target
        )

    def restore(
        self,
        coordinator_term: int,
        answers: Mapping[str, Sequence[tuple[int, int, RecordedAnswer]]],
    ) -> None:
        """Know again which writes were carried out; those of another coordinator mean nothing."""
        if coordinator_term < self.coordinator_term:
            return
        self._adopt_term(coordinator_term)
        for target, each in answers.items():
            for closure, number, answer in each:
                self._answers.setdefault(closure, {})[target, number] = answer

    def forget_closures(self, coordinator_term: int, closures: tuple[int, ...], below: int) -> None:
        """Forget the keys of closures, and refuse what still comes from them."""
        self._adopt_term(coordinator_term)
        if coordinator_term < self.coordinator_term:
            return
        self._forgotten_closures.update(closures)
        self._forgotten_below = max(self._forgotten_below, below)
        for closure in [known for known in self._answers if self._is_forgotten(known)]:
            del self._answers[closure]
        while self._forgotten_below in self._forgotten_closures:
            self._forgotten_below += 1
        self._forgotten_closures = {
            one for one in self._forgotten_closures if not 0 <= one < self._forgotten_below
        }

    def fence(self, coordinator_term: int, worker_session: int | None) -> None:
        """Refuse older incarnations from now on, and this worker."""
        self._adopt_term(coordinator_term)
        if worker_session is not None and coordinator_term == self.coordinator_term:
            self._fenced_sessions.add(worker_session)

    def _adopt_term(self, coordinator_term: int) -> None:
        if coordinator_term > self.coordinator_term:
            # Closures and workers of another coordinator: numbers mean others now.
            self.coordinator_term = coordinator_term
            self._fenced_sessions.clear()
            self._forgotten_closures.clear()
            self._forgotten_below = 0
            self._answers.clear()

    def _rejection_reason(self, key: WriteKey) -> str | None:
        if key.coordinator_term < self.coordinator_term:
            return (
                f"it is of incarnation {key.coordinator_term} of the coordinator, and there is "
                f"incarnation {self.coordinator_term} now"
            )
        if key.worker_session in self._fenced_sessions:
            return f"worker {key.worker_session} was given up, and its closures run elsewhere"
        if self._is_forgotten(key.closure):
            return f"closure {key.closure} has settled or was cancelled; this write comes late"
        return None

    def _is_forgotten(self, closure: int) -> bool:
        # What one worker does for itself alone has negative numbers, which are in no order.
        return 0 <= closure < self._forgotten_below or closure in self._forgotten_closures
