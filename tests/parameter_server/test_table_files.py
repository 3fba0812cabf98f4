"""Tables in files, the dtype of sent rows, and steps in the background."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import headrace as hr
from headrace.errors import InvalidArgumentError
from tests.parameter_server.small_cluster import cluster


@pytest.mark.parametrize("suffix", ["safetensors", "parquet"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_table_loads_the_rows_of_a_saved_table(tmp_path, suffix, dtype):
    ids = np.array([5, -9, 2**60, 0])
    path = tmp_path / f"rows.{suffix}"
    with cluster(2) as strategy, strategy.scope():
        first = hr.EmbeddingTable(3, name="first", dtype=dtype, initializer="normal")
        rows = first.lookup(ids)
        assert first.save(path) == 4
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        second = hr.EmbeddingTable(3, name="second", dtype=dtype, initializer=7.0, admission=5)
        second.assign([1], np.ones(3))
        assert second.load(str(path)) == 4
        assert np.array_equal(second.gather(ids), rows)
        assert (second.gather([1]) == 1).all()
        empty = hr.EmbeddingTable(3, name="empty", dtype=dtype)
        assert empty.save(path) == 0
        assert second.load(path) == 0


def test_a_saved_table_is_readable_by_other_programs(tmp_path):
    with cluster(1) as strategy, strategy.scope():
        table = hr.EmbeddingTable(2, name="t", initializer=0.5)
        table.lookup([3, 4])
        table.save(tmp_path / "t.safetensors")
        found = load_file(tmp_path / "t.safetensors")
        assert sorted(found["ids"].tolist()) == [3, 4]
        assert found["rows"].tolist() == [[0.5, 0.5]] * 2


def test_mismatched_table_files_are_rejected(tmp_path):
    path = tmp_path / "t.safetensors"
    with cluster(1) as strategy, strategy.scope():
        table = hr.EmbeddingTable(2, name="t")
        for columns in (
            {"weight": np.zeros((2, 2))},
            {"ids": np.arange(2), "rows": np.zeros((2, 3))},
            {"ids": np.arange(2), "rows": np.zeros((2, 2), int)},
        ):
            save_file(columns, path)
            with pytest.raises(InvalidArgumentError, match=r"t\.safetensors"):
                table.load(path)
        with pytest.raises(ValueError, match="parquet"):
            table.save(tmp_path / "t.npy")


def test_rows_sent_in_bfloat16_are_stored_in_float32():
    with cluster(2) as strategy, strategy.scope():
        plain = hr.EmbeddingTable(4, name="plain", initializer="normal")
        narrow = hr.EmbeddingTable(4, name="narrow", initializer="normal", wire_dtype="bfloat16")
        ids = np.arange(50)
        rows = plain.lookup(ids)
        sent = narrow.lookup(ids)
        assert sent.dtype == np.float32
        assert not np.array_equal(sent, rows)
        assert np.allclose(sent, rows, rtol=2**-8)
        optimizer = hr.optimizers.SGD(1.0)
        for _ in range(300):
            narrow.apply_gradients(optimizer, np.full((50, 4), 2.0**-10, np.float32), ids)
        assert np.allclose(narrow.gather(ids), rows - 300 * 2.0**-10, atol=2e-3)
        with pytest.raises(ValueError, match="wire_dtype"):
            hr.EmbeddingTable(4, name="other", wire_dtype="int8")


def test_closing_waits_for_background_steps_and_raises_errors_once():
    with cluster(1) as strategy:
        with strategy.scope():
            table = hr.EmbeddingTable(2, name="t", initializer=0.0)
        table.lookup([1])
        background = hr.optimizers.InBackground(hr.optimizers.SGD(1.0), in_flight=2)
        one = hr.IndexedSlices(np.ones((1, 2), np.float32), [1])
        bad = hr.IndexedSlices(np.full((1, 2), np.nan, np.float32), [1])
        background.apply_gradients([(one, table)])
        background.apply_gradients([(bad, table)])
        with pytest.raises(InvalidArgumentError, match="finite"):
            background.flush()
        background.apply_gradients([(one, table)])
        background.flush()
        assert table.gather([1]).tolist() == [[-2, -2]]
        with pytest.raises(ValueError, match="in_flight"):
            hr.optimizers.InBackground(hr.optimizers.SGD(1.0), in_flight=-1)
