"""A step that is compiled once for all replicas, and what code in it may ask.

The framework knows how a program is made and run; here is what it is made of: `PerReplica`s, the
place where the code runs, and what becomes of different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from headrace.arguments import check_callable, check_int
from headrace.distribute.agreement import RowsOfArguments
from headrace.distribute.collectives import ReduceOp
from headrace.distribute.context import OnReplica, check_cross_replica, here
from headrace.distribute.values import (
    DistributedValues,
    PerReplica,
    map_structure,
    refuse_other_count,
)
from headrace.element.structure import flatten, unflatten
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.frameworks import shares

__all__ = ["CompiledReplica", "Sharded", "compiled"]

_NO_VARIABLES = (
    "is used in a step that strategy.compile made, where nothing can be read or written while it "
    "runs: pass variable.read() as an argument, return the new value, and assign it outside"
)


class Sharded(PerReplica):
    """A result of a compiled step: the replicas' values are parts of one array.

    Attributes:
        array: The array over the strategy's mesh; the replicas' values one after another along its
            first axis.
    """

    __slots__ = ("_are_scalars", "_taken", "_values_of", "array")

    def __init__(
        self, array: Any, are_scalars: bool, values_of: Callable[[Any, bool], tuple[Any, ...]]
    ) -> None:
        self.array = array
        self._are_scalars = are_scalars
        self._values_of = values_of
        self._taken: tuple[Any, ...] | None = None

    @property
    def values(self) -> tuple[Any, ...]:  # type: ignore[override]
        """The values, in the order of the replicas."""
        if self._taken is None:
            self._taken = self._values_of(self.array, self._are_scalars)
        return self._taken

    @property
    def whole(self) -> tuple[Any, bool]:
        """The array, and whether the replicas' values are scalars."""
        return self.array, self._are_scalars


class CompiledReplica(OnReplica):
    """One replica's view in a compiled step; `get_replica_context()` returns it there.

    Args:
        strategy: Whose replicas run it.
        program: The framework's part (`frameworks/jax_program.py`).
    """

    __slots__ = ("_program",)

    def __init__(self, strategy: Any, program: Any) -> None:
        self.strategy = strategy
        self._program = program

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Which replica this is; an array, known when the program runs."""
        return self._program.replica_number()

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers."""
        count: int = self.strategy.num_replicas_in_sync
        return count

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Return the sum or mean of the replicas' values, leaf by leaf."""
        is_mean = ReduceOp.of(reduce_op) is ReduceOp.MEAN
        return map_structure(lambda leaf: self._program.reduced(is_mean, _no_variable(leaf)), value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Return the replicas' values, which are of one shape, one after another, leaf by leaf."""
        axis = check_int("axis", axis, minimum=0)
        return map_structure(lambda leaf: self._program.gathered(_no_variable(leaf), axis), value)

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise: all replicas are one program."""
        raise FailedPreconditionError(
            "merge_call has no meaning in a step that strategy.compile made, where no replica "
            "waits for others: use all_reduce or all_gather, or strategy.run"
        )

    def refuse_variable(self, name: str) -> NoReturn:
        """Raise for the use of a variable."""
        raise FailedPreconditionError(f"Variable {name!r} {_NO_VARIABLES}")

    def __repr__(self) -> str:
        return f"<CompiledReplica of {self.strategy!r}>"


def compiled(
    strategy: Any, fn: Callable[..., Any], remainder: str, donate: Sequence[int]
) -> Callable[..., Any]:
    """Return what `strategy.compile` returns."""
    program = strategy.framework.program()
    check_callable("fn", fn)
    shares.check_remainder(remainder)
    if isinstance(donate, int):
        donate = (donate,)
    numbers = [check_int("donate", each, minimum=0) for each in donate]
    devices = strategy.framework_devices
    context = CompiledReplica(strategy, program)

    def on_replica(*args: Any) -> Any:
        token = here.set(context)
        try:
            return fn(*args)
        finally:
            here.reset(token)

    def result(array: Any, is_scalar: bool) -> Any:
        return Sharded(array, is_scalar, lambda a, s: program.parts_of(a, devices, s))

    def parts(leaf: Any) -> Any:
        if isinstance(leaf, Sharded):
            return program.Whole(*leaf.whole)
        if isinstance(leaf, PerReplica):
            if len(leaf.values) != len(devices):
                refuse_other_count(len(leaf.values), len(devices))
            return leaf.values
        _no_variable(leaf)
        return None

    calls = strategy.calls_of_all("compiled step")
    look = None if calls is None else calls.look
    run = program.Program(strategy.mesh_devices(), on_replica, parts, result, numbers, look)

    def step(*args: Any) -> Any:
        check_cross_replica(strategy, "compile")
        rows = [_rows_of(arg) for arg in args]
        if calls is None:
            return run(*_with_equal_rows(args, rows, rows, remainder))
        of_all = calls.begin(rows, run.form_of(args, [each is not None for each in rows]))
        given = _with_equal_rows(args, rows, of_all, remainder)
        with calls.watched():
            return run(*given)

    return step


def _no_variable(leaf: Any) -> Any:
    if isinstance(leaf, DistributedValues) and not isinstance(leaf, PerReplica):
        raise FailedPreconditionError(f"{leaf!r} {_NO_VARIABLES}")
    return leaf


def _rows_of(arg: Any) -> list[int] | None:
    """Return how many rows each replica here has of a step of a dataset; None: it is none."""
    leaves, structure = flatten(arg)
    if not leaves or any(type(leaf) is not PerReplica for leaf in leaves):
        return None
    columns = [leaf.values for leaf in leaves]
    if not all(getattr(value, "ndim", 0) for column in columns for value in column):
        return None
    return shares.rows_of_shares(structure, columns)


def _with_equal_rows(
    args: Sequence[Any], rows: RowsOfArguments, of_all: RowsOfArguments, remainder: str
) -> list[Any]:
    """Return arguments in which all replicas have as many rows, those of other workers too."""
    return [
        arg if here is None or everywhere is None else _equal(arg, here, everywhere, remainder)
        for arg, here, everywhere in zip(args, rows, of_all, strict=True)
    ]


def _equal(arg: Any, rows: Sequence[int], of_all: Sequence[int], remainder: str) -> Any:
    leaves, structure = flatten(arg)
    columns = [leaf.values for leaf in leaves]
    if remainder == "drop":
        return unflatten(
            structure, [PerReplica(v[: min(of_all)] for v in column) for column in columns]
        )
    try:
        used = shares.rows_to_use(remainder, of_all)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error}; or call it with strategy.run") from None
    if remainder == "error":
        return arg
    assert used is not None
    made = [PerReplica(_padded(column, used)) for column in columns]
    return shares.with_mask(structure, made, PerReplica(shares.mask_of(rows, used)))


def _padded(column: Sequence[Any], rows: int) -> list[Any]:
    if all(len(value) == rows for value in column):
        return list(column)
    return shares.padded([value.__array__() for value in column], rows)
