"""Documented values of variable copies, for strategies of any framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.distribute import get_replica_context

AGGREGATIONS = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
WRITES = {
    "NONE": ([2.0, 3.0], [1.0, 2.0]),
    "SUM": ([4.0, 4.0], [3.0, 3.0]),
    "MEAN": ([2.5, 2.5], [1.5, 1.5]),
    "ONLY_FIRST_REPLICA": ([2.0, 2.0], [1.0, 1.0]),
}
READS = {"SUM": 3.0, "MEAN": 1.5, "ONLY_FIRST_REPLICA": 1.0}


def check_table(strategy: Any) -> None:
    """Check all numbers on a strategy of two replicas."""

    def one() -> int:
        return get_replica_context().replica_id_in_sync_group + 1

    def made(value: Any = 1.0, **kwargs: Any) -> Any:
        with strategy.scope():
            return hr.Variable(value, **kwargs)

    def copies(v: Any) -> list[float]:
        return [float(each) for each in v.values]

    for aggregation in AGGREGATIONS:
        for method, expected in zip(("assign_add", "assign"), WRITES[aggregation], strict=True):
            v = made(aggregation=aggregation)
            returned = strategy.run(lambda v=v, m=method: getattr(v, m)(one()))
            assert copies(v) == copies(returned) == expected, (aggregation, method)
        v = made(0.0, aggregation=aggregation)
        for use, value in ((v.assign, 1), (v.assign_add, 2), (v.assign_sub, 1)):
            assert use(1) == value
            assert copies(v) == [value, value]
    for aggregation, read in READS.items():
        v = made(0.0, aggregation=aggregation, synchronization="ON_READ")
        own = strategy.run(lambda v=v: (v.assign_add(one()), v.read())[1])
        assert copies(own) == copies(v) == [1.0, 2.0]
        assert v.read() == read
    v = made(3.0, aggregation="SUM", synchronization="ON_READ")
    assert v.read() == 3.0
    assert v.assign(10.0) == 10.0
    assert copies(v) == [5.0, 5.0]
    with pytest.raises(ValueError, match="SyncOnReadVariable does not support"):
        v.assign_add(1.0)
    count = made(7, aggregation="SUM", synchronization="ON_READ")
    assert count.read() == 7
    assert copies(count) == [4.0, 3.0]
    v = made()
    strategy.run(lambda: v.assign(one()))
    with pytest.warns(UserWarning, match="copies of Variable 'Variable' differ"):
        assert v.read() == 1
    for aggregation, match in (("NONE", "Could not convert"), ("MEAN", "non-floating")):
        with pytest.raises(ValueError, match=match):
            made(1, aggregation=aggregation, synchronization="ON_READ").read()
    assert np.asarray(made([1.0, 2.0])).tolist() == [1.0, 2.0]
    for aggregation, rows in (("SUM", [1.0, 2.0, 1.0]), ("MEAN", [0.5, 1.0, 0.5])):
        v = made(np.zeros((3, 1), np.float32), aggregation=aggregation)
        strategy.run(lambda v=v: v.scatter_add([one() - 1, one()], [[1.0]] * 2))
        assert [np.asarray(each)[:, 0].tolist() for each in v.values] == [rows, rows]
        assert np.asarray(v.gather([2, 1])).tolist() == [[rows[2]], [rows[1]]]
