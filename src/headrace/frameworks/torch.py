"""The PyTorch framework: tensors on the device of their replica; any number of logical CPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.element.description import decode_dtype
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.frameworks.framework import Array, Device, Exchange, Framework

__all__ = ["EXTENDED", "FRAMEWORK", "TorchFramework"]

_TEXT = (bytes, str)

EXTENDED = {
    name: (np.int16 if name == "bfloat16" else np.uint8, getattr(torch, name))
    for name in (
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}
"""Extended dtypes, as in the package ml_dtypes: NumPy's dtype of the bits, and PyTorch's dtype."""
_NAMES = {dtype: name for name, (_, dtype) in EXTENDED.items()}
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}


class TorchFramework(Framework):
    """Tensors of PyTorch; see `Framework`."""

    name = "torch"

    # --- devices ------------------------------------------------------------------------------

    def default_devices(self) -> list[str]:
        """Return all GPUs, or one CPU if there are none."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [f"gpu:{number}" for number in range(count)] or ["cpu:0"]

    def device(self, name: str) -> Device:
        """Return a CPU of any number, or an existing accelerator."""
        kind, _, number = name.partition(":")
        if kind == "cpu":
            return torch.device("cpu")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if kind in ("gpu", "cuda") and int(number) < count:
            return torch.device("cuda", int(number))
        if name == "mps:0" and torch.backends.mps.is_available():
            return torch.device("mps")
        available = "".join(f"gpu:{each}, " for each in range(count)) or "no GPU, "
        raise ValueError(
            f"device {name!r} does not exist: PyTorch has {available}and any number of logical "
            "CPUs (cpu:0, cpu:1, ...)"
        )

    def thread_settings(self) -> Any:
        """Return the gradient mode, the inference mode, and the autocast dtypes."""
        kinds = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ]
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), kinds

    def replica_context(self, device: Device, settings: Any) -> AbstractContextManager[Any] | None:
        """Apply the caller's thread settings, and make the replica's GPU the current device."""
        if device.type == "cpu" and settings == self.thread_settings():
            return None
        gradients, inference, kinds = settings
        stack = ExitStack()
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(gradients))
        for kind, dtype in kinds:
            stack.enter_context(torch.autocast(kind, dtype))
        return stack

    # --- arrays -------------------------------------------------------------------------------

    def put(self, values: Sequence[Any], devices: Sequence[Device]) -> list[Array]:
        """Put arrays on devices; on the CPU in the same memory."""
        return [_put(value, device) for value, device in zip(values, devices, strict=True)]

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype unchanged."""
        return dtype

    def as_array(self, value: Any, dtype: Any = None) -> Array:
        """Convert a value; the tensor shares the memory of a NumPy array."""
        if isinstance(value, torch.Tensor):
            return value if dtype is None else value.to(dtype)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSU":
            tensor = _tensor_of(value)
            return tensor if dtype is None else tensor.to(dtype)
        try:
            return torch.as_tensor(value, dtype=dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError(
                f"{value!r:.80} of type {type(value).__name__} cannot be converted to a PyTorch "
                f"tensor: {error}"
            ) from error

    def as_dtype(self, dtype: Any) -> Any:
        """Return PyTorch's dtype, also for NumPy's name of it."""
        if isinstance(dtype, torch.dtype):
            return dtype
        return _tensor_of(np.empty(0, dtype)).dtype

    def copy_to_device(self, value: Any, device: Device) -> Array:
        """Return a detached copy, without gradient history."""
        if isinstance(value, torch.Tensor):
            return value.detach().to(device, copy=True)
        return self.as_array(value).to(device, copy=True)

    def move_to_device(self, array: Array, device: Device) -> Array:
        """Move a tensor with `Tensor.to`."""
        return array.to(device)

    def replicate(self, value: Any, devices: Sequence[Device]) -> list[Any]:
        """Copy a tensor to each device; gradients flow through the copies."""
        if not isinstance(value, torch.Tensor):
            return [value] * len(devices)
        first, *others = devices
        return [value.to(first), *(value.to(device, copy=True) for device in others)]

    def to_numpy(self, array: Array) -> Any:
        """Return a NumPy array that shares CPU memory; without ml_dtypes bfloat16 is float32."""
        tensor = array.detach().cpu().resolve_conj().resolve_neg()
        name = _NAMES.get(tensor.dtype)
        if name is None:
            return tensor.numpy()
        try:
            dtype = decode_dtype(name)
        except FailedPreconditionError:
            return tensor.to(torch.float32).numpy()
        return tensor.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype)

    def dtype_kind(self, dtype: Any) -> str:
        """Return the kind code by PyTorch's predicates."""
        if dtype == torch.bool:
            return "b"
        if dtype.is_complex:
            return "c"
        if dtype.is_floating_point:
            return "f"
        return "i" if dtype.is_signed else "u"

    def can_cast(self, dtype: Any, to: Any) -> bool:
        """Apply PyTorch's rule."""
        found: bool = torch.can_cast(dtype, to)
        return found

    # --- gradients ----------------------------------------------------------------------------

    def traced_indices(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the values that require a gradient, if gradients are recorded."""
        if not torch.is_grad_enabled():
            return ()
        return tuple(
            index
            for index, value in enumerate(values)
            if isinstance(value, torch.Tensor) and value.requires_grad
        )

    def with_gradient(
        self,
        forward: Callable[[Sequence[Any]], list[Array]],
        backward: Callable[[Sequence[Array]], list[Array]],
        values: Sequence[Any],
        traced: Sequence[int],
    ) -> list[Array]:
        """Use an autograd function."""
        return list(_WithGradient.apply(forward, backward, tuple(traced), *values))

    # --- combining values of replicas ---------------------------------------------------------

    def as_summable(self, value: Any) -> Array:
        """Convert numbers; bool and unsigned integers, which PyTorch cannot add, become int64."""
        if isinstance(value, _TEXT) or (
            isinstance(value, np.ndarray) and value.dtype.kind in "OSU"
        ):
            raise InvalidArgumentError(
                f"values such as {value!r:.40} cannot be summed; read them with local_results"
            )
        tensor = self.as_array(value)
        narrow = tensor.dtype == torch.bool or tensor.dtype in _UNSIGNED
        return tensor.to(torch.int64) if narrow else tensor

    def sum_arrays(self, arrays: Sequence[Array]) -> Array:
        """Sum on the device of the first tensor."""
        first, *others = arrays
        if not others:
            return first.clone()
        for other in others:
            first = first + other.to(first.device)
        return first

    def sum_axes(self, array: Array, axes: tuple[int, ...]) -> Array:
        """Sum with PyTorch, where an empty tuple of axes would mean all axes."""
        return array.sum(dim=axes, dtype=array.dtype) if axes else array

    def divide(self, array: Array, count: int) -> Array:
        """Divide with PyTorch."""
        return torch.true_divide(array, count)

    def worker_all_reduce(
        self, rank: int, size: int, host: str, timeout: float, exchange: Exchange, device: Device
    ) -> Any:
        """Return Gloo's all-reduce, if PyTorch was built with Gloo."""
        if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
            return None
        workers = importlib.import_module("headrace.frameworks.torch_workers")
        return workers.GlooAllReduce(rank, size, host, timeout, exchange)

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Concatenate on the device of the first tensor."""
        return torch.cat([array.to(arrays[0].device) for array in arrays], dim=axis)


class _WithGradient(torch.autograd.Function):  # type: ignore[misc]
    """Autograd function of `TorchFramework.with_gradient`."""

    @staticmethod
    def forward(
        forward: Callable[[Sequence[Any]], list[Array]],
        backward: Callable[[Sequence[Array]], list[Array]],
        traced: tuple[int, ...],
        *values: Any,
    ) -> tuple[Array, ...]:
        """Call the given forward function (PyTorch's protocol)."""
        return tuple(forward([v.detach() if isinstance(v, torch.Tensor) else v for v in values]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Array, ...]) -> None:
        """Save what the backward function needs (PyTorch's protocol)."""
        _, ctx.gradient, ctx.traced, *values = inputs
        ctx.count = len(values)
        ctx.devices = [values[index].device for index in ctx.traced]
        others = [each for index, each in enumerate(output) if index not in ctx.traced]
        ctx.mark_non_differentiable(*others)

    @staticmethod
    def backward(ctx: Any, *upstream: Array) -> tuple[Any, ...]:
        """Call the given backward function (PyTorch's protocol)."""
        made = ctx.gradient([upstream[index] for index in ctx.traced])
        gradients: list[Any] = [None] * ctx.count
        for index, gradient, device in zip(ctx.traced, made, ctx.devices, strict=True):
            gradients[index] = gradient.to(device)
        return (None, None, None, *gradients)


def _put(value: Any, device: Device) -> Any:
    if isinstance(value, _TEXT) or value.dtype.kind in "OSU":
        return value
    tensor = _tensor_of(value)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _tensor_of(value: NDArray[Any] | np.generic) -> Any:
    """Return a tensor that shares an array's memory, or has a copy if PyTorch cannot use it.

    Raises:
        InvalidArgumentError: If PyTorch does not support the dtype.
    """
    array = np.asarray(value)
    if not array.flags.writeable or any(s < 0 or s % array.itemsize for s in array.strides):
        array = array.copy()
    extended = EXTENDED.get(array.dtype.name)
    if extended is not None:
        bits, dtype = extended
        return torch.from_numpy(array.view(bits)).view(dtype)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise InvalidArgumentError(
            f"PyTorch has no tensors of NumPy's {array.dtype}; convert it in the dataset, with "
            "map(lambda x: x.astype(...))"
        ) from error


FRAMEWORK = TorchFramework()
