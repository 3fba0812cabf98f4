"""What the iterators of one plan share: chance, options, and where splits come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headrace.plan.options import Options

__all__ = ["Context", "SplitProvider"]


class SplitProvider(Protocol):
    """Deals out the sources of a plan, part by part."""

    def next_split(self, source: int, repetition: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the next range of indices (start, stop) of a source, or None: no more of it.

        Args:
            source: The source's number in `plan.splits` order.
            repetition: Which pass over the source this is; a later pass is a larger tuple.
        """


@dataclass(frozen=True, kw_only=True)
class Context:
    """The circumstances in which a node's iterator is made."""

    seed: int
    """What random steps without a seed of their own draw from."""
    epoch: tuple[int, ...] = (0,)
    """Which pass this is: the user's iteration, then that of each `repeat` around the node."""
    path: tuple[int, ...] = ()
    """The node's place in the plan: tells one random step from another."""
    options: Options = field(default_factory=Options)
    splits: SplitProvider | None = None
    """None: every source is read whole."""
    source_numbers: Mapping[int, int] = field(default_factory=dict)
    """`id` of a source node -> its number; a source that is not here is read whole."""
    parallelism: int = 2
    """Threads that AUTOTUNE stands for."""

    def below(self, place: int) -> Context:
        """Return the context of a node's input number `place`."""
        return dataclasses.replace(self, path=(*self.path, place))

    def in_pass(self, number: int) -> Context:
        """Return the context of pass `number` within this one."""
        return dataclasses.replace(self, epoch=(*self.epoch, number))

    def first_pass(self, seed: int) -> Context:
        """Return the context of the same place in the very first pass of a run with `seed`."""
        return dataclasses.replace(self, seed=seed, epoch=(0,) * len(self.epoch))

    def with_options(self, options: Options) -> Context:
        """Return the context with `options` laid over its own."""
        merged = self.options.merged_with(options)
        seed = self.seed if options.seed is None else options.seed
        return dataclasses.replace(self, options=merged, seed=seed)

    def is_ordered(self, deterministic: bool | None) -> bool:
        """Say whether a parallel stage must keep its input's order."""
        wish = self.options.deterministic if deterministic is None else deterministic
        return wish is not False

    def threads(self, calls: int) -> int:
        """Return the number of threads that `num_parallel_calls` asks for."""
        return self.parallelism if calls < 0 else calls
