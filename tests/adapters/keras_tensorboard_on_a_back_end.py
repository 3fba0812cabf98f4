"""`hr.keras.TensorBoard` on one back end; `test_keras.py` runs it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.graph.keras_util import keras_model_to_graph_def
from tensorboard.util.tensor_util import make_ndarray

import headrace as hr
from headrace.adapters.keras_training.tensorboard import histogram

# A warning that Keras itself causes with PyTorch tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X, Y = np.ones((12, 3), np.float32), np.ones((12, 1), np.float32)


def model(optimizer: object = "sgd") -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")], name="net")
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = events(folder)
    return {
        tag: [(each.step, float(make_ndarray(each.tensor_proto))) for each in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
        if found.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
    }


def test_epoch_metrics_have_the_tags_of_keras(tmp_path):
    board = hr.keras.TensorBoard(tmp_path)
    net = model(keras.optimizers.SGD(0.25))
    history = net.fit(
        X, Y, batch_size=4, epochs=3, validation_data=(X, Y), verbose=0, callbacks=[board]
    ).history
    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    assert set(train) == {"epoch_loss", "epoch_mae", "epoch_learning_rate"}
    assert set(validation) == {
        *("epoch_loss", "epoch_mae"),
        *("evaluation_loss_vs_iterations", "evaluation_mae_vs_iterations"),
    }
    for name, found, key in (
        ("epoch_loss", train, "loss"),
        ("epoch_mae", train, "mae"),
        ("epoch_loss", validation, "val_loss"),
        ("epoch_mae", validation, "val_mae"),
    ):
        steps, values = zip(*found[name], strict=True)
        assert steps == (0, 1, 2)
        np.testing.assert_allclose(values, history[key], rtol=1e-6)
    assert train["epoch_learning_rate"] == [(0, 0.25), (1, 0.25), (2, 0.25)]
    by_iterations = validation["evaluation_loss_vs_iterations"]
    assert [step for step, _ in by_iterations] == [3, 6, 9]
    np.testing.assert_allclose([of for _, of in by_iterations], history["val_loss"], rtol=1e-6)


@pytest.mark.parametrize(
    ("update_freq", "steps"), [("batch", [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), ("epoch", [])]
)
def test_batch_metrics_are_written_by_update_freq(tmp_path, update_freq, steps):
    board = hr.keras.TensorBoard(tmp_path, update_freq=update_freq)
    model().fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[board])
    found = scalars(tmp_path / "train").get("batch_loss", [])
    assert [step for step, _ in found] == steps
    assert all(np.isfinite(value) for _, value in found)


def test_steps_per_second_are_written_of_epochs_and_batches(tmp_path):
    board = hr.keras.TensorBoard(tmp_path, write_steps_per_second=True, update_freq=1)
    model().fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[board])
    found = scalars(tmp_path / "train")
    assert [step for step, _ in found["epoch_steps_per_second"]] == [0, 1]
    assert [step for step, _ in found["batch_steps_per_second"]] == [1, 2, 3, 4, 5, 6]
    assert all(of > 0 for name in found if "per_second" in name for _, of in found[name])


def test_histograms_and_images_show_the_weights(tmp_path):
    board = hr.keras.TensorBoard(tmp_path, histogram_freq=2, write_images=True)
    net = model(keras.optimizers.SGD(0.0))
    net.layers[0].set_weights([np.array([[1.0], [2.0], [4.0]], "f4"), np.array([2.0], "f4")])
    net.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[board])
    found = events(tmp_path / "train")
    kernel = found.Tensors("net/dense/kernel/histogram")
    assert [each.step for each in kernel] == [0, 2]
    buckets = make_ndarray(kernel[0].tensor_proto)
    assert (buckets[0, 0], buckets[-1, 1], buckets[:, 2].sum()) == (1.0, 4.0, 3.0)
    width, height, png = make_ndarray(found.Tensors("net/dense/kernel/image")[0].tensor_proto)
    pixels = np.asarray(Image.open(io.BytesIO(png)))
    assert (int(width), int(height), pixels.ravel().tolist()) == (1, 3, [0, 85, 255])
    assert found.SummaryMetadata("net/dense/kernel/image").plugin_data.plugin_name == "images"


def test_a_histogram_skips_values_that_are_not_finite():
    summary = histogram("a", np.array([np.nan, np.inf, 3.0], "f4"))
    buckets = make_ndarray(summary.value[0].tensor)
    assert (buckets[:, 2].sum(), buckets[-1, 1]) == (1.0, 3.0)


def test_the_graph_is_what_tensorboard_draws_of_a_keras_model(tmp_path):
    model().fit(X, Y, verbose=0, callbacks=[hr.keras.TensorBoard(tmp_path, write_graph=True)])
    found = events(tmp_path / "train")
    assert found.SummaryMetadata("keras").plugin_data.plugin_name == "graph_keras_model"
    config = json.loads(make_ndarray(found.Tensors("keras")[0].tensor_proto).item())
    assert "net/dense" in [node.name for node in keras_model_to_graph_def(config).node]


def test_evaluate_uses_iterations_as_steps_and_a_second_fit_appends(tmp_path):
    board = hr.keras.TensorBoard(tmp_path)
    net = model()
    for _ in range(2):
        net.fit(X, Y, batch_size=4, verbose=0, callbacks=[board])
        net.evaluate(X, Y, verbose=0, callbacks=[board])
    assert [step for step, _ in scalars(tmp_path / "train")["epoch_loss"]] == [0, 0]
    found = scalars(tmp_path / "validation")["evaluation_loss_vs_iterations"]
    assert [step for step, _ in found] == [3, 6]
    assert len(list((tmp_path / "train").iterdir())) == 1


class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise RuntimeError("stop here")


def test_an_error_in_fit_flushes_and_closes_the_files(tmp_path):
    board = hr.keras.TensorBoard(tmp_path, update_freq=1)
    with pytest.raises(RuntimeError, match="stop here"):
        model().fit(X, Y, batch_size=4, verbose=0, callbacks=[board, Fail()])
    assert [step for step, _ in scalars(tmp_path / "train")["batch_loss"]] == [1, 2]
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if link.exists()]
    assert [path for path in opened if "tfevents" in path] == []


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("profile_batch", 2, ValueError),
        ("embeddings_freq", 1, ValueError),
        ("embeddings_metadata", "words.tsv", ValueError),
        ("update_freq", "step", ValueError),
        ("update_freq", 0, ValueError),
        ("write_images", True, ValueError),
        ("histogram_freq", -1, ValueError),
        ("log_dir", "gs://bucket/logs", ValueError),
        ("write_graph", 1, TypeError),
        ("histogram_freq", 1.5, TypeError),
    ],
)
def test_unsupported_arguments_are_rejected_by_name(name, value, kind):
    with pytest.raises(kind, match=f"`{name}"):
        hr.keras.TensorBoard(**{name: value})


def test_keras_tensorboard_without_tensorflow_refers_to_this_one():
    hr.keras.dataset  # noqa: B018 - loading it is what replaces the callback
    with pytest.raises(ImportError, match=r"use hr\.keras\.TensorBoard"):
        keras.callbacks.TensorBoard("logs")

    class Other(keras.callbacks.TensorBoard):
        summary = None

    assert Other("logs").log_dir == "logs"
