"""What the iterators of one plan share: chance, options, and where units come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.execution.dealer import Dealer
from headrace.execution.iteration import Iteration
from headrace.execution.unit_source import UnitSource
from headrace.plan.node import Node
from headrace.plan.options import Options
from headrace.plan.source import Source

__all__ = ["Context"]


def _as_it_is(node: Node, iterator: Any) -> Any:
    return iterator


@dataclass(frozen=True, kw_only=True)
class Context:
    """The circumstances in which a node's iterator is made."""

    build: Callable[[Node, Context], Any]
    """Makes the iterator of a dataset that a user's function returned, from its plan as written,
    in the context that `nested` gives."""
    watch: Callable[[Node, Any], Any] = field(default=_as_it_is)
    """Returns what stands in the place of a node's iterator (`watch_point`)."""
    seed: int
    """What random steps without a seed of their own draw from."""
    passes: tuple[int, ...] = (0,)
    """Which pass this is: the user's iteration, then that of each `repeat` around the node; in a
    nested dataset also the number of the outer element's place."""
    repetitions: tuple[int, ...] = ()
    """The numbers in `passes` that are those of a `repeat`."""
    job_passes: tuple[int, ...] | None = None
    """`passes` as shared jobs know them; None: the same. A cache makes its first pass in each, but
    a job's iteration can be read only once."""
    iteration: Iteration = field(default_factory=Iteration)
    """Numbers what datasets that functions return read of shared jobs."""
    outer_passes: int = 0
    """How many of `passes` a nested dataset was opened with; those of its own repeats follow."""
    outer: tuple[int, ...] = ()
    """Numbers of the steps that opened this dataset, outermost first; () for the plan itself."""
    places: tuple[int, ...] = ()
    """Numbers of the places of the outer elements that it was opened for, outermost first."""
    wants_places: bool = False
    """Whether chunks are to carry the numbers of their elements' places (`places`): a step above
    opens datasets for the elements."""
    names_units: bool = False
    """Whether places are to say which dealt unit they are of: a root above counts them."""
    options: Options = field(default_factory=Options)
    """The options of the whole plan."""
    free: frozenset[int] = frozenset()
    """`id` of each step that yields elements as they are ready (`plan.determinism`)."""
    dealer: Dealer | None = None
    """Deals units of the plan to its leaves; None: they are read whole."""
    unit_source: UnitSource | None = None
    """Where elements come from that the other half of the plan makes."""
    units_have_places: bool = False
    """Whether what comes from there has places, for some step opens datasets for it."""
    lending: frozenset[int] = frozenset()
    """`id` of each step that may lend what it keeps: its elements are only read
    (`plan.traverse`)."""
    parts_passes: bool = False
    """Whether a chunk of numbers that are repeated ends with a pass: rows in order are lent."""
    leaves: Mapping[int, int] = field(default_factory=dict)
    """`id` of a leaf node -> its number in the deal."""
    cache_seeds: dict[Any, int] = field(default_factory=dict)
    """Key of a cache -> the seed of the elements that it has in this iteration, once decided: in
    all passes the same."""
    fills_cache: bool = False
    """Whether a cache is filled: caches below have the elements of this context's seed, too."""
    contain_exits: bool = False
    """Whether KeyboardInterrupt, SystemExit and the like from a user's function become a
    UserFunctionError."""
    parallelism: int = 2
    """Threads that AUTOTUNE stands for."""

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at what passes, so that each step is to have an iterator."""
        return self.watch is not _as_it_is

    def in_pass(self, number: int) -> Context:
        """Return the context of pass `number` within this one."""
        job_passes = None if self.job_passes is None else (*self.job_passes, number)
        return self._with(
            passes=(*self.passes, number),
            repetitions=(*self.repetitions, number),
            job_passes=job_passes,
        )

    def in_first_pass(self) -> Context:
        """Return the context of the first pass, whichever this is; shared jobs go on."""
        return self._with(passes=(0,) * len(self.passes), job_passes=self.job_passes or self.passes)

    def pass_over(self, source: Source) -> tuple[int, ...]:
        """Return the pass number that a source is to be opened with.

        Readers of one shared job agree on it wherever they stand in a plan: so the place of the
        outer element, which tells nested datasets apart, is no part of it there.
        """
        if source.counter is None:
            return self.passes
        first, *repetitions = self.job_passes or self.passes
        if not self.outer:
            return (first + source.occurrence, *repetitions)
        opened_at = (*self.passes[: self.outer_passes], source.occurrence)
        return (self.iteration.nested(source.counter, opened_at, first), *self.repetitions)

    def with_places(self, wanted: bool) -> Context:
        """Return the context in which chunks carry the places of their elements, or do not."""
        if wanted == self.wants_places:
            return self
        return self._with(wants_places=wanted)

    def with_passes_apart(self) -> Context:
        """Return the context in which chunks of numbers end with their pass."""
        return self._with(parts_passes=True)

    def nested(self, step: int, place: int) -> Context:
        """Return the context of a dataset that step number `step` opens for the element there."""
        return self._with(
            passes=(*self.passes, place),
            outer_passes=len(self.passes) + 1,
            outer=(*self.outer, step),
            places=(*self.places, place),
            free=_NONE,
            lending=_NONE,
            dealer=None,
            names_units=False,
            unit_source=None,
            leaves={},
            cache_seeds={},
        )

    def _with(self, **changes: Any) -> Context:
        # Without the checks of `replace`: there may be a pass, or a dataset, for each element.
        context = object.__new__(Context)
        context.__dict__.update(self.__dict__, **changes)
        return context

    def entropy(self, number: int | None) -> list[int]:
        """Return what step `number` of this dataset draws from, if it has no seed of its own."""
        path = (*self.outer, number or 0)
        return [2, self.seed & _MASK, len(path), *path, *self.passes]

    def iteration_entropy(self, number: int) -> list[int]:
        """Return what number `number` draws from, if it draws the same in all repetitions."""
        path = (*self.outer, number)
        passes = self.passes[: max(self.outer_passes, 1)]
        return [4, self.seed & _MASK, len(path), *path, *passes]

    def fixed_entropy(self, number: int | None, drawn_seed: int | None) -> list[int]:
        """Return what step `number` draws from, if it is to draw the same in each pass.

        Args:
            number: Of a step without a seed of its own.
            drawn_seed: What was drawn for it when it was made. A nested dataset is made for each
                outer element, so there the place of that element decides.
        """
        if not self.outer and drawn_seed is not None:
            return [3, drawn_seed & _MASK]
        path = (*self.outer, number or 0)
        return [3, self.seed & _MASK, len(path), *path, *self.places]

    def threads(self, calls: int) -> int:
        """Return the number of threads that `num_parallel_calls` asks for."""
        return self.parallelism if calls < 0 else calls


_NONE: frozenset[int] = frozenset()
_MASK = (1 << 64) - 1
