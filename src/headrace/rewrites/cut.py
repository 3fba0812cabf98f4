"""A plan in two halves: what workers run unit by unit, and what the client runs over that.

    plan -> cut -> Cut(below, above)

`below` has roots (`rewrites.roots`) and is dealt in units. Where the plan has its elements in the
order of one process, `above` opens unit after unit (`plan.units`), and is else an ordinary plan:

* A step that works within one unit is below. An interleave stays above, where it takes units in
  turn; what its function opens is read below, one dataset a unit.
* One-to-one steps and filters over an interleave sink into it. Each element keeps the ordinal that
  it had before the filters, so that those left out count in the turns.
* One-to-one steps over steps that choose sink below them. Over a shuffle of values only where the
  elements that it then holds at the client fit a bound. What fails in them is chosen with the
  others, and raised above (`plan.units`).
* `repeat` and `concatenate` over others stay in both halves: below they say which units there are.

In any order, whatever carries origins stays below: batches, shuffles of values, buckets. A batch
that drops its remainder is made below with it and once more above, where remainders are joined. If
what is above needs more than one stream, it has them in order all the same; so has an `enumerate`
over units of a fixed number of elements (`range(n).map(f)`), whose numbers are those of
one process.

Rule 1. Both sides cut alike: what is cut how is all in the plan and in the name of the half.
Rule 2. The halves together have the elements of the plan; in order, bit for bit in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias, cast

from headrace.errors import FailedPreconditionError
from headrace.plan.batching import Batch, Unbatch
from headrace.plan.combining import Concatenate, Interleave
from headrace.plan.determinism import fixed_seeds, free_steps, with_fixed_seeds
from headrace.plan.elementwise import Filter, Map
from headrace.plan.node import Node
from headrace.plan.options import Options
from headrace.plan.ordering import Enumerate, Repeat, Shuffle
from headrace.plan.traverse import cardinality, element_spec, fold, walk
from headrace.plan.units import FailsBelow, RaiseFailed, Root, Units
from headrace.plan.user_function import step_name
from headrace.plan.windows import GroupByWindow
from headrace.rewrites.held_by_shuffles import bytes_by_spec, held_by
from headrace.rewrites.normal import Normal
from headrace.rewrites.optimize import prepare
from headrace.rewrites.positions import deal_of
from headrace.rewrites.roots import (
    NOWHERE,
    Part,
    carried,
    leaf_part,
    units_of_leaves,
    within_units,
)
from headrace.rewrites.unit_ranges import UnitRange, counts_rows, positions_of, ranges_of, size_of

__all__ = ["DEFAULT_BOUND", "Cut", "Half", "Placed", "cut", "cut_as"]

Half: TypeAlias = Literal[
    "in any order", "in order", "in order, sunk", "in order, held", "in order, sunk, held"
]
"""How a plan is cut: all that a worker needs to know of it. "sunk": one-to-one steps are below
shuffles of values. "held": what fails in steps that sank below those that choose is chosen with
the others; in places that were saved without that word, it was left out before."""

DEFAULT_BOUND = 1 << 30
"""Bytes that shuffles of values may hold at a client, of elements that are finished."""


class Placed(NamedTuple):
    """Where a step runs."""

    step: str
    where: Literal["workers", "client", "both"]
    why: str = ""


@dataclass(frozen=True)
class Cut:
    """The two halves of a plan."""

    below: Node
    """What workers run, with its roots."""
    above: Node
    """What the client runs: its leaves are `Units`."""
    half: Half
    """How it is cut. A place says it."""
    units: int
    """Units that `below` is dealt in, or INFINITE."""
    options: Options
    """Those of the whole plan."""
    placed: tuple[Placed, ...] = ()
    """Where each step runs and why, inputs first: for `explain`."""
    held_bytes: int | None = 0
    """What shuffles of values at the client hold of finished elements if one-to-one steps sink
    below them: 0 where there are none, None where the size of an element is not known."""
    half_below: Half | None = None
    """What workers are told, if it is not `half`: where `below` is the same, the word that those of
    earlier versions know, too."""

    @property
    def told(self) -> Half:
        """What workers are told of how it is cut."""
        return self.half_below or self.half

    @property
    def is_ordered(self) -> bool:
        """Whether the elements come in the order of one process."""
        return self.half != "in any order"

    @property
    def wants_places(self) -> bool:
        """Whether the client needs the places of elements: it opens datasets for some."""
        return any(isinstance(node, Interleave | GroupByWindow) for node in walk(self.above))


def cut(
    plan: Node,
    *,
    ordered: bool,
    bound: int = DEFAULT_BOUND,
    bytes_of: Callable[[Node], int | None] | None = None,
    fixed: Sequence[int] = (),
) -> Cut:
    """Return the halves of a plan as written.

    Args:
        plan: The plan.
        ordered: Whether its elements are to come in the order of one process.
        bound: Bytes that shuffles of values may hold at the client for one-to-one steps to sink
            below them.
        bytes_of: Returns the size of an element of a step, if it is known. By default it is where
            the plan's specs say it. Asked only where something hangs on it.
        fixed: As for `execution.build.start`.

    Raises:
        FailedPreconditionError: It reads a source that cannot be read in parts.
    """
    prepared = _prepared(plan, fixed)
    if not ordered:
        made = cut_as(prepared, "in any order")
        if not made.is_ordered:
            return made
    sunk, unsunk = cut_as(prepared, "in order, sunk, held"), cut_as(prepared, "in order, held")
    if sunk.placed == unsunk.placed:
        return sunk
    held = held_by(prepared.plan, bytes_of or bytes_by_spec)
    fits = held is not None and held <= bound
    return replace(sunk if fits else unsunk, held_bytes=held)


def _prepared(plan: Node, fixed: Sequence[int]) -> Normal:
    return prepare(with_fixed_seeds(plan, fixed or fixed_seeds(plan)))


def cut_as(prepared: Normal, half: Half) -> Cut:
    """Return the halves of a plan in normal form.

    Raises:
        FailedPreconditionError: It reads a source that cannot be read in parts.
    """
    deal = deal_of(prepared.plan)
    if deal is None:
        raise FailedPreconditionError(
            "the plan reads a source that cannot be read in parts, so it cannot be dealt out"
        )
    if deal.whole:
        above = Units(size=1, element_spec=element_spec(prepared.plan))
        placed = [Placed(step_name(node), "workers") for node in walk(prepared.plan)]
        return Cut(prepared.plan, above, half, 1, prepared.options, tuple(placed))
    if half == "in any order":
        cutter = _Cutter(prepared, in_order=False, sinks=False)
        made = cutter.cut(half)
        if made is not None:
            return made
        half = "in order, held"
    made = _in_order(prepared, half)
    if not half.endswith(_HELD):
        return made
    plain = cast(Half, half.removesuffix(_HELD))
    if not any(isinstance(node, Units) and node.holds_failures for node in walk(made.above)):
        return replace(made, half=plain)
    is_same = _in_order(prepared, plain).placed == made.placed
    return replace(made, half_below=plain) if is_same else made


_HELD = ", held"


def _in_order(prepared: Normal, half: Half) -> Cut:
    sinks, holds = "sunk" in half, half.endswith(_HELD)
    made = _Cutter(prepared, in_order=True, sinks=sinks, holds=holds).cut(half)
    assert made is not None
    return made


@dataclass
class _Stream:
    """Units of the lower half that one `Units` of the upper reads."""

    plan: Node
    cycle_length: int = 1
    block_length: int = 1
    has_sunk: bool = False
    """Whether steps that the client would run are in it by now."""
    holds_failures: bool = False
    """Whether some of those came from above steps that choose."""

    def sink(self, node: Node, *, is_chosen: bool) -> None:
        """Take in a step; `is_chosen`: the client chooses from what is below it."""
        if is_chosen and self.has_sunk and not self.holds_failures:
            self.plan = FailsBelow(input=self.plan, location=node.location)
        self.holds_failures = self.holds_failures or is_chosen
        self.has_sunk = True
        self.plan = node.over([self.plan])


@dataclass
class _Piece:
    """What has become of a subtree."""

    part: Part | None = None
    """All of it works within units, or carries their origins: it may be below."""
    above: Node = NOWHERE
    units: Node = NOWHERE
    """The `repeat` and `concatenate` steps of it over its streams."""
    streams: list[_Stream] = field(default_factory=list)
    """Those that one-to-one steps can sink into; []: they cannot."""
    is_direct: bool = False
    """Whether nothing stands over the stream, an interleave: filters sink, too."""
    is_shuffled: bool = False
    """Whether what sinks passes a shuffle of values."""
    is_chosen: bool = False
    """Whether what sinks passes steps that choose."""
    raises_failed: bool = False
    """Whether what fails in steps that sank is raised over those."""


class _Cutter:
    def __init__(
        self, prepared: Normal, *, in_order: bool, sinks: bool, holds: bool = False
    ) -> None:
        self._plan = prepared.plan
        self._options = prepared.options
        self._in_order = in_order
        self._sinks = sinks
        self._holds = holds
        wish = prepared.options.deterministic
        self._free = frozenset[int]() if in_order else free_steps(prepared.plan, wish)
        self._leaves = units_of_leaves(prepared.plan)
        self._streams: list[_Stream] = []
        self._placed: list[Placed] = []
        #: A step pairs elements with numbers that they have in one process, and only there.
        self._needs_order = False

    def cut(self, half: Half) -> Cut | None:
        """Return the halves; None: they cannot be read in any order."""
        whole = self._closed(fold(self._plan, self._visit))
        is_one = isinstance(whole.units, Units)
        if not self._in_order and (self._needs_order or not is_one):
            return None
        below = fold(whole.units, self._as_stream)
        deal = deal_of(below)
        assert deal is not None
        ranges = ranges_of(whole.units, [size_of(stream.plan) for stream in self._streams])
        above = fold(whole.above, lambda node, inputs: self._as_units(node, inputs, ranges))
        return Cut(below, above, half, deal.size, self._options, tuple(self._placed))

    # --- what becomes of a step -----------------------------------------------------------------

    def _visit(self, node: Node, inputs: list[_Piece]) -> _Piece:
        if id(node) in self._leaves:
            self._place(node, "both", "the index part: arithmetic from seed and pass")
            return _Piece(leaf_part(node, self._leaves[id(node)]))
        if not inputs or (inputs[0].part is not None and inputs[0].part.plan is NOWHERE):
            return _Piece(Part(NOWHERE))
        parts = [piece.part for piece in inputs if piece.part is not None]
        if len(parts) == len(inputs):
            below = self._below(node, parts)
            if below is not None:
                return below
            self._needs_order |= isinstance(node, Enumerate) and parts[0].rows is not None
        return self._above(node, [self._closed(piece) for piece in inputs])

    def _below(self, node: Node, parts: list[Part]) -> _Piece | None:
        """Return a step that runs on workers with all below it, or None."""
        is_free = id(node) in self._free
        part = within_units(node, parts, is_free=is_free, in_order=self._in_order)
        if part is not None:
            self._place(node, "workers", "works within one unit")
            return _Piece(part)
        if self._in_order:
            if isinstance(node, Interleave) and parts[0].rows == 1:
                self._place(node, "both", "opened by workers, taken in turn by the client")
                # Turns are taken by the client: a worker reads what it opens one after the other.
                flat = node.with_parameters(
                    cycle_length=1, block_length=1, num_parallel_calls=None, deterministic=None
                )
                rooted = Root(input=flat.over([parts[0].plan]), location=node.location)
                stream = _Stream(rooted, node.cycle_length, node.block_length)
                piece = self._opened(stream)
                piece.is_direct = True
                return piece
            return None
        if isinstance(node, Batch) and node.drop_remainder:
            return self._batched_twice(node, parts)
        part = carried(node, parts)
        if part is not None:
            self._place(node, "workers", "carries the origins of its input")
            return _Piece(part)
        return None

    def _batched_twice(self, node: Batch, parts: list[Part]) -> _Piece:
        """Return batches of which the remainders of all workers are joined at the client."""
        self._place(node, "both", "remainders of several workers are joined by the client")
        short = carried(node.with_parameters(drop_remainder=False), parts)
        assert short is not None
        piece = self._closed(_Piece(short))
        rows = Unbatch(input=piece.above, location=node.location)
        return _Piece(above=node.over([rows]), units=piece.units)

    def _above(self, node: Node, inputs: list[_Piece]) -> _Piece:
        """Return a step over streams: it sinks into them, or the client runs it."""
        first = inputs[0]
        if self._sinks_into(node, first):
            for stream in first.streams:
                stream.sink(node, is_chosen=first.is_chosen)
            if self._holds and first.is_chosen and not first.raises_failed:
                first.above = RaiseFailed(input=first.above, location=node.location)
                first.raises_failed = True
            self._place(node, "workers", "sinks below the steps that the client runs")
            return first
        self._place(node, "client", self._why(node, first))
        keeps_units = isinstance(node, Repeat | Concatenate)
        piece = _Piece(
            above=node.over([one.above for one in inputs]),
            units=node.over([one.units for one in inputs]) if keeps_units else first.units,
        )
        passes_through = node.chooses or node.is_transparent or isinstance(node, Concatenate)
        # What fails is raised in one place: over all steps that choose, or below.
        raising = {one.raises_failed for one in inputs}
        passes_through &= len(raising) == 1 and not (node.chooses and first.raises_failed)
        if passes_through and all(one.streams for one in inputs):
            piece.streams = [stream for one in inputs for stream in one.streams]
            piece.is_chosen = node.chooses or any(one.is_chosen for one in inputs)
            piece.raises_failed = first.raises_failed
            piece.is_direct = node.is_transparent and first.is_direct
            piece.is_shuffled = isinstance(node, Shuffle) or any(one.is_shuffled for one in inputs)
        return piece

    def _sinks_into(self, node: Node, piece: _Piece) -> bool:
        if not piece.streams or not self._in_order:
            return False
        if isinstance(node, Map):
            return self._sinks or not piece.is_shuffled
        return isinstance(node, Filter) and piece.is_direct

    def _why(self, node: Node, piece: _Piece) -> str:
        if isinstance(node, Map) and piece.streams and piece.is_shuffled:
            return "what the shuffle below would hold of it at the client does not fit the bound"
        if isinstance(node, Repeat | Concatenate):
            return "says which units come when"
        if not self._in_order:
            return "needs the whole stream, or takes apart what is made of several units"
        return "needs the elements of several units in order"

    def _place(
        self, node: Node, where: Literal["workers", "client", "both"], why: str = ""
    ) -> None:
        self._placed.append(Placed(step_name(node), where, why))

    # --- streams --------------------------------------------------------------------------------

    def _closed(self, piece: _Piece) -> _Piece:
        """Return a piece of which all that may be below is in streams."""
        return piece if piece.part is None else self._opened(_Stream(piece.part.rooted))

    def _opened(self, stream: _Stream) -> _Piece:
        units = Units(size=0, stream=len(self._streams))
        self._streams.append(stream)
        return _Piece(above=units, units=units, streams=[stream])

    def _as_stream(self, node: Node, inputs: list[Node]) -> Node:
        return self._streams[node.stream].plan if isinstance(node, Units) else node.over(inputs)

    def _as_units(self, node: Node, inputs: list[Node], ranges: dict[int, UnitRange]) -> Node:
        if not isinstance(node, Units):
            return node.over(inputs)
        unit_positions, positions = positions_of(self._streams[node.stream].plan)
        stream, (size, offset, strides) = self._streams[node.stream], ranges[node.stream]
        return node.with_parameters(
            size=size,
            offset=offset,
            strides=strides,
            cycle_length=stream.cycle_length,
            block_length=stream.block_length,
            unit_positions=unit_positions,
            positions=positions,
            counts_rows=counts_rows(stream.plan),
            holds_failures=self._holds and stream.holds_failures,
            element_spec=element_spec(stream.plan),
            count=cardinality(stream.plan),
            location=stream.plan.location,
        )
