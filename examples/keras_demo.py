"""Train a Keras model with `model.fit` while a worker and a parameter server are killed.

    this program    digits -> shuffle -> batch -> model.fit
    workers         gradients of one batch each; a round averages two
    servers         weights and Adam slots, replicated on two servers

The model is trained twice, from the same weights and on the same batches. In the second run a
worker and a parameter server are killed in the middle of an epoch. Training continues, and both
runs end with the same weights, bit for bit.

    pip install 'headrace[demo-keras]'
    python examples/keras_demo.py

Set KERAS_BACKEND=torch to train with PyTorch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported

import keras
import numpy as np
from rich.console import Console
from sklearn import datasets

import headrace as hr

EPOCHS = 12
BATCH_SIZE = 32
MIN_ACCURACY = 0.93


Digits = tuple[Any, Any]
"""Images of shape (n, 8, 8) with values 0 to 16 (uint8), and labels of shape (n,) (int64)."""


def load_digits() -> tuple[Digits, Digits]:
    """Return scikit-learn's 1,797 handwritten digits; every fifth is held out."""
    bunch = datasets.load_digits()
    images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.int64)
    held_out = np.arange(len(images)) % 5 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


class ProgressLines(keras.callbacks.Callback):
    """Prints a line for each epoch."""

    def __init__(self, console: Console, epochs: int) -> None:
        super().__init__()
        self._console = console
        self._epochs = epochs
        self._steps = 0
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the clock."""
        self._steps, self._began = 0, time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a step."""
        self._steps = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Print the line."""
        seconds = time.perf_counter() - self._began
        self._console.print(
            f"epoch {epoch + 1}/{self._epochs}  {self._steps} steps in {seconds:.1f} s  "
            f"loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.4f}  "
            f"held-out accuracy {logs['val_accuracy']:.4f}"
        )


class KillTasks(keras.callbacks.Callback):
    """Kills tasks of a cluster with SIGKILL; the cluster restarts them.

    Args:
        cluster: Local cluster of processes.
        console: Output, a line per kill.
        kills: For each kill the epoch and the batch after which it happens, and the task.
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
    def pending(self) -> list[str]:
        """Names of the tasks that were not killed yet."""
        return [f"{kind} {index}" for kind, index in self._kills.values()]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Kill the task that is scheduled after this batch, if any."""
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


def run_keras(epochs: int = EPOCHS, console: Console | None = None) -> int:
    """Run the demo; return the exit code, 0 if all of its checks pass."""
    console = console or Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    train_digits, held_out_digits = load_digits()
    steps = -(-len(train_digits[1]) // BATCH_SIZE)
    console.print(
        f"{len(train_digits[1])} handwritten digits; {len(held_out_digits[1])} more are held "
        f"out; Keras {keras.version()} on {keras.backend.backend()}"
    )
    with hr.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster:
        console.print(
            "workers in processes {} and {}, parameter servers in {} and {}".format(
                *(cluster.pid(kind, number) for kind in ("worker", "ps") for number in (0, 1))
            )
        )
        console.print("\nfirst run: no task is killed")
        expected, accuracy = train(
            cluster, train_digits, held_out_digits, epochs, [ProgressLines(console, epochs)]
        )
        console.print("\nsecond run: a worker and a parameter server are killed")
        middle = steps // 2
        kills = KillTasks(
            cluster,
            console,
            [(epochs // 3, middle, ("worker", 0)), (epochs * 2 // 3, middle, ("ps", 1))],
        )
        lines = ProgressLines(console, epochs)
        weights, accuracy_of_second = train(
            cluster, train_digits, held_out_digits, epochs, [lines, kills]
        )
    difference = max(
        float(np.max(np.abs(one - other))) for one, other in zip(expected, weights, strict=True)
    )
    console.print(
        f"\nlargest difference of a weight: {difference}; held-out accuracy {accuracy:.4f} and "
        f"{accuracy_of_second:.4f}"
    )
    problems = [f"{name} was not killed" for name in kills.pending]
    if not all(map(np.array_equal, expected, weights)) or accuracy != accuracy_of_second:
        problems.append("the two runs differ")
    if accuracy < MIN_ACCURACY:
        problems.append(f"held-out accuracy {accuracy:.4f} is below {MIN_ACCURACY}")
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


def train(
    cluster: hr.distribute.LocalCluster,
    train_digits: Digits,
    held_out_digits: Digits,
    epochs: int,
    callbacks: list[Any],
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
    batches = (
        hr.Dataset.from_tensor_slices(train_digits)
        .shuffle(len(train_digits[1]), seed=0)
        .batch(BATCH_SIZE)
    )
    held_out = hr.Dataset.from_tensor_slices(held_out_digits).batch(120)
    model.fit(batches, epochs=epochs, validation_data=held_out, callbacks=callbacks, verbose=0)
    accuracy = model.evaluate(held_out, return_dict=True, verbose=0)["accuracy"]
    weights = model.get_weights()
    strategy.close()
    return weights, accuracy


if __name__ == "__main__":
    sys.exit(run_keras())
