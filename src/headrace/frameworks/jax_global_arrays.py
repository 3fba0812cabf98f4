"""Global `jax.Array`s over a mesh, made from the rows of each process.

Rule 1. The sharding determines which rows of a batch a process provides, not the number of
        processes. The sharding splits the first axis into *shards*; devices that hold the same
        shard (tensor parallelism) need the same rows, and so do their processes.
Rule 2. Processes that need a common shard form a *pipeline* and read the same rows. There may be
        one pipeline for each process, one for all, or anything between.
Rule 3. Each shard is put on its devices from the process's own memory. Shards are not concatenated
        first, and no data moves between processes.
Rule 4. On the CPU, JAX may use a NumPy array's memory (if it is aligned to 64 bytes) instead of a
        copy, with any option. Therefore arrays are either given to JAX for good, or copied here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from headrace.element.structure import describe_component
from headrace.errors import InvalidArgumentError

__all__ = [
    "BatchLayout",
    "InputPipeline",
    "batch_layout",
    "check_is_numeric",
    "global_array",
    "group_pipelines",
    "jax_dtype",
    "to_jax_dtype",
    "whole_array",
]

_ALIGNMENT = 64
"""Alignment in bytes at which JAX uses memory instead of copying it."""


@dataclass(frozen=True)
class InputPipeline:
    """A group of processes that read the same rows.

    Attributes:
        processes: Process indices, in ascending order.
        shards: Shards of a batch that they need together, in ascending order.
    """

    processes: tuple[int, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True)
class BatchLayout:
    """The assignment of a batch's rows to devices and processes by a sharding.

    Attributes:
        sharding: The sharding.
        num_shards: Number of shards of the first axis.
        pipelines: All pipelines, in the order of their first shards.
        pipeline_index: Index of this process's pipeline.
        local_shards: Shards on the devices of this process, in ascending order.
        local_devices: Devices of this process, each with the index within `local_shards` of its
            shard.
    """

    sharding: Any
    num_shards: int
    pipelines: tuple[InputPipeline, ...]
    pipeline_index: int
    local_shards: tuple[int, ...]
    local_devices: tuple[tuple[Any, int], ...]

    @property
    def local_pipeline(self) -> InputPipeline:
        """Pipeline of this process."""
        return self.pipelines[self.pipeline_index]

    @property
    def processes(self) -> tuple[int, ...]:
        """Indices of all processes of the sharding, in ascending order."""
        return tuple(sorted(p for each in self.pipelines for p in each.processes))

    @property
    def pipeline_positions(self) -> tuple[int, ...]:
        """Index of each of `local_shards` among the shards of this process's pipeline."""
        return tuple(self.local_pipeline.shards.index(shard) for shard in self.local_shards)


def batch_layout(sharding: Any) -> BatchLayout:
    """Return the layout of a batch under a sharding.

    >>> import jax, numpy as np
    >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    >>> layout = batch_layout(NamedSharding(mesh, P("data")))
    >>> layout.num_shards, layout.local_shards, len(layout.pipelines)
    (1, (0,), 1)

    Args:
        sharding: A `jax.sharding.Sharding`, such as a `NamedSharding` over any mesh.

    Raises:
        TypeError: If it is not a sharding.
        ValueError: If none of its devices belongs to this process.
    """
    if not isinstance(sharding, jax.sharding.Sharding):
        raise TypeError(
            "`sharding` must be a jax.sharding.Sharding, such as NamedSharding(mesh, "
            f'PartitionSpec("data")), but got {sharding!r:.80} of type {type(sharding).__name__}'
        )
    return _batch_layout(sharding, jax.process_index())


@functools.lru_cache(maxsize=64)
def _batch_layout(sharding: Any, process: int) -> BatchLayout:
    # If there is one row per device, the axis can be split evenly by any arrangement of devices.
    devices = sharding.device_set
    first_rows = {
        device: index[0].start or 0
        for device, index in sharding_for_ndim(sharding, 1)
        .devices_indices_map((len(devices),))
        .items()
    }
    numbers = {row: number for number, row in enumerate(sorted(set(first_rows.values())))}
    needs: dict[int, set[int]] = {}
    for device, row in first_rows.items():
        needs.setdefault(device.process_index, set()).add(numbers[row])
    if process not in needs:
        raise ValueError(
            f"`sharding` has no device of this process ({process}), only of processes "
            f"{sorted(needs)}: use a mesh in which every process that reads has a device"
        )
    pipelines = group_pipelines(needs)
    local_shards = tuple(sorted(needs[process]))
    return BatchLayout(
        sharding=sharding,
        num_shards=len(numbers),
        pipelines=pipelines,
        pipeline_index=next(n for n, each in enumerate(pipelines) if process in each.processes),
        local_shards=local_shards,
        local_devices=tuple(
            (device, local_shards.index(numbers[row]))
            for device, row in first_rows.items()
            if device.process_index == process
        ),
    )


def group_pipelines(shards_by_process: Mapping[int, Iterable[int]]) -> tuple[InputPipeline, ...]:
    """Group processes that read the same rows, given the shards that each process needs.

    >>> [(each.processes, each.shards) for each in group_pipelines({0: [0, 1], 1: [2, 3]})]
    [((0,), (0, 1)), ((1,), (2, 3))]
    >>> pipelines = group_pipelines({0: [0], 1: [1], 2: [0], 3: [1]})
    >>> [(each.processes, each.shards) for each in pipelines]
    [((0, 2), (0,)), ((1, 3), (1,))]
    """
    found: list[tuple[set[int], set[int]]] = []
    for process, shards in sorted(shards_by_process.items()):
        processes, together = {process}, set(shards)
        apart = []
        for others, theirs in found:
            if theirs & together:
                processes |= others
                together |= theirs
            else:
                apart.append((others, theirs))
        found = [*apart, (processes, together)]
    made = [InputPipeline(tuple(sorted(p)), tuple(sorted(shards))) for p, shards in found]
    return tuple(sorted(made, key=lambda each: each.shards))


@functools.lru_cache(maxsize=256)
def sharding_for_ndim(sharding: Any, ndim: int) -> Any:
    """Return a sharding for an array of `ndim` axes.

    A `NamedSharding` may have more axes than an array, such as one for tokens when labels have only
    a batch axis; the surplus axes are ignored.
    """
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > ndim:
        spec = PartitionSpec(*sharding.spec[:ndim])
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


def global_array(
    layout: BatchLayout, pieces: Sequence[Any], path: str = "", *, may_alias: bool = True
) -> jax.Array:
    """Return a global array over all devices of a layout, made from this process's rows.

    Every process of the layout calls it with its own rows; processes of a pipeline have the same
    rows for the shards that they share. The processes do not wait for each other.

    >>> import jax, numpy as np
    >>> layout = batch_layout(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    >>> global_array(layout, [np.float32([1, 2])]).tolist()
    [1.0, 2.0]

    Args:
        layout: Layout of the sharding.
        pieces: For each shard of `layout.local_shards` its rows, the same number for each. All axes
            but the first are complete: where the sharding splits others, each device gets its part.
            A `jax.Array` that is already on its device is used as it is.
        path: Path of the leaf in the element, for errors.
        may_alias: Whether the memory of `pieces` is no longer written to. JAX may use that memory
            on the CPU, so with False the rows are copied first.

    Raises:
        InvalidArgumentError: If the array cannot be sharded so, or JAX does not support the dtype.
    """
    first = pieces[0]
    if len({piece.shape for piece in pieces}) > 1:
        raise InvalidArgumentError(
            f"{describe_component(path)} has shapes "
            f"{', '.join(str(piece.shape) for piece in pieces)} on the devices of this process, "
            "but a global array needs the same shape on all of them"
        )
    if not first.ndim:
        return _scalar_array(layout, pieces, path)
    shape = (len(first) * layout.num_shards, *first.shape[1:])
    sharding = sharding_for_ndim(layout.sharding, len(shape))
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{describe_component(path)} of shape {shape} cannot be sharded as {sharding}: {error}"
        ) from error
    on_cpu = layout.local_devices[0][0].platform == "cpu"
    prepared = [_prepare(piece, path, may_alias, on_cpu) for piece in pieces]
    parts = [
        prepared[index][(slice(None), *indices[device][1:])]
        for device, index in layout.local_devices
    ]
    arrays = jax.device_put(
        parts, [_device_target(device, sharding) for device, _ in layout.local_devices]
    )
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def whole_array(layout: BatchLayout, rows: Any, path: str = "") -> jax.Array:
    """Return the global array of a batch if all rows and devices are in this process.

    Equivalent to `global_array` with the pieces of the batch, in one call of JAX.

    Args:
        layout: Layout of the sharding; all its devices are local.
        rows: An array whose memory is no longer written to, or a scalar.
        path: Path of the leaf in the element, for errors.

    Raises:
        InvalidArgumentError: If the array cannot be sharded so, or JAX does not support the dtype.
    """
    if layout.num_shards > 1 and not np.ndim(rows):
        return _scalar_array(layout, [rows], path)
    sharding = sharding_for_ndim(layout.sharding, np.ndim(rows))
    given = to_jax_dtype(np.asarray(rows), path) if isinstance(rows, np.generic) else rows
    try:
        return jax.device_put(_prepare(given, path, True, True), sharding)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{describe_component(path)} of shape {np.shape(rows)} cannot be sharded as "
            f"{sharding}: {error}"
        ) from error


def _scalar_array(layout: BatchLayout, pieces: Sequence[Any], path: str) -> jax.Array:
    if layout.num_shards > 1 or len(layout.processes) > 1:
        raise InvalidArgumentError(
            f"{describe_component(path)} is a scalar and has no rows to divide among several "
            "devices: call the `batch` method on the dataset, or remove the component with map()"
        )
    sharding = sharding_for_ndim(layout.sharding, 0)
    return jax.device_put(to_jax_dtype(np.asarray(pieces[0]), path), sharding)


@functools.lru_cache(maxsize=1024)
def _device_target(device: Any, sharding: Any) -> Any:
    """Return the device, or the sharding with a memory kind, for one device's part of an array."""
    kind = sharding.memory_kind
    if kind is None or kind == device.default_memory().kind:
        return device
    return SingleDeviceSharding(device, memory_kind=kind)


def _prepare(piece: Any, path: str, may_alias: bool, on_cpu: bool) -> Any:
    if not isinstance(piece, np.ndarray):
        return piece  # a JAX array
    checked = to_jax_dtype(piece, path)
    if may_alias or checked is not piece or not on_cpu:
        return checked
    return _aligned_copy(checked)


def _aligned_copy(piece: NDArray[Any]) -> NDArray[Any]:
    """Return an aligned copy, which JAX uses on the CPU without copying it again."""
    memory = np.empty(piece.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    made = memory[start : start + piece.nbytes].view(piece.dtype).reshape(piece.shape)
    made[...] = piece
    return made


def check_is_numeric(dtype: np.dtype[Any], path: str = "") -> None:
    """Raise an error if JAX does not support a dtype.

    Raises:
        InvalidArgumentError: If values are bytes, str, objects, times or records.
    """
    # Extension types such as bfloat16 have kind "V", as records do, but their own scalar type.
    is_extension = dtype.kind == "V" and dtype.fields is None and dtype.type is not np.void
    if dtype.kind in "biufc" or is_extension:
        return
    what = {"S": "bytes", "U": "str", "O": "bytes or str"}.get(dtype.kind, str(dtype))
    raise InvalidArgumentError(
        f"{describe_component(path)} holds {what}, which JAX arrays cannot hold: convert it to "
        "numbers with map(), or remove the component"
    )


def jax_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that JAX converts a dtype to: 32 bits for 64, unless x64 is enabled."""
    made: np.dtype[Any] = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return made


def to_jax_dtype(array: NDArray[Any], path: str = "") -> NDArray[Any]:
    """Convert an array to the dtype that JAX would convert it to.

    JAX would do the same, but silently wraps integers that do not fit.

    Raises:
        InvalidArgumentError: If an integer does not fit, or JAX does not support the dtype.
    """
    check_is_numeric(array.dtype, path)
    dtype = jax_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        low, high = array.min(), array.max()
        if low < limits.min or high > limits.max:
            raise InvalidArgumentError(
                f"{describe_component(path)} holds {low if low < limits.min else high}, which does "
                f"not fit {dtype} (JAX converts {array.dtype} to it): enable 64 bits with "
                'jax.config.update("jax_enable_x64", True), or map it to smaller numbers'
            )
    return array.astype(dtype)
