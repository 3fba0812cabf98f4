"""`headrace demo`: real digits, through a dispatcher and two worker processes, into a classifier.

    on the workers    TFRecord shards -> list_files -> interleave -> parse -> augment
    distribute        ShardingPolicy.DYNAMIC
    here              shuffle -> batch -> JAX

The first run trains for some epochs and counts how often each example is visited. In the second
run a worker is killed during an epoch: training continues with the other worker, and lost examples
are counted.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from sklearn import datasets

import headrace as hr
from headrace.cli.digits_data import BATCH_SIZE, NUM_SHARDS, training_data, write_shards

__all__ = ["Classifier", "Digits", "load_digits", "run_demo"]


_HIDDEN = 128
_RATE = 3e-3
_PADDED = 32
"""Batches are padded to this many rows, so that JAX compiles one program for all of them."""


@dataclass(frozen=True)
class Digits:
    """8x8 images of uint8 in 0..16 and their labels of int64; every fifth is held out."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


def load_digits() -> Digits:
    """Return scikit-learn's 1,797 handwritten digits."""
    bunch = datasets.load_digits()
    images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.int64)
    held_out = np.arange(len(images)) % 5 == 0
    return Digits(images[~held_out], labels[~held_out], images[held_out], labels[held_out])


class Classifier:
    """A network with one hidden layer, trained with Adam."""

    def __init__(self, seed: int) -> None:
        first, second = jax.random.split(jax.random.key(seed))
        self._parameters = {
            "w1": jax.random.normal(first, (64, _HIDDEN)) * np.sqrt(2 / 64),
            "b1": jnp.zeros(_HIDDEN),
            "w2": jax.random.normal(second, (_HIDDEN, 10)) * np.sqrt(2 / _HIDDEN),
            "b2": jnp.zeros(10),
        }
        zeros = jax.tree.map(jnp.zeros_like, self._parameters)
        self._moments = (zeros, zeros)
        self._step = 0

    def train(self, images: NDArray[np.float32], labels: NDArray[np.int64]) -> tuple[float, float]:
        """Take one step on up to 32 images; return their loss and accuracy before it."""
        count = len(images)
        padded = np.zeros((_PADDED, 64), np.float32)
        padded[:count] = images.reshape(count, 64)
        targets = np.zeros(_PADDED, np.int32)
        targets[:count] = labels
        weights = (np.arange(_PADDED) < count).astype(np.float32) / count
        self._step += 1
        self._parameters, self._moments, loss, accuracy = _update(
            self._parameters, self._moments, self._step, padded, targets, weights
        )
        return float(loss), float(accuracy)

    def accuracy(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
        """Return the share of images whose label is predicted."""
        pixels = images.reshape(len(images), 64).astype(np.float32) / 16
        predicted = np.argmax(np.asarray(_logits(self._parameters, pixels)), axis=1)
        return float(np.mean(predicted == labels))


def _logits(parameters: dict[str, Any], images: Any) -> Any:
    hidden = jax.nn.relu(images @ parameters["w1"] + parameters["b1"])
    return hidden @ parameters["w2"] + parameters["b2"]


@jax.jit  # type: ignore[untyped-decorator]
def _update(
    parameters: Any, moments: Any, step: Any, images: Any, labels: Any, weights: Any
) -> tuple[Any, Any, Any, Any]:
    def objective(p: Any) -> tuple[Any, Any]:
        logits = _logits(p, images)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
        right = jnp.sum(weights * (jnp.argmax(logits, axis=1) == labels))
        return -jnp.sum(weights * picked), right

    (loss, accuracy), gradients = jax.value_and_grad(objective, has_aux=True)(parameters)
    # Adam (Kingma and Ba, 2015), algorithm 1.
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, moments[1], gradients)

    def stepped(p: Any, m: Any, v: Any) -> Any:
        return p - _RATE * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)

    return jax.tree.map(stepped, parameters, first, second), (first, second), loss, accuracy


_EPOCHS = 15
_MIN_ACCURACY = 0.95
_BATCHES_BEFORE_KILL = 16
_EPOCHS_TO_KILL_IN = 5
_MAX_LOST_FRACTION = 0.25
"""Maximum fraction of an epoch that may be lost. The dispatcher assigns a worker at most a quarter
of the remaining shards, two thirds in this demo."""


@dataclass
class EpochStats:
    """Measurements of one epoch."""

    visits: Counter[int] = field(default_factory=Counter)
    loss: float = 0.0
    accuracy: float = 0.0
    batches: int = 0
    seconds: float = 0.0
    by_worker: dict[str, int] = field(default_factory=dict)
    """Number of examples delivered by each worker, by its address."""

    @property
    def examples(self) -> int:
        """Number of delivered examples."""
        return sum(self.visits.values())

    def visit_histogram(self) -> Counter[int]:
        """Return how many examples were visited once, twice and so on."""
        return Counter(self.visits.values())


class WorkerKill:
    """Kills worker 0 with SIGKILL once, in an epoch of which both workers have delivered a part."""

    def __init__(self, cluster: hr.service.LocalCluster) -> None:
        self._cluster = cluster
        self._before: dict[str, int] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the worker was killed."""
        return self._before is not None

    def kill_if_due(self, epoch: EpochStats) -> bool:
        """Kill the worker if both workers have delivered enough; return whether it was killed."""
        shares = [examples for examples in epoch.by_worker.values() if examples >= BATCH_SIZE]
        if self.is_done or epoch.batches < _BATCHES_BEFORE_KILL or len(shares) < 2:
            return False
        self._before = dict(epoch.by_worker)
        self._cluster.kill_worker(0)
        return True

    def delivered_since(self, epoch: EpochStats) -> int:
        """Return how many examples the other worker has delivered since the kill."""
        if self._before is None:
            return 0
        killed = self._cluster.workers[0].address
        now, before = (
            sum(examples for address, examples in shares.items() if address != killed)
            for shares in (epoch.by_worker, self._before)
        )
        return now - before


def train_epoch(classifier: Classifier, data: hr.Dataset) -> Iterator[EpochStats]:
    """Train for one epoch; yield the measurements so far after every batch."""
    epoch = EpochStats()
    start = time.perf_counter()
    with iter(data) as batches:
        for batch in batches:
            loss, accuracy = classifier.train(batch["image"], batch["label"])
            epoch.visits.update(batch["number"].tolist())
            epoch.batches += 1
            # Running means over the batches so far.
            epoch.loss += (loss - epoch.loss) / epoch.batches
            epoch.accuracy += (accuracy - epoch.accuracy) / epoch.batches
            epoch.seconds = time.perf_counter() - start
            epoch.by_worker = hr.service.delivery_report(data)
            yield epoch
    epoch.seconds = time.perf_counter() - start
    yield epoch


def run_demo(epochs: int = _EPOCHS, console: Console | None = None) -> int:
    """Run the demo; return the exit code: 0 if every statement of the last line holds."""
    console = console or Console()
    began = time.perf_counter()
    digits = load_digits()
    total = len(digits.train_images)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as name:
        folder = Path(name)
        write_shards(folder, digits.train_images, digits.train_labels)
        console.print(
            f"{total} handwritten digits in {NUM_SHARDS} TFRecord shards; "
            f"{len(digits.test_images)} more held out for evaluation"
        )
        with hr.service.LocalCluster(num_workers=2, processes=True) as cluster:
            console.print(
                f"dispatcher at {cluster.target}, worker processes "
                + " and ".join(str(worker.pid) for worker in cluster.workers)
            )
            names = {worker.address: f"w{i}" for i, worker in enumerate(cluster.workers)}
            classifier = Classifier(seed=0)
            data = training_data(folder, cluster.target, read_ahead=8)
            for number in range(1, epochs + 1):
                epoch = _train_with_progress(
                    console, f"epoch {number}/{epochs}", classifier, data, total, names
                )
                if epoch.visit_histogram() != {1: total}:
                    problems.append(f"epoch {number} {_describe_visits(epoch, total)}")
            accuracy = classifier.accuracy(digits.test_images, digits.test_labels)
            console.print(f"held-out accuracy {accuracy:.3f}")
            if accuracy < _MIN_ACCURACY:
                problems.append(f"held-out accuracy {accuracy:.3f} is below {_MIN_ACCURACY}")

            data = training_data(folder, cluster.target, read_ahead=2)
            hit = _train_with_kill(console, cluster, data, total, names, problems)
    if problems:
        console.print("demo: failed: " + "; ".join(problems), style="red", soft_wrap=True)
        return 1
    console.print(
        f"demo: ok: each of {total} training examples was visited exactly once in each of "
        f"{epochs} epochs; with a worker killed in the middle of an epoch, "
        f"{_describe_lost(hit, total)}, "
        f"and the next epoch was complete; held-out accuracy {accuracy:.3f}; "
        f"{time.perf_counter() - began:.0f} s",
        soft_wrap=True,
        highlight=False,
    )
    return 0


def _train_with_kill(
    console: Console,
    cluster: hr.service.LocalCluster,
    data: hr.Dataset,
    total: int,
    names: dict[str, str],
    problems: list[str],
) -> EpochStats:
    """Train while worker 0 is killed, and for one more epoch; return the affected epoch."""
    console.print("\nsecond run: one worker is killed in the middle of an epoch")
    kill = WorkerKill(cluster)
    classifier = Classifier(seed=1)
    for number in range(1, _EPOCHS_TO_KILL_IN + 1):
        hit = _train_with_progress(console, f"epoch {number}", classifier, data, total, names, kill)
        if kill.is_done:
            break
    console.print(_summarize(hit, total), soft_wrap=True)
    after = _train_with_progress(console, f"epoch {number + 1}", classifier, data, total, names)
    console.print(f"the next epoch, with one worker, {_describe_visits(after, total)}")
    if not kill.is_done:
        problems.append("no worker was killed: no epoch received a batch from both workers")
    elif kill.delivered_since(hit) < BATCH_SIZE:
        problems.append("the other worker delivered less than one batch after the kill")
    if max(hit.visits.values()) > 1:
        problems.append(
            f"some examples were delivered twice after the kill: {_describe_visits(hit, total)}"
        )
    if total - len(hit.visits) > total * _MAX_LOST_FRACTION:
        problems.append(
            f"{_describe_lost(hit, total)} in the epoch of the kill, more than the allowed "
            f"{_MAX_LOST_FRACTION:.0%}"
        )
    if after.visit_histogram() != {1: total}:
        problems.append(f"the epoch after the kill {_describe_visits(after, total)}")
    return hit


def _train_with_progress(
    console: Console,
    title: str,
    classifier: Classifier,
    data: hr.Dataset,
    total: int,
    names: dict[str, str],
    kill: WorkerKill | None = None,
) -> EpochStats:
    """Train for one epoch with a progress bar; kill worker 0 during it if requested."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[details]}"),
    )
    epoch = EpochStats()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=total, details="")
        for epoch in train_epoch(classifier, data):
            named = {names.get(address, address): n for address, n in epoch.by_worker.items()}
            shares = " ".join(f"{name} {examples}" for name, examples in sorted(named.items()))
            rate = epoch.examples / max(epoch.seconds, 1e-9)
            progress.update(
                bar,
                completed=epoch.examples,
                details=f"loss {epoch.loss:.2f} acc {epoch.accuracy:.3f} {rate:,.0f}/s {shares}",
            )
            if kill is not None and kill.kill_if_due(epoch):
                progress.console.print(f"killed worker w0 after {epoch.examples} examples")
    return epoch


def _summarize(hit: EpochStats, total: int) -> str:
    reason = "assigned to it and not delivered; " if len(hit.visits) < total else ""
    return (
        f"training continued to the end of the epoch: {_describe_lost(hit, total)} ({reason}no "
        "example is delivered twice)"
    )


def _describe_lost(epoch: EpochStats, total: int) -> str:
    lost = total - len(epoch.visits)
    return f"{lost} of {total} examples were lost with worker w0" if lost else f"0 of {total} lost"


def _describe_visits(epoch: EpochStats, total: int) -> str:
    times = epoch.visit_histogram()
    parts = [f"{count} examples {_format_times(visits)}" for visits, count in sorted(times.items())]
    unseen = total - sum(times.values())
    if unseen:
        parts.append(f"{unseen} never")
    return "visited " + ", ".join(parts)


def _format_times(times: int) -> str:
    return {1: "once", 2: "twice"}.get(times, f"{times} times")
