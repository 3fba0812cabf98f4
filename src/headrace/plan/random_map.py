"""The steps of `random_map`: a random word for each element, and a map with a generator of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from headrace.arguments import check_callable
from headrace.element.spec import ArraySpec, Spec
from headrace.plan.elementwise import Map
from headrace.plan.node import Node, describe_function

__all__ = ["DrawRandomWords", "RandomMap"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DrawRandomWords(Node):
    """Pair each element with a random 64-bit word: `(element, word)`.

    The word follows from the seed, the epoch and the element number. It does not depend on the
    order of the elements, or on the process that reads them.
    """

    kind: ClassVar[str] = "random_words"
    is_random: ClassVar[bool] = True
    uses_element_numbers: ClassVar[bool] = True
    is_split_local: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True

    input: Node
    seed: int | None = None
    repeats_above: int = field(default=0, metadata={"is_parameter": False})
    """Number of `repeat` steps that follow it here but precede it in the plan as written, which
    determines the random words. Set by `rewrites.partition`."""

    def __post_init__(self) -> None:
        if self.seed is not None:
            self.validate_int("seed", minimum=-(1 << 63))

    def spec(self, *inputs: Spec) -> Spec | None:
        return (inputs[0], ArraySpec((), np.uint64))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RandomMap(Map):
    """Replace each pair of an element and a random word by `fn(element, rng)`."""

    kind: ClassVar[str] = "random_map"

    def __post_init__(self) -> None:
        check_callable("fn", self.fn)
        self.validate_parallelism(self.num_parallel_calls, self.deterministic)
        if not _takes_two_arguments(self.fn):
            raise TypeError(
                f"`fn` must take the element and a generator, as in `lambda x, rng: ...`, "
                f"but {describe_function(self.fn)} takes fewer than two arguments"
            )


def _takes_two_arguments(fn: Callable[..., Any]) -> bool:
    """Return whether a function takes at least two positional arguments, or if it is unknown."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return (
        any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
        or sum(each.kind in positional for each in parameters) >= 2
    )
