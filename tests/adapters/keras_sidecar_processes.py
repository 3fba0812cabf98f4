"""Programs of `test_keras_sidecar.py`: one trains, one evaluates, one writes a file all the time.

python keras_sidecar_processes.py PROGRAM ARGUMENT ...
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from pathlib import Path

import keras
import numpy as np

import headrace as hr

_CHUNK = 1 << 16
X = np.random.default_rng(1).standard_normal((64, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return made


class Notes(keras.callbacks.Callback):
    """Appends step, loss and weights of each epoch or evaluation to a file, a line each."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file

    def on_epoch_end(self, epoch, logs=None):
        self._write(logs["val_loss"])

    def _write(self, loss):
        step = int(self.model.optimizer.iterations)
        weights = [np.asarray(each).tolist() for each in self.model.get_weights()]
        with open(self._file, "a") as file:
            file.write(json.dumps([step, float(loss), weights]) + "\n")


class EvaluationNotes(Notes):
    on_epoch_end = None

    def on_test_end(self, logs=None):
        self._write(logs["loss"])


def train(pattern: str, notes: str, epochs: str) -> None:
    """Train, and save a checkpoint of each epoch."""
    weights_only = pattern.endswith(".weights.h5")
    save = keras.callbacks.ModelCheckpoint(pattern, save_weights_only=weights_only)
    pause = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: time.sleep(0.7))
    model().fit(
        X, Y, batch_size=8, epochs=int(epochs), validation_data=(X, Y), verbose=0,
        callbacks=[Notes(notes), save, pause],
    )  # fmt: skip


def evaluate(folder: str, notes: str, most: str, export: str) -> None:
    """Evaluate checkpoints, and keep the best model."""
    hr.keras.SidecarEvaluator(
        model(), hr.keras.dataset(hr.Dataset.from_tensor_slices((X, Y)).batch(16)), folder,
        max_evaluations=int(most), timeout=60,
        callbacks=[EvaluationNotes(notes), hr.keras.BestModelExporter(export)],
    ).start()  # fmt: skip


def overwrite(path: str) -> None:
    """Rewrite a file in place repeatedly; all weights of a version are the same number."""
    made = keras.Sequential([keras.Input((300,)), *(keras.layers.Dense(300) for _ in range(4))])
    target, versions = Path(path), []
    for number in (1, 2):
        made.set_weights([np.full_like(each, number) for each in made.get_weights()])
        version = target.parent.with_name(f"version-{number}-{target.name}")
        made.save(version) if path.endswith(".keras") else made.save_weights(version)
        versions.append(version.read_bytes())
    target.parent.mkdir()
    target.write_bytes(versions[0])
    chance = random.Random(1)
    for content in itertools.cycle(versions):
        with target.open("r+b", buffering=0) as file:
            for begin in range(0, len(content), _CHUNK):
                file.write(content[begin : begin + _CHUNK])
                time.sleep(0.001)
            file.truncate()
        if chance.random() < 0.3:
            time.sleep(0.8)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
