"""Train on Ray while the data service scales out and in, and while actors are killed.

    data actors       TFRecord files -> interleave -> parse; 2 to 4 workers
    this program      shuffle -> batch -> schedule(train_step, batch)
    training actors   two workers compute gradients in NumPy; two parameter servers, replicated

Ray runs on this machine only. Data workers are added while the first epoch is read, and drain while
the last one is. In between a data worker, a training worker and a parameter server are killed; Ray
restarts them. In every epoch each example must be trained on exactly once.

    pip install 'headrace[demo-ray]'
    python examples/ray_demo.py
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Read when Ray is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# By default, other programs of this machine have precedence over Ray's actors.
os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import ray
from numpy.typing import NDArray
from rich.console import Console
from sklearn import datasets

import headrace as hr

CPUS = 9
"""CPUs that Ray assumes, one for each worker and server. They share those of this machine."""
FILES = 48
PAUSE = 0.01
"""Seconds of waiting for each example, as for a download."""
BATCH_SIZE = 32
HIDDEN = 128
RATE = 4e-3
IN_FLIGHT = 6
"""Number of scheduled steps whose results were not fetched yet."""
MIN_WORKERS, MAX_WORKERS = 2, 4
SCALE_SECONDS = 300.0
"""Seconds to wait for workers that start or drain, also on a very slow machine."""
MIN_ACCURACY = 0.93


# --- the data -------------------------------------------------------------------------------------

FEATURES = {
    "image": hr.io.FixedLenFeature((), bytes),
    "label": hr.io.FixedLenFeature((), np.int64),
    "number": hr.io.FixedLenFeature((), np.int64),
}


class Digits(NamedTuple):
    """Images of shape (n, 64) with values from 0 to 1, and their labels."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load_digits() -> tuple[Digits, Digits]:
    """Return scikit-learn's 1,797 handwritten digits; every fifth is held out."""
    bunch = datasets.load_digits()
    images = (bunch.images.reshape(-1, 64) / 16).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    held_out = np.arange(len(images)) % 5 == 0
    return Digits(images[~held_out], labels[~held_out]), Digits(images[held_out], labels[held_out])


def write_files(folder: Path, digits: Digits) -> None:
    """Write an Example of image, label and running number for each digit."""
    for file in range(FILES):
        with hr.io.TFRecordWriter(str(folder / f"digits-{file:02d}.tfrecord")) as writer:
            for number in range(file, len(digits.labels), FILES):
                example = {
                    "image": digits.images[number].tobytes(),
                    "label": digits.labels[number],
                    "number": number,
                }
                writer.write(hr.io.encode_example(example))


def parse(record: bytes) -> dict[str, Any]:
    """Parse an Example; runs on the data workers."""
    time.sleep(PAUSE)
    example = hr.io.parse_example(record, FEATURES)
    return {**example, "image": np.frombuffer(example["image"], np.float32)}


def training_batches(folder: Path, cluster: hr.ray.DataCluster) -> hr.Dataset:
    """Return the batches of an epoch; the data workers read and parse."""
    files = hr.Dataset.list_files(str(folder / "*.tfrecord"))
    examples = files.interleave(hr.TFRecordDataset, cycle_length=2).map(parse)
    # Little is read ahead, so that workers which are killed or drain are in the middle of it.
    return (
        cluster.distribute(examples, hr.service.ShardingPolicy.DYNAMIC, max_outstanding_requests=4)
        .shuffle(256)
        .batch(BATCH_SIZE)
    )


# --- the model ------------------------------------------------------------------------------------


class Model(NamedTuple):
    """Variables of a network with one hidden layer, and their optimizer."""

    hidden: hr.Variable
    hidden_bias: hr.Variable
    output: hr.Variable
    output_bias: hr.Variable
    optimizer: Any

    def read(self) -> list[NDArray[np.float32]]:
        """Return the values of the variables."""
        return [np.asarray(variable.read()) for variable in self[:4]]


def make_model() -> Model:
    """Create the model, in the scope of a strategy."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(0, np.sqrt(2 / 64), (64, HIDDEN)).astype(np.float32)
    output = rng.normal(0, np.sqrt(2 / HIDDEN), (HIDDEN, 10)).astype(np.float32)
    return Model(
        hr.Variable(hidden, name="hidden"),
        hr.Variable(np.zeros(HIDDEN, np.float32), name="hidden_bias"),
        hr.Variable(output, name="output"),
        hr.Variable(np.zeros(10, np.float32), name="output_bias"),
        hr.optimizers.Adam(RATE),
    )


def train_step(
    model: Model,
    images: NDArray[np.float32],
    labels: NDArray[np.int64],
    numbers: NDArray[np.int64],
) -> tuple[float, NDArray[np.int64]]:
    """Train on a batch; return the loss before the step, and the numbers of its examples."""
    weights, bias, output, output_bias = model.read()
    hidden = np.maximum(images @ weights + bias, 0)
    logits = hidden @ output + output_bias
    logits -= logits.max(axis=1, keepdims=True)
    predicted = np.exp(logits)
    predicted /= predicted.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(predicted[rows, labels]).mean())
    predicted[rows, labels] -= 1
    predicted /= np.float32(len(labels))
    hidden_gradient = (predicted @ output.T) * (hidden > 0)
    model.optimizer.apply_gradients(
        [
            (images.T @ hidden_gradient, model.hidden),
            (hidden_gradient.sum(axis=0), model.hidden_bias),
            (hidden.T @ predicted, model.output),
            (predicted.sum(axis=0), model.output_bias),
        ]
    )
    return loss, numbers


def accuracy_of(model: Model, digits: Digits) -> float:
    """Return the fraction of images whose label is predicted."""
    weights, bias, output, output_bias = model.read()
    logits = np.maximum(digits.images @ weights + bias, 0) @ output + output_bias
    return float(np.mean(logits.argmax(axis=1) == digits.labels))


# --- training -------------------------------------------------------------------------------------


@dataclass
class Epoch:
    """Measurements of one epoch."""

    visits: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0


def train_epoch(
    coordinator: hr.coordinator.ClusterCoordinator,
    model: Model,
    batches: hr.Dataset,
    event: Callable[[], None],
    event_at: int,
) -> Epoch:
    """Train for an epoch, and call `event` once `event_at` examples were trained on."""
    epoch = Epoch()
    began = time.perf_counter()
    in_flight: deque[hr.coordinator.RemoteValue] = deque()
    is_over = False

    def fetch_oldest() -> None:
        loss, numbers = in_flight.popleft().fetch()
        epoch.steps += 1
        epoch.loss += (loss - epoch.loss) / epoch.steps
        epoch.visits.update(numbers.tolist())

    with iter(batches) as iterator:
        for batch in iterator:
            arguments = (model, batch["image"], batch["label"], batch["number"])
            in_flight.append(coordinator.schedule(train_step, arguments))
            if len(in_flight) > IN_FLIGHT:
                fetch_oldest()
            if not is_over and epoch.visits.total() >= event_at:
                event()
                is_over = True
    while in_flight:
        fetch_oldest()
    epoch.seconds = time.perf_counter() - began
    return epoch


def kill_data_worker() -> None:
    """Kill the process of a data worker, whose actor Ray restarts."""
    name = min(
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("headrace-data/") and actor["name"].count("/") == 2
    )
    ray.kill(ray.get_actor(name, namespace="headrace"), no_restart=False)


class Demo:
    """Trains epoch after epoch, and checks each.

    Args:
        console: Output.
        folder: Directory of the files.
        num_examples: Number of examples in an epoch.
        data: Cluster that reads them.
        training: Cluster that runs the steps.
    """

    def __init__(
        self,
        console: Console,
        folder: Path,
        num_examples: int,
        data: hr.ray.DataCluster,
        training: hr.ray.TrainingCluster,
    ) -> None:
        self.problems: list[str] = []
        self.epochs = self.steps = 0
        self._console = console
        self._num_examples = num_examples
        self._data = data
        self._batches = training_batches(folder, data)
        self._strategy = training.strategy(replication=2)
        with self._strategy.scope():
            self.model = make_model()
        self._coordinator = hr.coordinator.ClusterCoordinator(self._strategy)

    def train(self, what: str, event: Callable[[], None]) -> None:
        """Train for an epoch, with an event in the middle; print a line."""
        epoch = train_epoch(
            self._coordinator, self.model, self._batches, event, self._num_examples // 3
        )
        self.epochs += 1
        self.steps += epoch.steps
        is_exact = epoch.visits == Counter(range(self._num_examples))
        visits = "each example once" if is_exact else describe_visits(epoch, self._num_examples)
        self._console.print(
            f"epoch {self.epochs}  {epoch.steps} steps in {epoch.seconds:.1f} s  "
            f"loss {epoch.loss:.3f}  {visits}; {what}"
        )
        if not is_exact:
            self.problems.append(f"epoch {self.epochs}: {visits}")

    def wait_for_workers(self, count: int) -> None:
        """Wait until the data service has this number of workers."""
        deadline = time.monotonic() + SCALE_SECONDS
        while (found := self._data.num_workers) != count and time.monotonic() < deadline:
            time.sleep(0.1)
        if found != count:
            self.problems.append(f"{found} data workers, not {count}")
        self._console.print(f"         {found} data workers")

    def check_steps(self) -> None:
        """Check that the optimizer has applied each step once."""
        applied = self.model.optimizer.iterations
        if applied != self.steps:
            self.problems.append(f"{applied} steps were applied, not {self.steps}")

    def close(self) -> None:
        """Close the strategy."""
        self._strategy.close()


def describe_visits(epoch: Epoch, num_examples: int) -> str:
    """Return how often the examples were visited."""
    times = Counter(epoch.visits[number] for number in range(num_examples))
    return "visited " + ", ".join(f"{count} examples {n} times" for n, count in times.items())


def start_ray() -> None:
    """Start Ray on this machine, without its dashboard and the output of its processes."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=100 << 20,
    )


def run_ray(console: Console | None = None) -> int:
    """Run the demo; return the exit code, 0 if all of its checks pass."""
    console = console or Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    digits, held_out = load_digits()
    console.print(
        f"{len(digits.labels)} handwritten digits in {FILES} files; {len(held_out.labels)} more "
        "are held out"
    )
    console.print(f"starting Ray {ray.__version__} on this machine")
    start_ray()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="headrace-ray-") as name,
            hr.ray.DataCluster(MIN_WORKERS, work_dir=Path(name, "journal")) as data,
            hr.ray.TrainingCluster(workers=2, ps=2) as training,
        ):
            console.print(
                f"data service: a dispatcher and {MIN_WORKERS} workers\n"
                "training: 2 workers and 2 parameter servers, each in a Ray actor\n"
            )
            files = Path(name, "files")
            files.mkdir()
            write_files(files, digits)
            demo = Demo(console, files, len(digits.labels), data, training)
            run_epochs(demo, data, training)
            demo.check_steps()
            accuracy = accuracy_of(demo.model, held_out)
            demo.close()
    finally:
        ray.shutdown()
    problems = demo.problems
    if accuracy < MIN_ACCURACY:
        problems.append(f"held-out accuracy {accuracy:.3f} is below {MIN_ACCURACY}")
    if problems:
        console.print("demo: failed: " + "; ".join(problems), style="red")
        return 1
    console.print(
        f"demo: ok: each of {len(digits.labels)} examples was visited exactly once in each of "
        f"{demo.epochs} epochs, and each of {demo.steps} steps was applied once, with "
        f"{MIN_WORKERS} to {MAX_WORKERS} data workers and three killed actors; held-out accuracy "
        f"{accuracy:.3f}; {time.perf_counter() - began:.0f} s"
    )
    return 0


def run_epochs(demo: Demo, data: hr.ray.DataCluster, training: hr.ray.TrainingCluster) -> None:
    """Train while the service scales out, while actors are killed, and while it scales in."""
    demo.train("data workers were added", lambda: data.scale(MAX_WORKERS))
    demo.wait_for_workers(MAX_WORKERS)
    demo.train("a data worker was killed", kill_data_worker)
    demo.train("training worker 0 was killed", lambda: training.kill("worker", 0))
    demo.train("parameter server 1 was killed", lambda: training.kill("ps", 1))
    demo.train("data workers were drained", lambda: data.scale(MIN_WORKERS))
    demo.wait_for_workers(MIN_WORKERS)


if __name__ == "__main__":
    sys.exit(run_ray())
