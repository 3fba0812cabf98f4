"""Options that control how a plan runs."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.arguments import check_flag, check_int
from headrace.plan.node import Node

__all__ = ["AutoShardPolicy", "Options", "WithOptions"]

_USE_PARALLEL_CALLS = "num_parallel_calls of map() and interleave()"
_ALWAYS_REWRITTEN = "none: plans are always rewritten; Dataset.explain() shows the result"
_NOT_NEEDED = "none: remove the option"
#: Options of tf.data, current and deprecated, and their replacements here.
_REPLACEMENTS = {
    "autotune": "AUTOTUNE as the argument of a step",
    "dataset_name": _NOT_NEEDED,
    "experimental_deterministic": "deterministic",
    "experimental_external_state_policy": _NOT_NEEDED,
    "experimental_optimization": _ALWAYS_REWRITTEN,
    "experimental_service": "the arguments of hr.service.distribute",
    "experimental_slack": "Dataset.prefetch()",
    "experimental_stats": _NOT_NEEDED,
    "experimental_symbolic_checkpoint": "none: DatasetIterator.get_state() is always small",
    "experimental_threading": _USE_PARALLEL_CALLS,
    "experimental_warm_start": "Dataset.prefetch()",
    "framework_type": _NOT_NEEDED,
    "merge": "Dataset.with_options(); later options take precedence",
    "service": "the arguments of hr.service.distribute",
    "threading": _USE_PARALLEL_CALLS,
}


class AutoShardPolicy(enum.Enum):
    """How the workers of a strategy divide a dataset among them.

    A single worker always reads all of it.

    >>> options = hr.Options(auto_shard_policy=hr.distribute.AutoShardPolicy.DATA)
    >>> hr.Dataset.range(8).with_options(options).options().auto_shard_policy.name
    'DATA'
    """

    OFF = -1
    """No sharding: each worker reads all of it."""
    AUTO = 0
    """FILE if the dataset is read from files, else DATA."""
    FILE = 1
    """Each worker reads its own files."""
    DATA = 2
    """Each worker reads everything, and uses its replicas' part of each batch."""
    HINT = 3
    """Sharding as written in the dataset: `shard(SHARD_HINT, ...)` becomes the worker's shard."""


@dataclass
class Options:
    """How to run a dataset. Attributes may be set one by one, as in tf.data.

    >>> options = hr.Options(seed=7)
    >>> options.deterministic = False
    >>> hr.Dataset.range(3).with_options(options).options()
    Options(deterministic=False, seed=7, auto_shard_policy=None)

    Attributes:
        deterministic: False lets parallel steps yield elements in the order in which they are
            ready. None (default) is True.
        seed: Seed of every random step that has none of its own. None draws one per iteration.
        auto_shard_policy: How workers of a strategy share the dataset. None is AUTO.
    """

    deterministic: bool | None = None
    seed: int | None = None
    auto_shard_policy: AutoShardPolicy | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "deterministic":
            check_flag(name, value)
        if name == "seed" and value is not None:
            value = check_int("seed", value, minimum=-(1 << 63))
        if name == "auto_shard_policy" and not isinstance(value, AutoShardPolicy | None):
            raise TypeError(
                f"`auto_shard_policy` must be a hr.distribute.AutoShardPolicy, but got {value!r}"
            )
        if name not in self.__dataclass_fields__:
            raise AttributeError(_reject_option(name), name=name, obj=self)
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # else type checkers accept every name as an option

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(_reject_option(name), name=name, obj=self)

    @property
    def experimental_distribute(self) -> Options:
        """These options, for tf.data's name `options.experimental_distribute.auto_shard_policy`."""
        return self

    def merged_with(self, later: Options) -> Options:
        """Return these options, overridden by what `later` sets."""
        changes = {k: v for k, v in dataclasses.asdict(later).items() if v is not None}
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WithOptions(Node):
    """The same elements; `options` apply to the whole plan and override earlier ones."""

    kind: ClassVar[str] = "options"
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True

    input: Node
    options: Options

    def __post_init__(self) -> None:
        if not isinstance(self.options, Options):
            raise TypeError(f"`options` must be headrace.Options, but got {self.options!r}")
        # Copied, because the user may change the original.
        object.__setattr__(self, "options", dataclasses.replace(self.options))


def _reject_option(name: str) -> str:
    if name in _REPLACEMENTS:
        return f"Options has no attribute {name!r}; use instead: {_REPLACEMENTS[name]}"
    known = ", ".join(sorted(each.name for each in dataclasses.fields(Options)))
    return f"Options has no attribute {name!r}; it has: {known}"
