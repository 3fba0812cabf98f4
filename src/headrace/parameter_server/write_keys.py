"""Write keys: which writes were executed, and which are refused.

Rule 1. A key is executed once; a repetition gets the first answer.
Rule 2. The highest coordinator term is valid; writes of lower terms are refused.
Rule 3. Writes of a fenced worker are refused.
Rule 4. Writes of a finished closure are refused, and its keys are forgotten.

So the number of remembered keys is bounded by the running closures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headrace.errors import AbortedError
from headrace.parameter_server.operations import Counted
from headrace.parameter_server.specs import WriteKey
from headrace.serving.rpc import Done

__all__ = ["KeyState", "RecordedAnswer", "WriteKeys"]

RecordedAnswer = Counted | Done
"""Answer to a write: a record without arrays."""


class KeyState(msgspec.Struct, frozen=True, kw_only=True):
    """All write keys of a server, in the form in which they are saved.

    Attributes:
        coordinator_term: Highest term seen; 0 if none.
        fenced_sessions: Worker sessions whose writes are refused.
        forgotten_closures: Finished closures with numbers of at least `forgotten_below`.
        forgotten_below: All closures from 0 to below this number are finished.
        answers: (target, write number, answer) of executed writes, by closure.
    """

    coordinator_term: int = 0
    fenced_sessions: tuple[int, ...] = ()
    forgotten_closures: tuple[int, ...] = ()
    forgotten_below: int = 0
    answers: dict[int, tuple[tuple[str, int, RecordedAnswer], ...]] = {}


class WriteKeys:
    """The write keys that one server knows."""

    def __init__(self, state: KeyState | None = None) -> None:
        state = state or KeyState()
        self.coordinator_term: int = state.coordinator_term
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
        """Return the keys as a plain value."""
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
        """Return the recorded answer to a write, or None if it must be executed now.

        Raises:
            AbortedError: If the write is refused.
        """
        self._adopt_term(key.coordinator_term)
        reason = self._rejection_reason(key)
        if reason:
            raise AbortedError(f"a write to {target} is rejected: {reason}")
        return self._answers.get(key.closure, {}).get((target, key.number))

    def record(self, key: WriteKey, target: str, answer: RecordedAnswer) -> None:
        """Record an executed write."""
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
        """Add keys of executed writes; those of an older coordinator term are ignored."""
        if coordinator_term < self.coordinator_term:
            return
        self._adopt_term(coordinator_term)
        for target, each in answers.items():
            for closure, number, answer in each:
                self._answers.setdefault(closure, {})[target, number] = answer

    def forget_closures(self, coordinator_term: int, closures: tuple[int, ...], below: int) -> None:
        """Forget the keys of closures, and refuse their late writes."""
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
        """Refuse writes of older terms from now on, and those of this worker session."""
        self._adopt_term(coordinator_term)
        if worker_session is not None and coordinator_term == self.coordinator_term:
            self._fenced_sessions.add(worker_session)

    def _adopt_term(self, coordinator_term: int) -> None:
        if coordinator_term > self.coordinator_term:
            # Closure and worker numbers of another coordinator have other meanings.
            self.coordinator_term = coordinator_term
            self._fenced_sessions.clear()
            self._forgotten_closures.clear()
            self._forgotten_below = 0
            self._answers.clear()

    def _rejection_reason(self, key: WriteKey) -> str | None:
        if key.coordinator_term < self.coordinator_term:
            return (
                f"its coordinator term is {key.coordinator_term}, but the current term is "
                f"{self.coordinator_term}"
            )
        if key.worker_session in self._fenced_sessions:
            return (
                f"worker session {key.worker_session} is fenced, and its closures run on other "
                "workers"
            )
        if self._is_forgotten(key.closure):
            return f"closure {key.closure} has already finished or was cancelled"
        return None

    def _is_forgotten(self, closure: int) -> bool:
        # Work that a worker does on its own has negative closure numbers, which have no order.
        return 0 <= closure < self._forgotten_below or closure in self._forgotten_closures
