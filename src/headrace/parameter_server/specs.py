"""What operations speak of: shards, tables, first values, who writes, rules of optimizers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np

from headrace.distribute.scattering import is_floating
from headrace.element.description import decode_dtype
from headrace.serving.call import Message

__all__ = [
    "AdadeltaRule",
    "AdagradRule",
    "AdamRule",
    "AdamaxRule",
    "Constant",
    "FtrlRule",
    "Initializer",
    "LionRule",
    "NadamRule",
    "Normal",
    "OptimizerRule",
    "RMSpropRule",
    "RowWiseAdagradRule",
    "SgdRule",
    "ShardSpec",
    "StepParameters",
    "TableSpec",
    "Uniform",
    "WriteKey",
    "Zeros",
    "adding_dtype",
    "as_dtype",
    "fill_array",
    "name_of",
    "parse_dtype",
    "working_dtype",
]


# --- what is kept ------------------------------------------------------------------------------


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a variable: a run of its rows, or all of it.

    Attributes:
        name: Of the shard; no other in the cluster has it ("weights/part_0").
        variable: Name of the variable.
        index: Which shard of the variable it is.
        row: The first row of the variable that it holds.
        shape: Of the shard.
        dtype: As `mode_name` writes it ("float32", "bfloat16").
        variable_shape: Of the whole variable.
    """

    name: str
    variable: str
    index: int = 0
    row: int = 0
    shape: tuple[int, ...]
    dtype: str
    variable_shape: tuple[int, ...]


class Zeros(Message, frozen=True):
    """Every element is 0.

    >>> hr.initializers.Zeros()
    Zeros()
    """


class Constant(Message, frozen=True):
    """Every element is `value`.

    >>> hr.initializers.Constant(0.5)
    Constant(value=0.5)
    """

    value: float


class Uniform(Message, frozen=True):
    """Elements are spread evenly over [low, high), each by its row and column alone.

    >>> hr.initializers.Uniform(-0.1, 0.1)
    Uniform(low=-0.1, high=0.1, seed=0)
    """

    low: float = -0.05
    high: float = 0.05
    seed: int = 0


class Normal(Message, frozen=True):
    """Elements are normally distributed, each by its row and column alone.

    >>> hr.initializers.Normal(stddev=0.01, seed=3)
    Normal(mean=0.0, stddev=0.01, seed=3)
    """

    mean: float = 0.0
    stddev: float = 0.05
    seed: int = 0


Initializer: TypeAlias = Zeros | Constant | Uniform | Normal
"""First values, the same whatever the order of arrival and the number of shards."""


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a table: rows of those ids that fall to it (`gradients.shard_of_ids`).

    Attributes:
        name: Of the shard; no other in the cluster has it.
        table: Name of the table.
        index: Which shard of the table it is.
        shards: How many there are.
        dim: Elements in a row.
        dtype: As `mode_name` writes it; a floating one.
        initializer: First value of a row.
        admission: An id gets a row when it was looked up this often; before, it reads zeros and
            its gradients are dropped. 1: at once.
        evict_after: A row that was not touched for so many steps is dropped with its slots. None:
            never.
        capacity: The shard holds at most so many rows; those touched longest ago go first. None: no
            bound.
    """

    name: str
    table: str
    index: int = 0
    shards: int = 1
    dim: int
    dtype: str = "float32"
    initializer: Initializer = Uniform()
    admission: int = 1
    evict_after: int | None = None
    capacity: int | None = None


# --- who writes --------------------------------------------------------------------------------


class WriteKey(msgspec.Struct, frozen=True, kw_only=True):
    """Which write of which closure this is; a shard carries it out once.

    Another attempt at the closure writes with the same keys but for `worker_session`.

    Attributes:
        coordinator_term: Of the coordinator; one that starts again has a higher one.
        closure: Number of the closure.
        worker_session: Number that the coordinator gave this worker when it greeted it. A worker
            that was lost and returns gets another: a fence keeps out a number for ever.
        number: Counts the writes of this closure to this shard, table or counter, from 0.
    """

    coordinator_term: int
    closure: int
    worker_session: int
    number: int


class StepParameters(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an optimizer.

    Attributes:
        iteration: Steps that were taken before this one: `Counted.before` of `iterations`.
        learning_rate: For this step; a schedule has been evaluated.
    """

    iteration: int
    learning_rate: float


# --- how optimizers change a shard ---------------------------------------------------------------


class _Rule(Message, frozen=True, kw_only=True, repr_omit_defaults=True):
    """What all rules have.

    Attributes:
        weight_decay: Fraction of a value that each step takes off, times the learning rate.
        ema_momentum: How much of the running average of values a step keeps. None: no average.
        ema_overwrite_frequency: Every so many steps the average becomes the value. None: never.
    """

    weight_decay: float | None = None
    ema_momentum: float | None = None
    ema_overwrite_frequency: int | None = None


class SgdRule(_Rule, frozen=True, kw_only=True):
    """Gradient descent, with momentum."""

    momentum: float = 0.0
    nesterov: bool = False


class AdagradRule(_Rule, frozen=True, kw_only=True):
    """Adagrad: steps shrink by the gradients' squares so far."""

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7


class RowWiseAdagradRule(_Rule, frozen=True, kw_only=True):
    """Adagrad with one accumulator a row: the mean of the row's squares."""

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7


class AdadeltaRule(_Rule, frozen=True, kw_only=True):
    """Adadelta: steps are scaled by the running root mean square of earlier steps."""

    rho: float = 0.95
    epsilon: float = 1e-7


class RMSpropRule(_Rule, frozen=True, kw_only=True):
    """RMSprop: steps are divided by a running root mean square."""

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False


class AdamRule(_Rule, frozen=True, kw_only=True):
    """Adam, and AdamW: the decay of weights is apart from the gradient in both."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False


class AdamaxRule(_Rule, frozen=True, kw_only=True):
    """Adamax: Adam with a decaying maximum of gradients in place of the mean square."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


class NadamRule(_Rule, frozen=True, kw_only=True):
    """Nadam: Adam with Nesterov momentum."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


class LionRule(_Rule, frozen=True, kw_only=True):
    """Lion: steps of equal size, by the sign of a running average of gradients."""

    beta_1: float = 0.9
    beta_2: float = 0.99


class FtrlRule(_Rule, frozen=True, kw_only=True):
    """Follow the regularized leader."""

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0


OptimizerRule: TypeAlias = (
    SgdRule
    | AdagradRule
    | RowWiseAdagradRule
    | AdadeltaRule
    | RMSpropRule
    | AdamRule
    | AdamaxRule
    | NadamRule
    | LionRule
    | FtrlRule
)
"""What changes a shard and its slots. Clipping is not here: the client has the whole gradient."""


# --- names of dtypes, as specs carry them: "float32", "bool", "bfloat16" --------------------------

_NUMPY_DTYPE_NAMES = {
    np.dtype(kind).name
    for kind in (*np.typecodes["AllInteger"], *np.typecodes["Float"], *np.typecodes["Complex"], "?")
}


def fill_array(shape: tuple[int, ...], first: float, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array full of one number; zeros take no memory or time until they are touched."""
    return np.full(shape, first, dtype) if first else np.zeros(shape, dtype)


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype that a user gave: a type, a dtype or a name, such as "bfloat16".

    Raises:
        TypeError: It is none.
    """
    try:
        found: np.dtype[Any] = np.dtype(dtype)
        return found
    except TypeError:
        if not isinstance(dtype, str):
            raise
    try:
        return parse_dtype(dtype)
    except ValueError:
        raise TypeError(f"`dtype` must be the name of a dtype, but got {dtype!r}") from None


def name_of(dtype: Any) -> str:
    """Return the name of a dtype that a variable can have.

    Raises:
        TypeError: No variable can: strings, objects, records.
    """
    return _name_of(dtype if isinstance(dtype, np.dtype) else as_dtype(dtype))


@lru_cache(256)  # NumPy puts a name together each time, and each array that is sent has one
def _name_of(found: np.dtype[Any]) -> str:
    name: str = found.name
    # Those that another package has registered (ml_dtypes) are "built in" with number 2.
    if name not in _NUMPY_DTYPE_NAMES and found.isbuiltin != 2:
        raise TypeError(
            f"a variable on parameter servers holds numbers or bools, but got dtype {found}"
        )
    return name


@lru_cache(256)
def parse_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    Raises:
        ValueError: There is none.
        FailedPreconditionError: It needs a package that is not installed here.
    """
    return np.dtype(name) if name in _NUMPY_DTYPE_NAMES else decode_dtype(name)


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that a rule computes in, and that slots have.

    Numbers of less than 32 bits are stored as they are and changed in float32: with the 8 bits of
    bfloat16, small steps and running averages would be lost by rounding.
    """
    return dtype if dtype.isbuiltin == 1 and dtype.itemsize >= 4 else np.dtype(np.float32)


def adding_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that numbers are added in: floats of less than 32 bits in float32."""
    return working_dtype(dtype) if is_floating(dtype) else dtype
