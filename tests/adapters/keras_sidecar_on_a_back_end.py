"""`hr.keras.SidecarEvaluator` on one back end; `test_keras.py` runs it."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import headrace as hr
from headrace.adapters.keras_training import sidecar_evaluator, training_checkpoints
from headrace.adapters.keras_training.training_checkpoints import FoundCheckpoint
from headrace.errors import InvalidArgumentError

# A warning that Keras itself causes with PyTorch tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X, Y = np.ones((8, 1), np.float32), np.zeros((8, 1), np.float32)


@pytest.fixture(autouse=True)
def settle_soon(monkeypatch):
    monkeypatch.setattr(training_checkpoints, "_UNCHANGED_SECONDS", 0.05)


def model(weight: float = 0.0, optimizer: str = "adam") -> keras.Model:
    """A model whose loss on the data is the square of a weight."""
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)], name="net")
    made.compile(optimizer, "mse", metrics=["mae"])
    made.set_weights([np.full((1, 1), weight, np.float32)])
    return made


def written(path: Path, weight: float, iterations: int | None = None) -> None:
    made = model(weight)
    if iterations is None:
        made = keras.Sequential(made.layers)  # without an optimizer
        made.build((None, 1))
    else:
        made.optimizer.build(made.trainable_variables)
        made.optimizer.iterations.assign(iterations)
    made.save(path) if path.suffix == ".keras" else made.save_weights(path)
    written.count += 1
    # File times are coarse.
    os.utime(path, ns=(written.count * 10**9, written.count * 10**9))


written.count = 0


class Seen(keras.callbacks.Callback):
    """Records step and loss of each evaluation, and can call a function after it."""

    def __init__(self, *then):
        super().__init__()
        self.found = []
        self._then = list(then)

    def on_test_end(self, logs=None):
        self.found.append((int(self.model.optimizer.iterations), round(float(logs["loss"]), 4)))
        if self._then:
            self._then.pop(0)()


def evaluated(folder: Path, *then, callbacks=(), **options) -> list[tuple[int, float]]:
    seen = Seen(*then)
    options = {"timeout": 1.0, **options}
    hr.keras.SidecarEvaluator(
        model(), hr.keras.dataset(hr.Dataset.from_tensor_slices((X, Y)).batch(4)), folder,
        callbacks=[seen, *callbacks], **options,
    ).start()  # fmt: skip
    return seen.found


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_the_newest_checkpoint_and_then_new_ones_are_evaluated(tmp_path, suffix):
    for epoch in (1, 2):
        written(tmp_path / f"ckpt-{epoch}{suffix}", epoch, iterations=10 * epoch)
    found = evaluated(tmp_path, lambda: written(tmp_path / f"ckpt-3{suffix}", 3, iterations=30))
    assert found == [(20, 4.0), (30, 9.0)]


def test_an_overwritten_file_is_a_new_checkpoint(tmp_path):
    path = tmp_path / "last.keras"
    written(path, 1, iterations=5)
    assert evaluated(tmp_path, lambda: written(path, 2, iterations=6)) == [(5, 1.0), (6, 4.0)]


def test_the_step_is_the_number_in_the_name_or_a_count_without_iterations(tmp_path):
    written(tmp_path / "ckpt-7.weights.h5", 1)
    found = evaluated(tmp_path, lambda: written(tmp_path / "last.weights.h5", 2))
    assert found == [(7, 1.0), (2, 4.0)]


def test_iterations_of_a_wrapped_optimizer_are_found(tmp_path):
    made = model(2.0)
    made.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0)), "mse")
    made.fit(X, Y, batch_size=2, verbose=0)
    made.save(tmp_path / "ckpt-1.keras")
    assert evaluated(tmp_path) == [(4, 4.0)]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ckpt-3.weights.h5", 3),
        ("weights.02-0.31.weights.h5", 2),
        ("05-0.91.keras", 5),
        ("model_7.keras", 7),
        ("epoch12.keras", 12),
        ("ckpt-4", 4),
        ("resnet50.keras", None),
        ("best.weights.h5", None),
    ],
)
def test_the_number_of_a_checkpoint_is_delimited_in_its_name(name, number):
    assert FoundCheckpoint(f"/9/a-8/{name}", (0, 0, 0), 0.0).number == number


def test_evaluation_ends_at_its_limit_or_the_last_checkpoint_number(tmp_path):
    written(tmp_path / "a.keras", 1, iterations=1)
    then = functools.partial(written, tmp_path / "a.keras", 2, iterations=2)
    assert evaluated(tmp_path, then, then, max_evaluations=2, timeout=None) == [(1, 1.0), (2, 4.0)]
    written(tmp_path / "ckpt-5.keras", 3, iterations=9)  # the first four were replaced before
    assert evaluated(tmp_path, max_evaluations=5, timeout=None) == [(9, 9.0)]


def test_objects_of_a_checkpoint_manager_are_evaluated(tmp_path):
    def save(number, **objects):
        with hr.CheckpointManager(hr.Checkpoint(**objects), tmp_path) as manager:
            manager.save(number)

    trained = model(3.0)
    trained.optimizer.build(trained.trainable_variables)
    trained.optimizer.iterations.assign(40)
    save(1, model=model(2.0))
    found = evaluated(
        tmp_path,
        lambda: save(2, weights=model(5.0).weights),
        lambda: save(3, model=trained, optimizer=trained.optimizer),
    )
    assert found == [(1, 4.0), (2, 25.0), (40, 9.0)]
    save(4, step=4)
    with pytest.raises(InvalidArgumentError, match="no object `model` or `weights`, but step"):
        evaluated(tmp_path)


def test_tensorboard_metrics_have_the_iterations_as_steps(tmp_path):
    written(tmp_path / "ckpt-1.keras", 2, iterations=32)
    evaluated(tmp_path, callbacks=[hr.keras.TensorBoard(tmp_path / "logs")], max_evaluations=1)
    found = EventAccumulator(str(tmp_path / "logs" / "validation")).Reload()
    tags = ["evaluation_loss_vs_iterations", "evaluation_mae_vs_iterations"]
    assert sorted(found.Tags()["tensors"]) == tags
    assert [each.step for each in found.Tensors(tags[0])] == [32]


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_a_partial_file_is_skipped_for_the_previous_checkpoint(tmp_path, suffix, caplog):
    written(tmp_path / f"ckpt-2{suffix}", 2, iterations=2)
    whole = (tmp_path / f"ckpt-2{suffix}").read_bytes()
    (tmp_path / f"ckpt-2{suffix}").write_bytes(whole[: len(whole) // 2])
    written(tmp_path / f"ckpt-1{suffix}", 1, iterations=1)
    os.utime(tmp_path / f"ckpt-1{suffix}", ns=(1, 1))
    with caplog.at_level(logging.WARNING, "headrace"):
        assert evaluated(tmp_path) == [(1, 1.0)]
    assert f"ckpt-2{suffix} is not complete: it cannot be read" in caplog.text
    os.remove(tmp_path / f"ckpt-1{suffix}")
    (tmp_path / f"ckpt-2{suffix}").write_bytes(whole)
    assert evaluated(tmp_path) == [(2, 4.0)]


def test_a_checkpoint_of_another_model_raises_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sidecar_evaluator, "_UNCHANGED_SECONDS", 0.1)
    other = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, use_bias=False)])
    other.save(tmp_path / "ckpt-1.keras")
    with pytest.raises(ValueError, match="could not be loaded") as error:
        evaluated(tmp_path, timeout=20.0)
    assert any("ckpt-1.keras" in note for note in error.value.__notes__)


def test_a_long_wait_is_logged_and_ends_after_the_timeout(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("headrace.waiting.FIRST_WARNING_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING, "headrace"):
        assert evaluated(tmp_path / "later", timeout=0.3) == []
    waiting, stopped = caplog.messages
    assert waiting.startswith(f"waiting: no checkpoint in {tmp_path / 'later'} yet")
    assert stopped.startswith(f"stopped: no checkpoint in {tmp_path / 'later'} yet")


def test_wrong_arguments_are_rejected_by_name(tmp_path):
    def make(**options):
        given = {"model": model(), "data": None, "checkpoint_dir": tmp_path, **options}
        return hr.keras.SidecarEvaluator(**given)

    for name, value, kind in (
        ("model", 3, TypeError),
        ("model", keras.Sequential([keras.layers.Dense(1)]), ValueError),
        ("checkpoint_dir", 3, TypeError),
        ("checkpoint_dir", "s3://bucket/ckpt", ValueError),
        ("steps", 0, ValueError),
        ("max_evaluations", 0, ValueError),
        ("callbacks", [print], TypeError),
        ("callbacks", [hr.keras.BestModelExporter(tmp_path / "best.keras")], ValueError),
        ("timeout", -1, ValueError),
    ):
        with pytest.raises(kind, match=f"`{name}`"):
            make(**{name: value})
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`model` is not built"):
        make(model=unbuilt).start()


# --- export ---------------------------------------------------------------------------------------


def loss_of(path: Path) -> float:
    return float(keras.models.load_model(path).evaluate(X, Y, verbose=0)[0])


def test_a_restarted_evaluator_keeps_the_best_model(tmp_path):
    best = tmp_path / "export" / "best.keras"
    folder = tmp_path / "ckpt"
    folder.mkdir()
    losses = []

    def then(epoch, weight):
        losses.append(loss_of(best))
        written(folder / f"ckpt-{epoch}.keras", weight, iterations=epoch)

    written(folder / "ckpt-1.keras", 3, iterations=1)
    evaluated(
        folder,
        lambda: None,
        callbacks=[
            hr.keras.BestModelExporter(best),
            Seen(lambda: then(2, 2), lambda: then(3, 4), lambda: then(4, np.nan)),
        ],
    )
    assert losses == [9.0, 4.0, 4.0]
    assert loss_of(best) == 4.0
    assert os.listdir(best.parent) == ["best.keras"]
    written(folder / "ckpt-5.keras", 2.5, iterations=5)
    evaluated(folder, callbacks=[hr.keras.BestModelExporter(best)])
    assert loss_of(best) == 4.0
    written(folder / "ckpt-6.keras", 1, iterations=6)
    evaluated(folder, callbacks=[hr.keras.BestModelExporter(best)])
    assert loss_of(best) == 1.0


def test_the_best_model_can_have_the_highest_validation_metric_of_fit(tmp_path):
    exporter = hr.keras.BestModelExporter(tmp_path / "best.keras", monitor="mae", mode="max")
    net = model(2.0, keras.optimizers.SGD(0.25))  # its weight is halved in each step
    history = net.fit(
        X, Y, batch_size=8, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[exporter]
    ).history
    assert exporter.best == pytest.approx(history["val_mae"][0])
    assert loss_of(tmp_path / "best.keras") == pytest.approx(history["val_loss"][0])


def test_an_export_with_wrong_arguments_is_rejected(tmp_path):
    for name, value in (("filepath", "best.h5"), ("mode", "auto"), ("monitor", "")):
        with pytest.raises(ValueError, match=f"`{name}`"):
            hr.keras.BestModelExporter(**{"filepath": tmp_path / "best.keras", name: value})
    exporter = hr.keras.BestModelExporter(tmp_path / "best.keras", monitor="auc")
    with pytest.raises(ValueError, match="is 'auc', and the evaluation has loss, mae"):
        model().evaluate(X, Y, verbose=0, callbacks=[exporter])
