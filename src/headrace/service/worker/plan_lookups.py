"""Plans by digest, fetched once per worker even if several tasks read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from headrace.errors import DataLossError
from headrace.service.messages import GetElements, GetPlan, GetPlanReply, TaskDefinition

__all__ = ["PendingLookups", "PlanBytesCache", "PlanFetch", "TaskPlans"]


_CAPACITY = 64 << 20


class PlanBytesCache:
    """Most recently used plans, up to a number of bytes.

    Args:
        capacity: Maximum bytes. A larger plan is fetched whenever it is needed.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        #: Plans by digest, least recently used first.
        self._plans: dict[bytes, bytes] = {}

    @property
    def size(self) -> int:
        """Bytes of the cached plans."""
        return sum(map(len, self._plans.values()))

    def get(self, digest: bytes) -> bytes | None:
        """Return the bytes of a plan, or None if it is not cached."""
        plan = self._plans.pop(digest, None)
        if plan is not None:
            self._plans[digest] = plan
        return plan

    def put(self, digest: bytes, plan: bytes) -> None:
        """Cache a plan, unless it is too large; the least recently used plans are evicted."""
        if len(plan) > self._capacity:
            return
        self._plans[digest] = plan
        while self.size > self._capacity:
            del self._plans[next(iter(self._plans))]


class PlanFetch:
    """Fetch of a plan from the dispatcher, part by part.

    Args:
        digest: SHA-256 of the plan's bytes.
    """

    def __init__(self, digest: bytes) -> None:
        self._digest = digest
        self._parts: list[bytes] = []
        self._offset = 0
        # Computed per part, so that a long plan does not delay other requests.
        self._hash = hashlib.sha256()

    def next_request(self) -> GetPlan:
        """Return the next request."""
        return GetPlan(digest=self._digest, offset=self._offset)

    def add_part(self, reply: GetPlanReply) -> bytes | None:
        """Add the reply to the last request; return the plan once it is complete.

        Raises:
            DataLossError: If the plan has a different digest.
        """
        self._parts.append(reply.chunk)
        self._hash.update(reply.chunk)
        self._offset += len(reply.chunk)
        if reply.chunk and self._offset < reply.total_bytes:
            return None
        if self._hash.digest() != self._digest:
            raise DataLossError(
                f"the plan with SHA-256 {self._digest.hex()[:12]} is corrupt: received "
                f"{self._offset} of {reply.total_bytes} bytes with SHA-256 "
                f"{self._hash.hexdigest()[:12]}. The dispatcher's copy may be corrupt: register "
                "the dataset again"
            )
        return b"".join(self._parts)


# --- lookups: tasks that clients requested and that are unknown to the worker ---------------------

# Requests wait while the task's definition and plan are fetched, and are passed on in the order of
# arrival. A plan that several tasks read is fetched once.

R = TypeVar("R")


class TaskPlans(NamedTuple):
    """Plans that a task needs to start."""

    plan: bytes
    """The pickled plan, as written."""
    cost_plan: bytes
    """The pickled plan of the cost function; empty if there is none."""


class PendingLookups(Generic[R]):
    """Tasks whose definitions or plans are being fetched, with their waiting requests.

    Args:
        cache: Cache of plans.
    """

    def __init__(self, cache: PlanBytesCache) -> None:
        self._cache = cache
        self._waiting_requests: dict[int, list[tuple[R, GetElements]]] = {}
        #: Plans by digest that are held for tasks that need several, independent of the cache.
        self._plans_by_task: dict[int, dict[bytes, bytes]] = {}
        #: Plans being fetched, by digest, and the tasks that wait for them.
        self._fetches: dict[bytes, tuple[PlanFetch, list[TaskDefinition]]] = {}

    def __len__(self) -> int:
        return len(self._waiting_requests)

    def __iter__(self) -> Iterator[int]:
        return iter(self._waiting_requests)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._waiting_requests

    def add_request(self, request: R, message: GetElements) -> bool:
        """Add a waiting request; return whether it is the first for its task."""
        waiting = self._waiting_requests.setdefault(message.task_id, [])
        waiting.append((request, message))
        return len(waiting) == 1

    def add_task(self, task_id: int) -> bool:
        """Add a lookup without a request; return False if the task is being looked up."""
        is_new = task_id not in self._waiting_requests
        self._waiting_requests.setdefault(task_id, [])
        return is_new

    def release(self, task_id: int) -> list[tuple[R, GetElements]]:
        """Return and remove the requests that waited for a task."""
        self._plans_by_task.pop(task_id, None)
        return self._waiting_requests.pop(task_id, [])

    def release_all(self) -> list[tuple[R, GetElements]]:
        """Return and remove all waiting requests, and cancel all fetches."""
        waiting = [each for requests in self._waiting_requests.values() for each in requests]
        self._waiting_requests.clear()
        self._plans_by_task.clear()
        self._fetches.clear()
        return waiting

    # --- plans ------------------------------------------------------------------------------------

    def resolve(self, definition: TaskDefinition) -> TaskPlans | GetPlan | None:
        """Return a task's plans or the next request; None if another task fetches them."""
        plans = self._plans_by_task.setdefault(definition.task_id, {})
        for digest in filter(None, (definition.digest, definition.cost_fn_digest)):
            plan = plans.get(digest) or self._cache.get(digest)
            if plan is not None:
                plans[digest] = plan
            elif digest in self._fetches:
                self._fetches[digest][1].append(definition)
                return None
            else:
                fetch = PlanFetch(digest)
                self._fetches[digest] = fetch, [definition]
                return fetch.next_request()
        del self._plans_by_task[definition.task_id]
        return TaskPlans(plans[definition.digest], plans.get(definition.cost_fn_digest, b""))

    def add_plan_part(self, call: GetPlan, part: GetPlanReply) -> GetPlan | list[TaskDefinition]:
        """Add a part of a plan; return the tasks that waited for it, or the next request.

        Raises:
            DataLossError: If the plan has a different digest.
        """
        fetch, waiting = self._fetches.get(call.digest, (None, []))
        if fetch is None or call != fetch.next_request():
            return []
        plan = fetch.add_part(part)
        if plan is None:
            return fetch.next_request()
        self._cache.put(call.digest, plan)
        del self._fetches[call.digest]
        definitions = [
            definition for definition in waiting if definition.task_id in self._waiting_requests
        ]
        for definition in definitions:
            self._plans_by_task.setdefault(definition.task_id, {})[call.digest] = plan
        return definitions

    def cancel_fetch(self, digest: bytes) -> list[TaskDefinition]:
        """Cancel the fetch of a plan; return the tasks that waited for it."""
        _, waiting = self._fetches.pop(digest, (None, []))
        return waiting
