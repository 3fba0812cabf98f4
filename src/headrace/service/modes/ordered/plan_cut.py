"""How a plan is cut for reading in order: decided when somebody asks, and once.

Whether steps sink below a shuffle of values hangs on the bytes that it would hold at the client.
Where specs do not say what an element takes, some are made here to find out: those steps would run
here otherwise. What is decided holds for all passes, for `explain`, and for the job; a state names
its own half, and is gone on from in that.

Rule. Nothing of the user's is called before reading begins, or where nothing hangs on it.
"""

from __future__ import annotations

import functools
import threading

from headrace.data.inference import largest_of_first
from headrace.errors import describe_error
from headrace.plan.node import Node
from headrace.plan.user_function import step_name
from headrace.rewrites.cut import Cut, Half, cut, cut_as
from headrace.rewrites.explain import explain_cut
from headrace.rewrites.held_by_shuffles import bytes_by_spec
from headrace.rewrites.optimize import prepare

__all__ = ["InOrder"]

_SAMPLE = 4
"""Elements that are made to see how large they are."""
_LONGEST_REASON = 200


class InOrder:
    """The cut of a plan that is read in order.

    Args:
        plan: The plan as written.
    """

    def __init__(self, plan: Node) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._made: Cut | None = None
        self._notes: list[str] = []

    @property
    def half(self) -> Half:
        """What workers run of it."""
        return self._decided().half

    def account(self) -> str:
        """Return what is to be said of how it is run."""
        return explain_cut(self._decided(), self._notes)

    def keep(self, half: Half) -> None:
        """Cut it so, if nothing was decided yet: as it was where reading went on from."""
        with self._lock:
            if self._made is None:
                self._made = cut_as(prepare(self._plan), half)
                self._notes = ["cut as it was where reading went on from, which was not measured"]

    def _decided(self) -> Cut:
        with self._lock:
            if self._made is None:
                self._notes = []
                bytes_of = functools.cache(self._bytes_of)
                self._made = cut(self._plan, ordered=True, bytes_of=bytes_of)
            return self._made

    def _bytes_of(self, node: Node) -> int | None:
        """Return the bytes of an element of a step: of the largest of some, if specs do not say."""
        size, reason = bytes_by_spec(node), "there are no elements"
        if size is not None:
            return size
        try:
            size = largest_of_first(node, _SAMPLE)
        except Exception as error:
            # Files that only workers have, say: the client runs these steps.
            reason = describe_error(error).partition("\n")[0][:_LONGEST_REASON]
        self._notes.append(
            f"{step_name(node)}: size of an element is not known: {reason}"
            if size is None
            else f"{step_name(node)}: {size:,} bytes an element, measured: the largest of "
            f"{_SAMPLE} that were made here"
        )
        return size

    def __reduce__(self) -> tuple[object, ...]:
        return _taken_over, (self._plan, None if self._made is None else self._made.half)


def _taken_over(plan: Node, half: Half | None) -> InOrder:
    made = InOrder(plan)
    if half is not None:
        made.keep(half)
    return made
