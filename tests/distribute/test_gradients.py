"""Gradients of PyTorch through `all_reduce` and `all_gather` of replicas."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from headrace.distribute import MirroredStrategy, get_replica_context
from headrace.distribute.replica_threads import ReplicaStep, ReplicaThreadPool
from headrace.errors import DeadlineExceededError, FailedPreconditionError
from tests.distribute import scenarios
from tests.distribute.several_workers import Workers


def mirrored(replicas=2):
    return MirroredStrategy([f"cpu:{i}" for i in range(replicas)], framework="torch")


def replica_id():
    return get_replica_context().replica_id_in_sync_group


@pytest.mark.catalogue("1.2.3")
def test_gradients_include_the_losses_of_all_replicas():
    # TensorFlow has these numbers: the losses are 1 * y and 3 * y of y = x0 + x1.
    def step(op):
        x = torch.tensor(2.0 + replica_id(), dtype=torch.float64, requires_grad=True)
        y = get_replica_context().all_reduce(op, {"x": x, "n": 1})
        assert not y["n"].requires_grad
        return torch.autograd.grad(y["x"] * (1 + 2 * replica_id()), x)[0].item()

    assert mirrored().run(step, args=("SUM",)).values == (4.0, 4.0)
    assert mirrored().run(step, args=("MEAN",)).values == (2.0, 2.0)


@pytest.mark.catalogue("3.29.1", "3.29.2")
def test_a_gathered_value_gets_its_part_of_all_replicas_gradients():
    def step():
        x = torch.ones(1 + replica_id(), 2, requires_grad=True)
        both = get_replica_context().all_gather([x, torch.zeros(1)], axis=0)[0]
        weights = torch.arange(6.0).reshape(3, 2) * (1 + 2 * replica_id())
        return torch.autograd.grad((both * weights).sum(), x)[0]

    found = mirrored().run(step).values
    assert [each.tolist() for each in found] == [[[0, 4]], [[8, 12], [16, 20]]]


def test_second_order_gradients_include_all_replicas():
    def step():
        x = torch.tensor(2.0 + replica_id(), dtype=torch.float64, requires_grad=True)
        total = get_replica_context().all_reduce("SUM", x)
        both = get_replica_context().all_gather(x[None], 0)
        (first,) = torch.autograd.grad(total**3 + (both**3).sum(), x, create_graph=True)
        return torch.autograd.grad(first, x)[0].item()

    # The sum of both losses is 2 (a + b)^3 + 2 (a^3 + b^3). A replica's first gradient g_i is its
    # derivative in x_i, and its second one that of g_0 + g_1.
    assert mirrored().run(step).values == (2 * 2 * 6 * 5 + 12 * 2, 2 * 2 * 6 * 5 + 12 * 3)


@pytest.mark.parametrize("processes", [1, 2])
def test_synchronised_batch_norm_equals_that_of_the_whole_batch(processes):
    x = np.random.default_rng(5).normal(size=(12, 3))
    whole = torch.tensor(x, requires_grad=True)
    normal = (whole - whole.mean(0)) / (whole.var(0, unbiased=False) + 1e-3).sqrt()
    (normal * torch.tensor(np.cos(np.arange(36.0))).reshape(12, 3)).sum().backward()
    if processes == 1:
        found = [scenarios.batch_norm_of_replicas(mirrored(), x)]
    else:
        workers = Workers(2)
        try:
            found = workers.run(scenarios.batch_norm_of_workers, x.tolist())
        finally:
            workers.close()
    parts = [np.array(part) for each in found for part in each]
    assert len(parts) == 2
    assert np.abs(np.concatenate(parts) - whole.grad.numpy()).max() < 1e-6


@pytest.mark.parametrize(
    ("step", "match"),
    [
        ("other does not", r"replica 0 waits in gradient of all_reduce 1 \(SUM\), .*returned"),
        ("other continues", "(?=.*is in gradient of all_reduce 1)(?=.*is in all_reduce 2)"),
        ("other needs none", "is in all_reduce 1 .SUM. with gradients for values 0 of 1"),
        ("later", "calls gradient of all_reduce 1 .* after strategy.run has returned"),
    ],
)
def test_a_backward_pass_on_some_replicas_only_raises(step, match):
    def on_replica():
        needs = step != "other needs none" or replica_id() == 0
        x = torch.ones(1, requires_grad=needs)
        y = get_replica_context().all_reduce("SUM", x)
        if step != "later" and replica_id() == 0:
            y.sum().backward()
        if step == "other continues":
            get_replica_context().all_reduce("SUM", 1)
        return y

    strategy = mirrored()
    with pytest.raises(FailedPreconditionError, match=match):
        strategy.run(on_replica).values[1].sum().backward()
    assert strategy.run(lambda: get_replica_context().all_reduce("SUM", 1)).values == (2, 2)


def test_an_error_on_one_replica_ends_the_other_backward_passes():
    def on_replica():
        y = get_replica_context().all_reduce("SUM", torch.ones(1, requires_grad=True))
        if replica_id() == 1:
            raise ValueError("no loss here")
        y.sum().backward()

    with pytest.raises(ValueError, match="no loss here"):
        mirrored().run(on_replica)


def test_a_merge_timeout_names_the_missing_replica():
    ended = threading.Event()

    def function(replica, round_):
        if replica == 0:
            try:
                round_.merge(0, lambda values: values, 0, "gradient of all_reduce 1", 0.05)
            finally:
                ended.set()
        ended.wait(30)

    with pytest.raises(DeadlineExceededError, match="replica 1 did not call gradient of all_r"):
        ReplicaThreadPool(2).run(ReplicaStep(2, function, lambda call: call()))


def test_what_a_step_returned_is_freed_when_it_is_dropped():
    class Kept(torch.Tensor):
        pass

    def on_replica():
        x = torch.ones(1, requires_grad=True)
        inner = (get_replica_context().all_reduce("SUM", x) * 2).as_subclass(Kept)
        kept.append(weakref.ref(inner))
        return inner

    kept = []
    found = mirrored().run(on_replica)
    assert all(each() is not None for each in kept)
    del found
    gc.collect()
    assert [each() for each in kept] == [None, None]
