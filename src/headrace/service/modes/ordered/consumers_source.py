"""Consumers in turns: consumer i of n reads elements i, i + n, ... of the order of one process.

Each consumer reads in order, by a job of its own, and none waits for another: a consumer that lags
or is lost keeps nobody from anything. What workers make for it depends on the plan:

* Where each unit is one element, it is of its own elements alone (`Shard` moves into the index
  part). Those at the end that are too few for a round are read by each consumer.
* Else it is the whole stream, of which each consumer takes its part.

All consumers draw from one seed, which the dispatcher gives those that begin (`dispatcher.groups`).
A place is that of one process, before the next round; so it is the same for all consumers after as
many elements, and any number of consumers goes on from it. Once errors of that round were raised it
also says how many, and before or in place of which element the last: `"raised": [element, errors]`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError
from headrace.execution.delivered import NO_ORDER
from headrace.plan.determinism import seeds_named
from headrace.plan.fingerprint import fingerprint_with_steps
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN, Position, Reader, Source
from headrace.plan.traverse import cardinality, element_spec, walk
from headrace.plan.units import Units
from headrace.plan.user_function import step_name
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow
from headrace.rewrites.cut import Cut, Half, cut
from headrace.service.client.job_use import JobUse
from headrace.service.client.keeping import Keeper
from headrace.service.client.options import ReadingOptions
from headrace.service.client.source import RemoteSource
from headrace.service.client.visits import cannot_begin, cut_for, whole_stream_step
from headrace.service.modes.ordered.consumers import spec_of_parts
from headrace.service.modes.ordered.consumers_readers import (
    PartReader,
    Raised,
    Turn,
    WholeReader,
    drops_remainder,
    own_part,
)
from headrace.service.modes.ordered.plan_cut import InOrder

__all__ = ["InTurns", "check_buckets", "reads_its_part", "source_for", "undivided_step"]

_log = logging.getLogger(__name__)


def check_buckets(plan: Node) -> None:
    """Refuse a bucket: which elements it joins depends on the whole stream.

    Raises:
        FailedPreconditionError: There is one.
    """
    for node in walk(plan):
        if isinstance(node, BucketBySequenceLength | GroupByWindow):
            raise FailedPreconditionError(
                f"{step_name(node)} is not read in order by several consumers: what it joins "
                "depends on the whole stream. Leave out `ordered=True` (a round's batches are of "
                "one bucket then), or put that step after `distribute`"
            )


def reads_its_part(plan: Node) -> bool:
    """Whether workers make for each consumer its own elements alone."""
    made = cut(plan, ordered=True)
    alone = cut(own_part(plan, 2, 0), ordered=True)
    return _is_one_to_one(made, plan) and isinstance(alone.above, Units)


def undivided_step(plan: Node) -> str:
    """Return the first step above which workers cannot make a consumer its own elements alone.

    Empty: they can for the whole plan.
    """
    if reads_its_part(plan):
        return ""
    for below in plan.inputs:
        if found := undivided_step(below):
            return found
    return step_name(plan)


def _is_one_to_one(made: Cut, plan: Node) -> bool:
    above, total = made.above, cardinality(plan)
    if not isinstance(above, Units) or above.cycle_length != 1:
        return False
    # The last unit gives nothing where it is the rows that are too few for a batch.
    is_short = drops_remainder(plan) and total == above.size - 1
    return is_short or total in (INFINITE, above.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class InTurns(Source):
    """What one of several consumers reads (`plan.source.Source`).

    Attributes:
        turn: Which one it is.
        written: The plan, as one process would read it.
        spec: Spec of one element, or None.
        read: Returns the source of a plan that is read in order for this consumer: that of its job,
            or (False) one for this client alone.
        undivided: `undivided_step`.
        in_order: How the plan is cut. Consumers may differ in it: each has a job of its own.
        fixed_seeds: See `plan.source.Source`.
    """

    turn: Turn
    written: Node | None
    spec: Spec | None
    read: Callable[[Node, bool], RemoteSource]
    undivided: str
    in_order: InOrder = field(repr=False)
    fixed_seeds: tuple[int, ...] = ()
    _counter: IterationCounter = field(repr=False)
    _occurrence: int = field(default=0, repr=False)
    _use: JobUse = field(repr=False)
    _seed: int | None = field(default=None, repr=False)
    _keeper: Keeper = field(default_factory=Keeper, repr=False)

    @property
    def element_spec(self) -> Spec | None:
        return self.spec

    @property
    def size(self) -> int:
        return self.count if self.count in (0, INFINITE) else 1

    @property
    def count(self) -> int:
        """Number of elements, INFINITE or UNKNOWN."""
        assert self.written is not None
        total = cardinality(self.written)
        if total in (INFINITE, UNKNOWN):
            return total
        rounds, rest = divmod(total, self.turn.consumers)
        return rounds + (rest > 0 and self.turn.remainder != "drop")

    @property
    def elements_per_index(self) -> int | None:
        return 1 if self.count == INFINITE else None

    @property
    def element_count(self) -> int | None:
        return None if self.count in (INFINITE, UNKNOWN) else self.count

    @property
    def splittable(self) -> bool:
        return False

    @property
    def account(self) -> str:
        count = self.turn.consumers
        if not self.undivided:
            said = f"each element is computed once, for the one of {count} consumers that gets it"
        else:
            said = (
                f"each element is computed {count} times, once for each consumer: workers cannot "
                f"tell from the position of an element after {self.undivided} what it is made of"
            )
        return f"{self.in_order.account()}\n  consumers: {said}"

    @property
    def half_in_order(self) -> str:
        return self.in_order.half

    @property
    def has_halves(self) -> bool:
        return True

    @property
    def keeper(self) -> Keeper:
        """It keeps nothing but errors about missing elements: a place can be gone back to."""
        return self._keeper

    def seeded(self, seed: int) -> Source:
        return dataclasses.replace(self, _seed=seed)

    def apart(self) -> RemoteSource:
        assert self.written is not None
        return self.read(self.written, False).with_fixed_seeds(self.fixed_seeds).apart()

    def at_occurrence(self, occurrence: int) -> InTurns:
        return dataclasses.replace(self, _occurrence=occurrence)

    def cannot_begin_at(self, half: str, *, is_of_one_process: bool) -> str:
        assert self.written is not None
        return cannot_begin(self.written, cast(Half, half), is_of_one_process=is_of_one_process)

    def with_fixed_seeds(self, seeds: tuple[int, ...]) -> InTurns:
        return dataclasses.replace(self, fixed_seeds=seeds)

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        assert self.written is not None
        assert self._seed is not None
        if "positions" in (position or ()):
            raise FailedPreconditionError(NO_ORDER)
        if not self.undivided:
            turn = self.turn
            return PartReader(self._part, turn, self.written, position, pass_number, self._seed)
        source = self._part(self.written, True).seeded(self._seed)
        input = source.open(0, 1, position, pass_number=pass_number)
        return WholeReader(input, self.turn, Raised.of(position))

    def _part(self, plan: Node, is_job: bool) -> RemoteSource:
        """Return the source of a part of the plan, which has the steps of the whole."""
        part = self.read(plan, is_job).with_fixed_seeds(self.fixed_seeds)
        part = dataclasses.replace(part, _keeper=self._keeper)
        if is_job:
            part = dataclasses.replace(part, _use=self._use)
        return part

    def used_up(self, number: int) -> str:
        return self._use.used_up(number)


def source_for(
    plan: Node,
    options: ReadingOptions,
    *,
    spec: Spec | None,
    compression: str | None,
    register: Callable[[Node], str],
) -> InTurns:
    """Return what a consumer reads.

    Args:
        plan: The plan.
        options: How it is read: which consumer it is, too.
        spec: Spec of one element.
        compression: "AUTO", or None.
        register: Makes a plan known to the service; returns its id.

    Raises:
        FailedPreconditionError: The plan cannot be read so; the message says why.
    """
    index, consumers = options.consumer_index, options.num_consumers
    assert index is not None
    assert consumers is not None
    check_buckets(plan)
    digits, steps = fingerprint_with_steps(plan)
    terms = [
        f"num_consumers={consumers}, remainder={options.remainder!r}, dataset {digits}",
        *(f"{name} {own_digits}" for name, own_digits in steps),
    ]
    own = dataclasses.replace(
        options,
        num_consumers=None,
        consumer_index=None,
        remainder="drop",
        group=options.job_name or "",
        group_terms="\n".join(terms),
    )

    in_order = InOrder(plan)

    def read(part: Node, is_named: bool) -> RemoteSource:
        made = cut_for(part, own)
        assert made is not None
        total = cardinality(part)
        return RemoteSource(
            options=own,
            dataset_id=register(part),
            cardinality=total,
            # Its own job goes with the client: nobody else begins at that place.
            job_name=f"{options.job_name} (consumer {index} of {consumers})" if is_named else None,
            spec=element_spec(part),
            compression=compression,
            half=made.half,
            units=made.units,
            whole_stream=whole_stream_step(made) or "reading in order",
            written=part,
            in_order=in_order if part is plan else InOrder(part),
        )

    undivided = undivided_step(plan)
    if undivided:
        _log.warning(
            "all elements of job %r are computed %d times, once for each consumer: workers cannot "
            "tell from the position of an element after %s what it is made of (`explain()` shows "
            "the plan). Put that step after `distribute`, or leave out `ordered=True`",
            options.job_name,
            consumers,
            undivided,
        )
    register(plan)  # what cannot be sent is refused now
    turn = Turn(index, consumers, options.remainder)
    counter = IterationCounter()
    return InTurns(
        turn=turn,
        written=plan,
        spec=spec_of_parts(spec, options.remainder),
        read=read,
        undivided=undivided,
        in_order=in_order,
        fixed_seeds=tuple(seeds_named(plan, options.job_name or "")),
        _counter=counter,
        _use=JobUse(counter),
    )
