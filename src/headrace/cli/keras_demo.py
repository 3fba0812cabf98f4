"""`headrace demo --job keras`: Keras' `model.fit` on workers and parameter servers that are killed.

    coordinator     digits -> shuffle -> batch -> model.fit
    workers         gradients of a batch each; a round of two is averaged
    servers         weights and slots of Adam, each on two servers

The model is trained twice, from the same weights and on the same batches. In the second run a
worker and a parameter server are killed in the middle of an epoch. Training goes on, and both runs
end with the same weights, bit for bit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from rich.console import Console

import headrace as hr
from headrace.cli.digits_classifier import Digits, load_digits

__all__ = ["run_keras"]

_EPOCHS = 12
_BATCH_SIZE = 32
_WANTED_ACCURACY = 0.93


class _ProgressLines(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Prints a line for each epoch."""

    def __init__(self, console: Console, epochs: int) -> None:
        super().__init__()
        self._console = console
        self._epochs = epochs
        self._steps = 0
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._steps, self._began = 0, time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        seconds = time.perf_counter() - self._began
        self._console.print(
            f"epoch {epoch + 1}/{self._epochs}  {self._steps} steps in {seconds:.1f} s  "
            f"loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.4f}  "
            f"held-out accuracy {logs['val_accuracy']:.4f}"
        )


class _KillTasks(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Kills tasks of a cluster (SIGKILL); the cluster starts them again.

    Args:
        cluster: Local cluster of processes.
        console: Gets a line for each.
        kills: For each: the epoch and the batch after which to kill, and the task.
    """

    def __init__(
        self,
        cluster: hr.distribute.LocalCluster,
        console: Console,
        kills: Sequence[tuple[int, int, tuple[str, int]]],
    ) -> None:
        super().__init__()
        self._cluster = cluster
        self._console = console
        self._kills = {(epoch, batch): task for epoch, batch, task in kills}
        self._epoch = 0

    @property
    def left(self) -> list[str]:
        """Names of the tasks that were not killed."""
        return [f"{kind} {index}" for kind, index in self._kills.values()]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        task = self._kills.get((self._epoch, batch))
        pid = None if task is None else self._cluster.pid(*task)
        if task is None or pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        del self._kills[self._epoch, batch]
        self._console.print(
            f"killed {task[0]} {task[1]} (process {pid}) after step {batch + 1} of epoch "
            f"{self._epoch + 1}"
        )


def run_keras(epochs: int = _EPOCHS, console: Console | None = None) -> int:
    """Run the demo; return the exit code: 0 if all that the last line says is true."""
    console = console or Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    digits = load_digits()
    steps = -(-len(digits.train_images) // _BATCH_SIZE)
    console.print(
        f"{len(digits.train_images)} handwritten digits; {len(digits.test_images)} more are held "
        f"out; Keras {keras.version()} on {keras.backend.backend()}"
    )
    with hr.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster:
        console.print(
            "workers in processes {} and {}, parameter servers in {} and {}".format(
                *(cluster.pid(kind, number) for kind in ("worker", "ps") for number in (0, 1))
            )
        )
        console.print("\nfirst run: nothing is killed")
        expected, accuracy = _train(cluster, digits, epochs, [_ProgressLines(console, epochs)])
        console.print("\nsecond run: a worker and a parameter server are killed")
        middle = steps // 2
        kills = _KillTasks(
            cluster,
            console,
            [(epochs // 3, middle, ("worker", 0)), (epochs * 2 // 3, middle, ("ps", 1))],
        )
        lines = _ProgressLines(console, epochs)
        weights, accuracy_of_second = _train(cluster, digits, epochs, [lines, kills])
    difference = max(
        float(np.max(np.abs(one - other))) for one, other in zip(expected, weights, strict=True)
    )
    console.print(
        f"\nlargest difference of a weight: {difference}; held-out accuracy {accuracy:.4f} and "
        f"{accuracy_of_second:.4f}"
    )
    problems = [f"{name} was not killed" for name in kills.left]
    if not all(map(np.array_equal, expected, weights)) or accuracy != accuracy_of_second:
        problems.append("the two runs differ")
    if accuracy < _WANTED_ACCURACY:
        problems.append(f"held-out accuracy {accuracy:.4f} is below {_WANTED_ACCURACY}")
    if problems:
        console.print("demo: failed: " + "; ".join(problems), style="red")
        return 1
    count = sum(each.size for each in weights)
    console.print(
        f"demo: ok: with a worker and a parameter server killed, all {count:,} weights after "
        f"{epochs * steps} steps equal those of the undisturbed run, bit for bit; held-out "
        f"accuracy {accuracy:.4f}; {time.perf_counter() - began:.0f} s"
    )
    return 0


def _train(
    cluster: hr.distribute.LocalCluster, digits: Digits, epochs: int, callbacks: list[Any]
) -> tuple[list[Any], float]:
    """Train a model; return its weights and its accuracy on held-out digits."""
    keras.utils.set_random_seed(0)
    strategy = hr.distribute.ParameterServerStrategy(
        cluster.cluster_resolver, mode="sync", replication=2
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8)),
                keras.layers.Rescaling(1 / 16),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
    train = (
        hr.Dataset.from_tensor_slices((digits.train_images, digits.train_labels))
        .shuffle(len(digits.train_images), seed=0)
        .batch(_BATCH_SIZE)
    )
    held_out = hr.Dataset.from_tensor_slices((digits.test_images, digits.test_labels)).batch(120)
    model.fit(train, epochs=epochs, validation_data=held_out, callbacks=callbacks, verbose=0)
    accuracy = model.evaluate(held_out, return_dict=True, verbose=0)["accuracy"]
    weights = model.get_weights()
    strategy.close()
    return weights, accuracy
