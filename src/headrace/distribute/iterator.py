"""The iterator over a distributed dataset: one step at a time, for all local replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

from headrace.arguments import check_state_version
from headrace.data.optional import Optional
from headrace.distribute.agreement import Agreement
from headrace.distribute.context import OnReplica, here
from headrace.distribute.delivery import Delivery, OnHost
from headrace.distribute.feeds import Step
from headrace.distribute.sharing import spec_of_step
from headrace.distribute.streams import Streams, has_form_of_state, merged_states
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError

__all__ = ["VERSION", "DistributedIterator"]

VERSION = 1
"""Of states."""


class DistributedIterator:
    """Yields what the local replicas get, step by step.

    Also a context manager; `close` (or the end, or garbage collection) releases its threads and
    files. Not for several threads at once.

    Args:
        feed: What the replicas get.
        wraps: Whether leaves are `PerReplica`s; else they are those of the only replica.
        element_spec: Returns the spec.
        agreement: Asked at each step whether any worker has data: all workers so end together.
        empty: Returns a step without rows, given what the others' rows are like, if they said it.
        delivery: What becomes of the rows; None: arrays of NumPy.
        check_jobs: Raises if a job that is read was used up; called at an end without a step.
    """

    def __init__(
        self,
        feed: Streams,
        wraps: bool,
        element_spec: Callable[[], Spec],
        agreement: Agreement | None = None,
        empty: Callable[[Spec | None], Step] | None = None,
        delivery: Delivery | None = None,
        check_jobs: Callable[[], None] | None = None,
    ) -> None:
        self._feed = feed
        self._wraps = wraps
        self._element_spec = element_spec
        self._agreement = agreement
        self._empty = empty
        self._delivery = delivery or OnHost()
        #: What was read for a step that the workers have not agreed on: the step, or None.
        self._read: list[Step | None] = []
        #: What was read and agreed on, and not delivered yet; () has no rows.
        self._step: Step | tuple[()] | None = None
        self._has_ended = False
        #: None once there was a step.
        self._check_jobs = check_jobs

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if isinstance(here.get(), OnReplica):
            raise InvalidArgumentError(
                "next(iterator) should be called from outside of replica_fn. e.g. "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        delivered = None
        while delivered is None:
            if self._step is None:  # else an interruption came while it was delivered
                self._step = self._next_step()
            try:
                delivered = self._delivery.deliver(*(self._step or self._empty_step()), self._wraps)
            except Exception:
                self._step = None
                raise
            self._step = None
        return delivered[0]

    def _next_step(self) -> Step | tuple[()]:
        """Return the next step; (): one without rows. Interrupted, it loses nothing (`feeds`)."""
        if self._has_ended:
            raise StopIteration
        step = self._feed.next_step() if self._agreement is None else self._agreed()
        if step is None:
            self._has_ended = True
            self.close()
            if self._check_jobs is not None:
                self._check_jobs()
            raise StopIteration
        self._check_jobs = None
        return step

    def _empty_step(self) -> Step:
        assert self._empty is not None
        return self._empty(None if self._agreement is None else self._agreement.spec)

    def _agreed(self) -> Step | tuple[()] | None:
        """Return the next step; (): one without rows; None: no worker has data."""
        assert self._agreement is not None
        if not self._read:  # else an interruption came while the others were waited for
            self._read.append(self._feed.next_step())
        (step,) = self._read
        if step is not None and self._agreement.wants_spec:
            has_data = self._agreement.has_data(True, spec_of_step(*step))
        else:
            has_data = self._agreement.has_data(step is not None)
        self._read = []
        return () if step is None and has_data else step

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
        """Return where the next step begins: a JSON value, the same on all workers, who all ask.

        `set_state` on an iterator of the same dataset goes on there, also where it is distributed
        among another number of replicas or workers: nothing is lost, and nothing comes twice.
        """
        if self._read or self._step is not None:
            raise FailedPreconditionError(
                "the last step was interrupted when it had been read already; take the state after "
                "the next one"
            )
        here = self._feed.get_state()
        states = [here] if self._agreement is None else self._agreement.of_all(here)
        return {"version": VERSION, "distributed": merged_states(states)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken.

        Raises:
            FailedPreconditionError: The state is of another dataset, or of one that was distributed
                in another way.
        """
        if not isinstance(state, dict) or not {"version", "distributed"} <= state.keys():
            _refuse_state(state)
        check_state_version(state["version"], VERSION)
        if not has_form_of_state(state["distributed"]):
            _refuse_state(state)
        self._feed.set_state(state["distributed"])
        if self._agreement is not None:
            self._agreement.begin_again()
        self._read, self._step = [], None
        self._has_ended = False

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Release threads and files; the iterator is at its end then. May be called twice."""
        self._has_ended, self._step = True, None
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refuse_state(state: Any) -> NoReturn:
    raise TypeError(
        f"`state` must be a value of a DistributedIterator's `get_state`, but got {state!r:.80}"
    )
