"""Embedding table rows in JAX functions."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from tests.parameter_server.small_cluster import cluster

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")


@pytest.fixture
def strategy():
    with cluster(2) as made:
        yield made


@pytest.fixture
def table(strategy):
    with strategy.scope():
        return hr.EmbeddingTable(3, name="users", seed=1)


def test_rows_are_arguments_of_value_and_grad(table):
    ids = np.array([[9, -4, 9], [2**40, 9, 1]])
    rows, inverse, push = hr.jax.lookup(table, ids)
    assert inverse.shape == ids.shape
    first = table.gather(ids)
    assert np.array_equal(rows[inverse], first)

    def loss_of(rows, inverse):
        return (rows[inverse] * jnp.arange(18.0).reshape(2, 3, 3)).sum()

    loss, gradient = jax.jit(jax.value_and_grad(loss_of))(rows, inverse)
    assert np.isclose(loss, (first * np.arange(18.0).reshape(2, 3, 3)).sum())
    assert push(gradient, hr.optimizers.SGD(0.5)) == 1
    moved = first - table.gather(ids)
    assert np.allclose(moved[0, 0], 0.5 * (np.arange(3.0) * 3 + 0 + 6 + 12))
    assert np.allclose(moved[0, 1], 0.5 * np.arange(3.0, 6.0))


def test_several_tables_take_one_step(strategy, table):
    with strategy.scope():
        items = hr.EmbeddingTable(2, name="items", initializer=1.0, wire_dtype="bfloat16")
    tables = {"user": table, "item": items}
    ids = {"item": jnp.array([[5, 6], [5, 5]]), "user": [7]}
    optimizer = hr.optimizers.SGD(1.0, global_clipnorm=1.0)
    before = strategy.cluster.servers.status(0).requests
    rows, inverse, push = hr.jax.lookup(tables, ids, optimizer)
    assert strategy.cluster.servers.status(0).requests - before <= 2
    first = table.gather([7])
    push({"user": jnp.full_like(rows["user"], 3.0), "item": jnp.full_like(rows["item"], 3.0)})
    assert optimizer.iterations == 1
    assert inverse["item"].tolist() == [[0, 1], [0, 0]]
    assert np.allclose(first - table.gather([7]), 1 / np.sqrt(7), atol=1e-6)
    # The wire dtype has 8 bits.
    assert np.allclose(items.gather([5, 6]), 1 - 1 / np.sqrt(7), atol=4e-3)
    with pytest.raises(ValueError, match="user"):
        hr.jax.lookup(tables, {"user": [1]})


def test_features_that_share_a_table_are_summed_in_one_step(table):
    optimizer = hr.optimizers.SGD(1.0)
    rows, _, push = hr.jax.lookup({"a": table, "b": table}, {"a": [1, 2], "b": [2, 3, 3]})
    first = table.gather([1, 2, 3])
    assert push({"a": jnp.ones_like(rows["a"]), "b": 2 * jnp.ones_like(rows["b"])}, optimizer) == 1
    moved = first - table.gather([1, 2, 3])
    assert np.allclose(moved, np.array([[1.0], [3.0], [2.0]]), atol=1e-6)


def test_a_fixed_size_has_one_shape_for_compiled_functions(table):
    shapes = set()
    for ids in ([1, 2, 2], [3, 3, 3], [1, 2, 5]):
        rows, inverse, push = hr.jax.lookup(table, ids, size=len(ids))
        shapes.add((rows.shape, inverse.shape))
        push(jnp.ones_like(rows), hr.optimizers.SGD(1.0))
    assert shapes == {((3, 3), (3,))}
    assert sum(len(ids) for ids, _ in table.export()) == 4
    rows, _, push = hr.jax.lookup(table, [])
    assert rows.shape == (0, 3)
    push(rows, hr.optimizers.SGD(1.0))


def test_prefetched_rows_include_all_earlier_steps(table):
    later = hr.optimizers.InBackground(hr.optimizers.SGD(1.0), in_flight=1)
    rows, _, push = hr.jax.lookup(table, [1, 2], later)
    coming = None
    for _ in range(3):
        push(jnp.ones_like(rows))
        coming = hr.jax.prefetch(table, [2, 3])
    assert np.allclose(coming.result()[0][0], rows[1] - 3)
    later.flush()
    assert later.iterations == 3
    assert not hr.jax.lookup(table, [55], training=False)[0].any()


@pytest.mark.parametrize("trace", ["jit", "grad"])
def test_a_lookup_while_jax_traces_is_rejected(table, trace):
    for ids in (lambda x: [1], lambda x: x.astype(int)):
        for look in (hr.jax.lookup, hr.jax.prefetch):

            def traced(x, look=look, ids=ids):
                look(table, ids(x))
                return x

            with pytest.raises(FailedPreconditionError, match=r"outside|no numbers yet"):
                getattr(jax, trace)(traced)(1.0)


def test_mismatched_arguments_are_named(table):
    rows, _, push = hr.jax.lookup(table, [1, 2])
    with pytest.raises(ValueError, match="optimizer"):
        push(rows)
    with pytest.raises(TypeError, match="optimizer"):
        push(rows, 0.1)
    with pytest.raises(InvalidArgumentError, match="users"):
        push(rows[:1], hr.optimizers.SGD(1.0))
    with pytest.raises(InvalidArgumentError, match=r"of `rows`, not of `rows\[inverse\]`"):
        push(np.ones((5, rows.shape[1]), np.float32), hr.optimizers.SGD(1.0))
    with pytest.raises(TypeError, match="EmbeddingTable"):
        hr.jax.lookup(np.zeros((3, 2)), [1])
