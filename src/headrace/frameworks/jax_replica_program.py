"""One JAX program for all replicas: `jit(shard_map(...))` over a mesh with the axis "replica".

Rule 1. Each replica's code sees the same arguments as in a separate call: its part of per-replica
        values, and all other values whole. Per-replica values are concatenated along the first
        axis; scalars get a first axis for that, which the code does not see.
Rule 2. Every result is a per-replica value, whatever it was computed from.
Rule 3. There is one program for each structure of arguments; JAX compiles one for each shape.
Rule 4. On CPUs a call waits for its results. A program with collectives occupies one thread for
        each device, and two programs at the same time can deadlock for lack of threads.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.element.structure import rebuild
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.frameworks.framework import Array, Device
from headrace.frameworks.jax_global_arrays import (
    BatchLayout,
    batch_layout,
    global_array,
    to_jax_dtype,
)
from headrace.frameworks.jax_waiting import wait_until_ready

__all__ = [
    "AXIS",
    "AllReplicasArray",
    "ReplicaProgram",
    "all_gather",
    "all_reduce",
    "device_keys",
    "find_devices",
    "global_array",
    "is_peer_loss",
    "make_layout",
    "replica_index",
    "replica_values",
]

AXIS = "replica"

_PEER_LOSS = re.compile(r"[A-Z_]+: .*\b(Gloo|NCCL)\b", re.DOTALL)
_NUMBERS = (bool, int, float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic)


@functools.lru_cache(maxsize=64)
def make_layout(devices: tuple[Device, ...]) -> BatchLayout:
    """Return the layout of rows over replicas on these devices."""
    return batch_layout(NamedSharding(Mesh(np.array(devices), (AXIS,)), P(AXIS)))


def replica_values(array: Array, devices: Sequence[Device], is_scalar: bool) -> tuple[Array, ...]:
    """Return each replica's part of an array over all replicas."""
    parts = {shard.device: shard.data for shard in array.addressable_shards}
    found = [parts[device] for device in devices]
    return tuple(part.reshape(()) for part in found) if is_scalar else tuple(found)


def device_keys(devices: Sequence[Device]) -> list[str]:
    """Return device names that other processes of the program understand."""
    return [f"{device.platform}:{device.id}" for device in devices]


def find_devices(names: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices with these names, of any process."""
    kinds = {name.partition(":")[0] for name in names}
    found = {f"{each.platform}:{each.id}": each for kind in kinds for each in jax.devices(kind)}
    return tuple(found[name] for name in names)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an error means that another process of the program was lost."""
    # If the program runs synchronously in its call, JAX raises a ValueError with the same text.
    if not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return False
    return _PEER_LOSS.match(str(error)) is not None


# --- inside a program -----------------------------------------------------------------------------


def replica_index() -> Array:
    """Return the index of the replica that executes this code."""
    return jax.lax.axis_index(AXIS)


def all_reduce(is_mean: bool, value: Any) -> Array:
    """Return the sum or mean of a value over all replicas."""
    array = jnp.asarray(value)
    if array.dtype == jnp.bool_:
        array = array.astype(int)
    return (jax.lax.pmean if is_mean else jax.lax.psum)(array, AXIS)


def all_gather(value: Any, axis: int) -> Array:
    """Return the values of all replicas, concatenated along an axis."""
    array = jnp.asarray(value)
    if not 0 <= axis < array.ndim:
        raise ValueError(
            f"cannot gather values of rank {array.ndim} along axis {axis}: `axis` must be in "
            f"[0, {array.ndim}); give scalars an axis with value[None]"
        )
    if not array.shape[axis]:  # JAX cannot compile a gather of empty arrays
        return array
    return jax.lax.all_gather(array, AXIS, axis=axis, tiled=True)


# --- the program ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _DataclassNode:
    """A pytree node in place of a dataclass that is not registered with JAX."""

    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]


jax.tree_util.register_dataclass(_DataclassNode, ["values"], ["kind", "names"])


@jax.tree_util.register_pytree_node_class
class _ReplicaOutputs:
    """Results of a replica's code: arrays, and the template of the structure around them."""

    def __init__(self, arrays: Sequence[Array], template: Any) -> None:
        self.arrays, self.template = arrays, template

    def tree_flatten(self) -> tuple[Sequence[Array], Any]:
        """Return the arrays and the template (JAX's pytree protocol)."""
        return self.arrays, self.template

    @classmethod
    def tree_unflatten(cls, template: Any, arrays: Sequence[Array]) -> _ReplicaOutputs:
        """Rebuild the outputs (JAX's pytree protocol)."""
        return cls(arrays, template)


class _OutputTemplate:
    """The structure of a program's results.

    Attributes:
        tree: JAX's tree definition.
        leaf_kinds: For each leaf whether it is a scalar; a leaf that is no array is itself stored,
            in a tuple of one item.
    """

    def __init__(self, tree: Any, leaf_kinds: list[Any]) -> None:
        self.tree, self.leaf_kinds = tree, leaf_kinds


class AllReplicasArray(NamedTuple):
    """An array over all replicas, whose parts are the replicas' scalars or arrays with rows."""

    array: Array
    are_scalars: bool


class ReplicaProgram:
    """Runs a function on all replicas at once.

    Args:
        devices: Devices of the replicas of all processes, in replica order.
        function: Code of a replica.
        local_values: Returns the local replicas' values of a leaf, or the array over all replicas
            that contains them, or None if the leaf is the same for all replicas.
        make_result: Converts an array over all replicas, given whether its parts are scalars, to
            the value to return.
        donate: Indices of arguments whose memory may be reused for results.
        check_peers: Called periodically while waiting for results, if other processes take part;
            an error that it raises ends the wait.
    """

    def __init__(
        self,
        devices: tuple[Device, ...],
        function: Callable[..., Any],
        local_values: Callable[[Any], Sequence[Any] | AllReplicasArray | None],
        make_result: Callable[[Array, bool], Any],
        donate: Sequence[int],
        check_peers: Callable[[], object] | None = None,
    ) -> None:
        self._layout = make_layout(devices)
        self._mesh = self._layout.sharding.mesh
        self._is_single_device = len(devices) == 1
        self._local_devices = [device for device, _ in self._layout.local_devices]
        self._function = function
        self._local_values, self._make_result = local_values, make_result
        self._donate = frozenset(donate)
        self._programs: dict[Any, Callable[..., _ReplicaOutputs]] = {}
        self._check_peers = check_peers
        self._waits = devices[0].platform == "cpu" and not self._is_single_device

    def __call__(self, *args: Any) -> Any:
        """Run the program, and return the results as `make_result` converts them."""
        pairs = [
            self._convert_argument(leaf, number, path)
            for number, arg in enumerate(args)
            for path, leaf in jax.tree_util.tree_leaves_with_path(_wrap_unknown(arg))
        ]
        tree = jax.tree.structure(_wrap_unknown(args))
        kinds = tuple(kind for kind, _ in pairs)
        program = self._programs.get((tree, kinds))
        if program is None:
            program = self._programs[tree, kinds] = self._compile(tree, kinds, args)
        returned = program(*[value for kind, value in pairs if not isinstance(kind, tuple)])
        if self._waits and self._check_peers is not None:
            wait_until_ready(returned.arrays, self._check_peers)
        elif self._waits:
            jax.block_until_ready(returned.arrays)
        template: _OutputTemplate = returned.template
        arrays = iter(returned.arrays)
        leaves = [
            mark[0] if isinstance(mark, tuple) else self._leaf_result(next(arrays), mark)
            for mark in template.leaf_kinds
        ]
        return _unwrap(jax.tree.unflatten(template.tree, leaves))

    def describe_arguments(self, args: Sequence[Any], have_rows: Sequence[bool]) -> str:
        """Describe what must be equal in all processes: structures, shapes and dtypes.

        Args:
            args: Arguments as of a call.
            have_rows: For each argument whether its leaves have rows, whose number is left out.
        """
        descriptions = []
        for number, (arg, has_rows) in enumerate(zip(args, have_rows, strict=True)):
            for path, leaf in jax.tree_util.tree_leaves_with_path(_wrap_unknown(arg)):
                name = f"{number}{jax.tree_util.keystr(path)}"
                value = _describe_leaf(leaf, self._local_values(leaf), has_rows)
                descriptions.append(f"{name}: {value}")
        return ", ".join(descriptions)

    def _leaf_result(self, array: Array, is_scalar: bool) -> Any:
        return array if self._is_single_device else self._make_result(array, is_scalar)

    def _convert_argument(self, leaf: Any, number: int, path: Any) -> tuple[Any, Any]:
        """Return the kind of an argument's leaf, and the array to pass to the program.

        Kinds are "rows", "scalar", "same" and, for a leaf that is no array, a tuple with it.
        """
        parts = self._local_values(leaf)
        _check_not_donated(leaf if parts is None else parts, number, path)
        if isinstance(parts, AllReplicasArray):
            return ("scalar" if parts.are_scalars else "rows"), parts.array
        if parts is None:
            if isinstance(leaf, _NUMBERS):
                return "same", leaf
            if not isinstance(leaf, _ARRAYS):
                return self._check_constant(leaf, number, path), None
            if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
                return self._mesh_array_kind(leaf, number, path), leaf
            parts = [leaf] * len(self._local_devices)
        argument_path = f" of argument {number}{jax.tree_util.keystr(path)}"
        pieces = [
            piece
            if isinstance(piece, jax.Array)
            else to_jax_dtype(np.asarray(piece), argument_path)
            for piece in parts
        ]
        if self._is_single_device:
            piece = pieces[0]
            if piece is parts[0] and isinstance(piece, np.ndarray):
                piece = piece.copy()  # the step is asynchronous, and the caller may overwrite it
            return "same", jax.device_put(piece, self._local_devices[0])
        is_scalar = not any(piece.ndim for piece in pieces)
        if is_scalar:
            pieces = [piece.reshape(1) for piece in pieces]
        return ("scalar" if is_scalar else "rows"), global_array(
            self._layout, pieces, argument_path, may_alias=False
        )

    def _check_constant(self, leaf: Any, number: int, path: Any) -> tuple[Any]:
        try:
            hash(leaf)
        except TypeError:
            raise InvalidArgumentError(
                f"argument {number}{jax.tree_util.keystr(path)} is {leaf!r:.80} of type "
                f"{type(leaf).__name__}, which is neither an array nor hashable: pass arrays, "
                "numbers or hashable values to a compiled step"
            ) from None
        return (leaf,)

    def _mesh_array_kind(self, array: Array, number: int, path: Any) -> str:
        if array.sharding.is_fully_replicated and (
            array.sharding.device_set == self._layout.sharding.device_set
        ):
            return "same"
        if array.sharding.is_equivalent_to(self._layout.sharding, array.ndim):
            return "rows"
        raise InvalidArgumentError(
            f"argument {number}{jax.tree_util.keystr(path)} has the sharding {array.sharding}, "
            "but this step takes arrays that are sharded over the strategy's mesh by their "
            f"first axis, or replicated on all its devices: {self._layout.sharding}"
        )

    def _compile(
        self, tree: Any, kinds: tuple[Any, ...], args: Sequence[Any]
    ) -> Callable[..., _ReplicaOutputs]:
        is_alone = self._is_single_device

        def replica(*arrays: Array) -> _ReplicaOutputs:
            given = iter(arrays)
            leaves = []
            for kind in kinds:
                if isinstance(kind, tuple):
                    leaves.append(kind[0])
                else:
                    leaves.append(next(given)[0] if kind == "scalar" else next(given))
            result = self._function(*_unwrap(jax.tree.unflatten(tree, leaves)))
            found, returned = jax.tree.flatten(_wrap_unknown(result))
            made: list[Array] = []
            marks: list[Any] = []
            for leaf in found:
                if not isinstance(leaf, (*_ARRAYS, *_NUMBERS)):
                    marks.append((leaf,))
                    continue
                array = jnp.asarray(leaf)
                marks.append(not array.ndim)
                made.append(array if array.ndim or is_alone else array[None])
            return _ReplicaOutputs(made, _OutputTemplate(returned, marks))

        specs = tuple(
            P() if is_alone or kind == "same" else P(AXIS)
            for kind in kinds
            if not isinstance(kind, tuple)
        )
        owners = [n for n, arg in enumerate(args) for _ in jax.tree.leaves(_wrap_unknown(arg))]
        owners = [n for n, kind in zip(owners, kinds, strict=True) if not isinstance(kind, tuple)]
        mapped = jax.shard_map(
            replica,
            mesh=self._mesh,
            in_specs=specs,
            out_specs=P() if is_alone else P(AXIS),
            check_vma=False,
        )
        donated = [index for index, owner in enumerate(owners) if owner in self._donate]
        program: Callable[..., _ReplicaOutputs] = jax.jit(mapped, donate_argnums=donated)
        return program


def _check_not_donated(given: Any, number: int, path: Any) -> None:
    """Raise for an array that was donated: JAX would crash the process on several CPU devices."""
    arrays = given if isinstance(given, tuple | list) else (given,)
    if any(isinstance(array, jax.Array) and array.is_deleted() for array in arrays):
        raise FailedPreconditionError(
            f"argument {number}{jax.tree_util.keystr(path)} was donated to an earlier step, which "
            "reused its memory: pass the result of that step, as in weights = step(weights, "
            "batch), or remove its index from `donate`"
        )


def _describe_leaf(leaf: Any, parts: Any, has_rows: bool) -> str:
    if parts is None and not isinstance(leaf, _ARRAYS):
        # Constants are part of the program; numbers are not.
        return repr(leaf) if isinstance(leaf, str | bytes) else type(leaf).__name__
    array = leaf if parts is None else parts[0]
    shape = np.shape(array)[1:] if has_rows else np.shape(array)
    return f"{getattr(array, 'dtype', type(array).__name__)}{list(shape)}"


def _wrap_unknown(value: Any) -> Any:
    """Wrap dataclasses that are not registered with JAX, so that JAX can traverse the structure."""
    if not any(map(_is_unknown_dataclass, jax.tree.leaves(value))):
        return value
    return jax.tree.map(
        lambda leaf: _wrap_dataclass(leaf) if _is_unknown_dataclass(leaf) else leaf, value
    )


def _is_unknown_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _wrap_dataclass(leaf: Any) -> _DataclassNode:
    names = tuple(field.name for field in dataclasses.fields(leaf))
    return _DataclassNode(
        type(leaf), names, tuple(_wrap_unknown(getattr(leaf, name)) for name in names)
    )


def _unwrap(value: Any) -> Any:
    def unwrap_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, _DataclassNode):
            return leaf
        return rebuild(leaf.kind, leaf.names, [_unwrap(each) for each in leaf.values])

    return jax.tree.map(unwrap_leaf, value, is_leaf=lambda leaf: isinstance(leaf, _DataclassNode))
