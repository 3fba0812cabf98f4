"""Variables with PyTorch: tensors are accepted, with and without gradients."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr

torch = pytest.importorskip("torch")


@pytest.fixture
def weights(strategy):
    with strategy.scope():
        return hr.Variable(torch.ones(3, 2, requires_grad=True), name="weights")


def test_torch_gradients_train_variables(weights):
    w = torch.from_numpy(weights.read()).requires_grad_()
    (torch.ones(4, 3) @ w).sum().backward()
    hr.optimizers.SGD(0.25).apply_gradients([(w.grad, weights)])
    assert weights.dtype == np.float32
    assert (weights.read() == 0).all()


@pytest.mark.catalogue("2.7.9")
def test_rows_of_a_torch_embedding_are_trained(weights):
    ids = torch.tensor([[2, 0], [2, 2]])
    rows = torch.from_numpy(weights.gather(ids)).requires_grad_()
    rows.sum().backward()
    hr.optimizers.SGD(1.0).apply_gradients([(hr.IndexedSlices(rows.grad, ids), weights)])
    assert weights.read()[:, 0].tolist() == [0, 1, -2]


def test_all_kinds_of_tensors_are_accepted(weights):
    weights.assign(torch.zeros(2, 3).T)
    weights.assign_add(torch.ones(3, 2, requires_grad=True) * 2)
    weights.assign_add(torch.ones(3, 2, dtype=torch.bfloat16).float())
    hr.optimizers.SGD(1.0).apply_gradients([(torch.ones(3, 2, dtype=torch.bfloat16), weights)])
    assert (weights.read() == 2).all()
    with pytest.raises(TypeError, match="cannot be used as indices"):
        weights[torch.tensor(0)]
