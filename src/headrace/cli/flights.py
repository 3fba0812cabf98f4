"""`headrace demo --job flights`: late flights, learned on two workers and two parameter servers.

    here            flights -> shuffle -> batch -> schedule(train_step, batch)
    on workers      read rows, compute gradients in NumPy, push them
    on servers      a row for each airline, origin, destination, hour and aeroplane

The model is trained with several seeds, and compared with a logistic regression on held-out days.
On the way a worker is killed, and comes back: what it was doing is done by the other, and no step
counts twice. Then a server is killed: its rows go back to the last increment of a checkpoint, and
what came after that is lost and counted.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import headrace as hr
from headrace.cli.flights_data import Flights, load_flights
from headrace.cli.flights_model import Model, make_model, score_shard, train_step
from headrace.cli.scikit_learn import area_under_curve, baseline_area

__all__ = ["run_flights"]

_BATCH_SIZE = 1024
_SCORED_AT_ONCE = 2048
_SHARDS = 4
_SECONDS_BETWEEN_INCREMENTS = 0.25
"""Of a few seconds of training, what a killed server loses is to be a small part."""
_UNDER_WAY = 16
"""Steps that are scheduled before the result of the first is looked at."""
_MOST_BELOW = 0.005
"""What the area under the curve may be below that of the logistic regression."""


@dataclass
class Training:
    """What was seen of the training of one model."""

    steps: int = 0
    flights: int = 0
    loss: float = 0.0
    """Of late: a mean in which a step counts less with each one that follows."""
    by_worker: Counter[int] = field(default_factory=Counter)

    def add(self, flights: int, loss: float, worker: int) -> None:
        """Note a step."""
        self.loss += (loss - self.loss) * max(1 / (self.steps + 1), 0.02)
        self.steps += 1
        self.flights += flights
        self.by_worker[worker] += 1


class Kill:
    """Kills tasks, each once; the cluster starts them again.

    Args:
        cluster: Of processes.
        at: After how many steps which task is killed, in this order.
    """

    def __init__(
        self, cluster: hr.distribute.LocalCluster, at: Sequence[tuple[int, str, int]]
    ) -> None:
        self._cluster = cluster
        self._left = deque(at)
        self.after: dict[tuple[str, int], int] = {}
        """How many steps were done when a task was killed."""

    @property
    def is_done(self) -> bool:
        """Whether all were killed."""
        return not self._left

    def consider(self, training: Training) -> str | None:
        """Kill a task if it is time; return its name then."""
        if not self._left:
            return None
        steps, kind, number = self._left[0]
        pid = self._cluster.pid(kind, number)
        is_idle = kind == "worker" and not training.by_worker[number]
        if training.steps < steps or pid is None or is_idle:
            return None
        os.kill(pid, signal.SIGKILL)
        self._left.popleft()
        self.after[kind, number] = training.steps
        return f"{kind} {number}"


def run_flights(
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 2,
    console: Console | None = None,
    *,
    flights: tuple[Flights, Flights] | None = None,
) -> int:
    """Run the demo; return the exit code: 0 if all that the last line says is true.

    Args:
        seeds: One model is trained for each; on the way of the first, tasks are killed.
        epochs: How often a model sees each flight.
        console: Where to write.
        flights: To train on, and held out; None: those of the package.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    train, held_out = load_flights() if flights is None else flights
    console.print(
        f"{len(train)} flights, {train.late.mean():.1%} late; {len(held_out)} more, of every fifth "
        "day, are held out"
    )
    baseline = baseline_area(train, held_out)
    wanted = baseline - _MOST_BELOW
    console.print(
        f"logistic regression: held-out AUC {baseline:.4f}; each model must reach {wanted:.4f}"
    )
    problems: list[str] = []
    areas: list[float] = []
    steps = epochs * -(-len(train) // _BATCH_SIZE)
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
            # Steps are counted on server 0, so that all are counted though the other is killed.
            kill = Kill(cluster, [(steps // 3, "worker", 0), (steps * 2 // 3, "ps", 1)])
            lost = 0
            for seed in seeds:
                title = f"seed {seed}"
                with strategy.scope():
                    model = make_model(title, train.values, seed)
                with hr.CheckpointManager(
                    hr.Checkpoint(**model._asdict()),
                    str(Path(folder, title)),
                    incremental_seconds=_SECONDS_BETWEEN_INCREMENTS,
                ) as manager:
                    training = _train(
                        console,
                        coordinator,
                        model,
                        _batches(train, seed, epochs),
                        title,
                        steps,
                        kill if seed == seeds[0] else None,
                    )
                    lost += manager.lost_updates
                problems += _check(title, model, training, steps, len(train) * epochs)
                areas.append(_evaluate(coordinator, model, held_out))
                console.print(f"{title}: held-out AUC {areas[-1]:.4f}")
                if areas[-1] < wanted:
                    problems.append(f"{title}: held-out AUC {areas[-1]:.4f} is below {wanted:.4f}")
        strategy.close()
    if not kill.is_done:
        problems.append("worker 0 took no step in time, so not all were killed that were to be")
    if problems:
        console.print("demo: failed: " + "; ".join(problems), style="red")
        return 1
    console.print(
        f"demo: ok: {epochs * len(train)} flights in {steps} steps for each of {len(seeds)} models,"
        f" each step counted once, though worker 0 was killed after {kill.after['worker', 0]}; "
        f"server 1 was killed after {kill.after['ps', 1]} and came back with the last increment, "
        f"{lost} updates or more lost; held-out AUC {', '.join(f'{area:.4f}' for area in areas)}, "
        f"logistic regression {baseline:.4f}, which {sum(area > baseline for area in areas)} of "
        f"{len(areas)} models exceed; {time.perf_counter() - began:.0f} s"
    )
    return 0


def _batches(flights: Flights, seed: int, epochs: int) -> hr.Dataset:
    return (
        hr.Dataset.from_tensor_slices((flights.columns, flights.tails, flights.late))
        .shuffle(len(flights), seed=seed)
        .batch(_BATCH_SIZE)
        .repeat(epochs)
        .prefetch(4)
    )


def _train(
    console: Console,
    coordinator: hr.coordinator.ClusterCoordinator,
    model: Model,
    batches: hr.Dataset,
    title: str,
    steps: int,
    kill: Kill | None,
) -> Training:
    """Train a model under a progress bar; kill a worker on the way if asked to."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.completed:>4.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[facts]}"),
    )
    training = Training()
    under_way: deque[tuple[int, hr.coordinator.RemoteValue]] = deque()
    began = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=steps, facts="")

        def take() -> None:
            flights, value = under_way.popleft()
            training.add(flights, *value.fetch())
            rate = training.steps / (time.perf_counter() - began)
            shares = " ".join(f"w{n} {count}" for n, count in sorted(training.by_worker.items()))
            progress.update(
                bar,
                completed=training.steps,
                facts=f"loss {training.loss:.3f} {rate:.0f} steps/s {shares}",
            )
            killed = None if kill is None else kill.consider(training)
            if killed is not None:
                progress.console.print(f"killed {killed} after {training.steps} steps")

        for batch in batches:
            under_way.append((len(batch[-1]), coordinator.schedule(train_step, (model, *batch))))
            if len(under_way) > _UNDER_WAY:
                take()
        while under_way:
            take()
    coordinator.join()
    return training


def _check(title: str, model: Model, training: Training, steps: int, flights: int) -> list[str]:
    """Return what is not as it should be."""
    found = []
    if training.steps != steps or training.flights != flights:
        found.append(
            f"{title}: {training.steps} steps saw {training.flights} flights, not {steps} and "
            f"{flights}"
        )
    if model.optimizer.iterations != steps:
        found.append(f"{title}: {model.optimizer.iterations} steps were applied, not {steps}")
    if len(training.by_worker) < 2:
        found.append(f"{title}: one worker took all steps")
    return found


def _evaluate(
    coordinator: hr.coordinator.ClusterCoordinator, model: Model, held_out: Flights
) -> float:
    """Return the area under the curve, scored on the workers."""
    data = hr.Dataset.from_tensor_slices(
        {"columns": held_out.columns, "tails": held_out.tails, "late": held_out.late}
    ).batch(_SCORED_AT_ONCE)

    def merged(parts: list[tuple[NDArray[np.float32], NDArray[np.float32]]]) -> float:
        scores, late = (np.concatenate(each) for each in zip(*parts, strict=True))
        return area_under_curve(late, scores)

    area: float = coordinator.evaluate(
        lambda shard: score_shard(model, shard), data, _SHARDS, merged
    )
    return area
