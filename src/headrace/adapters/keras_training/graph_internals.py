"""Private parts of Keras that pickling relies on: what objects of a model's graph are made of."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras.src.ops.function import Function, make_node_key
from keras.src.ops.node import Node
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.utils import tracking
from keras.src.utils.backend_utils import DynamicBackend

from headrace.adapters.keras_training.embedding_internals import has_table
from headrace.adapters.keras_training.keras_internals import OWN_ATTRIBUTES, value_of

__all__ = [
    "Container",
    "DynamicBackend",
    "Function",
    "GraphObject",
    "Tracker",
    "add_container_items",
    "container_parts",
    "dynamic_backend_name",
    "fill_tracker",
    "graph_node_keys",
    "is_variable_value",
    "mark_values",
    "optimizer_template",
    "reduce_submodule",
    "restore_node_keys",
    "state_to_send",
    "tracker_parts",
    "variable_attributes",
    "zero_value",
]

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
_RESET_ATTRIBUTES: dict[str, Any] = {
    "train_function": None,
    "test_function": None,
    "predict_function": None,
    "stop_training": False,
    "_initial_epoch": None,
    "training": True,  # of modules of PyTorch: each step sets it
}

_RESET_COLLECTIONS = {"_losses": list, "_losses_override": list, "_loss_ids": set}

_OMITTED_ATTRIBUTES = frozenset(
    {
        "history",
        "stop_evaluating",
        "stop_predicting",
        "_eval_epoch_iterator",
        "_jax_state",
        "_jax_state_synced",
    }
)

_OMITTED_VARIABLE_ATTRIBUTES = frozenset({"_value", "_initializer"})

_SAVING_METHODS = ("save_own_variables", "load_own_variables")
"""Methods of an optimizer that this package replaces on the object; they are not sent."""

_ITERATIONS = "_iterations"

_NODES = "_nodes"

# Parameters of PyTorch that are values of Keras variables, by id.
_variable_values: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

# Modules of PyTorch whose mode, training or not, is set with that of a layer.
_submodules: weakref.WeakSet[Any] = weakref.WeakSet()


def state_to_send(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a model's graph that are sent."""
    state = {}
    for name, attribute in vars(value).items():
        if name in _OMITTED_ATTRIBUTES or name.startswith(OWN_ATTRIBUTES):
            continue
        if name == _NODES and isinstance(value, Function):
            continue
        if isinstance(value, keras.Layer):
            if name in _RESET_ATTRIBUTES:
                attribute = _RESET_ATTRIBUTES[name]
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
        if name not in _OMITTED_VARIABLE_ATTRIBUTES and not name.startswith(OWN_ATTRIBUTES)
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
        if name.startswith(OWN_ATTRIBUTES) or name in _SAVING_METHODS:
            continue  # of this package
        if name in ("_tracker", "_variables"):
            state[name] = value  # replaced below, at the same place
        elif isinstance(value, keras.Variable):
            if name == _ITERATIONS or not _assigns_attribute(kind, "build", name):
                state[name] = value
                if name != _ITERATIONS:
                    numbers.append((value, value_of(value)))
            elif _assigns_attribute(kind, "__init__", name):
                state[name] = None
        elif any(isinstance(each, keras.Variable) for each in _flatten_nested(value)):
            if _assigns_attribute(kind, "__init__", name):
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


def _assigns_attribute(kind: type, method: str, name: str) -> bool:
    # Also of decorated methods: Keras wraps `build`, and keeps the function as `__wrapped__`.
    methods = (inspect.unwrap(vars(each)[method]) for each in kind.__mro__ if method in vars(each))
    return any(name in code.co_names for fn in methods if (code := getattr(fn, "__code__", None)))


def _flatten_nested(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flatten_nested(each)
    else:
        yield value
