"""Private modules and attributes of Keras, with the versions of Keras that were tried.

No other module of this package imports from `keras.src` or names a private attribute of a Keras
object. After a new release of Keras, run `tests/adapters/test_keras_model_pickling.py` and add the
release to `TRIED_VERSIONS`; `tests/adapters/test_keras_versions.py` asks for it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.ops.function import Function, make_node_key
from keras.src.ops.node import Node
from keras.src.saving import saving_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.data_adapters import get_data_adapter as data_adapter
from keras.src.utils import tracking
from keras.src.utils.backend_utils import DynamicBackend
from keras.src.utils.python_utils import pythonify_logs

from headrace.errors import FailedPreconditionError
from headrace.frameworks.keras_state import LINKED
from headrace.parameter_server.arrays import as_array

__all__ = [
    "BACK_ENDS",
    "TRIED_VERSIONS",
    "Container",
    "CurrentLearningRate",
    "DynamicBackend",
    "Function",
    "GraphObject",
    "KerasSaveable",
    "Tracker",
    "add_container_items",
    "all_layers",
    "build_model",
    "check_back_end",
    "check_compiled",
    "check_labels",
    "compiled_losses",
    "container_parts",
    "data_adapter",
    "dynamic_backend_name",
    "excludes_from_decay",
    "fill_tracker",
    "first_epoch",
    "flat_logs",
    "graph_node_keys",
    "has_table",
    "in_stateless_scope",
    "is_variable_value",
    "learning_rate_variable",
    "leave_optimizers_unbuilt",
    "look_up_rows",
    "mark_values",
    "optimizer_template",
    "produces_mask",
    "pythonify_logs",
    "reduce_submodule",
    "replace_embedding_call",
    "replace_saving",
    "restore_embedding_call",
    "restore_node_keys",
    "row_values",
    "seed_variables",
    "set_momentum_product",
    "set_rows_shape",
    "sparse_embeddings",
    "state_to_send",
    "step_variables",
    "table_of_variable",
    "table_variable",
    "tracker_parts",
    "value_of",
    "variable_attributes",
    "zero_value",
]

TRIED_VERSIONS: dict[str, tuple[str, ...]] = {
    "3.15.0": ("jax", "torch"),
    "3.15.1": ("jax", "torch"),
}
"""Versions of Keras, and back ends, on which models have been pickled, loaded and trained.

All with JAX 0.10 and PyTorch 2.13. The first one is the oldest that pyproject.toml allows.
"""
BACK_ENDS = ("jax", "torch")
"""Back ends on which models are trained by strategies."""

Tracker = tracking.Tracker
Container: tuple[type, ...] = tuple(
    getattr(tracking, name)
    for name in ("TrackedList", "TrackedDict", "TrackedOrderedDict", "TrackedSet")
)
"""Collections that record which variables and layers are put into them."""
GraphObject: tuple[type, ...] = (KerasSaveable, Node, keras.KerasTensor)
"""Objects that form the graph of a model; their state is all in `__dict__`."""

# Attributes of models and layers that hold results of earlier calls or belong to a running `fit`.
# They are sent with these values.
_RESET: dict[str, Any] = {
    "train_function": None,
    "test_function": None,
    "predict_function": None,
    "stop_training": False,
    "_initial_epoch": None,
    "training": True,  # of modules of PyTorch: each step sets it
}
_RESET_COLLECTIONS = {"_losses": list, "_losses_override": list, "_loss_ids": set}
_LEFT_OUT = frozenset(
    {
        "history",
        "stop_evaluating",
        "stop_predicting",
        "_eval_epoch_iterator",
        "_jax_state",
        "_jax_state_synced",
    }
)
_NOT_SENT = frozenset({"_value", "_initializer"})
_OWN_ATTRIBUTES = "_headrace_"
"""Prefix of attributes that this package adds to Keras objects; they are not sent."""
_SAVING_METHODS = ("save_own_variables", "load_own_variables")
"""Methods of an optimizer that this package replaces on the object; they are not sent."""
_ITERATIONS = "_iterations"
_NODES = "_nodes"

# Parameters of PyTorch that are values of Keras variables, by id.
_variable_values: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# Modules of PyTorch whose mode, training or not, is set with that of a layer.
_submodules: weakref.WeakSet[Any] = weakref.WeakSet()


def check_back_end() -> str:
    """Return the back end of Keras in this process.

    Raises:
        FailedPreconditionError: Models are not trained by strategies on this back end.
    """
    back_end: str = keras.backend.backend()
    if back_end not in BACK_ENDS:
        raise FailedPreconditionError(
            f"Keras runs on the back end {back_end!r}, and strategies train models on jax and "
            'torch: set the environment variable KERAS_BACKEND to "jax" or "torch" before Keras '
            "is imported"
        )
    return back_end


def build_model(model: Any, batch: Any, *, with_loss: bool) -> None:
    """Build a model for a batch, and also its loss and its metrics; its optimizer stays as it is.

    Args:
        model: The model.
        batch: What its steps are called with.
        with_loss: Whether to build loss and metrics, which may need labels.
    """
    # Slots of the optimizer are on servers.
    optimizer, model.optimizer = getattr(model, "optimizer", None), None
    state, compiled = vars(model), {}
    if not with_loss:
        compiled = {name: state[name] for name in _COMPILED if name in state}
    try:
        state.update(dict.fromkeys(compiled))
        with warnings.catch_warnings():
            # Of JAX, for inputs of this dtype, which hold ids of tables: steps keep their 64 bits.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype int64")
            model._symbolic_build(data_batch=batch)
    finally:
        state.update(compiled)
        model.optimizer = optimizer


_COMPILED = ("_compile_loss", "_compile_metrics")


def check_compiled(model: Any, method: str) -> None:
    """Raise Keras' own error if `compile` was not called."""
    model._assert_compile_called(method)


def check_labels(model: Any, batch: Any, method: str) -> None:
    """Raise ValueError where Keras' own steps would compute a loss of labels that are missing."""
    kind = type(model)
    step = kind.train_step if method == "fit" else kind.test_step
    has_labels = len(batch) > 1 and batch[1] is not None
    is_of_keras = all(each.__module__.startswith("keras.") for each in (step, kind.compute_loss))
    if has_labels or model.loss is None or not is_of_keras:
        return
    raise ValueError(
        f"{method} of the Keras model {model.name!r}: the batches have no labels, and its loss "
        "needs them: batches must be (x, y) or (x, y, sample_weight), or pass `y` beside an array"
    )


def first_epoch(model: Any, initial_epoch: int) -> int:
    """Return the first epoch of `fit`: the one that a callback restored, if any."""
    return getattr(model, "_initial_epoch", None) or initial_epoch


def flat_logs(model: Any, logs: dict[str, Any]) -> Any:
    """Return what `evaluate` returns without `return_dict`."""
    return model._flatten_metrics_in_order(logs)


class CurrentLearningRate:
    """The learning rate that an optimizer was set to."""

    def __init__(self) -> None:
        #: An immutable JAX array, and the number in it.
        self._last: tuple[Any, float] = (None, 0.0)

    def of(self, optimizer: Any) -> float | None:
        """Return the learning rate of an optimizer; None: a schedule says it."""
        rate = learning_rate_variable(optimizer)
        if rate is None:
            return None
        value = rate.value
        if keras.backend.backend() != "jax":
            return float(np.asarray(value))
        if value is not self._last[0]:
            self._last = value, float(np.asarray(value))
        return self._last[1]


def learning_rate_variable(optimizer: Any) -> Any:
    """Return the variable that is the learning rate of an optimizer; None: a schedule says it."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def excludes_from_decay(optimizer: Any) -> bool:
    """Return whether `exclude_from_weight_decay` of an optimizer was called."""
    return bool(
        getattr(optimizer, "_exclude_from_weight_decay", None)
        or getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    )


def value_of(variable: Any) -> Any:
    """Return the value of a variable as an array of NumPy that belongs to the caller."""
    # `np.array(variable)` warns, and so does Keras' `convert_to_numpy` with PyTorch.
    return np.array(as_array(variable.value))


def seed_variables(model: Any) -> list[Any]:
    """Return the variables of a model that count draws of random numbers."""
    return [each.state for layer in all_layers(model) for each in layer._seed_generators]


def step_variables(model: Any) -> list[Any]:
    """Return the non-trainable variables that a step may change: no weights of frozen layers."""
    found = [each for layer in all_layers(model) for each in _own_state(layer)]
    found += seed_variables(model)
    return list({id(each): each for each in found}.values())


def _own_state(layer: Any) -> list[Any]:
    return list(layer._non_trainable_variables) if layer.trainable else []


def compiled_losses(model: Any) -> list[Any]:
    """Return the losses that `compile` was given, of a model that is built; each once."""
    compiled = getattr(model, "_compile_loss", None)
    found = [each[1] for each in getattr(compiled, "_flat_losses", None) or ()]
    return list({id(each): each for each in found}.values())


def produces_mask(layer: Any) -> bool:
    """Return whether a layer marks time steps that do not count."""
    return isinstance(layer, keras.layers.Masking) or bool(getattr(layer, "mask_zero", False))


def all_layers(model: Any) -> list[Any]:
    """Return a model and all layers in it."""
    return list(model._flatten_layers())


def state_to_send(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a model's graph that are sent."""
    state = {}
    for name, attribute in vars(value).items():
        if name in _LEFT_OUT or name.startswith(_OWN_ATTRIBUTES):
            continue
        if name == _NODES and isinstance(value, Function):
            continue
        if isinstance(value, keras.Layer):
            if name in _RESET:
                attribute = _RESET[name]
            elif name in _RESET_COLLECTIONS:
                attribute = _RESET_COLLECTIONS[name]()
        state[name] = attribute
    return state


def graph_node_keys(function: Any) -> list[tuple[Any, int]]:
    """Return the nodes of a functional model's graph: operations, and indices of their calls."""
    return [
        (node.operation, node.operation._inbound_nodes.index(node))
        for nodes in function._nodes_by_depth.values()
        for node in nodes
    ]


def restore_node_keys(function: Any, nodes: Iterable[tuple[Any, int]]) -> None:
    """Set which nodes belong to a functional model, whose keys contain ids of this process."""
    vars(function)[_NODES] = {make_node_key(operation, index) for operation, index in nodes}


def tracker_parts(tracker: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return a tracker's attributes without ids, and the objects whose ids it knows, by store."""
    state = dict(vars(tracker))
    stored = state.pop("stored_ids")
    objects = {
        name: [each for each in store if id(each) in stored[name]]
        for name, (_, store) in tracker.config.items()
    }
    return state, objects


def fill_tracker(tracker: Any, state: dict[str, Any], objects: dict[str, list[Any]]) -> None:
    """Restore a tracker in this process."""
    vars(tracker).update(state)
    tracker.stored_ids = {name: {id(each) for each in found} for name, found in objects.items()}


def container_parts(container: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return a tracking collection's attributes and its items; for mappings, pairs."""
    items = container.items() if isinstance(container, dict) else container
    return dict(vars(container)), list(items)


def add_container_items(container: Any, state: dict[str, Any], items: list[Any]) -> None:
    """Restore a tracking collection without telling its tracker, which knows the items."""
    vars(container).update(state)
    kind: Any = next(each for each in Container if isinstance(container, each)).__mro__[1]
    if isinstance(container, dict):
        for key, value in items:
            kind.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.extend(container, items)
    else:
        set.update(container, items)


def dynamic_backend_name(backend: Any) -> str:
    """Return the name of the back end that preprocessing layers compute with."""
    name: str = vars(backend)["_backend"]
    return name


def variable_attributes(variable: Any) -> tuple[dict[str, Any], Any]:
    """Return a variable's attributes without its value, and its parameter of PyTorch.

    On JAX, and for a variable without a value, the parameter is None.
    """
    state = {
        name: value
        for name, value in vars(variable).items()
        if name not in _NOT_SENT and not name.startswith(_OWN_ATTRIBUTES)
    }
    value = vars(variable).get("_value")
    if value is None or keras.backend.backend() != "torch":
        return state, None
    _variable_values[id(value)] = value
    return state, value


def zero_value(variable: Any, state: dict[str, Any], value: Any) -> None:
    """Restore a variable with zeros as its value.

    Args:
        variable: An instance without attributes.
        state: Attributes that `variable_attributes` returned.
        value: The parameter of PyTorch that is the value; None: make one.
    """
    vars(variable).update(state)
    variable._initializer = None
    if value is None:
        shape = (0, *state["_shape"][1:]) if has_table(variable) else state["_shape"]
        value = keras.ops.convert_to_tensor(np.zeros(shape, state["_dtype"]))
        if keras.backend.backend() == "torch":
            import torch  # noqa: PLC0415 - optional dependency

            value = torch.nn.Parameter(
                value, requires_grad=state["_trainable"] and value.is_floating_point()
            )
    variable._value = value


def mark_values(layer: Any) -> None:
    """Record a layer's modules of PyTorch, and the parameters that are values of its variables."""
    if keras.backend.backend() != "torch" or not isinstance(layer, keras.Layer):
        return
    attributes = vars(layer)
    for name in ("_trainable_variables", "_non_trainable_variables"):
        for variable in attributes.get(name, ()):
            variable_attributes(variable)
    modules = attributes.get("_modules", {})
    if (parameters := modules.get("_torch_params")) is not None:
        _variable_values.update({id(each): each for each in parameters.values()})
    for module in modules.values():
        if module is not None and not isinstance(module, keras.Layer):
            _submodules.update(module.modules())


def is_variable_value(parameter: Any) -> bool:
    """Return whether a parameter of PyTorch is known as the value of a Keras variable."""
    return _variable_values.get(id(parameter)) is parameter


def reduce_submodule(value: Any) -> Any:
    """Return how a module of PyTorch in a layer is pickled; NotImplemented for other values."""
    if keras.backend.backend() != "torch" or isinstance(value, type):
        return NotImplemented
    import torch  # noqa: PLC0415 - optional dependency

    if not isinstance(value, torch.nn.Module) or value not in _submodules:
        return NotImplemented
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        reduced = (*reduced[:2], {**reduced[2], "training": True}, *reduced[3:])
    return reduced


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
    kind: Any = type(layer)
    if isinstance(layer, keras.layers.Embedding):
        object.__setattr__(layer, "__class__", _looking_up(kind))
    kind = type(variable)
    variable.__class__ = _without_value(kind)
    if keras.backend.backend() != "torch":  # there it is a parameter, which `torch_rows` empties
        variable._value = None


def restore_embedding_call(layer: Any, shape: tuple[int, int]) -> None:
    """Undo `replace_embedding_call`; the matrix is zeros."""
    variable = layer._embeddings
    del vars(layer)[_LOOKUP], vars(variable)[_LOOKUP]
    object.__setattr__(layer, "__class__", type(layer).__mro__[1])
    variable.__class__ = type(variable).__mro__[1]
    variable._shape = shape
    if keras.backend.backend() != "torch":
        variable._value = keras.ops.zeros(shape, variable.dtype)


def set_rows_shape(variable: Any, count: int) -> None:
    """Set the shape of a matrix that holds `count` rows in this process."""
    variable._shape = (count, variable._shape[1])


def row_values(variable: Any) -> Any:
    """Return the rows of a matrix in this process; other reads of it raise."""
    base: Any = type(variable).__mro__[1]
    return base.value.fget(variable)


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


_LOOKUP = "_headrace_lookup"

# --- variables whose rows are in a table ----------------------------------------------------------

_TABLE = "_headrace_table"
_HAS_TABLE = "has_headrace_table"  # sent to workers
"""Of a variable, also in a worker's copy: its rows are in a table."""


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
        shape=(rows, dim), initializer=_no_rows, name="embeddings", trainable=True
    )
    vars(variable).update({_TABLE: table, _HAS_TABLE: True})
    kind: Any = type(variable)
    variable.__class__ = _table_backed(kind)
    variable._shape = (rows, dim)
    _refuse_reads(variable)
    return variable


def has_table(variable: Any) -> bool:
    """Return whether the rows of a variable are in a table."""
    return isinstance(variable, keras.Variable) and _HAS_TABLE in vars(variable)


def table_of_variable(variable: Any) -> Any:
    """Return what `table_variable` was given; None for another variable."""
    return vars(variable)[_TABLE] if has_table(variable) and _TABLE in vars(variable) else None


def _no_rows(shape: tuple[int, ...], dtype: Any = None) -> Any:
    return keras.ops.zeros((0, *shape[1:]), dtype=dtype)


def _refuse_reads(variable: Any) -> None:
    """Have a parameter of PyTorch refuse to be computed with: layers keep it, and may read it."""
    if keras.backend.backend() == "torch" and variable._value is not None:
        from headrace.adapters.keras_training.torch_rows import (  # noqa: PLC0415 - optional
            note_reads,
        )

        note_reads(variable._value, table_of_variable(variable))


@functools.cache
def _table_backed(kind: type) -> type:
    base: Any = kind

    class TableBackedVariable(base):  # type: ignore[misc]
        """A Keras variable whose rows are in a table on parameter servers."""

        _shape: tuple[int, ...]

        @property
        def value(self) -> Any:
            if keras.backend.backend() != "torch":
                table_of_variable(self).note_read()
            return base.value.fget(self)

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
            base._initialize(self, value)
            self._shape = shape
            _refuse_reads(self)

    setattr(TableBackedVariable, LINKED, kind)
    TableBackedVariable.__name__ = TableBackedVariable.__qualname__ = kind.__name__
    return TableBackedVariable


@functools.cache
def _looking_up(kind: type) -> type:
    base: Any = kind

    class LookingUp(base):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
                inputs = keras.ops.cast(inputs, "int32")
            rows = vars(self)[_LOOKUP].look_up(inputs)
            return keras.ops.cast(rows, dtype=self.compute_dtype)

    LookingUp.__name__ = LookingUp.__qualname__ = kind.__name__
    return LookingUp


@functools.cache
def _without_value(kind: type) -> type:
    base: Any = kind

    class WithoutValue(base):  # type: ignore[misc]
        @property
        def value(self) -> Any:
            # On PyTorch `train_step` takes gradients from values; what computes with one is found
            # by the parameter itself.
            if keras.backend.backend() != "torch":
                vars(self)[_LOOKUP].note_read()
            return base.value.fget(self)

    WithoutValue.__name__ = WithoutValue.__qualname__ = kind.__name__
    return WithoutValue


def optimizer_template(optimizer: Any) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Return an optimizer's attributes as they were before it was built.

    Returns:
        The attributes, without slots and without the variables that are trained; and pairs of
        variables, such as the learning rate, and their values, as arrays. Iterations start at 0.
    """
    kind = type(optimizer)
    state: dict[str, Any] = {}
    numbers: list[tuple[Any, Any]] = []
    for name, value in vars(optimizer).items():
        if name.startswith(_OWN_ATTRIBUTES) or name in _SAVING_METHODS:
            continue  # of this package
        if name in ("_tracker", "_variables"):
            state[name] = value  # replaced below, at the same place
        elif isinstance(value, keras.Variable):
            if name == _ITERATIONS or not _assigns(kind, "build", name):
                state[name] = value
                if name != _ITERATIONS:
                    numbers.append((value, value_of(value)))
            elif _assigns(kind, "__init__", name):
                state[name] = None
        elif any(isinstance(each, keras.Variable) for each in _flat(value)):
            if _assigns(kind, "__init__", name):
                state[name] = type(value)()
        else:
            state[name] = value
    state["built"] = False
    state["_trainable_variables_indices"] = {}
    kept = [each for each in state.values() if isinstance(each, keras.Variable)]
    state["_variables"] = [v for v in optimizer._variables if any(v is each for each in kept)]
    tracker_state, _ = tracker_parts(optimizer._tracker)
    (is_variable, _) = tracker_state["config"]["variables"]
    tracker_state["config"] = {"variables": (is_variable, state["_variables"])}
    state["_tracker"] = Tracker.__new__(Tracker)
    fill_tracker(state["_tracker"], tracker_state, {"variables": state["_variables"]})
    return state, numbers


def set_momentum_product(optimizer: Any, product: float) -> None:
    """Set the product of momentum factors that a `Nadam` keeps."""
    optimizer._u_product.assign(product)


def _assigns(kind: type, method: str, name: str) -> bool:
    # Also of decorated methods: Keras wraps `build`, and keeps the function as `__wrapped__`.
    methods = (inspect.unwrap(vars(each)[method]) for each in kind.__mro__ if method in vars(each))
    return any(name in code.co_names for fn in methods if (code := getattr(fn, "__code__", None)))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value
