"""Evaluation in a second process while training continues.

This program trains a model, and `ModelCheckpoint` writes a file after each epoch. A second process,
this file with the argument `evaluate`, waits for the files and evaluates them, and keeps the
best model in another directory. Training never waits for it: if an evaluation takes longer than an
epoch, the evaluator skips to the newest file.

    pip install 'headrace[keras,jax]'
    python examples/sidecar_evaluation.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import headrace as hr

EPOCHS = 4


def make_points(count: int, seed: int) -> hr.Dataset:
    """Return points of the plane, labeled by whether they are inside of a circle."""
    points = np.random.default_rng(seed).uniform(-1, 1, (count, 2)).astype(np.float32)
    return hr.Dataset.from_tensor_slices((points, (np.hypot(*points.T) < 0.8).astype(np.float32)))


def make_model() -> keras.Model:
    """Return a compiled classifier; both processes build the same one."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(32, activation="relu") for _ in range(2)]
    output = keras.layers.Dense(1, activation="sigmoid")
    model = keras.Sequential([keras.Input((2,)), *hidden, output])
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    return model


class PrintEvaluation(keras.callbacks.Callback):
    """Prints each evaluation with the training step of its checkpoint."""

    def on_test_end(self, logs: Any = None) -> None:
        """Print the results."""
        step = int(self.model.optimizer.iterations)
        print(f"evaluator: step {step}: accuracy {logs['accuracy']:.3f}", flush=True)


def evaluate(folder: Path) -> None:
    """Evaluate checkpoints until the one of the last epoch; run by the second process."""
    best = hr.keras.BestModelExporter(folder / "best" / "model.keras", "accuracy", mode="max")
    hr.keras.SidecarEvaluator(
        make_model(),
        hr.keras.dataset(make_points(1000, seed=1).batch(250)),
        folder / "checkpoints",
        max_evaluations=EPOCHS,
        callbacks=[PrintEvaluation(), best],
        timeout=60,
    ).start()


def main() -> None:
    """Train beside an evaluator, and check the best model that it has kept."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        evaluator = subprocess.Popen([sys.executable, __file__, "evaluate", name])
        try:
            make_model().fit(
                hr.keras.dataset(make_points(4000, seed=0).shuffle(4000, seed=0).batch(40)),
                epochs=EPOCHS,
                verbose=0,
                callbacks=[
                    keras.callbacks.ModelCheckpoint(folder / "checkpoints" / "{epoch}.keras"),
                    # Stands in for a larger model.
                    keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: time.sleep(1.5)),
                ],
            )
            print(f"trained {EPOCHS} epochs", flush=True)
            assert evaluator.wait(timeout=90) == 0
        finally:
            evaluator.kill()
        model = keras.saving.load_model(folder / "best" / "model.keras")
        held_out = hr.keras.dataset(make_points(1000, seed=1).batch(250))
        accuracy = model.evaluate(held_out, return_dict=True, verbose=0)["accuracy"]
    assert accuracy > 0.9
    print(f"best model: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    evaluate(Path(sys.argv[2])) if sys.argv[1:2] == ["evaluate"] else main()
