"""Private parts of Keras around embeddings: layers and variables whose rows are on servers."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.saving import saving_lib

from headrace.adapters.keras_training.keras_internals import (
    OWN_ATTRIBUTES,
    all_layers,
    extend_class,
)
from headrace.frameworks.keras_state import LINKED_ATTRIBUTE

__all__ = [
    "has_table",
    "leave_optimizers_unbuilt",
    "look_up_rows",
    "note_reads",
    "replace_embedding_call",
    "replace_saving",
    "restore_embedding_call",
    "row_values",
    "set_rows_shape",
    "sparse_embeddings",
    "stop_noting_reads",
    "table_of_variable",
    "table_variable",
]

_LOOKUP = OWN_ATTRIBUTES + "lookup"
_TABLE = OWN_ATTRIBUTES + "table"
_HAS_TABLE = "has_headrace_table"  # sent to workers
"""Attribute of variables, also of their copies in workers, whose rows are in a table."""


def sparse_embeddings(model: Any) -> dict[int, Any]:
    """Return the `Embedding` layers of a model that use rows of their matrix alone.

    Returns:
        By index of the matrix among the model's trainable variables: all layers with a table, and
        others with a matrix. Left out are layers whose matrix another layer has too, subclasses
        that look up in another way, and those with a regularizer, a constraint, LoRA or
        quantization.
    """
    holders: dict[int, int] = {}
    for layer in all_layers(model):
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
            holders[id(variable)] = holders.get(id(variable), 0) + 1
    base = keras.layers.Embedding
    found = {
        id(layer._embeddings): layer
        for layer in all_layers(model)
        if isinstance(layer, base)
        and layer.built
        and type(layer).call is base.call
        and type(layer).embeddings is base.embeddings
        and not layer.lora_enabled
        and getattr(layer, "quantization_mode", None) is None
        and layer.embeddings_regularizer is None
        and layer.embeddings_constraint is None
        and holders.get(id(layer._embeddings)) == 1
    }
    for layer in all_layers(model):
        variable = getattr(layer, "_embeddings", None)
        if has_table(variable):
            found[id(variable)] = layer
    return {
        index: found[id(variable)]
        for index, variable in enumerate(model.trainable_variables)
        if id(variable) in found
    }


def replace_embedding_call(layer: Any, lookup: Any) -> None:
    """Have an `Embedding` call `lookup.look_up(ids)`, and drop the value of its matrix.

    Any other read of the matrix calls `lookup.note_read()`.
    """
    variable = layer._embeddings
    vars(layer)[_LOOKUP] = vars(variable)[_LOOKUP] = lookup
    if isinstance(layer, keras.layers.Embedding):
        object.__setattr__(layer, "__class__", extend_class(type(layer), _LookupLayer))
    variable.__class__ = extend_class(type(variable), _ValuelessVariable)
    if (
        keras.backend.backend() != "torch"
    ):  # there it is a parameter, which `TorchEmbeddingRows` empties
        variable._value = None


def restore_embedding_call(layer: Any, shape: tuple[int, int]) -> None:
    """Undo `replace_embedding_call`; the matrix is zeros."""
    variable = layer._embeddings
    del vars(layer)[_LOOKUP], vars(variable)[_LOOKUP]
    object.__setattr__(layer, "__class__", type(layer).__bases__[1])
    variable.__class__ = type(variable).__bases__[1]
    variable._shape = shape
    if keras.backend.backend() != "torch":
        variable._value = keras.ops.zeros(shape, variable.dtype)


def set_rows_shape(variable: Any, count: int) -> None:
    """Set the shape of a matrix that holds `count` rows in this process."""
    variable._shape = (count, variable._shape[1])


def row_values(variable: Any) -> Any:
    """Return the rows of a matrix in this process; other reads of it raise."""
    return super(_ValuelessVariable, variable).value


def look_up_rows(layer: Any, ids: Any) -> Any:
    """Return the rows of ids from the table of a layer, in a step on a training worker.

    Elsewhere it returns zeros where Keras computes shapes alone, and else raises an error.
    """
    lookup = vars(layer).get(_LOOKUP)
    if lookup is not None:
        return lookup.look_up(ids)
    variable = layer._embeddings
    if in_symbolic_scope():
        return keras.ops.zeros((*ids.shape, variable.shape[1]), dtype=variable.dtype)
    return table_of_variable(variable).refuse_call()


def replace_saving(saving: Any, loading: Any) -> None:
    """Have all that saves and loads models of Keras do so in a context.

    Args:
        saving: Called with a model and a file, which is written in the context that it returns.
        loading: Called with a file, which is read in the context that it returns.
    """
    for name in ("save_model", "save_weights_only"):
        _in_context(name, lambda model, file: saving(model, file))
    _in_context("load_model", lambda file: loading(file))
    _in_context("load_weights_only", lambda model, file: loading(file))


def leave_optimizers_unbuilt(when: Any) -> None:
    """Have Keras not make slots for the weights of a model that it loads, if `when(model)`."""
    original = keras.Model.compile_from_config

    @functools.wraps(original)
    def compile_from_config(self: Any, config: Any) -> None:
        built = self.built
        if when(self):
            object.__setattr__(self, "built", False)
        try:
            original(self, config)
        finally:
            object.__setattr__(self, "built", built)

    keras.Model.compile_from_config = compile_from_config


def _in_context(name: str, context: Any) -> None:
    original = getattr(saving_lib, name)
    count = len(inspect.signature(context).parameters)
    names = list(inspect.signature(original).parameters)[:count]

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        with context(*(given[each] for each in names)):
            return original(*args, **kwargs)

    setattr(saving_lib, name, function)


def table_variable(layer: Any, rows: int, dim: int, table: Any) -> Any:
    """Add a weight to a layer that has no value; it is always trainable.

    Args:
        layer: Being built.
        rows: How many it shows to have; 0 where any id has a row.
        dim: Elements in a row.
        table: Of its methods `note_read()` is called by reads of the value, and `assign(values,
            rows)` by assignments. Its `table` is that of the variable.
    """
    variable = layer.add_weight(
        shape=(rows, dim), initializer=_empty_matrix, name="embeddings", trainable=True
    )
    vars(variable).update({_TABLE: table, _HAS_TABLE: True})
    kind = type(variable)
    variable.__class__ = extend_class(kind, _TableBacked, **{LINKED_ATTRIBUTE: kind})
    variable._shape = (rows, dim)
    _refuse_reads(variable)
    return variable


def has_table(variable: Any) -> bool:
    """Return whether the rows of a variable are in a table."""
    return isinstance(variable, keras.Variable) and _HAS_TABLE in vars(variable)


def table_of_variable(variable: Any) -> Any:
    """Return what `table_variable` was given; None for another variable."""
    return vars(variable)[_TABLE] if has_table(variable) and _TABLE in vars(variable) else None


def _empty_matrix(shape: tuple[int, ...], dtype: Any = None) -> Any:
    return keras.ops.zeros((0, *shape[1:]), dtype=dtype)


def _refuse_reads(variable: Any) -> None:
    """Have a parameter of PyTorch refuse to be computed with: layers keep it, and may read it."""
    if keras.backend.backend() == "torch" and variable._value is not None:
        note_reads(variable._value, table_of_variable(variable))


class _TableBacked:
    """A Keras variable whose rows are in a table on parameter servers."""

    _shape: tuple[int, ...]

    @property
    def value(self) -> Any:
        if keras.backend.backend() != "torch":
            table_of_variable(self).note_read()
        return super().value  # type: ignore[misc]

    @property
    def table(self) -> Any:
        return table_of_variable(self).table

    @property
    def trainable(self) -> bool:
        return True  # also in a frozen layer: else its rows would be state, which is read whole

    @trainable.setter
    def trainable(self, value: bool) -> None:
        pass

    def assign(self, value: Any) -> Any:
        table_of_variable(self).assign(value, self._shape[0])
        return value

    def _initialize(self, value: Any) -> None:
        shape = self._shape
        super()._initialize(value)  # type: ignore[misc]
        self._shape = shape
        _refuse_reads(self)


class _LookupLayer:
    """An `Embedding` layer in a worker's copy of a model."""

    compute_dtype: Any

    def call(self, inputs: Any) -> Any:
        if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        return keras.ops.cast(vars(self)[_LOOKUP].look_up(inputs), dtype=self.compute_dtype)


class _ValuelessVariable:
    """The matrix of such a layer."""

    @property
    def value(self) -> Any:
        # On PyTorch `train_step` takes gradients from values; what computes with one is found by
        # the parameter itself.
        if keras.backend.backend() != "torch":
            vars(self)[_LOOKUP].note_read()
        return super().value  # type: ignore[misc]


# --- parameters of PyTorch ------------------------------------------------------------------------

# Functions that read or set an attribute, such as `grad`.
_DESCRIPTOR_METHODS = frozenset({"__get__", "__set__", "__delete__"})


def note_reads(parameter: Any, owner: Any) -> None:
    """Call `owner.note_read()` whenever something computes with a parameter of PyTorch."""
    plain = type(parameter)
    if not isinstance(parameter, _ReadNotingParameter):
        parameter.__class__ = extend_class(plain, _ReadNotingParameter, plain_class=plain)
    parameter.lookup = owner


def stop_noting_reads(parameter: Any) -> None:
    """Undo `note_reads`."""
    del parameter.lookup
    parameter.__class__ = type(parameter).plain_class


class _ReadNotingParameter:
    lookup: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _DESCRIPTOR_METHODS:
            for each in (*args, *(kwargs or {}).values()):
                if isinstance(each, _ReadNotingParameter):
                    each.lookup.note_read()
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]
