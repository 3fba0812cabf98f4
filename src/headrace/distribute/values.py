"""Values that differ between replicas, and structures of them.

Rule 1. A value of several replicas is a structure with a `PerReplica` for each leaf, not a
        `PerReplica` of structures.
Rule 2. Results of a step may include lists; they are containers here, as are tuples, namedtuples,
        mappings and dataclasses.
Rule 3. An identical object that every replica returned stays one object: it was not created on a
        replica. Numbers are always values, even if Python shares their objects.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from headrace.element.structure import rebuild
from headrace.frameworks.framework import Framework

__all__ = [
    "ArrayOperators",
    "DistributedValues",
    "PerReplica",
    "PerReplicaSpec",
    "check_replica_count",
    "local_results",
    "map_structure",
    "regroup",
    "select",
]

_NUMBERS = (bool, int, float, complex, np.generic)
_NOT_AN_ARRAY = (
    "It looks like you are using a PerReplica object while not inside a replica context, which is "
    "not supported. Run your function on the replicas with strategy.run(fn, args=(value,)), or "
    "take the replicas' values with strategy.local_results(value)"
)


class DistributedValues:
    """Base class of objects with a value for each local replica, in `values`."""

    __slots__ = ()


class PerReplica(DistributedValues):
    """One value for each local replica. Not an array: `run` passes each replica its value.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> value = hr.distribute.PerReplica([1, 2])
    >>> strategy.run(lambda x: x * 10, args=(value,)).values
    (10, 20)

    Attributes:
        values: The values, in replica order.
    """

    __slots__ = ("values",)

    values: tuple[Any, ...]

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = tuple(values)
        if not self.values:
            raise ValueError("`values` must hold a value for each replica, but is empty")

    def __repr__(self) -> str:
        lines = "".join(f"  {index}: {value!r},\n" for index, value in enumerate(self.values))
        return f"PerReplica:{{\n{lines[:-2]}\n}}"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(_NOT_AN_ARRAY)

    __array__ = __len__ = __getitem__ = __iter__ = __contains__ = _refuse
    __float__ = __int__ = __index__ = __complex__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __pos__ = __abs__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __format__(self, format_spec: str) -> str:
        # An f-string may contain a loss that was not reduced.
        return str(self) if not format_spec else self._refuse()

    def __reduce__(self) -> tuple[Any, ...]:
        return PerReplica, (self.values,)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name, name=name, obj=self)
        raise AttributeError(
            f"PerReplica has no attribute {name!r}, it has `values`. {_NOT_AN_ARRAY}",
            name=name,
            obj=self,
        )


class PerReplicaSpec:
    """Spec of a `PerReplica`. Immutable and hashable.

    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.distribute_dataset(hr.Dataset.range(8).batch(4)).element_spec
    PerReplicaSpec(ArraySpec(shape=(None,), dtype=int64), ArraySpec(shape=(None,), dtype=int64))

    Attributes:
        specs: An `ArraySpec` for each local replica.
    """

    __slots__ = ("specs",)

    specs: tuple[Any, ...]

    def __init__(self, *specs: Any) -> None:
        object.__setattr__(self, "specs", specs)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"PerReplicaSpec is immutable: cannot set {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerReplicaSpec) and self.specs == other.specs

    def __hash__(self) -> int:
        return hash(self.specs)

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.specs))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return PerReplicaSpec, self.specs


def regroup(values: Sequence[Any], *, always_wrap: bool = False, wraps_arrays: bool = False) -> Any:
    """Return one structure with `PerReplica` leaves from the replicas' structures.

    Args:
        values: The replicas' results: structures with the same containers.
        always_wrap: Whether to wrap even identical objects, and the result of a single replica.
        wraps_arrays: Whether to wrap arrays and numbers of a single local replica, because other
            processes have replicas, too.

    Raises:
        ValueError: If the containers differ.
    """
    first = values[0]
    if not always_wrap and all(value is None for value in values):
        return first
    if len(values) == 1 and not (always_wrap or wraps_arrays):
        return first
    return map_structure(lambda *leaves: _wrap_leaves(leaves, always_wrap, wraps_arrays), *values)


def _wrap_leaves(leaves: tuple[Any, ...], always_wrap: bool, wraps_arrays: bool) -> Any:
    first = leaves[0]
    if always_wrap or isinstance(first, _NUMBERS):
        return PerReplica(leaves)
    if wraps_arrays and hasattr(first, "__array__") and not isinstance(first, DistributedValues):
        return PerReplica(leaves)
    return first if all(leaf is first for leaf in leaves) else PerReplica(leaves)


def select(replica: int, structure: Any, count: int | None = None) -> Any:
    """Return the structure of one replica: its values of the `PerReplica`s, and the other leaves.

    Args:
        replica: Index of the replica in this process.
        structure: Structure with `PerReplica`s.
        count: Expected number of local replicas; None accepts any number of values.

    Raises:
        ValueError: If there are values for another number of replicas.
    """
    if type(structure) is np.ndarray:  # the most common argument that all replicas share
        return structure

    def part(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        values = leaf.values
        if count is not None and len(values) != count:
            check_replica_count(len(values), count)
        return values[replica]

    return part(structure) if type(structure) is PerReplica else map_structure(part, structure)


def check_replica_count(found: int, count: int) -> NoReturn:
    """Raise if values are for another number of replicas than the strategy has."""
    raise ValueError(
        f"a PerReplica has values for {found} replicas, but this strategy has {count} in this "
        "process; use it with the strategy that created it, or create it with "
        "distribute_values_from_function"
    )


def local_results(structure: Any) -> tuple[Any, ...]:
    """Return a tuple with each local replica's structure; a plain value is returned itself."""
    if isinstance(structure, DistributedValues):
        values: tuple[Any, ...] = structure.values  # type: ignore[attr-defined]
        return values
    count = _count_replicas(structure)
    return tuple(select(each, structure) for each in range(count)) if count else (structure,)


def _count_replicas(structure: Any) -> int:
    """Return the number of values in the `PerReplica`s of a structure; 0 without a `PerReplica`."""
    found = 0

    def record_count(leaf: Any) -> None:
        nonlocal found
        if isinstance(leaf, PerReplica):
            found = len(leaf.values)

    map_structure(record_count, structure)
    return found


def map_structure(function: Callable[..., Any], *structures: Any) -> Any:
    """Return a structure with `function(leaf, ...)` in place of each leaf.

    Lists, tuples, namedtuples, mappings and dataclasses keep their types.

    Raises:
        ValueError: If the structures differ.
    """
    return _map(function, structures, "")


def _map(function: Callable[..., Any], structures: tuple[Any, ...], path: str) -> Any:
    first = structures[0]
    kind = type(first)
    if not _is_container(kind):  # type: ignore[arg-type]
        if any(_is_container(each) for each in set(map(type, structures))):
            _refuse_structures(structures, path)
        return function(*structures)
    if any(type(each) is not kind for each in structures[1:]):
        _refuse_structures(structures, path)
    if isinstance(first, Mapping):
        if any(each.keys() != first.keys() for each in structures[1:]):
            _refuse_structures(structures, path)
        mapped = {
            key: _map(function, tuple(each[key] for each in structures), f"{path}[{key!r}]")
            for key in first
        }
        return mapped if kind is dict else _mapping_like(first, mapped)
    if isinstance(first, list | tuple):
        if any(len(each) != len(first) for each in structures[1:]):
            _refuse_structures(structures, path)
        parts = [
            _map(function, members, f"{path}[{index}]")
            for index, members in enumerate(zip(*structures, strict=True))
        ]
        if hasattr(first, "_fields"):
            return tuple.__new__(kind, parts)
        try:
            return kind(parts)
        except TypeError:  # a class that holds only numbers, such as a shape of PyTorch
            return tuple(parts) if isinstance(first, tuple) else parts
    names = tuple(field.name for field in dataclasses.fields(first))
    parts = [
        _map(function, tuple(getattr(each, name) for each in structures), f"{path}.{name}")
        for name in names
    ]
    return rebuild(kind, names, parts)


@functools.lru_cache(1024)
def _is_container(kind: type) -> bool:
    return issubclass(kind, list | tuple | Mapping) or (
        dataclasses.is_dataclass(kind) and not issubclass(kind, type)
    )


def _mapping_like(first: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if hasattr(first, "copy"):  # keeps other attributes, such as the factory of a defaultdict
        copied: Any = first.copy()
        copied.update(items)
        return copied
    mapping_type: Any = type(first)
    return mapping_type(items)


def _refuse_structures(structures: tuple[Any, ...], path: str) -> NoReturn:
    location = f"at {path}" if path else "at the top"
    found = ", ".join(f"replica {i}: {_describe(each)}" for i, each in enumerate(structures))
    raise ValueError(
        f"the replicas' values have different structures {location} ({found}); return the same "
        "nesting, keys and lengths on every replica"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {list(value)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


# --- Array operators of objects that hold an array ------------------------------------------------
#
# Operators, indices, and the protocols by which NumPy, JAX and PyTorch convert objects to arrays.

#: Operator for each NumPy function, to be applied to arrays of other frameworks.
_OPERATORS: dict[Any, Callable[..., Any]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.true_divide: operator.truediv,
    np.floor_divide: operator.floordiv,
    np.remainder: operator.mod,
    np.power: operator.pow,
    np.matmul: operator.matmul,
    np.negative: operator.neg,
    np.positive: operator.pos,
    np.absolute: operator.abs,
    np.less: operator.lt,
    np.less_equal: operator.le,
    np.equal: operator.eq,
    np.not_equal: operator.ne,
    np.greater: operator.gt,
    np.greater_equal: operator.ge,
    np.bitwise_and: operator.and_,
    np.bitwise_or: operator.or_,
    np.bitwise_xor: operator.xor,
    np.invert: operator.invert,
    np.left_shift: operator.lshift,
    np.right_shift: operator.rshift,
}


class ArrayOperators(NDArrayOperatorsMixin):
    """Operators of an object that converts itself to an array where one is needed.

    Attributes:
        framework: Framework of the array.
    """

    framework: Framework

    @abstractmethod
    def read(self) -> Any:
        """Return the array."""

    def numpy(self) -> Any:
        """Return the array as a read-only NumPy array."""
        array = self.framework.to_numpy(self.read())
        if isinstance(array, np.ndarray) and array.flags.writeable:  # PyTorch's own memory
            array = array.view()
            array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.asarray(self.numpy())
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, ArrayOperators) for each in kwargs.get("out", ())):
            raise TypeError(
                "operators cannot write to a Variable; use assign, assign_add or assign_sub"
            )
        array_operator = _OPERATORS.get(ufunc)
        if array_operator is None or self.framework.uses_host_memory:
            plain = [each.numpy() if isinstance(each, ArrayOperators) else each for each in inputs]
            return getattr(ufunc, method)(*plain, **kwargs)
        to_array = self.framework.from_numpy
        return array_operator(
            *[
                each.read() if isinstance(each, ArrayOperators) else to_array(each)
                for each in inputs
            ]
        )

    def __jax_array__(self) -> Any:
        return self.read()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def plain(leaf: Any) -> Any:
            return leaf.read() if isinstance(leaf, ArrayOperators) else leaf

        return function(*map_structure(plain, args), **map_structure(plain, kwargs or {}))

    def __getitem__(self, key: Any) -> Any:
        return self.read()[key]

    def __len__(self) -> int:
        return len(self.read())

    def __float__(self) -> float:
        return float(self.read())

    def __int__(self) -> int:
        return int(self.read())

    def __bool__(self) -> bool:
        return bool(self.read())
