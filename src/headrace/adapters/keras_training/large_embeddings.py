"""`keras.layers.Embedding` with a large matrix, made in the scope of a `ParameterServerStrategy`.

Its rows are in a table on the servers, which makes each of them when a step looks it up first. The
matrix exists in no process. A layer is large from `LARGE_BYTES` on, and only if servers can make
its first values and nothing needs all of its rows.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

from headrace.adapters.keras_training.embedding_tables import ServerTable
from headrace.adapters.keras_training.keras_internals import (
    all_layers,
    has_table,
    look_up_rows,
    table_variable,
)
from headrace.adapters.keras_training.table_embedding import (
    Embedding,
    parameter_server_strategy,
    server_initializer,
)
from headrace.adapters.keras_training.table_saving import load_table, save_table
from headrace.errors import FailedPreconditionError

__all__ = ["LARGE_BYTES", "install", "use_tables"]

LARGE_BYTES = 64 << 20
"""Size of a matrix above which its rows are in a table."""

_STRATEGY = "_headrace_strategy"


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
            object.__setattr__(layer, _STRATEGY, vars(layer).get(_STRATEGY) or strategy)


def _replace_new(kind: Any) -> None:
    original = kind.__new__

    @functools.wraps(original)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, *args, **kwargs)
        if (strategy := parameter_server_strategy()) is not None:
            object.__setattr__(made, _STRATEGY, strategy)
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
    if layer.built or size <= LARGE_BYTES or not vars(layer).get(_STRATEGY):
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
    table = ServerTable(layer.name, layer.output_dim, settings, vars(layer)[_STRATEGY])
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
