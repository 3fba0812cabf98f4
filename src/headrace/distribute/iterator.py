"""The iterator over a distributed dataset: one step at a time, for all local replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from headrace.data.optional import Optional
from headrace.distribute.context import OnReplica, here
from headrace.distribute.feeds import Feed, Step
from headrace.distribute.values import PerReplica
from headrace.element.spec import Spec
from headrace.element.structure import unflatten
from headrace.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError

__all__ = ["DistributedIterator"]

_VERSION = 1


class DistributedIterator:
    """Yields what the local replicas get, step by step.

    Also a context manager; `close` (or the end, or garbage collection) releases its threads and
    files. Not for several threads at once.

    Args:
        feed: What the replicas get.
        wraps: Whether leaves are `PerReplica`s; else they are those of the only replica.
        element_spec: Returns the spec.
        agree: Asked at each step with whether there is data here; returns whether there is any on
            any worker. All workers so end together.
        empty: Returns a step without rows.
    """

    def __init__(
        self,
        feed: Feed,
        wraps: bool,
        element_spec: Callable[[], Spec],
        agree: Callable[[bool], bool] | None = None,
        empty: Callable[[], Step] | None = None,
    ) -> None:
        self._feed = feed
        self._wraps = wraps
        self._element_spec = element_spec
        self._agree = agree
        self._empty = empty
        self._has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if isinstance(here.get(), OnReplica):
            raise InvalidArgumentError(
                "next(iterator) should be called from outside of replica_fn. e.g. "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        if self._has_ended:
            raise StopIteration
        step = self._feed.next_step()
        if self._agree is not None and not self._agree(step is not None):
            step = None
        elif step is None and self._agree is not None:
            assert self._empty is not None
            step = self._empty()
        if step is None:
            self.close()
            raise StopIteration
        structure, columns = step
        if not self._wraps:
            return unflatten(structure, [column[0] for column in columns])
        return unflatten(structure, [PerReplica(column) for column in columns])

    def get_next(self) -> Any:
        """Return what the replicas get next.

        Raises:
            OutOfRangeError: There is nothing left; a StopIteration, too.
        """
        try:
            return next(self)
        except OutOfRangeError:
            raise
        except StopIteration:
            raise OutOfRangeError("the distributed dataset has no more elements") from None

    def get_next_as_optional(self) -> Optional:
        """Return what the replicas get next, or an `Optional` without a value at the end."""
        for step in self:
            return Optional(step)
        return Optional()

    @property
    def element_spec(self) -> Spec:
        """Spec of what `next` returns; at each leaf a `PerReplicaSpec` of several replicas."""
        return self._element_spec()

    def get_state(self) -> dict[str, Any]:
        """Return where the next step begins: a JSON value.

        `set_state` on an iterator of the same dataset goes on there, also where it is distributed
        among another number of replicas: nothing is lost, and nothing comes twice.
        """
        return {"version": _VERSION, "distributed": self._feed.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken.

        Raises:
            FailedPreconditionError: The state is of another dataset, or of one that was distributed
                in another way.
        """
        if not isinstance(state, dict) or not {"version", "distributed"} <= state.keys():
            raise TypeError(
                f"`state` must be a value of a DistributedIterator's `get_state`, but got "
                f"{state!r:.80}"
            )
        if state["version"] != _VERSION:
            raise FailedPreconditionError(
                f"the state has version {state['version']!r}, and this Headrace reads version "
                f"{_VERSION}; begin the pass again, or restore it with the Headrace that saved it"
            )
        self._feed.set_state(state["distributed"])
        self._has_ended = False

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Release threads and files; the iterator is at its end then. May be called twice."""
        self._has_ended = True
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
