"""The JAX framework: immutable arrays, each on the device of its replica."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.frameworks import jax_replica_program
from headrace.frameworks.framework import Array, Device, Exchange, Framework
from headrace.frameworks.jax_global_arrays import jax_dtype, to_jax_dtype

__all__ = ["FRAMEWORK", "JaxFramework"]

_PLATFORMS = ("gpu", "tpu", "cpu")
_RANKS = {kind: rank for rank, kind in enumerate("buifc")}
_TEXT = (bytes, str)
_GRADIENT_TRACERS = ("JVPTracer", "LinearizeTracer")
"""Tracers of `jax.grad`, `jax.vjp` and `jax.linearize`; JAX has no public names for them."""


class JaxFramework(Framework):
    """Arrays of JAX; see `Framework`."""

    name = "jax"

    # --- devices ------------------------------------------------------------------------------

    def default_devices(self) -> list[str]:
        """Return the devices of the default platform; one CPU, because CPUs share the cores."""
        platform = jax.default_backend()
        if platform == "cpu":
            return ["cpu:0"]
        return [f"{platform}:{number}" for number in range(len(jax.local_devices()))]

    def device(self, name: str) -> Device:
        """Return one of the local devices of JAX."""
        kind, _, number = name.partition(":")
        devices = _devices_of(kind)
        if int(number) < len(devices):
            return devices[int(number)]
        available = [f"{k}:{i}" for k in _PLATFORMS for i in range(len(_devices_of(k)))]
        message = f"device {name!r} does not exist: JAX has {', '.join(available)}"
        if kind == "cpu":
            message += (
                "; to have more CPU devices, request them before JAX is first used: "
                f'jax.config.update("jax_num_cpu_devices", {int(number) + 1})'
            )
        raise ValueError(message)

    def thread_settings(self) -> Any:
        """Return whether 64-bit dtypes are enabled, which `jax.enable_x64` sets for a thread."""
        return jax.config.jax_enable_x64

    def check_not_sharded(self, values: Any) -> None:
        """Reject sharded arrays: each replica would get the whole array, and sums repeat it."""
        for leaf in jax.tree.leaves(values):
            if isinstance(leaf, jax.Array) and not leaf.sharding.is_fully_replicated:
                raise InvalidArgumentError(
                    f"an array of shape {leaf.shape} that is sharded over several devices is a "
                    "single value, not one for each replica: pass it to jax.jit, or to the "
                    "function that strategy.compile returned; for run, reduce and gather, "
                    "distribute the dataset without `global_arrays`"
                )

    def replica_context(self, device: Device, settings: Any) -> AbstractContextManager[Any] | None:
        """Make the replica's device the default, with the caller's 64-bit setting."""
        on_device: AbstractContextManager[Any] = jax.default_device(device)
        if jax.config.jax_enable_x64 == settings:
            return on_device
        stack = ExitStack()
        stack.enter_context(jax.enable_x64(settings))
        stack.enter_context(on_device)
        return stack

    def join_workers(
        self, rank: int, size: int, host: str | None, timeout: float, exchange: Exchange
    ) -> bool:
        """Form one JAX program from all workers with `jax.distributed`."""
        workers = importlib.import_module("headrace.frameworks.jax_workers")
        return bool(workers.join_workers(rank, size, host, timeout, exchange))

    # --- arrays -------------------------------------------------------------------------------

    def replica_programs(self) -> Any:
        """Return the module for JAX programs over all replicas."""
        return jax_replica_program

    def put(self, values: Sequence[Any], devices: Sequence[Device]) -> list[Array]:
        """Put all arrays in one call of JAX, because each call is expensive."""
        made = list(values)
        numbers = [
            index
            for index, value in enumerate(values)
            if not isinstance(value, _TEXT) and value.dtype.kind not in "OSU"
        ]
        arrays = jax.device_put(
            [to_jax_dtype(np.asarray(values[index])) for index in numbers],
            [devices[index] for index in numbers],
        )
        for index, array in zip(numbers, arrays, strict=True):
            made[index] = array
        return made

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the 32-bit dtype for 64-bit ones, unless x64 is enabled."""
        return dtype if dtype.kind in "OSU" else jax_dtype(dtype)

    def as_array(self, value: Any, dtype: Any = None) -> Array:
        """Convert a value; memory of others is copied, because JAX may read it later."""
        if isinstance(value, jax.Array):
            return value if dtype is None else value.astype(dtype)
        try:
            return jnp.array(value, None if dtype is None else self.as_dtype(dtype))
        except TypeError as error:
            raise InvalidArgumentError(
                f"{value!r:.80} of type {type(value).__name__} cannot be converted to a JAX array: "
                f"{error}"
            ) from error

    def as_dtype(self, dtype: Any) -> Any:
        """Return JAX's dtype: float32 for float64, unless 64 bits are enabled."""
        return self.device_dtype(np.dtype(dtype))

    def copy_to_device(self, value: Any, device: Device) -> Array:
        """Put a value on a device; JAX arrays are immutable, others are copied."""
        if isinstance(value, jax.core.Tracer):
            raise FailedPreconditionError(
                "a value that JAX is tracing cannot be stored in a Variable: return it from the "
                "compiled function, and assign the result"
            )
        return jax.device_put(value if isinstance(value, jax.Array) else np.array(value), device)

    def move_to_device(self, array: Array, device: Device) -> Array:
        """Move an array with `jax.device_put`."""
        return jax.device_put(array, device)

    def replicate(self, value: Any, devices: Sequence[Device]) -> list[Any]:
        """Put the array on each device."""
        if not isinstance(value, jax.Array):
            return [value] * len(devices)
        return [jax.device_put(value, device) for device in devices]

    def to_numpy(self, array: Array) -> Any:
        """Return a NumPy array; on the CPU a read-only view."""
        return np.asarray(array)

    def dtype_kind(self, dtype: Any) -> str:
        """Return the kind code, also of the extended float dtypes."""
        if dtype == jnp.bool_:
            return "b"
        kinds = {
            "u": jnp.unsignedinteger,
            "i": jnp.signedinteger,
            "f": jnp.floating,
            "c": jnp.complexfloating,
        }
        for kind, of_numbers in kinds.items():
            if jnp.issubdtype(dtype, of_numbers):
                return kind
        return str(np.dtype(dtype).kind)

    def can_cast(self, dtype: Any, to: Any) -> bool:
        """Compare the kinds of the dtypes."""
        return _RANKS.get(self.dtype_kind(dtype), 9) <= _RANKS.get(self.dtype_kind(to), -1)

    # --- gradients ----------------------------------------------------------------------------

    def traced_indices(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the values traced by `jax.grad` and similar; reject other tracers."""
        found = [
            (index, type(value).__name__)
            for index, value in enumerate(values)
            if isinstance(value, jax.core.Tracer)
        ]
        for _, kind in found:
            if kind not in _GRADIENT_TRACERS:
                raise FailedPreconditionError(
                    f"a value that JAX traces ({kind}, as in jax.jit or jax.vmap) cannot be "
                    "reduced or gathered in strategy.run, where replicas exchange values: compile "
                    "the whole step with strategy.compile, or move all_reduce and all_gather out "
                    "of the function that JAX transforms; jax.grad of them is supported"
                )
        return tuple(index for index, _ in found)

    def with_gradient(
        self,
        forward: Callable[[Sequence[Any]], list[Array]],
        backward: Callable[[Sequence[Array]], list[Array]],
        values: Sequence[Any],
        traced: Sequence[int],
    ) -> list[Array]:
        """Use `jax.custom_vjp`; `jax.grad` calls its functions with values, not with tracers."""

        def run_forward(*given: Any) -> list[Array]:
            made = list(values)
            for index, value in zip(traced, given, strict=True):
                made[index] = value
            if self.traced_indices(given):  # in a gradient of a gradient
                return self.with_gradient(forward, backward, made, traced)
            return forward(made)

        def gradient(dtypes: Sequence[Any], upstream: Sequence[Any]) -> tuple[Any, ...]:
            are_real = [jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes]
            arrived = [
                upstream[index] if is_real else jnp.zeros(upstream[index].shape)
                for index, is_real in zip(traced, are_real, strict=True)
            ]
            return tuple(
                each.astype(dtype) if is_real else None
                for each, dtype, is_real in zip(backward(arrived), dtypes, are_real, strict=True)
            )

        dtypes = [values[index].dtype for index in traced]
        function = jax.custom_vjp(run_forward)
        function.defvjp(
            lambda *given: (run_forward(*given), None),
            lambda _, upstream: gradient(dtypes, upstream),
        )
        found: list[Array] = function(*[values[index] for index in traced])
        return found

    # --- combining values of replicas ---------------------------------------------------------

    def as_summable(self, value: Any) -> Array:
        """Convert numbers; True counts as 1."""
        if isinstance(value, _TEXT) or (hasattr(value, "dtype") and value.dtype == object):
            raise InvalidArgumentError(
                f"values such as {value!r:.40} cannot be summed; read them with local_results"
            )
        array = self.as_array(value)
        return array.astype(int) if array.dtype == jnp.bool_ else array

    def sum_arrays(self, arrays: Sequence[Array]) -> Array:
        """Sum the arrays on the device of the first."""
        first, *others = _on_one_device(arrays)
        for other in others:
            first = first + other
        return first

    def sum_axes(self, array: Array, axes: tuple[int, ...]) -> Array:
        """Sum with `jnp.sum`."""
        return jnp.sum(array, axis=axes, dtype=array.dtype)

    def divide(self, array: Array, count: int) -> Array:
        """Divide with JAX."""
        return array / count

    def worker_all_reduce(
        self, rank: int, size: int, host: str, timeout: float, exchange: Exchange, device: Device
    ) -> Any:
        """Return a collective over one device of each worker."""
        workers = importlib.import_module("headrace.frameworks.jax_workers")
        return workers.JaxAllReduce(device, exchange)

    def concatenate(self, arrays: Sequence[Array], axis: int) -> Array:
        """Concatenate on the device of the first array."""
        return jnp.concatenate(_on_one_device(arrays), axis=axis)


def _devices_of(kind: str) -> list[Device]:
    with contextlib.suppress(RuntimeError):  # the platform does not exist
        found: list[Device] = jax.local_devices(backend=kind)
        return found
    return []


def _on_one_device(arrays: Sequence[Array]) -> list[Array]:
    """Move arrays to the device of the first."""
    first, *others = arrays
    return (
        [first, *(jax.device_put(other, first.device) for other in others)] if others else [first]
    )


FRAMEWORK = JaxFramework()
