"""PyTorch layers with rows of embedding tables."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidArgumentError, UnavailableError
from tests.parameter_server.small_cluster import cluster

torch = pytest.importorskip("torch")

F32 = np.float32


@pytest.fixture
def strategy():
    with cluster(2) as made:
        yield made


@pytest.fixture
def table(strategy):
    with strategy.scope():
        return hr.EmbeddingTable(3, name="users", seed=1)


@pytest.fixture
def items(strategy):
    with strategy.scope():
        return hr.EmbeddingTable(2, name="items", initializer=1.0, wire_dtype="bfloat16")


def steps(model, **options):
    return hr.torch.TableOptimizer(hr.optimizers.SGD(1.0), model, **options)


@pytest.mark.catalogue("3.8.9", "3.8.10")
@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_an_embedding_trains_like_torch_nn_embedding(table, in_flight):
    ids = torch.tensor([[5, -7, 5], [2**50, 5, 9]])
    names, where = np.unique(ids.numpy(), return_inverse=True)
    own = torch.nn.Embedding.from_pretrained(torch.from_numpy(table.lookup(names)), freeze=False)
    layer = hr.torch.Embedding(table)
    optimizer = steps(layer, in_flight=in_flight)
    weights = torch.arange(18.0).reshape(2, 3, 3)
    for _ in range(4):
        for model, given in ((layer, ids), (own, torch.from_numpy(where.reshape(2, 3)))):
            found = model(given)
            assert found.shape == (2, 3, 3)
            (found * weights).sum().backward()
        optimizer.step()
        optimizer.flush()
        with torch.no_grad():
            own.weight -= own.weight.grad
            own.weight.grad = None
    assert np.allclose(table.gather(names), own.weight.detach().numpy(), rtol=1e-6)
    assert optimizer.iterations == 4


@pytest.mark.catalogue("2.7.8", "3.1.41")
@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["offsets", "last", "list"])
def test_bags_are_combined_by_their_mode(table, mode, weighted, form):
    bags = [[4, 4, 9], [], [0], [-1, 8, 4, 0], []]
    weights = [[0.5, 2.0, 1.0], [], [3.0], [1.0, 0.25, 1.0, 2.0], []]
    flat = torch.tensor([each for bag in bags for each in bag])
    layer = hr.torch.EmbeddingBag(table, mode, include_last_offset=form == "last")
    lengths = [len(bag) for bag in bags]
    starts = np.cumsum([0, *lengths])
    given = {
        "offsets": (flat, torch.tensor(starts[:-1])),
        "last": (flat, torch.tensor(starts)),
        "list": ([torch.tensor(bag, dtype=torch.int64) for bag in bags],),
    }[form]
    w = torch.tensor([each for bag in weights for each in bag], requires_grad=True)
    found = layer(*given, per_sample_weights=w if weighted else None)
    expected = []
    for bag, numbers in zip(bags, weights, strict=True):
        used = np.array(numbers if weighted else [1.0] * len(bag))
        total = used @ table.gather(np.array(bag, np.int64)) if bag else np.zeros(3)
        size = {"sum": 1.0, "mean": used.sum(), "sqrtn": np.sqrt((used**2).sum())}[mode]
        expected.append(total / size if bag else total)
    assert np.allclose(found.detach().numpy(), expected, atol=1e-6)
    before = table.gather([4, 9])
    found[0].sum().backward()
    optimizer = steps(layer)
    optimizer.step()
    optimizer.flush()
    moved = before - table.gather([4, 9])
    used = np.array(weights[0] if weighted else [1.0] * 3)
    size = {"sum": 1.0, "mean": used.sum(), "sqrtn": np.sqrt((used**2).sum())}[mode]
    assert np.allclose(moved[:, 0], np.array([used[:2].sum(), used[2]]) / size, atol=1e-6)
    assert (w.grad is not None) == weighted


def test_bags_of_equal_length_can_be_rows_of_a_matrix(table):
    ids = torch.tensor([[1, 2], [3, 3]])
    found = hr.torch.EmbeddingBag(table)(ids)
    assert np.allclose(found.detach().numpy(), table.gather(ids).mean(1))


@pytest.mark.catalogue("2.7.8")
def test_padding_ids_are_neither_sent_nor_trained(strategy, table):
    layer = torch.nn.ModuleList(
        [
            hr.torch.Embedding(table, padding_idx=0),
            hr.torch.EmbeddingBag(table, "mean", padding_idx=0),
        ]
    )
    ids = torch.tensor([[0, 6], [0, 0]])
    rows, pooled = layer[0](ids), layer[1](ids)
    assert not rows[0, 0].any()
    assert not rows[1].any()
    assert torch.equal(pooled[0], rows[0, 1])
    assert not pooled[1].any()
    (rows.sum() + pooled.sum()).backward()
    optimizer = steps(layer)
    optimizer.step()
    optimizer.flush()
    assert [ids.tolist() for ids, _ in table.export()] == [[6]]
    assert optimizer.iterations == 1


def test_empty_inputs_are_allowed(table):
    embedding, bag = hr.torch.Embedding(table), hr.torch.EmbeddingBag(table)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert embedding(nothing).shape == (0, 3)
    assert embedding(nothing.reshape(4, 0)).shape == (4, 0, 3)
    pooled = bag(nothing, torch.tensor([0, 0]))
    assert pooled.tolist() == [[0, 0, 0]] * 2
    (pooled.sum() + embedding(nothing).sum()).backward()
    steps(torch.nn.ModuleList([embedding, bag]), in_flight=0).step()
    assert bag(nothing, nothing).shape == (0, 3)


def test_lookups_without_training_create_no_rows(table):
    layer = hr.torch.Embedding(table)
    layer.eval()
    assert not layer(torch.tensor([1, 2])).any()
    layer.train()
    with torch.no_grad():
        layer(torch.tensor([1, 2]))
    assert list(table.export()) == []
    assert layer(torch.tensor([1, 2])).any()


def test_several_tables_take_one_step_in_one_call(strategy, table, items):
    model = torch.nn.ModuleDict(
        {"user": hr.torch.Embedding(table), "item": hr.torch.EmbeddingBag(items, "sum")}
    )
    optimizer = steps(model, scale=0.5)
    users, bags = torch.tensor([3, 3]), torch.tensor([[1, 2], [1, 1]])
    before = strategy.cluster.servers.status(0).requests
    hr.torch.prefetch({model["user"]: users, model["item"]: bags})
    found = model["user"](users), model["item"](bags)
    assert strategy.cluster.servers.status(0).requests - before <= 3
    assert found[1].tolist() == [[2, 2], [2, 2]]
    (found[0].sum() + found[1].sum()).backward()
    first = table.gather([3])
    optimizer.step()
    optimizer.flush()
    assert optimizer.iterations == 1
    assert np.allclose(first - table.gather([3]), 1.0)
    assert items.gather([1, 2]).tolist() == [[-0.5, -0.5], [0.5, 0.5]]


def test_prefetched_rows_include_all_earlier_steps(table):
    layer = hr.torch.Embedding(table)
    optimizer = steps(layer)
    now, coming = torch.tensor([1, 2]), torch.tensor([2, 3])
    layer(now).sum().backward()
    first = table.gather([2])
    optimizer.step()
    layer.prefetch(coming)
    layer.prefetch(torch.tensor([77]))
    assert np.allclose(layer(coming)[0].detach().numpy(), first - 1.0)
    # Prefetched rows are used once, and eval mode creates no rows.
    assert layer(torch.tensor([77])).shape == (1, 3)
    layer.eval()
    layer.prefetch(torch.tensor([88]))
    assert not layer(torch.tensor([88])).any()


def test_gradients_accumulate_until_step_or_zero_grad(table):
    layer = hr.torch.Embedding(table)
    optimizer = steps(layer, in_flight=0)
    ids = torch.tensor([4])
    first = table.lookup(ids)
    optimizer.step()  # there is nothing to push
    for _ in range(3):
        layer(ids).sum().backward()
    optimizer.step()
    layer(ids).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert np.allclose(table.gather(ids), first - 3)
    assert optimizer.iterations == 1


def test_clipping_sees_all_tables_of_a_step(table, items):
    model = torch.nn.ModuleList([hr.torch.Embedding(table), hr.torch.Embedding(items)])
    optimizer = hr.torch.TableOptimizer(hr.optimizers.SGD(1.0, global_clipnorm=1.0), model)
    first = table.lookup([0])
    (model[0](torch.tensor([0])).sum() * 3 + model[1](torch.tensor([0])).sum() * 3).backward()
    optimizer.step()
    optimizer.flush()
    assert np.allclose(first - table.gather([0]), 1 / np.sqrt(5), atol=1e-6)


def test_a_background_error_is_raised_once_and_the_next_step_works(table):
    layer = hr.torch.Embedding(table)
    optimizer = steps(layer)
    ids = torch.tensor([1])
    (layer(ids).sum() * float("nan")).backward()
    optimizer.step()
    with pytest.raises(InvalidArgumentError, match="users"):
        optimizer.flush()
    layer(ids).sum().backward()
    optimizer.step()
    optimizer.flush()
    assert optimizer.iterations == 1


def test_pending_steps_finish_when_the_strategy_is_closed():
    with cluster(1) as strategy:
        with strategy.scope():
            table = hr.EmbeddingTable(2, name="t", initializer="zeros")
        layer = hr.torch.Embedding(table)
        layer(torch.tensor([1])).sum().backward()
        steps(layer).step()
        address = strategy.server_addresses[0]
        strategy.close()
        again = hr.distribute.ParameterServerStrategy(
            hr.distribute.SimpleClusterResolver(
                hr.distribute.ClusterSpec({"ps": [address], "worker": ["localhost:1"]})
            )
        )
        with again.scope():
            assert hr.EmbeddingTable(2, name="t", initializer="zeros").gather([1]).tolist() == [
                [-1, -1]
            ]
        again.close()


def test_a_copied_layer_shares_the_table_and_has_no_gradients(table):
    layer = hr.torch.Embedding(table)
    layer(torch.tensor([1])).sum().backward()
    copied = copy.deepcopy(layer)
    assert copied.table is table
    assert copied.take_gradients() == []
    assert list(layer.parameters()) == []
    assert layer.state_dict() == {}
    assert "users" in repr(layer)


def test_bfloat16_rows_become_bfloat16_tensors(strategy):
    with strategy.scope():
        table = hr.EmbeddingTable(2, name="b", dtype="bfloat16", initializer=1.0)
    layer = hr.torch.Embedding(table)
    found = layer(torch.tensor([1, 1]))
    assert found.dtype is torch.bfloat16
    found.sum().backward()
    optimizer = steps(layer)
    optimizer.step()
    optimizer.flush()
    assert table.gather([1]).astype(F32).tolist() == [[-1, -1]]


def test_wrong_arguments_are_named(table):
    with pytest.raises(TypeError, match="EmbeddingTable"):
        hr.torch.Embedding(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="sqrtn"):
        hr.torch.EmbeddingBag(table, "max")
    with pytest.raises(ValueError, match=r"must contain an hr\.torch\.Embedding"):
        steps(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="`optimizer` must be an Optimizer"):
        hr.torch.TableOptimizer(torch.nn.Linear(1, 1), hr.optimizers.SGD(1.0))
    bag = hr.torch.EmbeddingBag(table)
    with pytest.raises(ValueError, match="offsets"):
        bag(torch.tensor([1, 2]))
    with pytest.raises(InvalidArgumentError, match="rise"):
        bag(torch.tensor([1, 2]), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="per_sample_weights"):
        bag(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(3))
    with pytest.raises(TypeError, match="integers"):
        hr.torch.Embedding(table)(torch.tensor([0.5]))


def test_a_lost_server_is_reported_by_the_next_step():
    with cluster(1, server_timeout=0.2) as strategy:
        with strategy.scope():
            table = hr.EmbeddingTable(2, name="t")
        layer = hr.torch.Embedding(table)
        optimizer = steps(layer, in_flight=1)
        rows = layer(torch.tensor([1]))
        again = layer(torch.tensor([2]))
        strategy.cluster.servers.close()
        rows.sum().backward()
        optimizer.step()
        again.sum().backward()
        with pytest.raises((UnavailableError, hr.errors.CancelledError)):
            optimizer.step()
