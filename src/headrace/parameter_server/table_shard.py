"""One shard of a table: rows are created for ids seen often enough, and evicted with time.

    looked up      the id is counted, and gets a row when it was seen `admission` times
    not admitted   it reads zeros, and its gradients are dropped
    used           by a look-up or a gradient: the row's age is reset to 0 steps
    evicted        because of age or capacity: the row is dropped with its slots

The clock is the highest step that an optimizer has reached on this shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.distribute.row_access import is_floating
from headrace.errors import InvalidArgumentError
from headrace.parameter_server.array_shard import (
    check_gradient,
    check_value_indices,
    is_strictly_increasing,
)
from headrace.parameter_server.gradients import sum_rows, unique_ids
from headrace.parameter_server.rules import apply_sparse, slots_for_rule
from headrace.parameter_server.shard_values import DirtyRows
from headrace.parameter_server.specs import (
    OptimizerRule,
    StepParameters,
    TableSpec,
    parse_dtype,
    working_dtype,
)
from headrace.parameter_server.table_rows import RowColumn, TableRows, initial_rows

__all__ = ["TableShard", "slot_column"]

Array = NDArray[Any]
Ids = NDArray[np.int64]

_COUNT = _WHEN = RowColumn((), np.dtype(np.int64), with_id=True)
#: Largest number of ids waiting for admission, per row of the capacity.
_WAITING_IDS_PER_ROW = 4


class TableShard:
    """Rows of the ids assigned to one server.

    Args:
        spec: Spec of the shard.
        period: Current period of marks.
    """

    def __init__(self, spec: TableSpec, period: int) -> None:
        self.dtype: np.dtype[Any] = parse_dtype(spec.dtype)
        if not is_floating(self.dtype):
            raise InvalidArgumentError(
                f"the table {spec.table} needs a floating dtype, but got {spec.dtype}"
            )
        bounds = (spec.dim, spec.admission, spec.shards, spec.evict_after, spec.capacity)
        if min(1 if bound is None else bound for bound in bounds) < 1 or not (
            0 <= spec.index < spec.shards
        ):
            raise InvalidArgumentError(
                "`dim`, `admission`, `shards`, `evict_after` and `capacity` of the table "
                f"{spec.table} must be at least 1, and `index` must be below `shards`, but got "
                f"{spec}"
            )
        self.spec = spec
        #: Columns: "value", "seen", "last_used", and slots as "optimizer/name".
        self.rows: TableRows = TableRows(
            value=RowColumn((spec.dim,), self.dtype), seen=_COUNT, last_used=_WHEN
        )
        #: Ids that have not been seen often enough.
        self.waiting_ids: TableRows = TableRows(seen=_COUNT, last_used=_WHEN)
        self.step: int = 0
        self.dirty_rows: DirtyRows = DirtyRows(period)
        #: Ids that lost their row, with the period in which they did.
        self.removed_ids: list[tuple[int, Ids]] = []
        self._period = period
        self._next_sweep = 0

    @property
    def slots(self) -> list[str]:
        """Names of the slots of rows."""
        return [name for name in self.rows.columns if "/" in name]

    @property
    def nbytes(self) -> int:
        """Bytes of rows, slots and indices."""
        return self.rows.nbytes + self.waiting_ids.nbytes + self.dirty_rows.nbytes

    def begin_period(self, period: int) -> None:
        """Begin a period of marks."""
        self._period = period
        self.dirty_rows.begin_period(period)

    def lookup(
        self,
        ids: Array,
        occurrences: Array | None,
        is_counted: bool,
        allocate: Callable[..., Array],
    ) -> Array:
        """Count ids, unless this is a repetition, and return their rows."""
        found = self._checked(ids)
        if occurrences is not None and (
            occurrences.shape != found.shape or occurrences.dtype.kind not in "iu"
        ):
            raise InvalidArgumentError(
                f"counts of the table {self.spec.table} must be integers of shape {found.shape}, "
                f"but got {occurrences.dtype} of shape {occurrences.shape}"
            )
        if occurrences is not None and occurrences.size and occurrences.min() < 1:
            raise InvalidArgumentError(
                f"counts of the table {self.spec.table} must be at least 1, but got "
                f"{occurrences.min()}"
            )
        if not is_counted:
            return self._read(self.rows.index.find(found), allocate)
        distinct, inverse = found, None
        counts = (
            np.ones(len(found), np.int64) if occurrences is None else occurrences.astype(np.int64)
        )
        if not is_strictly_increasing(found):
            distinct, inverse = unique_ids(found)
            sums = np.zeros(len(distinct), np.int64)
            np.add.at(sums, inverse, counts)
            counts = sums
        rows = self.rows.index.find(distinct)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            rows[absent] = self._admit(distinct[absent], counts[absent], rows[rows >= 0])
        has_row = rows >= 0
        found_rows = rows if has_row.all() else rows[has_row]
        self.rows["seen"][found_rows] += counts if found_rows is rows else counts[has_row]
        self.rows["last_used"][found_rows] = self.step
        self.dirty_rows.mark_rows(found_rows, self.rows.index.capacity)
        return self._read(rows if inverse is None else rows[inverse], allocate)

    def gather(
        self, ids: Array, allocate: Callable[..., Array], *, initialize: bool = False
    ) -> Array:
        """Return rows without changing anything.

        Args:
            ids: Ids of the rows.
            allocate: Allocates the returned array.
            initialize: Whether ids without a row get initial values, not zeros.
        """
        found = self._checked(ids)
        rows = self.rows.index.find(found)
        answer = self._read(rows, allocate)
        if initialize and (absent := np.flatnonzero(rows < 0)).size:
            answer[absent] = initial_rows(
                self.spec.initializer, found[absent], self.spec.dim, self.dtype
            )
        return answer

    def assign(self, ids: Array, values: Array) -> None:
        """Write rows; ids without one are admitted."""
        found = self._checked(ids)
        self._check_values(found, values, "values")
        if values.dtype != self.dtype:
            raise InvalidArgumentError(
                f"values of dtype {values.dtype} cannot be written to the table {self.spec.table} "
                f"of dtype {self.spec.dtype}; convert them first"
            )
        if not is_strictly_increasing(found):
            distinct, inverse = unique_ids(found)
            last = np.zeros(len(distinct), np.int64)
            # For equal ids, the last value is used.
            last[inverse] = np.arange(len(found))
            found, values = distinct, values[last]
        rows = self.rows.index.find(found)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            counts = np.full(len(absent), self.spec.admission)
            rows[absent] = self._admit(found[absent], counts, rows[rows >= 0])
        has_row = rows >= 0
        self.rows["value"][rows[has_row]] = values[has_row]
        self.rows["last_used"][rows[has_row]] = self.step
        self.dirty_rows.mark_rows(rows[has_row], self.rows.index.capacity)

    def apply(
        self,
        optimizer: str,
        rule: OptimizerRule,
        step: StepParameters,
        ids: Array,
        gradient: Array,
        value_indices: Array | None = None,
    ) -> None:
        """Apply one step of an optimizer to existing rows.

        Args:
            optimizer: Name of the optimizer.
            rule: Update rule.
            step: Parameters of the step.
            ids: Ids of the rows.
            gradient: One gradient for each id, or gradients that ids share.
            value_indices: Index of the gradient of each id; None means one per id.
        """
        found = self._checked(ids)
        check_gradient(gradient, self.spec.table)
        self._check_values(found if value_indices is None else gradient, gradient, "gradients")
        check_value_indices(value_indices, found, gradient, self.spec.table)
        if not is_strictly_increasing(found):
            found, gradient = sum_rows(
                found, gradient if value_indices is None else gradient[value_indices]
            )
            value_indices = None
        rows = self.rows.index.find(found)
        has_row = rows >= 0
        if not has_row.all():
            rows = rows[has_row]
            if value_indices is None:
                gradient = gradient[has_row]
            else:
                value_indices = value_indices[has_row]
        slots = self._get_or_create_slots(optimizer, rule)
        self.step = max(self.step, step.iteration + 1)
        if len(rows):
            apply_sparse(rule, step, self.rows["value"], rows, gradient, slots, value_indices)
            self.rows["last_used"][rows] = self.step
            self.dirty_rows.mark_rows(rows, self.rows.index.capacity)
        if self.spec.evict_after is not None and self.step >= self._next_sweep:
            # The sweep visits all rows, so it does not run at each step: a row may exceed the age
            # by a quarter.
            self.evict(self.spec.evict_after)
            self._next_sweep = self.step + max(1, self.spec.evict_after // 4)

    def evict(self, older_than: int | None) -> int:
        """Evict rows not used for `older_than` steps; return their number."""
        age = self.spec.evict_after if older_than is None else older_than
        if age is None:
            raise InvalidArgumentError(
                f"the table {self.spec.table} was created without `evict_after`; pass `older_than`"
            )
        oldest_step = self.step - age
        for part in (self.waiting_ids, self.rows):
            rows = part.index.rows()
            ids = part.index.ids_of(rows[part["last_used"][rows] <= oldest_step])
            if part is self.waiting_ids:
                part.index.remove(ids)
            else:
                self._drop(ids)
        return len(ids)

    def export(self, start: int, limit: int) -> tuple[Ids, Array, int | None]:
        """Return ids and values of some rows, and the start of the next part."""
        rows = self.rows.index.rows()
        rows = rows[np.searchsorted(rows, start) :]
        part = rows[:limit]
        following = int(rows[limit]) if len(rows) > limit else None
        return self.rows.index.ids_of(part), self.rows["value"][part], following

    def removed_since(self, mark: int) -> Ids:
        """Return ids that lost their row in periods after `mark`, and have none now."""
        removed = [ids for period, ids in self.removed_ids if period > mark]
        ids = np.unique(np.concatenate(removed)) if removed else np.zeros(0, np.int64)
        return ids[self.rows.index.find(ids) < 0]

    def _admit(self, ids: Ids, counts: Ids, in_use: Ids) -> Ids:
        """Count ids without a row; return the new row of each admitted id, else -1."""
        answer = np.full(len(ids), -1, np.int64)
        seen = counts
        admitted = np.arange(len(ids))
        if self.spec.admission > 1:
            waiting, _ = self.waiting_ids.find_or_add(ids)
            self.waiting_ids["seen"][waiting] += counts
            self.waiting_ids["last_used"][waiting] = self.step
            seen = self.waiting_ids["seen"][waiting]
            admitted = np.flatnonzero(seen >= self.spec.admission)
            self._sweep_waiting_ids(waiting)
        if self.spec.capacity is not None:
            admitted = admitted[: max(0, self.spec.capacity - len(in_use))]
            self._free_capacity(len(admitted), self.spec.capacity, in_use)
        if not len(admitted):
            return answer
        if self.spec.admission > 1:
            self.waiting_ids.index.remove(ids[admitted])
        rows, _ = self.rows.find_or_add(ids[admitted])
        self.rows["value"][rows] = initial_rows(
            self.spec.initializer, ids[admitted], self.spec.dim, self.dtype
        )
        # The caller adds the current count.
        self.rows["seen"][rows] = seen[admitted] - counts[admitted]
        answer[admitted] = rows
        return answer

    def _sweep_waiting_ids(self, in_use: Ids) -> None:
        """Bound the number of ids that are seen a few times and never again."""
        if self.spec.capacity is None:
            return
        over = len(self.waiting_ids) - _WAITING_IDS_PER_ROW * self.spec.capacity
        if over > 0:
            count = over + self.spec.capacity // 4
            rows = self.waiting_ids.least_recently_used(count, in_use)
            self.waiting_ids.index.remove(self.waiting_ids.index.ids_of(rows))

    def _free_capacity(self, count: int, capacity: int, in_use: Ids) -> None:
        over = len(self.rows) + count - capacity
        if over > 0:
            # Evict more than needed: finding the oldest rows visits all rows.
            rows = self.rows.least_recently_used(over + capacity // 16, in_use)
            self._drop(self.rows.index.ids_of(rows))

    def _drop(self, ids: Ids) -> None:
        self.rows.index.remove(ids)
        if self._period and len(ids):
            self.removed_ids.append((self._period, ids))

    def _get_or_create_slots(self, optimizer: str, rule: OptimizerRule) -> dict[str, Array]:
        found = {}
        for slot in slots_for_rule(rule):
            name = f"{optimizer}/{slot.name}"
            if name not in self.rows.columns:
                shape = () if slot.is_per_row else (self.spec.dim,)
                self.rows.add_column(name, slot_column(shape, self.dtype, slot.initial_value))
            found[slot.name] = self.rows[name]
        return found

    def _read(self, rows: Ids, allocate: Callable[..., Array]) -> Array:
        answer = allocate((len(rows), self.spec.dim), self.dtype)
        table = self.rows["value"]
        if not len(table):
            answer[...] = 0
        elif answer.size:
            np.take(table, rows, axis=0, out=answer, mode="clip")
            absent = rows < 0
            if absent.any():
                answer[absent] = 0
        return answer

    def _checked(self, ids: Array) -> Ids:
        if ids.ndim != 1 or ids.dtype != np.int64:
            raise InvalidArgumentError(
                f"ids of the table {self.spec.table} must be int64 of one dimension, but got "
                f"{ids.dtype} of shape {ids.shape}"
            )
        return np.ascontiguousarray(ids)

    def _check_values(self, ids: Ids, values: Array, description: str) -> None:
        shape = (len(ids), self.spec.dim)
        if values.shape != shape:
            raise InvalidArgumentError(
                f"{description} of shape {values.shape} do not fit {len(ids)} ids of the table "
                f"{self.spec.table}: expected shape {shape}"
            )


def slot_column(shape: tuple[int, ...], dtype: np.dtype[Any], first: float) -> RowColumn:
    """Return the column of a slot for values of a dtype."""
    return RowColumn(shape, working_dtype(dtype), first)
