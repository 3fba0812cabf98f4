"""The iterator that a user sees: one element at a time, with a state that can be saved.

Its place is known at any moment, from the chunk that the last element came from. What is held in
memory can be made again from the place: so an interruption (Ctrl-C) at any instruction loses
nothing, and is no case of its own.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

from headrace.data.at_exit import close_at_exit, leave_in_children, unless_left
from headrace.data.optional import Optional
from headrace.data.saved_state import (
    PLACES,
    VERSION,
    Mark,
    Marks,
    check_form,
    check_state,
    served_steps,
)
from headrace.element.chunk import States
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError, OutOfRangeError
from headrace.execution.build import draw_seed, start, start_halves
from headrace.execution.context import Iteration
from headrace.execution.delivered import NO_ORDER
from headrace.execution.intake import Pace
from headrace.execution.iterator import ElementIterator, Singles, State
from headrace.execution.rest import start_rest
from headrace.plan.determinism import fixed_seeds, holding_over
from headrace.plan.elements import FromSource, Read
from headrace.plan.identity import Entry, identity
from headrace.plan.node import Node
from headrace.plan.source import Source
from headrace.plan.traverse import merged_options, walk
from headrace.rewrites.cut import Half
from headrace.threads import run_aside

__all__ = ["DatasetIterator"]


class DatasetIterator:
    """Yields the elements of a dataset, once.

    Also a context manager; `close` (or the end, or garbage collection) releases its threads and
    files. Not for several threads at once.

    After an interruption (KeyboardInterrupt, `sys.exit()` in a function of the pipeline) it goes on
    with the element that was being made.

    >>> with iter(hr.Dataset.range(5)) as iterator:
    ...     _ = next(iterator)
    ...     state = iterator.get_state()
    >>> iterator = iter(hr.Dataset.range(5))
    >>> iterator.set_state(state)
    >>> [int(x) for x in iterator]
    [1, 2, 3, 4]

    Args:
        plan: The plan as written.
        pass_number: Which iteration over the dataset this is; a shared job may have used it, and
            the number is the next one then.
        element_spec: Returns the spec of the elements.
        for_training: Whether to raise FailedPreconditionError, in place of ending without an
            element, where the job of a data service that it reads is used up.
    """

    def __init__(
        self,
        plan: Node,
        pass_number: int = 0,
        element_spec: Callable[[], Spec] | None = None,
        *,
        for_training: bool = False,
    ) -> None:
        self._plan = plan
        #: Whether a job of a data service that is used up is an error.
        self._for_training = for_training
        self._iteration = Iteration(plan, pass_number)
        seed = merged_options(plan).seed
        self._seed = draw_seed() if seed is None else seed
        #: Seeds of shuffles that have the same order in each pass.
        self._fixed = fixed_seeds(plan)
        self._element_spec = element_spec
        self._identity: list[Entry] | None = None
        #: What runs, for whoever closes it; [] before the first read.
        self._running: list[ElementIterator] = []
        #: Errors about missing elements, to be raised after the last one.
        self._losses: list[Exception] = []
        sources = [node.source for node in walk(plan) if isinstance(node, FromSource | Read)]
        self._keepers = tuple(source.keeper for source in sources if source.keeper is not None)
        #: Why there are no states; "": there are.
        self._cannot_restore = next((why for s in sources if (why := s.cannot_restore)), "")
        self._cannot_restore = self._cannot_restore or holding_over(plan)
        #: How the plan is cut in two where it goes on from a place over units; None: it is not.
        self._half: Half | None = None
        #: Whether it reads what is left after a reading in no order.
        self._is_rest = False
        #: The source that runs the plan elsewhere, if that is all there is.
        self._source = _runs_elsewhere(plan)
        #: After how many steps others run those before, where steps of this process come after.
        self._served = [] if self._source else served_steps(plan)
        self._finalizer = weakref.finalize(self, unless_left(_close_dropped), self._running)
        close_at_exit(self, self._finalizer)
        self._go_to(None)
        leave_in_children(self, DatasetIterator._leave_to_parent)

    def _go_to(self, state: State) -> None:
        """Make `state` the place; the next read goes there."""
        for keeper in self._keepers:
            keeper.watch(self)
        self._states: States = lambda index: state
        self._offset = 0
        self._is_at_beginning = state is None
        self._marks = Marks()
        self._pace = Pace()
        #: Elements that come next, after which what runs goes on. None: it does not stand at the
        #: place, as while it is at work.
        self._rows: Iterator[Any] | None = None
        self._has_ended = False

    def _leave_to_parent(self) -> list[ElementIterator]:
        """Let go of what runs, in a forked child; it is built again at the place."""
        running = list(self._running)
        self._running.clear()
        states, offset, has_ended = self._states, self._offset, self._has_ended
        is_at_beginning = self._is_at_beginning
        self._go_to(None)
        self._states, self._offset, self._has_ended = states, offset, has_ended
        self._is_at_beginning = is_at_beginning
        return running

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        rows = self._rows
        if rows is not None:
            # While this is at work the place stays what it was: an interruption leads back to it.
            self._rows = None
            try:
                for row in rows:
                    # No call and no loop until the return: Python looks for signals only there.
                    self._offset += 1
                    if self._running:  # else this is a forked child, which builds its own
                        self._rows = rows
                    return row
            except Exception as error:
                self._stand_after(error)
                raise
            if self._keepers:
                self._say_where()
            if not self._running:
                self._resume()
        elif self._has_ended:
            self._raise_loss()
            raise StopIteration
        else:
            self._resume()
        try:
            found = self._first_of_next()
        except Exception as error:
            self._stand_after(error)
            raise
        if found is None:
            self._raise_loss()
            if self._for_training:
                self.check_job()
            raise StopIteration
        row, rows, self._states = found
        self._offset = 1
        if self._running:
            self._rows = rows
        return row

    def _first_of_next(self) -> tuple[Any, Iterator[Any], States] | None:
        """Return the next element, those after it, and the states before all; None at the end."""
        iterator = self._running[-1]
        while True:
            got = iterator.singles() if iterator.gives_rows else self._next_chunk(iterator)
            if got is None:
                break
            rows, states = got
            for row in rows:
                self._is_at_beginning = False
                return row, rows, states
        iterator.close()
        self._has_ended = True
        losses = [keeper.take_loss() for keeper in self._keepers]
        self._losses = [loss for loss in losses if loss is not None]
        for keeper in self._keepers:
            keeper.leave_off(self)
        return None

    def check_job(self) -> None:
        """Refuse to end without an element because the job that is read is used up.

        >>> iterator = iter(hr.Dataset.range(0))
        >>> iterator.check_job()  # it reads no job of a data service

        Raises:
            FailedPreconditionError: It names the job.
        """
        if not self._is_at_beginning:
            return
        for node in walk(self._plan):
            words = node.source.used_up(self.pass_number) if isinstance(node, FromSource) else ""
            if words:
                raise FailedPreconditionError(words)

    def _raise_loss(self) -> None:
        """Raise what is known to be missing, each error once."""
        if self._losses:
            raise self._losses.pop(0)

    def _next_chunk(self, iterator: ElementIterator) -> Singles | None:
        if iterator.reads_ahead_freely:
            chunk = self._pace.next_chunk(iterator)
        else:
            chunk = iterator.next_chunk(iterator.at_hand)
        return None if chunk is None else (iter(chunk.rows()), chunk.states)

    def _stand_after(self, error: Exception) -> None:
        """Make the place after an error that is being raised the place."""
        _raise_interruption(error)
        if not self._running:  # a forked child asks for that element again
            return
        state = self._running[-1].get_state()
        self._states, self._offset, self._rows = lambda index: state, 0, iter(())

    def _resume(self) -> None:
        """Build what runs, at the place."""
        state = self._states(self._offset)
        if self._running:
            for keeper in self._keepers:
                keeper.hold(self)
        _close_quietly(self._running)  # it may be anywhere
        iterator = self._start()
        self._running.append(iterator)
        if state is not None:
            iterator.set_state(state)
        self._states, self._offset = lambda index: state, 0

    def _start(self) -> ElementIterator:
        passes = (self.pass_number,)
        if self._is_rest:
            return start_rest(self._plan, seed=self._seed, fixed=self._fixed, pass_number=passes)
        if self._half:
            return start_halves(
                self._plan, self._half, seed=self._seed, fixed=self._fixed, pass_number=passes
            )
        return start(
            self._plan,
            seed=self._seed,
            fixed=self._fixed,
            pass_number=passes,
            iteration=self._iteration,
        )

    def _say_where(self) -> None:
        """Let go of what was kept to come back to this place, or to one before."""
        for keeper in self._keepers:
            keeper.release(self)
            if keeper.is_full:
                keeper.forget((self._marks.oldest() or Mark(self._states, self._offset)).state)

    def get_next(self) -> Any:
        """Return the next element.

        >>> iterator = iter(hr.Dataset.range(1))
        >>> iterator.get_next()
        np.int64(0)
        >>> iterator.get_next()
        Traceback (most recent call last):
        headrace.errors.OutOfRangeError: the dataset has no more elements

        Raises:
            OutOfRangeError: There is none; a StopIteration, too.
        """
        try:
            return next(self)
        except OutOfRangeError:
            raise
        except StopIteration:
            raise OutOfRangeError("the dataset has no more elements") from None

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an `Optional` without a value at the end.

        >>> iterator = iter(hr.Dataset.range(1))
        >>> iterator.get_next_as_optional().has_value()
        True
        >>> iterator.get_next_as_optional().has_value()
        False
        """
        for element in self:
            return Optional(element)
        return Optional()

    @property
    def pass_number(self) -> int:
        """Which iteration this is over the dataset, or over the shared job that it reads.

        >>> dataset = hr.Dataset.range(1)
        >>> iter(dataset).pass_number, iter(dataset).pass_number
        (0, 1)
        """
        return self._iteration.number

    @property
    def element_spec(self) -> Spec:
        """Spec of the elements.

        >>> iter(hr.Dataset.range(3)).element_spec
        ArraySpec(shape=(), dtype=int64)
        """
        if self._element_spec is None:
            raise FailedPreconditionError("this iterator was made of a plan, without its spec")
        return self._element_spec()

    def get_state(self) -> dict[str, Any]:
        """Return where the next element comes from: a JSON value of a few hundred bytes.

        `set_state` on an iterator of the same dataset, in this process or another, continues with
        the same elements.

        >>> dataset = hr.Dataset.range(5).shuffle(5)
        >>> iterator = iter(dataset)
        >>> _ = next(iterator)
        >>> state, rest = iterator.get_state(), list(iterator)
        >>> other = iter(dataset)
        >>> other.set_state(state)
        >>> list(other) == rest
        True

        Raises:
            FailedPreconditionError: Nobody could go there: it reads the data service, for one.
        """
        return self.state_at(self.mark())

    def mark(self) -> Mark:
        """Return the place of the next element; `state_at` makes a state of it, now or later.

        >>> iterator = iter(hr.Dataset.range(5))
        >>> marks = [iterator.mark() for _ in iterator]
        >>> iterator.set_state(iterator.state_at(marks[2]))
        >>> [int(x) for x in iterator]
        [3, 4]
        """
        if not self._offset and not self._cannot_restore and self._states(0) is None:
            # The beginning, too, is a place: of what a cache holds now, whatever comes into it.
            self._resume()
            stream = self._running[-1].get_state()
            self._states, self._rows = lambda index: stream, iter(())
        mark = Mark(self._states, self._offset)
        if self._keepers:
            self._marks.add(mark)
        return mark

    def state_at(self, mark: Mark) -> dict[str, Any]:
        """Return what `get_state` would have returned when `mark` was taken.

        >>> iterator = iter(hr.Dataset.range(5))
        >>> mark = iterator.mark()
        >>> state = iterator.get_state()
        >>> _ = next(iterator)
        >>> iterator.state_at(mark) == state
        True

        Raises:
            FailedPreconditionError: As `get_state`.
        """
        self._check_it_has_states()
        if self._identity is None:
            self._identity = identity(self._plan)
        stream = mark.state
        for keeper in self._keepers:
            stream = keeper.said(stream)
        seed, at = self._place(stream)
        state = {
            "version": VERSION,
            "plan": self._identity,
            "seed": seed,
            "pass": self.pass_number,
            "at": at,
        }
        if self._fixed:
            state["fixed"] = list(self._fixed)
        return state

    def _place(self, stream: State) -> tuple[int, dict[str, Any]]:
        """Return the seed and where it stands, for anybody who reads this dataset."""
        if self._half:
            return self._seed, {"units": stream, "half": self._half}
        if self._is_rest:
            return self._seed, {"positions": stream}
        if self._served:
            return self._seed, {"stream": stream, "served": self._served}
        if self._source is None:
            return self._seed, {"stream": stream}
        # Where nothing was read yet, it stands at the beginning, wherever that is read.
        position, _ = stream.get("hint", (None, 0))
        if position is None:
            return self._seed, {"stream": None}
        at = dict(position)
        at.pop("iteration", None)  # that of the state
        return at.pop("seed"), at

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken.

        The next read goes there. Errors of elements that must be read again on the way are not
        raised again.

        >>> iterator = iter(hr.Dataset.range(3))
        >>> state = iterator.get_state()
        >>> _ = list(iterator)
        >>> iterator.set_state(state)
        >>> [int(x) for x in iterator]
        [0, 1, 2]

        Raises:
            FailedPreconditionError: The state is of another dataset or another version; the message
                names the first step that differs. Or this iterator has no states.
        """
        check_form(state)
        self._check_it_has_states()
        check_state(state, self._plan, self._served)
        fixed = state.get("fixed", ())
        if not fixed and merged_options(self._plan).seed is not None:
            fixed = fixed_seeds(self._plan)  # the options decide them
        if len(fixed) != len(self._fixed):
            raise FailedPreconditionError(
                "the state lacks 'fixed', which says the order of steps that draw the same in each "
                "pass: restore one that was saved in full, or begin the pass again"
            )
        self.close()
        self._seed = state["seed"]
        self._iteration.resume(state["pass"])
        self._fixed = list(fixed)
        at = state["at"]
        if self._source is not None:
            self._go_to(self._over_units(at))
            return
        self._half = cast(Half, at["half"]) if "units" in at else None
        self._is_rest = "positions" in at
        self._go_to(next(at[name] for name in PLACES if name in at))

    def _over_units(self, at: dict[str, Any]) -> State:
        """Return the state of the source that runs the plan elsewhere, for a place of anybody's."""
        source = self._source
        assert source is not None
        place = next(at[name] for name in PLACES if name in at)
        if place is None:
            return None
        if "positions" in at:
            if source.has_order:
                raise FailedPreconditionError(NO_ORDER)
            position: dict[str, Any] = {"positions": place, "seed": self._seed}
        else:
            half = at.get("half") or source.half_in_order
            why = source.cannot_begin_at(half, is_of_one_process="stream" in at)
            if why:
                raise FailedPreconditionError(why)
            position = {"units": place, "half": half, "seed": self._seed}
            if "raised" in at:  # by a consumer in order, of the round that comes next
                position["raised"] = at["raised"]
        fresh = start(self._plan, seed=self._seed)
        at_start: dict[str, Any] = fresh.get_state()
        fresh.close()
        return {**at_start, "ordinal": 1, "hint": [position, 0]}

    def _check_it_has_states(self) -> None:
        # Said before a trainer keeps a state, not when it is needed.
        if self._cannot_restore:
            raise FailedPreconditionError(f"this iterator has no states: {self._cannot_restore}")

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Release threads and files; the iterator is at its end then. May be called twice.

        >>> iterator = iter(hr.Dataset.range(1000).prefetch(10))
        >>> _ = next(iterator)
        >>> iterator.close()
        """
        if self._running and not self._has_ended:
            for keeper in self._keepers:
                keeper.stop_at(self._states(self._offset))
        self._has_ended = True
        self._rows = None
        self._losses.clear()
        for keeper in self._keepers:
            keeper.leave_off(self)
        while self._running:
            self._running[-1].close()
            self._running.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _runs_elsewhere(plan: Node) -> Source | None:
    """Return the source that runs a plan elsewhere, if there is nothing else to it."""
    while plan.is_transparent and len(plan.inputs) == 1:
        (plan,) = plan.inputs
    return plan.source if isinstance(plan, FromSource) and plan.source.has_halves else None


def _close_quietly(running: list[ElementIterator]) -> None:
    """Close what an iterator left running."""
    for iterator in running:
        with contextlib.suppress(Exception):
            iterator.close()
    running.clear()


def _close_dropped(running: list[ElementIterator]) -> None:
    """Close what an iterator left running that nobody holds any more, or at interpreter exit."""
    if running:
        run_aside(functools.partial(_close_quietly, list(running)))
        running.clear()


def _raise_interruption(error: Exception) -> None:
    """Raise what interrupted the wait for a thread, where only its consequence arrived here.

    A condition that is interrupted before it has its lock again says that there is none to
    release. Errors of users' functions are no bare RuntimeErrors.
    """
    cause = error.__context__
    if type(error) is RuntimeError and cause is not None and not isinstance(cause, Exception):
        raise cause
