"""`hr.keras.Embedding`: a layer with a row for any id, kept in a table on parameter servers.

`keras.layers.Embedding` with a large matrix, made in the scope of a `ParameterServerStrategy`, gets
such a table, too. Servers make a row when a step looks it up first, and the matrix exists in no
process. A layer is large from `LARGE_BYTES` on, and only if servers can make its first values and
nothing needs all of its rows.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import keras
import msgspec
import numpy as np

from headrace.adapters.keras_training.embedding_internals import (
    has_table,
    look_up_rows,
    table_variable,
)
from headrace.adapters.keras_training.embedding_tables import ServerTable, load_table, save_table
from headrace.adapters.keras_training.keras_internals import all_layers, set_strategy, strategy_of
from headrace.arguments import check_int
from headrace.distribute.bag_combiner import COMBINERS, Combiner
from headrace.distribute.current_strategy import get_strategy
from headrace.errors import FailedPreconditionError
from headrace.parameter_server import initializers
from headrace.parameter_server.strategy import ParameterServerStrategy
from headrace.parameter_server.table import EmbeddingTable

__all__ = [
    "LARGE_BYTES",
    "Embedding",
    "check_combiner",
    "config_of_initializer",
    "install",
    "output_shape",
    "parameter_server_strategy",
    "server_initializer",
    "use_tables",
]

_INITIALIZERS = {
    name: getattr(initializers, name) for name in ("Constant", "Normal", "Uniform", "Zeros")
}


@keras.saving.register_keras_serializable(package="headrace")
class Embedding(keras.layers.Layer):  # type: ignore[misc]
    """Turns integer ids into rows of a table on parameter servers, without a vocabulary.

        with strategy.scope():
            model = keras.Sequential([
                keras.Input((8,), dtype="int64"),
                hr.keras.Embedding(16, name="users", combiner="mean"),
                keras.layers.Dense(1),
            ])

    Any int64 is an id. Its row is made when a training step looks it up; evaluation and prediction
    read zeros for ids without a row, and make none. Only the rows of a batch travel, and the
    optimizer of the model trains them. The layer works in `fit`, `evaluate` and `predict` of a
    model of a `ParameterServerStrategy`. Ids that need 64 bits need an input of dtype int64.

    >>> import keras
    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         layer = hr.keras.Embedding(4, name="users", combiner="sum")
    ...         model = keras.Sequential([keras.Input((8,), dtype="int64"), layer])
    ...     strategy.close()
    >>> model.output_shape
    (None, 4)

    Args:
        output_dim: Elements in a row.
        name: Name of the layer and its table.
        initializer: First values of a row: "uniform" (-0.05 to 0.05), "normal", "zeros", a number,
            one of `hr.initializers`, or an initializer of Keras of one of these kinds.
        seed: Other seeds have other first values; for the names "uniform" and "normal".
        combiner: Combines the rows of ids along the last axis: "sum", "mean", or "sqrtn", the sum
            divided by the square root of their number. None returns a row for each id.
        mask_zero: Id 0 is padding: later layers get a mask, or with a combiner, it does not count.
        dtype: A dtype or dtype policy of Keras.
        admission: An id gets its row in the training step that is the n-th to look it up; until
            then it reads zeros. None: in the first one.
        evict_after: Number of steps after which an unused row is removed. None keeps all rows.
        capacity: Maximum number of rows; the ones unused for longest are removed. None: no bound.

    Call arguments:
        inputs: Integer tensor of ids, of any shape; with a combiner, of at least one dimension
            beside the batch.
        weights: Weight of each id, of the shape of `inputs`; for a layer with a combiner. "mean"
            divides by the sum of weights, "sqrtn" by the square root of the sum of their squares.
    """

    #: Number of ids; None: all of int64.
    input_dim: int | None = None
    built: bool

    def __init__(
        self,
        output_dim: int,
        *,
        name: str | None = None,
        initializer: Any = "uniform",
        seed: int = 0,
        combiner: Combiner | None = None,
        mask_zero: bool = False,
        dtype: Any = None,
        admission: int | None = None,
        evict_after: int | None = None,
        capacity: int | None = None,
        **keras_arguments: Any,
    ) -> None:
        check_int("output_dim", output_dim, minimum=1)
        check_combiner(combiner)
        super().__init__(name=name, dtype=dtype, autocast=False, **keras_arguments)
        self.output_dim = int(output_dim)
        self.initializer = _from_config(initializer)
        self.seed = seed
        self.combiner = combiner
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero and combiner is None
        self.admission = admission
        self.evict_after = evict_after
        self.capacity = capacity
        self._settings = {
            "initializer": server_initializer(self.initializer, self.name),
            "seed": seed,
            "dtype": self.variable_dtype,
            "admission": admission,
            "evict_after": evict_after,
            "capacity": capacity,
        }
        set_strategy(self, parameter_server_strategy())

    def build(self, input_shape: Any = None) -> None:
        """Make the variable that stands for the rows; it has none."""
        if self.built:
            return
        table = ServerTable(self.name, self.output_dim, self._settings, strategy_of(self))
        self._embeddings = table_variable(self, self.input_dim or 0, self.output_dim, table)
        self.built = True

    @property
    def embeddings(self) -> Any:
        """The variable that stands for the rows; its `table` is the `hr.EmbeddingTable`."""
        return self._embeddings

    @property
    def table(self) -> EmbeddingTable:
        """The `hr.EmbeddingTable` with the rows; it is made where there is none yet."""
        if not self.built:
            self.build()
        table: EmbeddingTable = self._embeddings.table
        return table

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """Look up rows, and combine them."""
        return self.embed(inputs, weights, self.combiner)

    def embed(self, inputs: Any, weights: Any, combiner: str | None) -> Any:
        """Look up rows, and combine them by a combiner other than the layer's."""
        dtype = self._check_dtype(inputs)
        if weights is not None and combiner is None:
            raise ValueError(
                f"the layer {self.name!r} got `weights` but has no combiner: create it with "
                'combiner="sum", "mean" or "sqrtn"'
            )
        if dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int64" if dtype == "uint32" else "int32")
        rows = keras.ops.cast(look_up_rows(self, inputs), self.compute_dtype)
        if combiner is None:
            return rows
        if self.mask_zero:
            counts = keras.ops.cast(keras.ops.not_equal(inputs, 0), self.compute_dtype)
            weights = counts if weights is None else counts * weights
        return combine(rows, weights, combiner)

    def _check_dtype(self, ids: Any) -> str:
        dtype: str = keras.backend.standardize_dtype(ids.dtype)
        if not dtype.startswith(("int", "uint")):
            raise TypeError(
                f"ids of the layer {self.name!r} must be integers, but got {dtype}: make the input "
                'with keras.Input(shape, dtype="int64")'
            )
        return dtype

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return which ids are no padding; None without `mask_zero`, or with a combiner."""
        if not self.mask_zero or self.combiner is not None:
            return None
        return keras.ops.not_equal(inputs, 0)

    def compute_output_shape(self, inputs_shape: Any, weights_shape: Any = None) -> Any:
        """Return the shape of the rows."""
        return output_shape(inputs_shape, self.output_dim, self.combiner)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Return the shape and dtype of the rows."""
        self._check_dtype(inputs)
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), self.compute_dtype)

    def save_own_variables(self, store: Any) -> None:
        """Write where the table is saved, beside the file."""
        save_table(self, store)

    def load_own_variables(self, store: Any) -> None:
        """Have the table restored that was saved beside the file."""
        load_table(self, store)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer."""
        return {
            **super().get_config(),
            "output_dim": self.output_dim,
            "initializer": config_of_initializer(self.initializer),
            "seed": self.seed,
            "combiner": self.combiner,
            "mask_zero": self.mask_zero,
            "admission": self.admission,
            "evict_after": self.evict_after,
            "capacity": self.capacity,
        }


def check_combiner(combiner: Any) -> None:
    """Raise ValueError for a combiner that does not exist."""
    if combiner is not None and combiner not in COMBINERS:
        known = ", ".join(map(repr, COMBINERS))
        raise ValueError(f"`combiner` must be None or one of {known}, but got {combiner!r}")


def output_shape(ids_shape: Any, dim: int, combiner: str | None) -> tuple[Any, ...]:
    """Return the shape of the rows of ids, combined along the last axis."""
    shape = tuple(ids_shape)
    if combiner is None or len(shape) < 2:
        return (*shape, dim)
    return (*shape[:-1], dim)


def combine(rows: Any, weights: Any, combiner: str) -> Any:
    """Combine rows along the last axis but one, as `keras_rs.layers.EmbedReduce` does.

    Args:
        rows: Of shape (batch, ids, dim), with any number of axes between; of (batch, dim), there is
            one id in each bag.
        weights: None: all count alike.
        combiner: "sum", "mean" or "sqrtn".
    """
    ops = keras.ops
    if weights is not None:
        weights = ops.expand_dims(ops.cast(weights, rows.dtype), -1)
    if len(rows.shape) < 3:
        return rows if weights is None or combiner != "sum" else rows * weights
    total = ops.sum(rows if weights is None else rows * weights, axis=-2)
    if combiner == "sum":
        return total
    if weights is None:
        count = rows.shape[-2]
        return total / (count if combiner == "mean" else count**0.5)
    if combiner == "mean":
        return ops.divide_no_nan(total, ops.sum(weights, axis=-2))
    return ops.divide_no_nan(total, ops.sqrt(ops.sum(ops.square(weights), axis=-2)))


def parameter_server_strategy() -> Any:
    """Return the strategy of the current scope if it has parameter servers, else None."""
    strategy = get_strategy()
    return strategy if isinstance(strategy, ParameterServerStrategy) else None


def server_initializer(given: Any, layer: str) -> Any:
    """Return what `hr.EmbeddingTable` takes for an initializer of a layer.

    A random one without a seed gets a seed that follows from the name of the layer.

    Raises:
        ValueError: If the servers do not support it.
    """
    if not isinstance(given, keras.initializers.Initializer):
        return given
    kinds = keras.initializers
    if type(given) is kinds.Zeros:
        return initializers.Zeros()
    if type(given) is kinds.Ones:
        return initializers.Constant(1.0)
    if type(given) is kinds.Constant and isinstance(given.value, int | float):
        return initializers.Constant(float(given.value))
    # Without a seed a program that is started again must not have another one: the servers may
    # still have the table.
    seed = given.get_config().get("seed")
    seed = zlib.crc32(layer.encode()) if seed is None else seed
    if isinstance(seed, int) and type(given) is kinds.RandomUniform:
        return initializers.Uniform(float(given.minval), float(given.maxval), seed)
    if isinstance(seed, int) and type(given) is kinds.RandomNormal:
        return initializers.Normal(float(given.mean), float(given.stddev), seed)
    raise ValueError(
        f"`initializer` of the layer {layer!r} is {type(given).__name__}, which parameter servers "
        "do not have: use RandomUniform or RandomNormal with a number as the seed, Zeros, Ones, "
        "Constant, or one of hr.initializers"
    )


def config_of_initializer(initializer: Any) -> Any:
    """Return an initializer as values of JSON."""
    if isinstance(initializer, keras.initializers.Initializer):
        return keras.saving.serialize_keras_object(initializer)
    if isinstance(initializer, msgspec.Struct):
        return {"headrace": type(initializer).__name__, **msgspec.structs.asdict(initializer)}
    return initializer


def _from_config(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    if "headrace" in config:
        arguments = dict(config)
        return _INITIALIZERS[arguments.pop("headrace")](**arguments)
    return keras.saving.deserialize_keras_object(config)


LARGE_BYTES = 64 << 20
"""Size of a matrix above which its rows are in a table."""


def install() -> None:
    """Replace methods of `keras.layers.Embedding`; layers with a matrix keep the original ones."""
    kind = keras.layers.Embedding
    _replace_new(kind)
    _replace(kind, "build", _build, when=_is_large)
    for name, method in _METHODS.items():
        _replace(kind, name, method, when=_has_table)


def use_tables(model: Any, strategy: Any) -> None:
    """Have layers of a model that are not built yet use the servers of a strategy."""
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.Embedding | Embedding) and not layer.built:
            set_strategy(layer, strategy_of(layer) or strategy)


def _replace_new(kind: Any) -> None:
    original = kind.__new__

    @functools.wraps(original)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, *args, **kwargs)
        if (strategy := parameter_server_strategy()) is not None:
            set_strategy(made, strategy)
        return made

    kind.__new__ = staticmethod(new)


def _replace(kind: Any, name: str, replacement: Any, when: Any) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (replacement if when(self) else original)(self, *args, **kwargs)

    setattr(kind, name, method)


def _has_table(layer: Any) -> bool:
    return has_table(vars(layer).get("_embeddings"))


def _is_large(layer: Any) -> bool:
    """Return whether the build of a layer makes a table."""
    base = keras.layers.Embedding
    size = layer.input_dim * layer.output_dim * np.dtype(_numpy_dtype(layer)).itemsize
    if layer.built or size <= LARGE_BYTES or not strategy_of(layer):
        return False
    needs_matrix = (
        type(layer).call is not base.call
        or type(layer).embeddings is not base.embeddings
        or layer.embeddings_regularizer is not None
        or layer.embeddings_constraint is not None
        or layer.lora_rank
        or getattr(layer, "quantization_mode", None) is not None
    )
    return not needs_matrix and _server_initializer(layer) is not None


def _numpy_dtype(layer: Any) -> str:
    return "float16" if layer.variable_dtype == "bfloat16" else str(layer.variable_dtype)


def _server_initializer(layer: Any) -> Any:
    given = layer.embeddings_initializer
    if not isinstance(given, keras.initializers.Initializer):
        return None
    try:
        return server_initializer(given, layer.name)
    except ValueError:
        return None


def _build(layer: Any, input_shape: Any = None) -> None:
    settings = {"initializer": _server_initializer(layer), "dtype": layer.variable_dtype}
    table = ServerTable(layer.name, layer.output_dim, settings, strategy_of(layer))
    layer._embeddings = table_variable(layer, layer.input_dim, layer.output_dim, table)
    layer.built = True


def _call(layer: Any, inputs: Any) -> Any:
    if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
        inputs = keras.ops.cast(inputs, "int32")
    return keras.ops.cast(look_up_rows(layer, inputs), dtype=layer.compute_dtype)


def _refuse(layer: Any, *args: Any, **kwargs: Any) -> None:
    raise FailedPreconditionError(
        f"the rows of the layer {layer.name!r} are in a table on parameter servers, which has "
        "neither LoRA nor quantization: make the layer outside of the scope of the strategy"
    )


_METHODS = {
    "call": _call,
    "save_own_variables": save_table,
    "load_own_variables": load_table,
    "enable_lora": _refuse,
    "quantize": _refuse,
}
