"""Keras models as bytes for another process, without `get_config` and values of variables.

The graph of objects of a model is pickled, which works for subclassed models with constructor
arguments, lambdas, custom losses and `train_step`, and classes of `__main__`. All variables of a
loaded model are zeros: their values live on parameter servers.

The bytes begin with a line that names the format and the versions of Python, Keras and its back end
that wrote them. Dumping a model twice gives the same bytes, also if values of variables changed in
between, so that a digest tells whether a process already has the model.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import keras

from headrace.adapters.keras_training import graph_internals as internals
from headrace.adapters.keras_training.keras_internals import all_layers, check_back_end
from headrace.errors import FailedPreconditionError
from headrace.frameworks.keras_state import LINKED_ATTRIBUTE
from headrace.parameter_server.pickling import WorkerPickler
from headrace.plan.serialize import find_references
from headrace.versions import own_versions, python_mismatch

__all__ = [
    "ModelPickler",
    "check_built",
    "dump_model",
    "dump_objects",
    "load_objects",
    "reduce_keras",
]

MODEL_FORMAT = 1
"""Number of the format of pickled models."""
_MAGIC = b"headrace-keras-model "
_MAX_HEADER_BYTES = 200


def dump_model(model: keras.Model) -> bytes:
    """Return a model as bytes for another process of the same Python and Keras versions.

    What is sent: layers, variables (names, shapes, dtypes, `trainable`, no values), what `compile`
    was given, and the optimizer with its numbers but without slots. The learning rate is such a
    number; iterations start at 0. Arrays that are no variables travel with their values. What is
    not sent: functions that Keras compiled, histories and callbacks.

    Args:
        model: A model that is built.

    Returns:
        The same bytes for the same model in one process, whatever the values of its variables.

    Raises:
        FailedPreconditionError: If the model is not built, the back end is neither jax nor torch,
            or something in the model cannot be pickled; the message names its layer and attribute.
    """
    check_built(model)
    return dump_objects(model, f"the model {model.name!r}", model)


def check_built(model: keras.Model) -> None:
    """Check that a model can be sent to another process as it is.

    Raises:
        FailedPreconditionError: If the model is not built, or the back end is neither jax nor
            torch.
    """
    check_back_end()
    if not model.built:
        raise FailedPreconditionError(
            f"the model {model.name!r} is not built, so its variables are not known: call "
            "model.build(input_shape), or the model on a first batch, before it is sent to "
            "another process"
        )
    if model.compiled:
        _ = model.jit_compile  # "auto" is decided when it is first read


def dump_objects(value: Any, what: str, layer: Any = None) -> bytes:
    """Return objects of Keras as bytes for another process, as `dump_model` does.

    Args:
        value: Of Keras, or a structure of such objects.
        what: Its description in errors.
        layer: The layer that all layers in `value` belong to, if there are any.

    Raises:
        FailedPreconditionError: If an object in them cannot be pickled.
    """
    for each in () if layer is None else all_layers(layer):
        internals.mark_values(each)
    with io.BytesIO() as file:
        file.write(_header())
        pickler = ModelPickler(file)
        try:
            pickler.dump_graph(value)
        except Exception as error:
            culprit = _find_unpicklable(pickler.reduced) or error
            raise FailedPreconditionError(
                f"{what} cannot be sent to another process: {culprit}. Create such things in the "
                "methods that use them, not in the constructor"
            ) from error
        return file.getvalue()


def load_objects(data: bytes) -> Any:
    """Return what `dump_model` or `dump_objects` made. Runs code: only for trusted bytes.

    Returns:
        The objects, whose variables are zeros and whose optimizers are not built.

    Raises:
        FailedPreconditionError: If another version of Python or Keras, or another back end, wrote
            the bytes; they are no model; or a module that they name cannot be imported here.
    """
    check_back_end()
    with io.BytesIO(data) as file:
        file.seek(_check_header(data))
        unpickler = pickle.Unpickler(file)
        try:
            loaded = unpickler.load()
            while (found := unpickler.load()) is not None:
                value, restore, state = found
                restore(value, state)
        except ModuleNotFoundError as error:
            raise FailedPreconditionError(
                f"the model needs the module {error.name!r}, which cannot be imported in this "
                "process: install it, or define the model's classes in the main program, whose "
                "classes are sent with the model"
            ) from error
    return loaded


class ModelPickler(WorkerPickler):
    """Pickles Keras objects as they are, and the rest as for workers.

    Attributes:
        reduced: Keras objects that were reached, in order.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.reduced: list[Any] = []
        self._pending: list[Any] | None = None

    def dump_graph(self, root: Any) -> None:
        """Pickle an object, then the states of Keras objects one by one, then None.

        The graph of a deep model is a long chain, and a pickler that followed it would exceed the
        recursion limit. So objects are pickled without their attributes where they are reached.
        """
        self._pending = []
        self.dump(root)
        for pending in self._pending:  # dumping appends to it
            self.dump(pending)
        self.dump(None)

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is pickled."""
        reduced = reduce_keras(value)
        if reduced is NotImplemented:
            return super().reducer_override(value)
        if isinstance(value, internals.GraphObject):
            self.reduced.append(value)
            if self._pending is not None and len(reduced) == 6 and reduced[5] is not _set_variable:
                create, arguments, state, _, _, restore = reduced
                self._pending.append((value, restore, state))
                return create, arguments
        return reduced


def reduce_keras(value: Any) -> Any:
    """Return how a Keras object is pickled as it is, without values of variables.

    For `reducer_override` of picklers that can pickle functions by value. Such a pickler follows
    the graph of a model depth first: for models of many layers use `dump_model`.

    Returns:
        What `__reduce_ex__` may return; NotImplemented for values that are not Keras' and for
        Keras objects that need no help, such as initializers and dtype policies.
    """
    kind = type(value)
    for kinds, reduce in _REDUCERS:
        if issubclass(kind, kinds):
            return reduce(value)
    torch = sys.modules.get("torch")
    if torch is not None and _plain_class(kind) in (torch.Tensor, torch.nn.Parameter):
        return _reduce_tensor(value)
    return internals.reduce_submodule(value)


def _reduce_object(value: Any) -> Any:
    internals.mark_values(value)
    state = internals.state_to_send(value)
    return _new, (type(value),), state, None, None, _set_attributes


def _reduce_function(value: Any) -> Any:
    internals.mark_values(value)
    state = (internals.state_to_send(value), internals.graph_node_keys(value))
    return _new, (type(value),), state, None, None, _set_function


def _reduce_optimizer(optimizer: Any) -> Any:
    state = internals.optimizer_template(optimizer)
    return _new, (type(optimizer),), state, None, None, _set_optimizer


def _reduce_variable(variable: Any) -> Any:
    state = internals.variable_attributes(variable)
    kind = getattr(type(variable), LINKED_ATTRIBUTE, type(variable))
    return _new, (kind,), state, None, None, _set_variable


def _reduce_tracker(tracker: Any) -> Any:
    state = internals.tracker_parts(tracker)
    return _new, (type(tracker),), state, None, None, _set_tracker


def _reduce_container(container: Any) -> Any:
    state = internals.container_parts(container)
    return _new, (type(container),), state, None, None, _set_container


def _reduce_backend(backend: Any) -> Any:
    return type(backend), (internals.dynamic_backend_name(backend),)


def _plain_class(kind: type) -> type:
    """Return the class that a loaded tensor has."""
    plain: type = getattr(kind, "plain_class", kind)
    return plain


def _reduce_tensor(tensor: Any) -> Any:
    if tensor.layout is not _torch().strided:
        return NotImplemented
    described = (
        _plain_class(type(tensor)),
        tuple(tensor.shape),
        tensor.dtype,
        tensor.requires_grad,
    )
    on_host = tensor.device.type == "cpu"
    if internals.is_variable_value(tensor):
        return _make_tensor, (*described, on_host, None)
    torch = _torch()
    # A copy: tensors that were expanded count as contiguous, and their bytes cannot be viewed.
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    values = flat.view(torch.uint8)
    return _make_tensor, (*described, on_host, values.numpy().tobytes())


_REDUCERS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    (keras.Variable, _reduce_variable),
    (keras.optimizers.Optimizer, _reduce_optimizer),
    (internals.Function, _reduce_function),
    (internals.GraphObject, _reduce_object),
    (internals.Tracker, _reduce_tracker),
    (internals.Container, _reduce_container),
    (internals.DynamicBackend, _reduce_backend),
)


def _new(kind: type) -> Any:
    # Not `kind.__new__`: those of Keras wrap methods and need the constructor's arguments.
    bases: tuple[Any, ...] = (list, OrderedDict, dict, set, object)
    base = next(each for each in bases if issubclass(kind, each))
    return base.__new__(kind)


def _set_attributes(value: Any, state: dict[str, Any]) -> None:
    vars(value).update(state)


def _set_function(function: Any, state: tuple[dict[str, Any], list[tuple[Any, int]]]) -> None:
    attributes, nodes = state
    _set_attributes(function, attributes)
    internals.restore_node_keys(function, nodes)


def _set_optimizer(optimizer: Any, state: tuple[dict[str, Any], list[tuple[Any, Any]]]) -> None:
    attributes, numbers = state
    _set_attributes(optimizer, attributes)
    for variable, number in numbers:
        variable.assign(number)


def _set_variable(variable: Any, state: tuple[dict[str, Any], Any]) -> None:
    internals.zero_value(variable, *state)


def _set_tracker(tracker: Any, state: tuple[dict[str, Any], dict[str, list[Any]]]) -> None:
    internals.fill_tracker(tracker, *state)


def _set_container(container: Any, state: tuple[dict[str, Any], list[Any]]) -> None:
    internals.add_container_items(container, *state)


def _make_tensor(
    kind: Any,
    shape: tuple[int, ...],
    dtype: Any,
    requires_grad: bool,
    on_host: bool,
    values: bytes | None,
) -> Any:
    torch = _torch()
    # Tensors of an accelerator go where Keras puts its own in this process.
    device = torch.device("cpu") if on_host else keras.ops.convert_to_tensor(0.0).device
    if values is None or not values:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    else:
        flat = torch.frombuffer(bytearray(values), dtype=dtype)
        tensor = flat.reshape(shape).to(device)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _torch() -> Any:
    import torch  # noqa: PLC0415 - optional dependency

    return torch


def _header() -> bytes:
    versions = own_versions()
    header_fields = (MODEL_FORMAT, versions.python, keras.__version__, keras.backend.backend())
    return _MAGIC + " ".join(map(str, header_fields)).encode() + b"\n"


def _check_header(data: bytes) -> int:
    """Return the length of a pickled model's header."""
    end = data.find(b"\n", 0, _MAX_HEADER_BYTES)
    header_fields = data[len(_MAGIC) : end].decode("ascii", "replace").split(" ")
    if (
        not data.startswith(_MAGIC)
        or end < 0
        or header_fields[0] != str(MODEL_FORMAT)
        or len(header_fields) != 4
    ):
        found = f"format {header_fields[0]:.20}" if data.startswith(_MAGIC) else "no header"
        raise FailedPreconditionError(
            f"this process ({own_versions()}) reads pickled Keras models of format {MODEL_FORMAT}, "
            f"but this one has {found}: use the same version of Headrace in both processes"
        )
    _, python, version, back_end = header_fields
    own_python, own_version = own_versions().python, keras.__version__
    own_back_end = keras.backend.backend()
    is_same_keras = (version, back_end) == (own_version, own_back_end)
    if python_mismatch(python, own_python) or not is_same_keras:
        raise FailedPreconditionError(
            f"the model was pickled by Python {python} with Keras {version} on {back_end}, but "
            f"this process runs Python {own_python} with Keras {own_version} on {own_back_end}: "
            "use the same versions and KERAS_BACKEND in both processes"
        )
    return end + 1


class _AttributePickler(WorkerPickler):
    """Pickles one attribute of a Keras object, without other Keras objects that it leads to."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (*internals.GraphObject, internals.Tracker)):
            return _new, (object,)
        reduced = reduce_keras(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def _find_unpicklable(objects: list[Any]) -> str | None:
    for owner in reversed(objects):
        for name, value in vars(owner).items():
            if (problem := _pickling_error(value)) is not None:
                captured = _captured_values(value)
                inside = f"holds {captured}" if captured else f"is {problem}"
                return f"the attribute `{name}` of {_describe_owner(owner)} {inside}"
        for kind in type(owner).__mro__:
            for name, value in vars(kind).items():
                if (
                    kind.__module__ == "__main__"
                    and (problem := _captured_values(value)) is not None
                ):
                    return f"the method `{name}` of {_describe_owner(owner)} holds {problem}"
    return None


def _captured_values(fn: Any) -> str | None:
    for name, value in find_references(fn).items():
        if (problem := _pickling_error(value)) is not None:
            return f"`{name}`, {problem}"
    return None


def _pickling_error(value: Any) -> str | None:
    if isinstance(value, internals.GraphObject):
        return None  # its attributes are checked one by one
    try:
        with io.BytesIO() as file:
            _AttributePickler(file).dump(value)
    except Exception as error:
        return f"a {type(value).__name__} that cannot be pickled ({error})"
    return None


def _describe_owner(owner: Any) -> str:
    kinds = {
        keras.Model: "model",
        keras.Layer: "layer",
        keras.optimizers.Optimizer: "optimizer",
        keras.metrics.Metric: "metric",
        keras.losses.Loss: "loss",
    }
    what = next((word for kind, word in kinds.items() if isinstance(owner, kind)), "object")
    return f"the {what} {getattr(owner, 'name', '')!r} ({type(owner).__name__})"
