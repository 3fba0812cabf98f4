"""The index of ids: rows are found, assigned, freed and reused, as in a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.parameter_server.table_rows import IdIndex

LOWEST, HIGHEST = -(2**63), 2**63 - 1


def ids_of(*numbers):
    return np.array(numbers, np.int64)


def test_id_columns_keep_their_rows_when_the_capacity_grows():
    table = IdIndex(num_columns=2)
    rows, _ = table.find_or_add(ids_of(7, 8, 9))
    table.id_column(0)[rows] = 70, 80, 90
    table.id_column(1)[rows] += 1
    table.find_or_add(np.arange(1000, 2000, dtype=np.int64))
    assert table.ids_of(rows).tolist() == [7, 8, 9]
    assert table.id_column(0)[table.find(ids_of(9, 7, 8))].tolist() == [90, 70, 80]
    assert table.id_column(1)[: table.used].sum() == 3
    assert len(table.id_column(0)) == table.capacity


def test_ids_with_colliding_hashes_are_distinguished():
    table = IdIndex()
    # With at most 2**20 slots, the search of each begins at the same slot.
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)
    ids = np.array([(1 << 44) + k for k in range(200)], np.uint64) * np.uint64(inverse)
    ids = ids.view(np.int64)
    rows, _ = table.find_or_add(ids)
    assert sorted(rows.tolist()) == list(range(200))
    table.remove(ids[::2])
    assert (table.find(ids[::2]) == -1).all()
    assert table.find(ids[1::2]).tolist() == rows[1::2].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_the_index_behaves_like_a_dict(seed):
    rng = np.random.default_rng(seed)
    table, model = IdIndex(), {}
    few = int(rng.choice([20, 300, 10**6]))
    for _ in range(60):
        ids = rng.integers(-few, few, int(rng.integers(0, 80)))
        ids = np.append(ids, rng.choice([LOWEST, HIGHEST, -1, 0], int(rng.integers(3))))
        match int(rng.integers(3)):
            case 0 | 1:
                rows, added = table.find_or_add(ids)
                new = set(ids.tolist()) - set(model)
                assert len(added) == len(new), seed
                for one, row in zip(ids.tolist(), rows.tolist(), strict=True):
                    assert model.setdefault(one, row) == row, seed
            case 2:
                ids = np.unique(ids)
                rows = table.remove(ids)
                removed = [model.pop(one) for one in ids.tolist() if one in model]
                assert sorted(rows.tolist()) == sorted(removed), seed
        assert len(table) == len(model), seed
        assert len(set(model.values())) == len(model), seed
        requested = rng.integers(-few, few, 50)
        assert table.find(requested).tolist() == [
            model.get(one, -1) for one in requested.tolist()
        ], seed
        live = table.rows()
        assert sorted(live.tolist()) == sorted(model.values()), seed
        assert set(table.ids_of(live).tolist()) == set(model), seed


def test_rows_stay_dense_when_ids_are_added_and_removed():
    table = IdIndex()
    for start in range(0, 100_000, 500):
        table.find_or_add(np.arange(start, start + 500, dtype=np.int64))
        table.remove(np.arange(start - 500, start, dtype=np.int64))
    assert len(table) == 500
    assert table.capacity <= 1024
    assert table.nbytes < 64_000


def test_a_failed_allocation_changes_nothing():
    def grow(capacity):
        if capacity > 64:
            raise MemoryError

    table = IdIndex(grow)
    rows, _ = table.find_or_add(np.arange(60, dtype=np.int64))
    for _ in range(3):
        with pytest.raises(MemoryError):
            table.find_or_add(np.arange(50, 70, dtype=np.int64))
        assert (len(table), table.capacity) == (60, 64)
    assert table.find(np.arange(62, dtype=np.int64)).tolist() == [*rows.tolist(), -1, -1]
    assert len(table.find_or_add(np.arange(64, dtype=np.int64))[1]) == 4


def test_a_partly_failed_allocation_changes_nothing(monkeypatch):
    table = IdIndex(num_columns=2)
    rows, _ = table.find_or_add(np.arange(60, dtype=np.int64))
    with monkeypatch.context() as patch:
        zeros, made = np.zeros, []

        def zeros_once(shape, dtype):
            made.append(shape)
            if len(made) > 1:
                raise MemoryError
            return zeros(shape, dtype)

        patch.setattr(np, "zeros", zeros_once)
        with pytest.raises(MemoryError):
            table.add(np.arange(60, 100, dtype=np.int64))
    assert (len(table), table.capacity) == (60, 64)
    table.find_or_add(np.arange(100, dtype=np.int64))
    assert table.find(np.arange(60, dtype=np.int64)).tolist() == rows.tolist()
    assert len(table) == len(table.rows()) == 100
