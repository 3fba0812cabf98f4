"""Records used by operations: shards, tables, initializers, write keys, and optimizer rules."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np

from headrace.distribute.row_access import is_floating
from headrace.element.description import decode_dtype
from headrace.serving.rpc import Message

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


# --- contents -------------------------------------------------------------------------------------


class ShardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a variable: consecutive rows, or all of it.

    Attributes:
        name: Name of the shard, unique in the cluster ("weights/part_0").
        variable: Name of the variable.
        index: Index of the shard in the variable.
        row: First row of the variable in the shard.
        shape: Shape of the shard.
        dtype: Name of the dtype, as returned by `name_of` ("float32", "bfloat16").
        variable_shape: Shape of the whole variable.
    """

    name: str
    variable: str
    index: int = 0
    row: int = 0
    shape: tuple[int, ...]
    dtype: str
    variable_shape: tuple[int, ...]


class Zeros(Message, frozen=True):
    """Sets every element to 0.

    >>> hr.initializers.Zeros()
    Zeros()
    """


class Constant(Message, frozen=True):
    """Sets every element to `value`.

    >>> hr.initializers.Constant(0.5)
    Constant(value=0.5)
    """

    value: float


class Uniform(Message, frozen=True):
    """Draws elements uniformly from [low, high), each determined by its row, column and the seed.

    >>> hr.initializers.Uniform(-0.1, 0.1)
    Uniform(low=-0.1, high=0.1, seed=0)

    Attributes:
        low: Lower limit.
        high: Upper limit, which is never drawn.
        seed: Seed of the values.
    """

    low: float = -0.05
    high: float = 0.05
    seed: int = 0


class Normal(Message, frozen=True):
    """Draws elements from a normal distribution, each determined by its row, column and the seed.

    >>> hr.initializers.Normal(stddev=0.01, seed=3)
    Normal(mean=0.0, stddev=0.01, seed=3)

    Attributes:
        mean: Mean of the distribution.
        stddev: Standard deviation.
        seed: Seed of the values.
    """

    mean: float = 0.0
    stddev: float = 0.05
    seed: int = 0


Initializer: TypeAlias = Zeros | Constant | Uniform | Normal
"""Initial values, independent of the order of requests and the number of shards."""


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a table: rows of the ids assigned to it (`gradients.assign_shards`).

    Attributes:
        name: Name of the shard, unique in the cluster.
        table: Name of the table.
        index: Index of the shard in the table.
        shards: Number of shards of the table.
        dim: Number of elements in a row.
        dtype: Name of the floating dtype, as returned by `name_of`.
        initializer: Initial value of a row.
        admission: Number of look-ups after which an id gets a row; before, it reads zeros and its
            gradients are dropped. 1 admits it at once.
        evict_after: Number of steps after which an unused row is evicted with its slots. None
            disables this.
        capacity: Largest number of rows in the shard; the least recently used are evicted first.
            None means unlimited.
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


# --- identity of writes ---------------------------------------------------------------------------


class WriteKey(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a write of a closure; a shard applies it once.

    Another run of the closure writes with the same keys, except for `worker_session`.

    Attributes:
        coordinator_term: Term of the coordinator; a restarted one has a higher term.
        closure: Number of the closure.
        worker_session: Number that the coordinator gave the worker's session. A worker that was
            lost and returns gets another one, as a fence on a number is permanent.
        number: Number of the closure's write to this shard, table or counter, from 0.
    """

    coordinator_term: int
    closure: int
    worker_session: int
    number: int


class StepParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one optimizer step.

    Attributes:
        iteration: Number of earlier steps: `Counted.before` of the step counter.
        learning_rate: Learning rate of this step; a schedule has been evaluated.
    """

    iteration: int
    learning_rate: float


# --- optimizer rules ------------------------------------------------------------------------------


class _Rule(Message, frozen=True, kw_only=True, repr_omit_defaults=True):
    """Base of all rules.

    Attributes:
        weight_decay: Fraction of a value that each step subtracts, times the learning rate.
        ema_momentum: Fraction of the moving average of the values that a step keeps. None disables
            the average.
        ema_overwrite_frequency: Interval, in steps, at which the values are set to the average.
            None never does so.
    """

    weight_decay: float | None = None
    ema_momentum: float | None = None
    ema_overwrite_frequency: int | None = None


class SgdRule(_Rule, frozen=True, kw_only=True):
    """Gradient descent, with momentum."""

    momentum: float = 0.0
    nesterov: bool = False


class AdagradRule(_Rule, frozen=True, kw_only=True):
    """Adagrad: steps shrink with the sum of the squared gradients."""

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7


class RowWiseAdagradRule(_Rule, frozen=True, kw_only=True):
    """Adagrad with one accumulator per row, for the mean of the row's squares."""

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7


class AdadeltaRule(_Rule, frozen=True, kw_only=True):
    """Adadelta: steps are scaled by the running root mean square of earlier steps."""

    rho: float = 0.95
    epsilon: float = 1e-7


class RMSpropRule(_Rule, frozen=True, kw_only=True):
    """RMSprop: steps are divided by the running root mean square of the gradients."""

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False


class AdamRule(_Rule, frozen=True, kw_only=True):
    """Adam and AdamW: weight decay is decoupled from the gradient in both."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False


class AdamaxRule(_Rule, frozen=True, kw_only=True):
    """Adamax: Adam with a decaying maximum of the gradients instead of the mean square."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


class NadamRule(_Rule, frozen=True, kw_only=True):
    """Nadam: Adam with Nesterov momentum."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


class LionRule(_Rule, frozen=True, kw_only=True):
    """Lion: steps of equal size, with the sign of a running average of the gradients."""

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
"""Rule by which a shard and its slots are updated. Clipping is done by the client, which has the
whole gradient.
"""


# --- names of dtypes in specs: "float32", "bool", "bfloat16" --------------------------------------

_NUMPY_DTYPE_NAMES = {
    np.dtype(kind).name
    for kind in (*np.typecodes["AllInteger"], *np.typecodes["Float"], *np.typecodes["Complex"], "?")
}


def fill_array(shape: tuple[int, ...], first: float, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array filled with one number; zeros take no memory until they are accessed."""
    return np.full(shape, first, dtype) if first else np.zeros(shape, dtype)


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return a dtype given by the user: a type, a dtype or a name, such as "bfloat16".

    Raises:
        TypeError: If it is not a dtype.
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
        TypeError: If it is not numeric or bool, such as strings, objects or records.
    """
    return _name_of(dtype if isinstance(dtype, np.dtype) else as_dtype(dtype))


@lru_cache(256)  # NumPy builds the name each time, and each sent array needs it
def _name_of(found: np.dtype[Any]) -> str:
    name: str = found.name
    # Dtypes registered by another package (ml_dtypes) have the `isbuiltin` number 2.
    if name not in _NUMPY_DTYPE_NAMES and found.isbuiltin != 2:
        raise TypeError(
            f"a variable on parameter servers holds numbers or bools, but got dtype {found}"
        )
    return name


@lru_cache(256)
def parse_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    Raises:
        ValueError: If the name is unknown.
        FailedPreconditionError: If it needs a package that is not installed.
    """
    return np.dtype(name) if name in _NUMPY_DTYPE_NAMES else decode_dtype(name)


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a rule's computations and slots.

    Values of less than 32 bits are stored as they are and updated in float32: with the 8 bits of
    bfloat16, small steps and running averages would be lost by rounding.
    """
    return dtype if dtype.isbuiltin == 1 and dtype.itemsize >= 4 else np.dtype(np.float32)


def adding_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers are added: floats of less than 32 bits in float32."""
    return working_dtype(dtype) if is_floating(dtype) else dtype
