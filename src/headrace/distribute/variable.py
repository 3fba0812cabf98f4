"""Variables: arrays that stay, with a copy on each replica of the strategy they were made in.

    ON_WRITE   a write on the replicas makes one value of theirs, as `aggregation` says, and every
               copy gets it; so copies are alike. NONE writes each copy by itself
    ON_READ    each replica writes its own copy; a read outside of them makes one value

Copies are arrays of the strategy's framework. They are never written into: a write puts others in
their place, so a read copies nothing.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.arguments import check_flag, check_string
from headrace.distribute.collectives import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
    member_named,
)
from headrace.distribute.context import CrossReplica, OnReplica, here
from headrace.distribute.current import MadeOnce, get_strategy
from headrace.distribute.scattering import (
    Scattering,
    Slices,
    check_combines,
    check_range,
    combined,
    scattered,
    slices_of,
    written_together,
)
from headrace.distribute.spmd import CompiledReplica
from headrace.distribute.values import ArrayOperators, DistributedValues, select
from headrace.errors import FailedPreconditionError

__all__ = ["Variable"]


class Variable(ArrayOperators, Scattering, DistributedValues, metaclass=MadeOnce):
    """An array that stays; in the scope of a strategy, with a copy on each replica.

    >>> import headrace as hr
    >>> strategy = hr.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     total = hr.Variable(1.0, aggregation="SUM")
    >>> _ = strategy.run(lambda: total.assign_add(2.0))
    >>> total.read()
    np.float64(5.0)

    Args:
        initial_value: An array or number, or a function that returns one.
        name: For people.
        dtype: Of the variable; None: that of the initial value.
        trainable: Whether it is to be trained; None: unless it is ON_READ. It changes nothing here.
        aggregation: A `VariableAggregation`, or its name.
        synchronization: A `VariableSynchronization`, or its name.
        shape: What the initial value must have; None: any.
        per_worker_variable: Of strategies of parameter servers, where each worker has a copy.
    """

    if TYPE_CHECKING:  # what `Variable` makes in the scope of parameter servers has, besides
        gather: Callable[..., Any]
        sparse_read: Callable[..., Any]
        scatter_add: Callable[..., Any]
        scatter_sub: Callable[..., Any]
        scatter_update: Callable[..., Any]
        batch_scatter_update: Callable[..., Any]
        scatter_mul: Callable[..., Any]
        scatter_div: Callable[..., Any]
        scatter_min: Callable[..., Any]
        scatter_max: Callable[..., Any]
        shards: Sequence[Any]
        read_all: Callable[[], list[Any]]

    def __init__(
        self,
        initial_value: Any,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool | None = None,
        aggregation: Any = VariableAggregation.NONE,
        synchronization: Any = VariableSynchronization.AUTO,
        *,
        shape: Any = None,
        per_worker_variable: bool = False,
    ) -> None:
        if name is not None:
            check_string("name", name)
        if per_worker_variable:
            raise ValueError(
                "a variable with `per_worker_variable` is made in the scope of a "
                "ParameterServerStrategy; elsewhere ON_READ gives each replica a copy of its own"
            )
        check_flag("trainable", trainable)
        self.strategy = get_strategy()
        self.name = name or "Variable"
        self.aggregation = member_named("aggregation", VariableAggregation, aggregation)
        wanted = member_named("synchronization", VariableSynchronization, synchronization)
        if wanted is VariableSynchronization.NONE:
            raise ValueError(
                "`synchronization` NONE is not supported; use ON_WRITE, where copies are alike, or "
                "ON_READ, where each replica has its own"
            )
        self._on_read = wanted is VariableSynchronization.ON_READ
        if self._on_read and trainable:
            raise ValueError(
                "`trainable` True does not go with `synchronization` ON_READ, whose copies differ: "
                "leave it out, or use ON_WRITE"
            )
        self.trainable = not self._on_read if trainable is None else bool(trainable)
        self.framework = framework = self.strategy.framework
        initial = initial_value() if callable(initial_value) else initial_value
        own_dtype = None if dtype is None else framework.dtype(dtype)
        if own_dtype is not None:
            check_range(initial, own_dtype, framework, f"Variable {self.name!r}")
        value = framework.array(initial, own_dtype)
        kind = framework.kind(value.dtype)
        if kind in "OSU":
            raise ValueError(
                "`initial_value` must be a number or an array of numbers, or a function that "
                f"returns one, but it has dtype {value.dtype}"
            )
        wanted_shape = (shape,) if isinstance(shape, int) else shape
        if shape is not None and tuple(wanted_shape) != tuple(value.shape):
            raise ValueError(
                f"`shape` is {shape}, but the initial value has shape {tuple(value.shape)}"
            )
        if self.aggregation is VariableAggregation.MEAN and kind not in "fc":
            raise ValueError(
                "creating a distributed Variable with aggregation=MEAN and a non-floating dtype "
                f"is not supported, and this one has {value.dtype}; give it a dtype such as "
                "np.float32, or another aggregation"
            )
        value = self.strategy.value_of_first(value, f"the initial value of Variable {self.name!r}")
        self._copies: list[Any] = self._kept(self._shares(value, kind))
        #: Whether copies may differ that were to be alike, and nobody was warned.
        self._may_differ = False

    @property
    def synchronization(self) -> VariableSynchronization:
        """ON_WRITE or ON_READ."""
        kinds = VariableSynchronization
        return kinds.ON_READ if self._on_read else kinds.ON_WRITE

    @property
    def values(self) -> tuple[Any, ...]:
        """The copies, in the order of the replicas."""
        return tuple(map(self.framework.plain, self._copies))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return tuple(self._copies[0].shape)

    @property
    def dtype(self) -> Any:
        """The dtype, as the framework has it."""
        return self._copies[0].dtype

    # --- reading ------------------------------------------------------------------------------

    def read(self) -> Any:
        """Return the value: on a replica its copy, else one for all.

        It cannot be written into; of PyTorch it must not.

        Raises:
            ValueError: It is ON_READ without an aggregation, so that there is no one value.
            FailedPreconditionError: It is read in a compiled step.
        """
        replica = self._replica()
        if replica is not None:
            return self.framework.plain(self._copies[replica])
        if self._on_read and self.strategy.num_replicas_in_sync > 1:
            return self._aggregated(self._copies)
        if self._may_differ:
            self._warn_where_copies_differ()
        return self.framework.plain(self._copies[0])

    value = read_value = read

    # --- writing ------------------------------------------------------------------------------

    def assign(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Any:
        """Make `value` the value, and return it.

        On replicas all call it, where `aggregation` makes one value of theirs. The other arguments
        are accepted as in tf.Variable.
        """
        return self._write("assign", value, lambda old, new: new)

    def assign_add(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Any:
        """Add `value`, and return the new value; see `assign`."""
        return self._write("assign_add", value, operator.add)

    def assign_sub(
        self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True
    ) -> Any:
        """Subtract `value`, and return the new value; see `assign`."""
        return self._write("assign_sub", value, operator.sub)

    def _write(self, method: str, value: Any, change: Callable[..., Any]) -> Any:
        replica = self._replica()
        if replica is None:
            return self._write_all(method, value, change)
        value = self._fitting(value)
        if self._on_read or self.aggregation is VariableAggregation.NONE:
            self._may_differ = not self._on_read
            device = self.strategy.framework_devices[replica]
            new = change(self._copies[replica], self.framework.moved(value, device))
            self._copies[replica] = self.framework.kept(new, device)
            return self.framework.plain(self._copies[replica])

        def merged(brought: list[tuple[Any, str, Any]]) -> list[None]:
            values = written_together(brought)
            aggregated = self._fitting(self._aggregated(values))
            aggregated = self.framework.moved(aggregated, self.strategy.framework_devices[0])
            self._copies = self._kept([change(self._copies[0], aggregated)] * len(self._copies))
            return [None] * len(values)

        place = here.get()
        assert isinstance(place, OnReplica)
        place.meet(merged, (self, method, value))  # type: ignore[attr-defined]
        return self.framework.plain(self._copies[replica])

    def _check_scope(self) -> None:
        place = here.get()
        if isinstance(place, CrossReplica) and place.strategy is not self.strategy:
            raise ValueError(
                f"Variable {self.name!r} belongs to {self.strategy!r}, and is written in the scope "
                f"of {place.strategy!r}; write it in its own"
            )
        if isinstance(place, OnReplica) and place.strategy.num_replicas_in_sync > 1:
            # They would read and write one value at the same time, and writes would be lost.
            raise ValueError(
                f"Variable {self.name!r} was made outside of the scope of {place.strategy!r}, and "
                "its replicas would all write one value at the same time; make it in "
                "`with strategy.scope():`, where each has a copy"
            )

    def _write_all(self, method: str, value: Any, change: Callable[..., Any]) -> Any:
        self._check_scope()
        count, everywhere = len(self._copies), self.strategy.num_replicas_in_sync
        summed = self._on_read and self.aggregation is VariableAggregation.SUM
        if summed and method != "assign" and everywhere > 1:
            raise ValueError(
                f"SyncOnReadVariable does not support `{method}` in cross-replica context when "
                "aggregation is set to VariableAggregation.SUM; call it on the replicas, or assign"
            )
        values = [self._fitting(select(i, value)) for i in range(count)]
        if summed:
            values = self._shares(values[0], self.framework.kind(self.dtype))
        devices = self.strategy.framework_devices
        moved = map(self.framework.moved, values, devices)
        self._copies = self._kept(
            [change(old, new) for old, new in zip(self._copies, moved, strict=True)]
        )
        return self.read()

    def _scatter(self, how: str, ids: Any, values: Any) -> Any:
        if self._on_read:
            raise NotImplementedError(
                f"scatter_{how} of Variable {self.name!r}, which has synchronization ON_READ, is "
                "not supported: assign the whole, or make it ON_WRITE"
            )
        slices = slices_of(ids, values, self)
        replica, devices = self._replica(), self.strategy.framework_devices
        if replica is None:
            self._check_scope()
            self._copies = self._kept([self._with_rows(how, old, slices) for old in self._copies])
            return self.read()
        if self.aggregation is VariableAggregation.NONE:
            self._may_differ = True
            new = self._with_rows(how, self._copies[replica], slices)
            self._copies[replica] = self.framework.kept(new, devices[replica])
            return self.framework.plain(self._copies[replica])
        check_combines(how, self.aggregation.name, self.name)

        def merged(brought: list[tuple[Any, str, Slices]]) -> list[None]:
            found = combined(written_together(brought), self.aggregation.name, self.strategy)
            self._copies = self._kept([self._with_rows(how, self._copies[0], found)] * len(devices))
            return [None] * len(brought)

        here.get().meet(merged, (self, f"scatter_{how}", slices))  # type: ignore[union-attr]
        return self.framework.plain(self._copies[replica])

    def _with_rows(self, how: str, old: Any, slices: Slices) -> Any:
        """Return a copy with rows changed, by NumPy."""
        return self.framework.array(scattered(how, self.framework.numpy(old), *slices), self.dtype)

    # --- the copies ---------------------------------------------------------------------------

    def _replica(self) -> int | None:
        """Return which replica's code asks; None: it is none, or another strategy's."""
        place = here.get()
        if isinstance(place, CompiledReplica):
            place.refuse_variable(self.name)
        if isinstance(place, OnReplica) and place.strategy is self.strategy:
            return place.replica_id_in_sync_group - self.strategy.first_replica  # type: ignore[no-any-return]
        return None

    def _aggregated(self, values: Sequence[Any]) -> Any:
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.strategy.value_of_first(values[0], f"a value of Variable {self.name!r}")
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                "Could not convert from VariableAggregation.NONE to a ReduceOp: the replicas have "
                f"a value of Variable {self.name!r} each; read `values`, or give it an aggregation"
            )
        return self.strategy.reduce_replicas(ReduceOp.of(self.aggregation.name), values)

    def _shares(self, value: Any, kind: str) -> list[Any]:
        """Return the copies of which a read makes `value` again."""
        here, everywhere = len(self.strategy.framework_devices), self.strategy.num_replicas_in_sync
        summed = self._on_read and self.aggregation is VariableAggregation.SUM
        if not summed or everywhere == 1:
            return [value] * here
        if kind in "iu":
            share = value // everywhere
            rest = value - share * (everywhere - 1)
            first = rest if self.strategy.first_replica == 0 else share
            return [first, *[share] * (here - 1)]
        return [self.framework.array(value / everywhere, value.dtype)] * here

    def _kept(self, values: Sequence[Any]) -> list[Any]:
        """Return values on the devices of the replicas; one that stands there twice is kept once.

        That is for arrays that nobody can write into: those of NumPy.
        """
        framework, devices = self.framework, self.strategy.framework_devices
        if framework.shares_host and all(value is values[0] for value in values):
            return [framework.kept(values[0], devices[0])] * len(devices)
        return [framework.kept(*each) for each in zip(values, devices, strict=True)]

    def _fitting(self, value: Any) -> Any:
        """Return a value as an array of the variable's shape and dtype."""
        given = value.read() if isinstance(value, Variable) else value
        # Before the framework has it: JAX makes 32 bits of 64.
        check_range(given, self.dtype, self.framework, f"Variable {self.name!r}")
        array = self.framework.array(given)
        if tuple(array.shape) != self.shape:
            raise ValueError(
                f"Variable {self.name!r} has shape {self.shape}, and a value of shape "
                f"{tuple(array.shape)} does not fit"
            )
        if not self.framework.can_cast(array.dtype, self.dtype):
            raise TypeError(
                f"Variable {self.name!r} has dtype {self.dtype}, which would lose what is in a "
                f"value of dtype {array.dtype}; convert it with astype"
            )
        return self.framework.array(array, self.dtype)

    def _warn_where_copies_differ(self) -> None:
        first, *others = map(self.framework.numpy, self._copies)
        if all(np.array_equal(copy, first) for copy in others):
            return
        self._may_differ = False
        warnings.warn(
            f"the replicas' copies of Variable {self.name!r} differ, since each wrote its own: it "
            "has aggregation NONE. This is that of the first; give it an aggregation, or "
            "synchronization ON_READ",
            stacklevel=4,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        return self.__copy__()

    def __copy__(self) -> Variable:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._copies = list(self._copies)
        return made

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise FailedPreconditionError(
            f"Variable {self.name!r} is an array of this process and cannot be pickled: elsewhere "
            "it would be another variable. Pass its value, variable.read(); or make it in the "
            "scope of a ParameterServerStrategy, where all processes have the same"
        )

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<Variable {self.name!r} shape={self.shape} dtype={self.dtype}>"
