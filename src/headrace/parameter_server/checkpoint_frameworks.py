"""Objects of Keras, PyTorch and JAX in a checkpoint: how each is saved and restored in place.

    variables     torch tensors and parameters, Keras variables: restored in place
    containers    Keras models, layers, optimizers and metrics: by their variables
    states        what has `state_dict` and `load_state_dict`: torch modules, optimizers ...
    JAX arrays    cannot change: the dict or list that holds one gets another

No framework is imported here: one whose objects come along has been.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.parameter_server.arrays import as_array
from headrace.parameter_server.specs import dtype_named, name_of

__all__ = [
    "array_like",
    "array_of",
    "assign",
    "decode_state",
    "encode_state",
    "form_of",
    "has_state_dict",
    "is_array",
    "is_variable",
    "kind_of_state",
    "parameters_of",
    "state_mismatch",
    "variables_of",
    "write_refusal",
]

_WIDE_INTEGER = 2**63


def _is_a(value: Any, module: str, *names: str) -> bool:
    """Return whether a value is of one of the classes of a module, if that is loaded."""
    found: Any = sys.modules.get(module)
    kinds = tuple(kind for name in names if isinstance(kind := getattr(found, name, None), type))
    return isinstance(value, kinds)


def is_variable(value: Any) -> bool:
    """Return whether a value is a variable of a framework, which is restored in place."""
    return _is_a(value, "torch", "Tensor") or _is_a(value, "keras", "Variable")


def is_array(value: Any) -> bool:
    """Return whether a value is an array of a framework that cannot be changed."""
    return _is_a(value, "jax", "Array")


def has_state_dict(value: Any) -> bool:
    """Return whether a value is saved by its `state_dict`."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
        and variables_of(value) is None
    )


def variables_of(value: Any) -> Sequence[Any] | None:
    """Return the variables of a Keras model, layer, optimizer or metric; None: it is none.

    Raises:
        ValueError: It does not have all of its variables yet.
    """
    is_optimizer = _is_a(value, "keras.optimizers", "Optimizer")
    if not is_optimizer and not _is_a(value, "keras", "Layer", "Metric"):
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


def form_of(value: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape of an array or variable, and the name of its dtype."""
    if _is_a(value, "torch", "Tensor"):
        return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return tuple(value.shape), name_of(np.dtype(_dtype_of(value)))


def _dtype_of(value: Any) -> Any:
    return dtype_named(value.dtype) if isinstance(value.dtype, str) else value.dtype


def array_of(value: Any) -> NDArray[Any]:
    """Return the numbers of an array or variable of any framework."""
    return as_array(value.value if _is_a(value, "keras", "Variable") else value)


def assign(value: Any, array: NDArray[Any]) -> None:
    """Change a variable of a framework in place."""
    if _is_a(value, "keras", "Variable"):
        value.assign(array)
        return
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        value.copy_(_tensor(array))


def write_refusal(value: Any) -> str:
    """Return why a tensor of PyTorch cannot be written into; "": it can, or is none."""
    if not _is_a(value, "torch", "Tensor"):
        return ""
    torch: Any = sys.modules["torch"]
    if value.is_inference() and not torch.is_inference_mode_enabled():
        return (
            "it is a tensor made in torch.inference_mode(), which can be written there alone; "
            "use its clone()"
        )
    if value.layout is torch.strided and any(
        size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True)
    ):
        return "several elements are in one place, as expand() makes them; use its clone()"
    return ""


def array_like(value: Any, array: NDArray[Any]) -> Any:
    """Return an array of JAX on the devices of another one."""
    return sys.modules["jax"].device_put(np.array(array), value.sharding)


def _tensor(array: NDArray[Any]) -> Any:
    torch: Any = sys.modules["torch"]
    own = np.array(array, order="C")
    if name_of(own.dtype) == "bfloat16":
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


# --- states -------------------------------------------------------------------------------------


def encode_state(path: str, value: Any, add: Callable[[NDArray[Any]], str]) -> Any:
    """Return a state as a value of JSON.

    Args:
        path: Of the object, for errors.
        value: What `state_dict` returned.
        add: Keeps an array; returns its key.

    Raises:
        TypeError: It holds what is not saved.
    """
    if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        items = value.items()
        return {"dict": [[key, encode_state(f"{path}/{key}", of, add)] for key, of in items]}
    if type(value) in (list, tuple):
        parts = [encode_state(f"{path}/{number}", of, add) for number, of in enumerate(value)]
        return {type(value).__name__: parts}
    if _is_a(value, "torch", "Tensor"):
        return {"tensor": add(as_array(value))}
    if isinstance(value, np.ndarray | np.generic) or is_array(value):
        return {"array": add(as_array(value))}
    if value is None or isinstance(value, bool | str):
        return {"value": value}
    if isinstance(value, int) and -_WIDE_INTEGER <= value < _WIDE_INTEGER:
        return {"value": value}
    if isinstance(value, float):
        # JSON has no form for what is not finite.
        return {"value": value} if math.isfinite(value) else {"number": repr(value)}
    raise TypeError(
        f"the state_dict holds a {type(value).__name__} at {path!r}, which a checkpoint does not "
        "save: it saves tensors, arrays, numbers and strings, and dicts, lists and tuples of them"
    )


def decode_state(saved: Any, array: Callable[[str], NDArray[Any]]) -> Any:
    """Return a state that `encode_state` made a value of JSON.

    Args:
        saved: The value.
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


def kind_of_state(value: Any) -> str:
    """Return the class of an object with a `state_dict`, and of the schedulers in it."""
    inside = getattr(value, "_schedulers", None)
    if not isinstance(inside, list | tuple):
        return type(value).__name__
    return f"{type(value).__name__} of {', '.join(map(kind_of_state, inside))}"


def parameters_of(value: Any) -> tuple[str, ...]:
    """Return dtype and shape of each parameter that an optimizer of PyTorch changes."""
    if not _is_a(value, "torch.optim", "Optimizer"):
        return ()
    return tuple(_form_text(each) for group in value.param_groups for each in group["params"])


def _form_text(value: Any) -> str:
    shape, dtype = form_of(value)
    return f"{dtype} {shape}"


def state_mismatch(value: Any, state: Any, kind: str, parameters: Sequence[str]) -> str:
    """Return why a state does not fit an object of PyTorch; "": it does, as far as is known.

    Args:
        value: The object.
        state: What was saved.
        kind: What `kind_of_state` returned when it was saved; "": it is not known.
        parameters: Likewise of `parameters_of`; empty: they are not known.
    """
    if _is_a(value, "torch.nn", "Module"):
        return _module_mismatch(value.state_dict(), state)
    is_optimizer = _is_a(value, "torch.optim", "Optimizer")
    if is_optimizer or _is_a(value, "torch.optim.lr_scheduler", *_SCHEDULERS):
        here = kind_of_state(value)
        if kind and kind != here:
            return f"it is {here} here, and {kind} in the checkpoint"
    if not is_optimizer:
        return ""
    sizes = [
        [len(group["params"]) for group in each["param_groups"]]
        for each in (value.state_dict(), state)
    ]
    if sizes[0] != sizes[1]:
        return f"its groups have {sizes[0]} parameters here, and {sizes[1]} in the checkpoint"
    for number, (mine, saved) in enumerate(zip(parameters_of(value), parameters, strict=False)):
        if mine != saved:
            return f"parameter {number} is {mine} here, and {saved} in the checkpoint"
    return ""


_SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau")


def _module_mismatch(here: Any, there: Any) -> str:
    for name in sorted({*here, *there}):
        if name not in here or name not in there:
            where = "here" if name in here else "in the checkpoint"
            return f"{name!r} is only {where}"
        mine, saved = here[name], there[name]
        if not _is_a(mine, "torch", "Tensor"):
            continue
        if _is_a(mine, "torch.nn.parameter", "UninitializedTensorMixin"):
            return f"{name!r} has no shape yet: run the module once before"
        if not _is_a(saved, "torch", "Tensor"):
            return f"{name!r} is a tensor here, and {type(saved).__name__} in the checkpoint"
        for what, one, other in zip(("shape", "dtype"), form_of(mine), form_of(saved), strict=True):
            if one != other:
                return f"{name!r} has {what} {one} here, and {other} in the checkpoint"
    return ""
