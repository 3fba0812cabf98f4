"""Finds out what a thread does from its stack: the step it executes, and whether it waits.

Used by profilers that sample all threads: of an iterator (`statistics`) and of a data worker.

Rule 1. A thread is attributed to the innermost step on its stack, whether it runs the step's code
    or a user function called by it.
Rule 2. The stacks of other threads are only read, and only frames of steps, which last for one
    chunk: where Python returns a snapshot of a frame's locals (before 3.13), objects in it stay
    alive until the first sample after the frame returns.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from enum import Enum
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

from headrace.execution.parallel_calls import ParallelCalls
from headrace.execution.parallel_map import ParallelMapIterator
from headrace.execution.sampling import self_of
from headrace.execution.threads import ReadAheadThread, input_wait_code
from headrace.plan.node import Node

__all__ = ["Activity", "StepRegistry", "find_activity", "name_step"]

StepT = TypeVar("StepT")


class Activity(Enum):
    """Activity of a thread in a step."""

    USER_CODE = "user code"
    """Runs a function of the user."""
    OWN_CODE = "own code"
    """Runs the step itself, including its reads of files and its array operations."""
    INPUT_WAIT = "waits for its input"
    """Waits for another step or, in a step that reads a data service, for the service."""
    CONSUMER_WAIT = "waits for its consumer"
    """Has read ahead as far as it may."""


def name_step(node: Node) -> str:
    """Return the name of a step in statistics: its kind, and the user's file and line."""
    kind = node.kind or type(node).__name__
    return f"{kind} at {node.location}" if node.location else kind


class StepRegistry(Generic[StepT]):
    """Maps iterators to the caller's records of their steps."""

    def __init__(self) -> None:
        #: Names of the classes of steps, including their base classes.
        self.classes: set[str] = {ParallelCalls.__qualname__, ReadAheadThread.__qualname__}
        self._seen_classes: set[type] = set()
        #: Steps by `id` of their iterators.
        self._steps: dict[int, tuple[weakref.ref[Any], StepT]] = {}

    def register(self, iterator: Any, step: StepT) -> None:
        """Record the step of an iterator, as long as the iterator is alive."""
        iterator_class = type(iterator)
        if iterator_class not in self._seen_classes:
            self._seen_classes.add(iterator_class)
            self.classes.update(kind.__qualname__ for kind in iterator_class.__mro__)
        number, steps = id(iterator), self._steps
        # Iterators without support for weak references remain unknown.
        with contextlib.suppress(TypeError):
            steps[number] = weakref.ref(iterator, lambda _: steps.pop(number, None)), step

    def find(self, found: object) -> StepT | None:
        """Return the step of an iterator, or of threads that work for it.

        It is looked up by identity alone, because another thread may still be constructing the
        object.
        """
        while isinstance(found, ReadAheadThread | ParallelCalls):
            found = getattr(found, "owner", None)
        entry = self._steps.get(id(found))
        return entry[1] if entry is not None and entry[0]() is found else None


def find_activity(
    innermost: FrameType,
    registry: StepRegistry[StepT],
    outside: frozenset[CodeType] = frozenset(),
) -> tuple[StepT | None, Activity] | None:
    """Return the step that a thread executes and what it does there.

    Args:
        innermost: The thread's innermost frame.
        registry: The steps.
        outside: Code of functions that are outside of the steps, though steps call them.

    Returns:
        None outside of the steps. The step is None for a consumer that waits for the threads of
        the last step.
    """
    frame: FrameType | None = innermost
    is_awaiting_input = is_waiting = False
    found: tuple[StepT | None, Activity] | None = None
    while frame is not None:
        code = frame.f_code
        if code in outside:
            return None
        is_awaiting_input = is_awaiting_input or code in input_wait_code
        is_waiting = is_waiting or code is _CONDITION_WAIT
        if code.co_qualname.rpartition(".")[0] in registry.classes:
            owner = self_of(frame)
            step = registry.find(owner)
            if step is not None:
                activity = _classify(innermost, frame, owner, is_awaiting_input, is_waiting)
                if activity is not Activity.INPUT_WAIT or not isinstance(
                    owner, ParallelMapIterator
                ):
                    return step, activity
                # The reader of this step waits for its threads.
                found = None, activity
        frame = frame.f_back
    return found


def _classify(
    innermost: FrameType, frame: FrameType, owner: object, is_awaiting_input: bool, is_waiting: bool
) -> Activity:
    if is_awaiting_input:
        return Activity.INPUT_WAIT
    if isinstance(owner, ReadAheadThread) and is_waiting:
        return Activity.CONSUMER_WAIT
    if isinstance(owner, ParallelCalls) and frame.f_code is _IDLE and innermost is frame:
        return Activity.CONSUMER_WAIT if owner.is_full else Activity.INPUT_WAIT
    is_engine = innermost.f_globals.get("__name__", "").startswith("headrace.")
    return Activity.OWN_CODE if is_engine else Activity.USER_CODE


_CONDITION_WAIT = threading.Condition.wait.__code__
_IDLE = ParallelCalls._run.__code__
