"""The objects of a checkpoint, by path: "model/layers/0/weights".

Dicts, lists, tuples, other `Checkpoint` objects, and objects with `variables` (metrics, Keras
models) are traversed; everything else is saved as one of the kinds of `_KINDS`.

All saved objects can be restored: an object that is changed in place may be anywhere; a number,
string or other value that is replaced must be in a dict, a list or a `Checkpoint`. Objects of
frameworks:

    Keras variables, PyTorch tensors                  restored in place
    Keras models, layers, optimizers and metrics      by their variables
    PyTorch modules, optimizers and schedulers        by `state_dict` and `load_state_dict`
    JAX arrays                                        replaced in the dict or list with them

No framework is imported here: if an object of one occurs, it has been imported already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.variable import Variable
from headrace.parameter_server.arrays import as_array
from headrace.parameter_server.checkpoint_format import (
    ArrayEntry,
    Entry,
    OptimizerEntry,
    StateDictEntry,
    StateEntry,
    TableEntry,
    ValueEntry,
    VariableEntry,
    compute_checksum,
)
from headrace.parameter_server.optimizer import Optimizer
from headrace.parameter_server.specs import name_of, parse_dtype
from headrace.parameter_server.table import EmbeddingTable
from headrace.parameter_server.variable import ServerVariable

__all__ = [
    "Leaf",
    "as_local_array",
    "assign",
    "decode_state",
    "describe",
    "describe_holders",
    "describe_state_dict",
    "encode_state",
    "has_state",
    "is_array",
    "is_object",
    "is_restored_in_place",
    "is_state_dict",
    "is_variable",
    "list_leaves",
    "mismatch_reason",
    "shape_and_dtype",
    "state_mismatch",
    "to_array",
    "to_array_like",
    "write_mismatch",
]


class Leaf(NamedTuple):
    """One object, and how to replace it.

    Attributes:
        path: Path of the object.
        value: The object.
        replace: Replaces the object; raises TypeError if that is impossible.
    """

    path: str
    value: Any
    replace: Callable[[Any], None]


def list_leaves(objects: dict[str, Any]) -> dict[str, Leaf]:
    """Return all objects by path.

    Raises:
        TypeError: If an object cannot be saved.
        ValueError: If a dict has two keys that are equal as strings, such as 1 and "1".
    """
    found: dict[str, Leaf] = {}
    for leaf in _walk("", objects, (), {}):
        found[leaf.path] = leaf
    return found


def describe_holders(objects: dict[str, Any]) -> dict[str, str]:
    """Return class and number of variables of all objects saved by their variables, by path.

    Variables are matched by position, so those of another class would be mistaken for its own.
    """
    found: dict[str, str] = {}
    for _ in _walk("", objects, (), found):
        pass
    return found


def _walk(
    path: str, value: Any, ancestors: tuple[int, ...], holders: dict[str, str]
) -> Iterator[Leaf]:
    children = _children(value)
    if children is None:
        raise AssertionError(path)
    if id(value) in ancestors:
        raise ValueError(f"{path or 'the checkpoint'} contains itself")
    if not isinstance(value, dict | list | tuple) and not hasattr(value, "checkpoint_objects"):
        holders[path] = (
            f"{type(value).__name__} of {len(children)} variable{'s' * (len(children) != 1)}"
        )
    keys: dict[str, Any] = {}
    for key, child in children:
        name = str(key).replace("%", "%25").replace("/", "%2F")
        child_path = f"{path}/{name}" if path else name
        if keys.setdefault(child_path, key) is not key:
            raise ValueError(
                f"the keys {keys[child_path]!r} and {key!r} of a dict have the same path "
                f"{child_path!r}, so only one object would be saved; rename one of them"
            )
        if _children(child) is not None:
            yield from _walk(child_path, child, (*ancestors, id(value)), holders)
        else:
            _check_kind(child_path, child, value)
            yield Leaf(child_path, child, _replacer_for(value, key))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the children of a container with their keys; None for other objects."""
    inside = getattr(value, "checkpoint_objects", None)
    if isinstance(inside, dict):
        return list(inside.items())
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, ServerVariable | Variable | EmbeddingTable | Optimizer) or _has_state(
        value
    ):
        return None
    variables = owned_variables(value)
    if variables is None and has_state_dict(value):
        return None
    if variables is None:
        variables = getattr(value, "variables", None)
    return list(enumerate(variables)) if isinstance(variables, list | tuple) else None


def _replacer_for(container: Any, key: Any) -> Callable[[Any], None]:
    inside = getattr(container, "checkpoint_objects", container)

    def replace(value: Any) -> None:
        inside[key] = value

    return replace


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "get_state", None)) and callable(
        getattr(value, "set_state", None)
    )


def _check_kind(path: str, value: Any, container: Any) -> None:
    if is_restored_in_place(value):
        return
    if not (
        value is None
        or isinstance(value, int | float | complex | str | np.generic | np.ndarray)
        or is_array(value)
    ):
        raise TypeError(
            f"{path!r} is a {type(value).__name__}, which a checkpoint does not save: it saves "
            "variables, tables, optimizers, iterators and metrics, arrays, numbers and strings, "
            "objects of Keras and PyTorch, and dicts and lists of them"
        )
    if not isinstance(getattr(container, "checkpoint_objects", container), dict | list):
        raise TypeError(
            f"{path!r} is a {type(value).__name__} in a {type(container).__name__} and could not "
            "be restored, because both are immutable. Use a list or a dict in place of the "
            f"{type(container).__name__}, or a NumPy array or a variable in it"
        )


def is_restored_in_place(value: Any) -> bool:
    """Return whether a value is restored without being replaced."""
    return (
        isinstance(value, ServerVariable | Variable | EmbeddingTable | Optimizer)
        or (isinstance(value, np.ndarray) and value.flags.writeable)
        or is_variable(value)
        or _has_state(value)
        or has_state_dict(value)
    )


def as_local_array(value: Any) -> NDArray[Any] | None:
    """Return the array that this process saves for an object; None if it is saved otherwise."""
    if isinstance(value, ServerVariable | EmbeddingTable | Optimizer):
        return None
    if isinstance(value, Variable):
        return np.asarray(value.read())
    if isinstance(value, str | bool) or value is None or _has_state(value):
        return None
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return None
    if isinstance(value, float) and type(value) is float and math.isfinite(value):
        return None
    if has_state_dict(value):
        return None
    found = to_array(value)
    name_of(found.dtype)
    return found


def describe_state_dict(leaf: Leaf) -> tuple[StateDictEntry, dict[str, NDArray[Any]]]:
    """Return the manifest entry of an object with a `state_dict`, and the arrays in it."""
    arrays: dict[str, NDArray[Any]] = {}

    def add(array: NDArray[Any]) -> str:
        key = f"{leaf.path}//{len(arrays)}"
        name_of(array.dtype)
        arrays[key] = np.array(array)  # training may continue while it is written
        return key

    state = encode_state(leaf.path, leaf.value.state_dict(), add)
    checksums = {key: compute_checksum({key: array}) for key, array in arrays.items()}
    entry = StateDictEntry(
        state, checksums, state_class_name(leaf.value), describe_parameters(leaf.value)
    )
    return entry, arrays


def describe(leaf: Leaf, counters: dict[str, int]) -> Entry:
    """Return the manifest entry of an object."""
    value = leaf.value
    match value:
        case ServerVariable():
            return VariableEntry(value.name, value.shape, name_of(value.dtype))
        case EmbeddingTable():
            return TableEntry(value.name, value.dim, name_of(value.dtype))
        case Optimizer():
            count = counters.get(f"{value.name}/iterations", 0)
            return OptimizerEntry(value.name, type(value).__name__, count)
    array = as_local_array(value)
    if array is not None:
        return ArrayEntry(leaf.path, array.shape, name_of(array.dtype))
    if _has_state(value):
        return StateEntry(value.get_state())
    return ValueEntry(value)


def is_object(leaf: Leaf) -> bool:
    """Return whether it stays the same object while its value changes: not a number or an array."""
    return _kind(leaf.value) != _ARRAY


def has_state(leaf: Leaf) -> bool:
    """Return whether it is saved by its `get_state`."""
    return _kind(leaf.value) == _STATE


def is_state_dict(leaf: Leaf) -> bool:
    """Return whether it is saved by its `state_dict`."""
    return _kind(leaf.value) == _STATE_DICT


def mismatch_reason(leaf: Leaf, entry: Entry) -> str:
    """Return why an object cannot be restored from its entry; "" if it can."""
    value = leaf.value
    current, saved = _kind(value), _KINDS[type(entry)]
    if current != saved and {current, saved} not in _CONVERTIBLE:
        return f"{leaf.path!r} is {current}, but was saved as {saved}"
    if isinstance(entry, TableEntry):
        dtype = name_of(value.dtype)
        if (value.dim, dtype) != (entry.dim, entry.dtype):
            return (
                f"table {leaf.path!r} has rows of {value.dim} {dtype}, but of {entry.dim} "
                f"{entry.dtype} in the checkpoint"
            )
    if isinstance(entry, VariableEntry | ArrayEntry) and (
        current in (_VARIABLE, _LOCAL) or isinstance(value, np.ndarray) or is_array(value)
    ):
        shape, dtype = shape_and_dtype(value)
        if shape != entry.shape:
            return f"{leaf.path!r} has shape {shape}, but {entry.shape} in the checkpoint"
        if dtype != entry.dtype:
            return f"{leaf.path!r} has dtype {dtype}, but {entry.dtype} in the checkpoint"
    if isinstance(entry, OptimizerEntry) and type(value).__name__ != entry.kind:
        return (
            f"the optimizer {leaf.path!r} is {type(value).__name__}, but {entry.kind} in the "
            "checkpoint"
        )
    return ""


_VARIABLE, _LOCAL, _ARRAY = "a variable on parameter servers", "a variable", "an array or number"
_TABLE, _OPTIMIZER, _STATE = "a table", "an optimizer", "an object with a state"
_STATE_DICT = "an object with a state_dict"

_KINDS: dict[type[Any], str] = {
    VariableEntry: _VARIABLE,
    TableEntry: _TABLE,
    OptimizerEntry: _OPTIMIZER,
    ArrayEntry: _ARRAY,
    ValueEntry: _ARRAY,
    StateEntry: _STATE,
    StateDictEntry: _STATE_DICT,
}
_CONVERTIBLE = ({_VARIABLE, _LOCAL}, {_VARIABLE, _ARRAY}, {_LOCAL, _ARRAY})


def _kind(value: Any) -> str:
    for kind, name in (
        (ServerVariable, _VARIABLE),
        (EmbeddingTable, _TABLE),
        (Optimizer, _OPTIMIZER),
        (Variable, _LOCAL),
    ):
        if isinstance(value, kind):
            return name
    if _has_state(value):
        return _STATE
    if is_variable(value):
        return _LOCAL
    return _STATE_DICT if has_state_dict(value) else _ARRAY


# --- objects of frameworks ------------------------------------------------------------------------

_WIDE_INTEGER = 2**63


def _is_instance_of(value: Any, module: str, *names: str) -> bool:
    """Return whether a value is an instance of a class of a module, if that is loaded."""
    found: Any = sys.modules.get(module)
    kinds = tuple(kind for name in names if isinstance(kind := getattr(found, name, None), type))
    return isinstance(value, kinds)


def is_variable(value: Any) -> bool:
    """Return whether a value is a variable of a framework, which is restored in place."""
    return _is_instance_of(value, "torch", "Tensor") or _is_instance_of(value, "keras", "Variable")


def is_array(value: Any) -> bool:
    """Return whether a value is an immutable array of a framework."""
    return _is_instance_of(value, "jax", "Array")


def has_state_dict(value: Any) -> bool:
    """Return whether a value is saved by its `state_dict`."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
        and owned_variables(value) is None
    )


def owned_variables(value: Any) -> Sequence[Any] | None:
    """Return the variables of a Keras model, layer, optimizer or metric; None for other objects.

    Raises:
        ValueError: If it does not have all of its variables yet.
    """
    is_optimizer = _is_instance_of(value, "keras.optimizers", "Optimizer")
    if not is_optimizer and not _is_instance_of(value, "keras", "Layer", "Metric"):
        return None
    if "_headrace_placed" in vars(value):
        raise ValueError(
            f"the slots of {type(value).__name__} {value.name!r} of Keras are on parameter "
            "servers: save them with its model, model.compile(optimizer) and model.save(path), or "
            "with keras.callbacks.BackupAndRestore in model.fit"
        )
    if not getattr(value, "built", True):
        call = "build(model.trainable_variables)" if is_optimizer else "build(input_shape)"
        raise ValueError(
            f"{type(value).__name__} {value.name!r} of Keras is not built, so its variables can "
            f"neither be saved nor restored: call {call} first"
        )
    return list(value.variables)


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape of an array or variable, and the name of its dtype."""
    if _is_instance_of(value, "torch", "Tensor"):
        return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return tuple(value.shape), name_of(np.dtype(_dtype_of(value)))


def _dtype_of(value: Any) -> Any:
    return parse_dtype(value.dtype) if isinstance(value.dtype, str) else value.dtype


def to_array(value: Any) -> NDArray[Any]:
    """Return the NumPy array of an array or variable of any framework."""
    return as_array(value.value if _is_instance_of(value, "keras", "Variable") else value)


def assign(value: Any, array: NDArray[Any]) -> None:
    """Assign a value to a variable of a framework, in place."""
    if _is_instance_of(value, "keras", "Variable"):
        value.assign(array)
        return
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        value.copy_(_tensor(array))


def write_mismatch(value: Any) -> str:
    """Return why a PyTorch tensor cannot be written to; "" if it can, or is not a tensor."""
    if not _is_instance_of(value, "torch", "Tensor"):
        return ""
    torch: Any = sys.modules["torch"]
    if value.is_inference() and not torch.is_inference_mode_enabled():
        return (
            "it was created in torch.inference_mode(), and can be written only there; use its "
            "clone()"
        )
    if value.layout is torch.strided and any(
        size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True)
    ):
        return "several elements share memory, as after expand(); use its clone()"
    return ""


def to_array_like(value: Any, array: NDArray[Any]) -> Any:
    """Return a JAX array on the devices of another one."""
    return sys.modules["jax"].device_put(np.array(array), value.sharding)


def _tensor(array: NDArray[Any]) -> Any:
    torch: Any = sys.modules["torch"]
    contiguous = np.array(array, order="C")
    if name_of(contiguous.dtype) == "bfloat16":
        return torch.from_numpy(contiguous.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(contiguous)


# --- states ------------------------------------------------------------------------------------


def encode_state(path: str, value: Any, add: Callable[[NDArray[Any]], str]) -> Any:
    """Return a state as a JSON value.

    Args:
        path: Path of the object, for errors.
        value: Result of `state_dict`.
        add: Stores an array; returns its key.

    Raises:
        TypeError: If it contains a value that cannot be saved.
    """
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        items = value.items()
        return {"dict": [[key, encode_state(f"{path}/{key}", item, add)] for key, item in items]}
    if type(value) in (list, tuple):
        parts = [encode_state(f"{path}/{number}", item, add) for number, item in enumerate(value)]
        return {type(value).__name__: parts}
    if _is_instance_of(value, "torch", "Tensor"):
        return {"tensor": add(as_array(value))}
    if isinstance(value, np.ndarray | np.generic) or is_array(value):
        return {"array": add(as_array(value))}
    if value is None or isinstance(value, bool | str):
        return {"value": value}
    if isinstance(value, int) and -_WIDE_INTEGER <= value < _WIDE_INTEGER:
        return {"value": value}
    if isinstance(value, float):
        # JSON does not support non-finite numbers.
        return {"value": value} if math.isfinite(value) else {"number": repr(value)}
    raise TypeError(
        f"the state_dict contains a {type(value).__name__} at {path!r}, which a checkpoint does "
        "not save: it saves tensors, arrays, numbers and strings, and dicts, lists and tuples of "
        "them"
    )


def decode_state(saved: Any, array: Callable[[str], NDArray[Any]]) -> Any:
    """Return the state that `encode_state` converted to a JSON value.

    Args:
        saved: The JSON value.
        array: Returns the array of a key.
    """
    ((kind, inside),) = saved.items()
    match kind:
        case "dict":
            return {key: decode_state(each, array) for key, each in inside}
        case "list":
            return [decode_state(each, array) for each in inside]
        case "tuple":
            return tuple(decode_state(each, array) for each in inside)
        case "tensor":
            return _tensor(array(inside))
        case "array":
            return np.array(array(inside))[()]
        case "number":
            return float(inside)
        case _:
            return inside


def state_class_name(value: Any) -> str:
    """Return the class of an object with a `state_dict`, and of the schedulers in it."""
    inside = getattr(value, "_schedulers", None)
    if not isinstance(inside, list | tuple):
        return type(value).__name__
    return f"{type(value).__name__} of {', '.join(map(state_class_name, inside))}"


def describe_parameters(value: Any) -> tuple[str, ...]:
    """Return dtype and shape of each parameter of a PyTorch optimizer."""
    if not _is_instance_of(value, "torch.optim", "Optimizer"):
        return ()
    return tuple(_form_text(each) for group in value.param_groups for each in group["params"])


def _form_text(value: Any) -> str:
    shape, dtype = shape_and_dtype(value)
    return f"{dtype} {shape}"


def state_mismatch(value: Any, state: Any, kind: str, parameters: Sequence[str]) -> str:
    """Return why a state does not fit a PyTorch object; "" if it fits, as far as is known.

    Args:
        value: The object.
        state: The saved state.
        kind: Saved result of `state_class_name`; "" if unknown.
        parameters: Saved result of `describe_parameters`; empty if unknown.
    """
    if _is_instance_of(value, "torch.nn", "Module"):
        return _module_mismatch(value.state_dict(), state)
    is_optimizer = _is_instance_of(value, "torch.optim", "Optimizer")
    if is_optimizer or _is_instance_of(value, "torch.optim.lr_scheduler", *_SCHEDULERS):
        class_name = state_class_name(value)
        if kind and kind != class_name:
            return f"it is {class_name}, but {kind} in the checkpoint"
    if not is_optimizer:
        return ""
    sizes = [
        [len(group["params"]) for group in each["param_groups"]]
        for each in (value.state_dict(), state)
    ]
    if sizes[0] != sizes[1]:
        return f"its groups have {sizes[0]} parameters, but {sizes[1]} in the checkpoint"
    for number, (current, saved) in enumerate(
        zip(describe_parameters(value), parameters, strict=False)
    ):
        if current != saved:
            return f"parameter {number} is {current}, but {saved} in the checkpoint"
    return ""


_SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau")


def _module_mismatch(current_state: Any, saved_state: Any) -> str:
    for name in sorted({*current_state, *saved_state}):
        if name not in current_state or name not in saved_state:
            location = "in the model" if name in current_state else "in the checkpoint"
            return f"{name!r} is only {location}"
        current, saved = current_state[name], saved_state[name]
        if not _is_instance_of(current, "torch", "Tensor"):
            continue
        if _is_instance_of(current, "torch.nn.parameter", "UninitializedTensorMixin"):
            return f"{name!r} has no shape yet: run the module once first"
        if not _is_instance_of(saved, "torch", "Tensor"):
            return f"{name!r} is a tensor, but {type(saved).__name__} in the checkpoint"
        for attribute, own, other in zip(
            ("shape", "dtype"), shape_and_dtype(current), shape_and_dtype(saved), strict=True
        ):
            if own != other:
                return f"{name!r} has {attribute} {own}, but {other} in the checkpoint"
    return ""
