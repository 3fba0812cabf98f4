"""Plans: their bytes by digest, fetched once by a worker however many tasks read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from headrace.errors import DataLossError
from headrace.service.messages import GetElements, GetPlan, GetPlanReply, TaskDefinition

__all__ = ["Fetch", "Lookups", "PlanCache", "Plans"]


_CAPACITY = 64 << 20


class PlanCache:
    """The plans that were used last, up to a number of bytes.

    Args:
        capacity: Bytes to keep. A larger plan is fetched whenever it is needed.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        #: By digest, the one used last at the end.
        self._plans: dict[bytes, bytes] = {}

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return sum(map(len, self._plans.values()))

    def get(self, digest: bytes) -> bytes | None:
        """Return a plan's bytes, if they are kept."""
        plan = self._plans.pop(digest, None)
        if plan is not None:
            self._plans[digest] = plan
        return plan

    def put(self, digest: bytes, plan: bytes) -> None:
        """Keep a plan, unless it is too large; what was not used for longest goes for it."""
        if len(plan) > self._capacity:
            return
        self._plans[digest] = plan
        while self.size > self._capacity:
            del self._plans[next(iter(self._plans))]


class Fetch:
    """A plan that is fetched from the dispatcher, part by part.

    Args:
        digest: SHA-256 of its bytes.
    """

    def __init__(self, digest: bytes) -> None:
        self._digest = digest
        self._parts: list[bytes] = []
        self._offset = 0
        # Computed part by part: a long plan must not hold up those who wait for something else.
        self._hash = hashlib.sha256()

    def question(self) -> GetPlan:
        """Return what to ask for next."""
        return GetPlan(digest=self._digest, offset=self._offset)

    def take(self, answer: GetPlanReply) -> bytes | None:
        """Take the answer to the last question; return the plan when it is whole.

        Raises:
            DataLossError: It has another digest.
        """
        self._parts.append(answer.chunk)
        self._hash.update(answer.chunk)
        self._offset += len(answer.chunk)
        if answer.chunk and self._offset < answer.total_bytes:
            return None
        if self._hash.digest() != self._digest:
            raise DataLossError(
                f"the plan {self._digest.hex()[:12]} arrived damaged: {self._offset} bytes of "
                f"{answer.total_bytes}, with SHA-256 {self._hash.hexdigest()[:12]}; the "
                "dispatcher's "
                "copy of it may be damaged: register the dataset again"
            )
        return b"".join(self._parts)


# --- lookups: tasks that clients asked for and that the worker does not know yet ------------------

# Requests wait while the task's definition and its plan are fetched, and are handed on in the order
# in which they came. A plan that several tasks read is fetched once.

R = TypeVar("R")


class Plans(NamedTuple):
    """What a task needs to begin."""

    plan: bytes
    """The pickled plan, as written."""
    cost_plan: bytes
    """That of the cost function; empty: it has none."""


class Lookups(Generic[R]):
    """What waits for the dispatcher to say what a task is.

    Args:
        plans: Where plans are kept.
    """

    def __init__(self, plans: PlanCache) -> None:
        self._plans = plans
        self._parked: dict[int, list[tuple[R, GetElements]]] = {}
        #: Of tasks that wait for more than one: what is here, by digest, whatever the cache keeps.
        self._here: dict[int, dict[bytes, bytes]] = {}
        #: By digest: plans that are being fetched, and the tasks that wait for them.
        self._fetches: dict[bytes, tuple[Fetch, list[TaskDefinition]]] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[int]:
        return iter(self._parked)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._parked

    def park(self, request: R, message: GetElements) -> bool:
        """Let a request wait; return whether it is the first for its task."""
        waiting = self._parked.setdefault(message.task_id, [])
        waiting.append((request, message))
        return len(waiting) == 1

    def add(self, task_id: int) -> bool:
        """Look a task up that nobody asked for; return whether it is not looked up already."""
        is_new = task_id not in self._parked
        self._parked.setdefault(task_id, [])
        return is_new

    def release(self, task_id: int) -> list[tuple[R, GetElements]]:
        """Return the requests that waited for a task."""
        self._here.pop(task_id, None)
        return self._parked.pop(task_id, [])

    def release_all(self) -> list[tuple[R, GetElements]]:
        """Return all requests that wait; nothing is fetched any more."""
        waiting = [each for requests in self._parked.values() for each in requests]
        self._parked.clear()
        self._here.clear()
        self._fetches.clear()
        return waiting

    # --- plans ----------------------------------------------------------------------------------

    def defined(self, definition: TaskDefinition) -> Plans | GetPlan | None:
        """Return a task's plans, or what to ask for; None: it is being fetched for another task."""
        here = self._here.setdefault(definition.task_id, {})
        for digest in filter(None, (definition.digest, definition.cost_fn_digest)):
            plan = here.get(digest) or self._plans.get(digest)
            if plan is not None:
                here[digest] = plan
            elif digest in self._fetches:
                self._fetches[digest][1].append(definition)
                return None
            else:
                fetch = Fetch(digest)
                self._fetches[digest] = fetch, [definition]
                return fetch.question()
        del self._here[definition.task_id]
        return Plans(here[definition.digest], here.get(definition.cost_fn_digest, b""))

    def fetched(self, asked: GetPlan, part: GetPlanReply) -> GetPlan | list[TaskDefinition]:
        """Take a part of a plan; return the tasks that waited for it, or what to ask for.

        Raises:
            DataLossError: It is not the plan that was asked for.
        """
        fetch, waiting = self._fetches.get(asked.digest, (None, []))
        if fetch is None or asked != fetch.question():
            return []
        plan = fetch.take(part)
        if plan is None:
            return fetch.question()
        self._plans.put(asked.digest, plan)
        del self._fetches[asked.digest]
        there = [definition for definition in waiting if definition.task_id in self._parked]
        for definition in there:
            self._here.setdefault(definition.task_id, {})[asked.digest] = plan
        return there

    def take_waiting(self, digest: bytes) -> list[TaskDefinition]:
        """Return the tasks that wait for a plan, which is fetched no more."""
        _, waiting = self._fetches.pop(digest, (None, []))
        return waiting
