"""Global `jax.Array`s over a mesh, made of the rows that each process has for itself.

Rule 1. Which rows of a batch a process owes follows from the sharding, not from the number of
        processes. The sharding cuts the first axis into *shards*; devices that hold the same shard
        (tensor parallelism) need the same rows, and so do their processes.
Rule 2. Processes that need a shard in common form a *pipeline*: they read the same rows. There may
        be one for each process, one for all, or anything between.
Rule 3. Each shard is put on its devices from the process's own memory. Nothing is joined first, and
        nothing travels between processes.
Rule 4. On the CPU, JAX keeps a NumPy array's memory (if it is aligned to 64 bytes) in place of a
        copy, whatever one asks of it. So what is put is given away for good, or copied here.
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
"""To so many bytes memory must be aligned for JAX to keep it in place of a copy."""


@dataclass(frozen=True)
class InputPipeline:
    """Processes that read the same rows.

    Attributes:
        processes: Their indices, in order.
        shards: Which shards of a batch they need together, in order.
    """

    processes: tuple[int, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True)
class BatchLayout:
    """How a sharding shares the rows of a batch among devices and processes.

    Attributes:
        sharding: The sharding.
        num_shards: Into how many the first axis is cut.
        pipelines: Who reads what, in the order of their first shards.
        pipeline_index: The number of the pipeline of this process.
        local_shards: The shards that devices of this process hold, in order.
        local_devices: The devices of this process, each with the number within `local_shards` of
            what it holds.
    """

    sharding: Any
    num_shards: int
    pipelines: tuple[InputPipeline, ...]
    pipeline_index: int
    local_shards: tuple[int, ...]
    local_devices: tuple[tuple[Any, int], ...]

    @property
    def local_pipeline(self) -> InputPipeline:
        """The pipeline of this process."""
        return self.pipelines[self.pipeline_index]

    @property
    def processes(self) -> tuple[int, ...]:
        """All processes that take part."""
        return tuple(sorted(p for each in self.pipelines for p in each.processes))

    @property
    def pipeline_positions(self) -> tuple[int, ...]:
        """For each shard of `local_shards`, its number among those of this process's pipeline."""
        return tuple(self.local_pipeline.shards.index(shard) for shard in self.local_shards)


def batch_layout(sharding: Any) -> BatchLayout:
    """Return how a sharding shares the rows of a batch.

    >>> import jax, numpy as np
    >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    >>> layout = batch_layout(NamedSharding(mesh, P("data")))
    >>> layout.num_shards, layout.local_shards, len(layout.pipelines)
    (1, (0,), 1)

    Args:
        sharding: A `jax.sharding.Sharding`, such as a `NamedSharding` over any mesh.

    Raises:
        TypeError: It is none.
        ValueError: No device of it belongs to this process.
    """
    if not isinstance(sharding, jax.sharding.Sharding):
        raise TypeError(
            "`sharding` must be a jax.sharding.Sharding, such as NamedSharding(mesh, "
            f'PartitionSpec("data")), but got {sharding!r:.80} of type {type(sharding).__name__}'
        )
    return _batch_layout(sharding, jax.process_index())


@functools.lru_cache(maxsize=64)
def _batch_layout(sharding: Any, process: int) -> BatchLayout:
    # As many rows as devices can be cut evenly, however the devices are arranged.
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
            f"`sharding` has no device of this process ({process}), but some of "
            f"{sorted(needs)}: use a mesh in which every process that reads has a device"
        )
    pipelines = group_pipelines(needs)
    here = tuple(sorted(needs[process]))
    return BatchLayout(
        sharding=sharding,
        num_shards=len(numbers),
        pipelines=pipelines,
        pipeline_index=next(n for n, each in enumerate(pipelines) if process in each.processes),
        local_shards=here,
        local_devices=tuple(
            (device, here.index(numbers[row]))
            for device, row in first_rows.items()
            if device.process_index == process
        ),
    )


def group_pipelines(shards_by_process: Mapping[int, Iterable[int]]) -> tuple[InputPipeline, ...]:
    """Return who reads the same rows, given the shards that each process needs.

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
    """Return a sharding for an array of so many axes.

    A `NamedSharding` may speak of more axes than an array has, as one for tokens does where labels
    have a batch axis alone: it holds for those that are there.
    """
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > ndim:
        spec = PartitionSpec(*sharding.spec[:ndim])
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


def global_array(
    layout: BatchLayout, pieces: Sequence[Any], path: str = "", *, may_alias: bool = True
) -> jax.Array:
    """Return one array over all devices of a layout, made of this process's rows.

    Every process of the layout makes it with rows of its own; those of one pipeline have the same
    rows for the shards that they share. No process waits for another.

    >>> import jax, numpy as np
    >>> layout = batch_layout(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    >>> global_array(layout, [np.float32([1, 2])]).tolist()
    [1.0, 2.0]

    Args:
        layout: Of the sharding.
        pieces: For each shard of `layout.here` its rows, as many for each. They are whole in all
            axes but the first: where the sharding cuts others, each device gets its part. A
            `jax.Array` that is on its device already is taken as it is.
        path: Where the leaf is in the element, for errors.
        may_alias: Whether nobody writes into the memory of `pieces` any more. JAX keeps it on the
            CPU; so if somebody may, it is copied first.

    Raises:
        InvalidArgumentError: It cannot be cut so, or JAX has no such dtype.
    """
    first = pieces[0]
    if len({piece.shape for piece in pieces}) > 1:
        raise InvalidArgumentError(
            f"{describe_component(path)} has shapes "
            f"{', '.join(str(piece.shape) for piece in pieces)} on "
            "the devices of this process, and one array has one shape on all of them"
        )
    if not first.ndim:
        return _scalar_array(layout, pieces, path)
    shape = (len(first) * layout.num_shards, *first.shape[1:])
    sharding = sharding_for_ndim(layout.sharding, len(shape))
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{describe_component(path)} of shape {shape} cannot be cut as {sharding} says: {error}"
        ) from error
    on_cpu = layout.local_devices[0][0].platform == "cpu"
    prepared = [_prepare(piece, path, may_alias, on_cpu) for piece in pieces]
    parts = [
        prepared[place][(slice(None), *indices[device][1:])]
        for device, place in layout.local_devices
    ]
    arrays = jax.device_put(
        parts, [_device_target(device, sharding) for device, _ in layout.local_devices]
    )
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def whole_array(layout: BatchLayout, rows: Any, path: str = "") -> jax.Array:
    """Return the array of a batch that this process has whole, where it has all devices.

    It is what `global_array` returns for the pieces of the batch, in one call of JAX.

    Args:
        layout: Of the sharding, all of whose devices are here.
        rows: An array that nobody writes into any more, or a scalar.
        path: Where the leaf is in the element, for errors.

    Raises:
        InvalidArgumentError: It cannot be cut so, or JAX has no such dtype.
    """
    if layout.num_shards > 1 and not np.ndim(rows):
        return _scalar_array(layout, [rows], path)
    sharding = sharding_for_ndim(layout.sharding, np.ndim(rows))
    given = to_jax_dtype(np.asarray(rows), path) if isinstance(rows, np.generic) else rows
    try:
        return jax.device_put(_prepare(given, path, True, True), sharding)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{describe_component(path)} of shape {np.shape(rows)} cannot be cut as {sharding} "
            f"says: {error}"
        ) from error


def _scalar_array(layout: BatchLayout, pieces: Sequence[Any], path: str) -> jax.Array:
    if layout.num_shards > 1 or len(layout.processes) > 1:
        raise InvalidArgumentError(
            f"{describe_component(path)} is a scalar, so its rows cannot be shared by several "
            "devices: call "
            "the `batch` method on the dataset, or leave it out with map()"
        )
    sharding = sharding_for_ndim(layout.sharding, 0)
    return jax.device_put(to_jax_dtype(np.asarray(pieces[0]), path), sharding)


@functools.lru_cache(maxsize=1024)
def _device_target(device: Any, sharding: Any) -> Any:
    """Return where one device's part of an array goes."""
    kind = sharding.memory_kind
    if kind is None or kind == device.default_memory().kind:
        return device
    return SingleDeviceSharding(device, memory_kind=kind)


def _prepare(piece: Any, path: str, may_alias: bool, on_cpu: bool) -> Any:
    if not isinstance(piece, np.ndarray):
        return piece  # JAX's own
    checked = to_jax_dtype(piece, path)
    if may_alias or checked is not piece or not on_cpu:
        return checked
    return _aligned_copy(checked)


def _aligned_copy(piece: NDArray[Any]) -> NDArray[Any]:
    """Return a copy that JAX keeps on the CPU, so that it makes no second one."""
    memory = np.empty(piece.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    made = memory[start : start + piece.nbytes].view(piece.dtype).reshape(piece.shape)
    made[...] = piece
    return made


def check_is_numeric(dtype: np.dtype[Any], path: str = "") -> None:
    """Raise unless JAX has arrays of a dtype.

    Raises:
        InvalidArgumentError: They are bytes, str or objects, times, or records.
    """
    # Extension types such as bfloat16 are of kind "V", as records are, but of a type of their own.
    is_extension = dtype.kind == "V" and dtype.fields is None and dtype.type is not np.void
    if dtype.kind in "biufc" or is_extension:
        return
    what = {"S": "bytes", "U": "str", "O": "bytes or str"}.get(dtype.kind, str(dtype))
    raise InvalidArgumentError(
        f"{describe_component(path)} holds {what}, of which JAX has no arrays: make numbers of it "
        "with "
        "map(), or leave it out"
    )


def jax_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that JAX makes of one: of 64 bits those of 32, unless x64 is enabled."""
    made: np.dtype[Any] = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return made


def to_jax_dtype(array: NDArray[Any], path: str = "") -> NDArray[Any]:
    """Return an array in the dtype that JAX makes of its own.

    JAX does the same; but it wraps whole numbers that do not fit around without a word.

    Raises:
        InvalidArgumentError: Whole numbers do not fit, or JAX has no such dtype.
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
                f"{describe_component(path)} holds {low if low < limits.min else high}, which "
                f"{dtype} does "
                f"not, and JAX makes {dtype} of {array.dtype}: enable 64 bits with "
                'jax.config.update("jax_enable_x64", True), or map it to smaller numbers'
            )
    return array.astype(dtype)
