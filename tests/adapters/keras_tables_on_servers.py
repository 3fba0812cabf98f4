"""Embeddings of Keras models in tables; `test_keras.py` runs it on each back end."""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource

import keras
import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, NotFoundError
from tests.adapters import keras_on_parameter_servers
from tests.adapters.keras_on_parameter_servers import ROWS

# Warnings that Keras itself causes, also when it saves a model.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",
    "ignore:Explicitly requested dtype int64:UserWarning",  # of JAX, for an input of this dtype
)

cluster = keras_on_parameter_servers.cluster
make_strategy = keras_on_parameter_servers.make_strategy

WORDS, DIM = 40, 4
IDS = np.random.default_rng(3).integers(0, WORDS, (ROWS, 6))
OTHER = np.random.default_rng(4).integers(0, WORDS, (ROWS, 3))
TARGET = (IDS.sum(axis=1, keepdims=True) / 100).astype(np.float32)
LARGE = 10**8
"""Rows of a layer that is too large for a matrix."""


_numbers = itertools.count()


def spread(ids):
    """Return ids spread over the rows of a large layer."""
    return ids * 1_499_983 + 17


def wide(ids):
    """Return ids that need 64 bits."""
    return ids * 2**53 - 2**58


def optimizer(name):
    return {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad}[name](0.1)


def new_name():
    """Return a table name that is not used on the servers, which all tests share."""
    return f"words_{next(_numbers)}"


def words(model):
    return next(each for each in model.layers if each.name.startswith("words"))


def towers(make_embedding, last=keras.ops.sum):
    """A model in which two inputs share a layer, and a third is computed from the first."""
    left = keras.Input((6,), dtype="int64", name="left")
    right = keras.Input((3,), dtype="int64", name="right")
    shared = make_embedding()
    parts = [last(shared(each), axis=1) for each in (left, right, left[:, ::2])]
    return keras.Model({"left": left, "right": right}, keras.layers.Dense(1)(sum(parts)))


def plain():
    return towers(lambda: keras.layers.Embedding(WORDS, DIM, name=new_name()))


def large():
    return towers(lambda: keras.layers.Embedding(LARGE, DIM, name=new_name()))


def any_id():
    return towers(lambda: hr.keras.Embedding(DIM, name=new_name()))


def batches(coded):
    return {"left": coded(IDS), "right": coded(OTHER)}


def pair(make, coded, strategy, name="sgd"):
    """Return a local model, and an equal one with a table."""
    alone = plain()
    with strategy.scope():
        placed = make()
    rows = words(alone).get_weights()[0]
    words(placed).embeddings.table.assign(coded(np.arange(WORDS)), rows)
    placed.layers[-1].set_weights(alone.layers[-1].get_weights())
    for model in (alone, placed):
        # Compiling makes these tests slow.
        model.compile(optimizer(name), "mse", run_eagerly=name == "adagrad")
    return alone, placed


def rows_of(model, coded):
    return words(model).embeddings.table.gather(coded(np.arange(WORDS)))


def count_rows(table):
    return sum(len(ids) for ids, _ in table.export())


def assert_same(alone, placed, coded):
    expected = words(alone).get_weights()[0]
    np.testing.assert_allclose(rows_of(placed, coded), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(
        alone.layers[-1].get_weights(), placed.layers[-1].get_weights(), strict=True
    ):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "coded", "name"),
    [(large, spread, "sgd"), (large, spread, "adagrad"), (any_id, wide, "adagrad")],
)
def test_table_rows_train_as_matrix_rows(make_strategy, make, coded, name):
    alone, placed = pair(make, coded, make_strategy(staleness=0), name)
    x, coded_x = batches(lambda ids: ids), batches(coded)
    alone.fit(x, TARGET, batch_size=24, epochs=3, shuffle=False, verbose=0)
    placed.fit(coded_x, TARGET, batch_size=24, epochs=3, shuffle=False, verbose=0)
    assert_same(alone, placed, coded)
    expected = alone.predict(x, batch_size=24, verbose=0)
    found = placed.predict(coded_x, batch_size=24, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert placed.evaluate(coded_x, TARGET, batch_size=24, verbose=0) == pytest.approx(
        alone.evaluate(x, TARGET, batch_size=24, verbose=0), rel=1e-4
    )
    assert count_rows(words(placed).embeddings.table) == WORDS


class Chained(keras.Model):
    """A model in which ids of one layer depend on rows of another; both layers have admission."""

    def __init__(self):
        super().__init__()
        self.first = hr.keras.Embedding(4, name=new_name(), admission=2)
        self.second = hr.keras.Embedding(4, name=new_name(), initializer="normal", mask_zero=True)
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        rows = self.first(x % 50)
        ids = keras.ops.argmax(rows, -1) * 7 + 1
        return self.dense(keras.ops.mean(rows + self.second(ids), axis=1))


def test_ids_computed_from_rows_are_admitted_at_the_second_step(make_strategy):
    with make_strategy(staleness=0).scope():
        model = Chained()
    model.compile("sgd", "mse")
    model.fit(IDS[:20], TARGET[:20], batch_size=20, verbose=0)
    assert count_rows(model.first.table) == 0
    assert [ids.tolist() for ids, _ in model.second.table.export()] == [[1]]  # of zeros
    history = model.fit(IDS[:20], TARGET[:20], batch_size=24, epochs=30, verbose=0).history
    assert count_rows(model.first.table) == len(np.unique(IDS[:20]))
    found = np.concatenate([ids for ids, _ in model.second.table.export()])
    assert len(found) > 1
    assert set(found) <= {1, 8, 15, 22}
    assert history["loss"][-1] < history["loss"][0] / 2
    model.evaluate(IDS + 1000, TARGET, verbose=0)
    assert count_rows(model.first.table) == len(np.unique(IDS[:20]))


def test_frozen_rows_do_not_change_and_new_ids_get_none(make_strategy):
    _, model = pair(large, spread, make_strategy(staleness=0))
    words(model).trainable = False
    before = rows_of(model, spread)
    dense = model.layers[-1].get_weights()[0]
    model.fit(batches(lambda ids: spread(ids % 30 + 20)), TARGET, verbose=0)
    np.testing.assert_array_equal(rows_of(model, spread), before)
    assert count_rows(words(model).embeddings.table) == WORDS
    assert not np.array_equal(model.layers[-1].get_weights()[0], dense)


def test_uses_of_all_rows_are_rejected_by_name(make_strategy):
    _, model = pair(large, spread, make_strategy())
    layer = words(model)
    assert layer.count_params() == LARGE * DIM
    assert layer.embeddings.shape == (LARGE, DIM)
    model.summary(print_fn=lambda *_, **__: None)
    for read in (model.get_weights, layer.embeddings.numpy, lambda: model(batches(spread))):
        with pytest.raises(
            FailedPreconditionError, match=rf"(?s){layer.name}.*table.gather\(ids\)"
        ):
            read()
    with pytest.raises(FailedPreconditionError, match="neither LoRA nor quantization"):
        layer.enable_lora(2)
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")
    with pytest.raises(FailedPreconditionError, match="use_ema"):
        model.fit(batches(spread), TARGET, verbose=0)
    with pytest.raises(FailedPreconditionError, match="belongs to no strategy"):
        hr.keras.Embedding(3, name="alone").table  # noqa: B018 - a property that raises


def test_only_large_layers_that_servers_can_initialize_use_tables(make_strategy):
    def has_matrix(rows, *args, **settings):
        layer = keras.layers.Embedding(rows, *args, **settings)
        layer.build()
        return not hasattr(layer.embeddings, "table")

    with make_strategy().scope():
        assert has_matrix(WORDS, DIM)
        for initializer in ("uniform", "random_normal", "zeros", "ones"):
            assert not has_matrix(LARGE, DIM, embeddings_initializer=initializer)
        assert has_matrix(2**17, 129, embeddings_initializer="glorot_uniform")
        assert has_matrix(2**17, 129, embeddings_regularizer="l2")
        assert has_matrix(2**17, 129, embeddings_constraint="non_neg")
    assert has_matrix(2**17, 129)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_rows_of_a_bag_are_combined(make_strategy, combiner):
    ids, weights = keras.Input((3,), dtype="int64"), keras.Input((3,))
    with make_strategy().scope():
        layer = hr.keras.Embedding(DIM, name=new_name(), combiner=combiner, mask_zero=True)
        model = keras.Model([ids, weights], [layer(ids), layer(ids, weights)])
    assert [each.shape for each in model.outputs] == [(None, DIM)] * 2
    rows = np.random.default_rng(0).random((4, DIM), np.float32)
    layer.table.assign([0, 5, 6, 7], rows)
    given = np.array([[5, 6, 0], [0, 0, 0], [7, 7, 6]])
    factors = np.array([[0.5, 2.0, 9.0], [1.0, 1.0, 1.0], [1.0, 3.0, 0.25]], np.float32)
    plain, weighted = model.predict([given, factors], verbose=0)
    for found, used in ((plain, (given != 0) * 1.0), (weighted, (given != 0) * factors)):
        total = (rows[np.maximum(given - 4, 0)] * used[..., None]).sum(1)
        divisor = {"sum": 1, "mean": used.sum(1), "sqrtn": np.sqrt((used**2).sum(1))}[combiner]
        divisor = np.broadcast_to(divisor, 3)[:, None]
        expected = np.where(divisor > 0, total / np.where(divisor > 0, divisor, 1), 0)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_layer_without_input_dim_has_a_config(make_strategy):
    normal = hr.initializers.Normal(stddev=0.5, seed=3)
    layer = hr.keras.Embedding(3, name="w", initializer=normal, combiner="sum", capacity=9)
    made = hr.keras.Embedding.from_config(layer.get_config())
    assert made.get_config() == layer.get_config()
    assert made.initializer == normal
    with pytest.raises(TypeError, match=r'keras.Input\(shape, dtype="int64"\)'):
        keras.Sequential([keras.Input((3,)), hr.keras.Embedding(3)])
    with pytest.raises(ValueError, match="'sum', 'mean', 'sqrtn'"):
        hr.keras.Embedding(3, combiner="max")
    with pytest.raises(ValueError, match="GlorotUniform"):
        hr.keras.Embedding(3, initializer=keras.initializers.GlorotUniform())


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [large, any_id])
def test_keras_files_refer_to_tables_that_servers_write_and_read(make_strategy, tmp_path, make):
    coded = spread if make is large else wide
    _, model = pair(make, coded, make_strategy(staleness=0), "adagrad")
    x = batches(coded)
    pattern = str(tmp_path / "ckpt-{epoch}.weights.h5")
    saves = keras.callbacks.ModelCheckpoint(pattern, save_weights_only=True)
    model.fit(x, TARGET, batch_size=24, epochs=2, verbose=0, callbacks=[saves])
    last, expected = rows_of(model, coded), model.predict(x, verbose=0)
    for _ in range(2):
        model.save(tmp_path / "model.keras")
    assert sorted(os.listdir(tmp_path))[:2] == ["ckpt-1.weights.h5", "ckpt-1.weights.h5.tables"]
    manifests = [each for each in os.listdir(tmp_path / "model.keras.tables") if "json" in each]
    assert len(manifests) == 1
    model.load_weights(tmp_path / "ckpt-1.weights.h5")
    assert not np.array_equal(rows_of(model, coded), last)
    model.load_weights(tmp_path / "ckpt-2.weights.h5")
    np.testing.assert_array_equal(rows_of(model, coded), last)
    with make_strategy(staleness=0).scope():
        other = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(other.predict(x, verbose=0), expected, rtol=1e-6)
    other.fit(x, TARGET, verbose=0)
    assert count_rows(words(other).embeddings.table) == WORDS
    os.rename(tmp_path / "model.keras", tmp_path / "moved.keras")
    with pytest.raises(NotFoundError, match=r"moved\.keras\.tables .*together"):
        other.load_weights(tmp_path / "moved.keras")
    os.rename(tmp_path / "model.keras.tables", tmp_path / "moved.keras.tables")
    other.load_weights(tmp_path / "moved.keras")
    np.testing.assert_array_equal(rows_of(other, coded), last)


def test_a_model_without_tables_has_plain_files(make_strategy, tmp_path):
    with make_strategy().scope():
        model = plain()
    model.save(tmp_path / "model.keras")
    assert os.listdir(tmp_path) == ["model.keras"]


# --- features of Keras RS -------------------------------------------------------------------------


@dataclasses.dataclass
class TableConfig:
    """The attributes of `keras_rs.layers.TableConfig`."""

    name: str
    vocabulary_size: int = WORDS
    embedding_dim: int = DIM
    initializer: object = dataclasses.field(
        default_factory=lambda: keras.initializers.VarianceScaling(mode="fan_out")
    )
    optimizer: object = "adam"
    combiner: str = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256


@dataclasses.dataclass
class FeatureConfig:
    """The attributes of `keras_rs.layers.FeatureConfig`, and a length as in TensorFlow."""

    name: str
    table: TableConfig
    input_shape: tuple
    output_shape: tuple
    max_sequence_length: int = 0


def test_features_in_a_structure_share_tables(make_strategy, tmp_path):
    users, items = TableConfig(new_name(), combiner="sum"), TableConfig(new_name())
    features = {
        "user": FeatureConfig("user", users, (24, 1), (24, DIM)),
        "lists": [
            FeatureConfig("friends", users, (24, 6), (24, DIM)),
            FeatureConfig("items", items, (24, 6), (24, DIM)),
            FeatureConfig("last items", items, (24, 6), (24, 8, DIM), max_sequence_length=8),
        ],
    }
    shape = {"user": (1,), "lists": [(6,), (6,), (6,)]}
    with make_strategy(staleness=0).scope():
        inputs = {
            "user": keras.Input(shape["user"], dtype="int32", name="user"),
            "lists": [keras.Input((6,), dtype="int32", name=f"list_{i}") for i in range(3)],
        }
        layer = hr.keras.DistributedEmbedding(features)
        found = layer(inputs)
        assert set(found) == {"user", "lists"}
        assert [each.shape[1:] for each in found["lists"]] == [(DIM,), (DIM,), (8, DIM)]
        parts = [found["user"], *found["lists"][:2], keras.ops.sum(found["lists"][2], axis=1)]
        flat = [inputs["user"], *inputs["lists"]]
        model = keras.Model(flat, keras.layers.Dense(1)(keras.ops.concatenate(parts, -1)))
    assert set(layer.tables) == {users.name, items.name}
    model.compile(keras.optimizers.Adagrad(0.1), "mse", run_eagerly=True)
    x = [IDS[:, :1], IDS, IDS, IDS % 20]
    losses = model.fit(x, TARGET, batch_size=24, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert count_rows(layer.tables[users.name]) == len(np.unique(IDS))
    outputs = model.predict(x, batch_size=24, verbose=0)
    model.save(tmp_path / "model.keras")
    with make_strategy().scope():
        other = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(other.predict(x, batch_size=24, verbose=0), outputs, rtol=1e-6)


def test_unsupported_feature_settings_raise_and_are_named():
    def make(shape=(8, 3), output=(8, DIM), **table):
        config = FeatureConfig("friends", TableConfig("users", **table), shape, output)
        return hr.keras.DistributedEmbedding(config)

    for settings, named in (
        ({"optimizer": keras.optimizers.SGD()}, "`optimizer` of the table 'users'"),
        ({"placement": "sparsecore"}, "`placement` of the table 'users' is 'sparsecore'"),
        ({"combiner": "max"}, "'sum', 'mean', 'sqrtn'"),
        ({"initializer": "truncated_normal"}, "`initializer` of the layer 'users'"),
    ):
        with pytest.raises(ValueError, match=named):
            make(**settings)
    ids = keras.Input((3,), dtype="int32")
    with pytest.raises(ValueError, match="`input_shape` of the feature 'friends'"):
        make(shape=(8, 4))(ids)
    with pytest.raises(ValueError, match="`output_shape` of the feature 'friends'"):
        make(output=(8, 3, DIM))(ids)


# --- memory and lost workers ----------------------------------------------------------------------


def test_a_layer_too_large_for_any_process_trains(make_strategy):
    with make_strategy(staleness=0).scope():
        layer = keras.layers.Embedding(10**9, 64, name=new_name())  # 256 GB
        model = keras.Sequential([keras.Input((6,), dtype="int32"), layer, keras.layers.Flatten()])
    model.compile(keras.optimizers.Adagrad(0.1), "mse", run_eagerly=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ids = IDS * 24_999_999
    model.fit(ids, np.zeros((ROWS, 6 * 64), np.float32), batch_size=24, verbose=0)
    assert count_rows(layer.embeddings.table) == len(np.unique(ids))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB


def test_a_killed_worker_neither_loses_nor_repeats_a_step():
    with hr.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver, staleness=0)
        alone, placed = pair(any_id, wide, strategy, "adagrad")
        kills = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: batch == 1 and cluster.kill("worker", 0)
        )
        x, settings = batches(wide), {"batch_size": 12, "shuffle": False, "verbose": 0}
        alone.fit(batches(lambda ids: ids), TARGET, epochs=2, **settings)
        placed.fit(x, TARGET, epochs=2, callbacks=[kills], **settings)
        assert_same(alone, placed, wide)
        strategy.close()
