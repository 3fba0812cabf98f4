"""Options: how a plan is to be run, apart from what it says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.arguments import check_flag, check_int
from headrace.plan.node import Node

__all__ = ["Options", "WithOptions"]


@dataclass
class Options:
    """How to run a dataset. Attributes may be set one by one, as in tf.data.

    Attributes:
        deterministic: False lets parallel stages yield elements in the order in which they are
            ready. None (default) is True.
        seed: Seed of every random step that has none of its own. None draws one per iteration.
    """

    deterministic: bool | None = None
    seed: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "deterministic":
            check_flag(name, value)
        if name == "seed" and value is not None:
            value = check_int("seed", value, minimum=-(1 << 63))
        if name not in self.__dataclass_fields__:
            known = ", ".join(sorted(self.__dataclass_fields__))
            raise AttributeError(f"Options has no attribute {name!r}; it has: {known}")
        super().__setattr__(name, value)

    def merged_with(self, later: Options) -> Options:
        """Return these options, overridden by what `later` sets."""
        changes = {k: v for k, v in dataclasses.asdict(later).items() if v is not None}
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WithOptions(Node):
    """The same elements; `options` hold for the whole plan, over what was set before."""

    kind: ClassVar[str] = "options"
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    keeps_count: ClassVar[bool] = True

    input: Node
    options: Options

    def __post_init__(self) -> None:
        if not isinstance(self.options, Options):
            raise TypeError(f"`options` must be headrace.Options, but got {self.options!r}")
        # A copy of its own: the user may go on changing theirs.
        object.__setattr__(self, "options", dataclasses.replace(self.options))
