"""Variables with JAX: its arrays are accepted, and reads in traced functions are rejected."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")


@pytest.fixture
def weights(strategy):
    with strategy.scope():
        return hr.Variable(jnp.ones((3, 2)), name="weights")


def test_jax_gradients_train_variables(weights):
    def loss(w, x):
        return (x @ w).sum()

    x = jnp.ones((4, 3))
    gradient = jax.grad(loss)(weights.read(), x)
    hr.optimizers.SGD(0.25).apply_gradients([(gradient, weights)])
    assert weights.dtype == np.float32
    assert (weights.read() == 0).all()
    weights.assign_add(jnp.ones((3, 2)))
    weights.scatter_update(jnp.array([1]), jnp.zeros((1, 2)))
    assert weights.gather(jnp.array([1, 2])).tolist() == [[0, 0], [1, 1]]


def test_jax_bfloat16_gradients_are_accepted(strategy, weights):
    gradient = jnp.ones((3, 2), jnp.bfloat16)
    hr.optimizers.SGD(1.0).apply_gradients([(gradient, weights)])
    assert (weights.read() == 0).all()
    with strategy.scope():
        assert hr.Variable(gradient).dtype == gradient.dtype


@pytest.mark.parametrize("trace", ["jit", "grad", "vmap"])
def test_reading_while_jax_traces_is_rejected(strategy, weights, trace):
    with strategy.scope():
        table = hr.EmbeddingTable(2, name="table")
    reads = [
        lambda x: weights.read().sum() * x,
        lambda x: jnp.asarray(weights.gather([0])).sum() * x,
        lambda x: (np.asarray(weights) * 2).sum() * x,
        lambda x: table.lookup([1]).sum() * x,
    ]
    for read in reads:
        with pytest.raises(FailedPreconditionError, match="read it outside and pass the array"):
            getattr(jax, trace)(read)(jnp.ones(1) if trace == "vmap" else 1.0)
        assert np.isfinite(read(1.0))


def test_a_traced_gradient_is_rejected(weights):
    @jax.jit
    def step(gradient):
        hr.optimizers.SGD(1.0).apply_gradients([(gradient, weights)])
        return gradient

    with pytest.raises(FailedPreconditionError, match="has no concrete value"):
        step(jnp.ones((3, 2)))


def test_jax_arrays_are_rejected_as_indices(weights):
    for key in (jnp.array(1), slice(jnp.array(0), None), (0, jnp.array([0]))):
        with pytest.raises(TypeError, match="cannot be used as indices"):
            weights[key]
