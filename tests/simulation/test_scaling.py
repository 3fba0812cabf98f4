"""Workers that join and drain as the scaling policy says, with faults of everything else."""

from __future__ import annotations

import random

import pytest

from headrace.service.config import ShardingPolicy
from headrace.service.dispatcher.worker_scaling import ScalingPolicy, ScalingState, ServiceLoad
from headrace.service.worker_scaler import LauncherControl
from tests.simulation.cluster import Cluster
from tests.simulation.kernel import require
from tests.simulation.production import Plan
from tests.simulation.scenario import Scenario

_MIN, _MAX = 1, 4


class _SimulatedLauncher:
    """Starts workers within a second, and drains the newest."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._num_starting = 0
        self.num_actions = 0

    def num_workers(self) -> int:
        return self._num_starting + len(self._cluster.active_workers)

    def start_workers(self, count: int) -> None:
        self.num_actions += 1
        for _ in range(count):
            self._num_starting += 1
            self._cluster.simulation.call_later(self._cluster.simulation.random.random(), self._add)

    def _add(self) -> None:
        self._num_starting -= 1
        self._cluster.add_worker()

    def stop_workers(self, count: int) -> None:
        self.num_actions += 1
        for worker in self._cluster.active_workers[-count:]:
            worker.drain(10_000.0)


def _scenario(seed: int, kind: str, *, in_order: bool) -> Scenario:
    rng = random.Random(f"scaling {seed}")
    return Scenario(
        seed=seed,
        kind_name=kind,
        mode=ShardingPolicy.DYNAMIC,
        plan=Plan(
            size=300,
            max_split_elements=rng.choice((1, 3, 9)),
            cycle_length=1 if in_order else rng.choice((1, 3)),
            shuffle_buffer=1 if in_order else rng.choice((1, 30)),
            batch_size=1 if in_order else rng.choice((1, 7)),
            cost=rng.choice((0.02, 0.05)),
        ),
        in_order=in_order,
        workers=1,
        clients=1,
        think=rng.choice((0.0, 0.02)),
        fault_seconds=0.0 if kind == "draining" else 10.0,
    )


@pytest.fixture
def any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that wants another number of workers in every evaluation."""

    def decide(
        self: ScalingPolicy, load: ServiceLoad, state: ScalingState
    ) -> tuple[int, ScalingState]:
        number = random.Random(f"{load.now:.3f}").randrange(_MAX + 3)
        return (number if load.jobs else 0), state

    monkeypatch.setattr(ScalingPolicy, "decide", decide)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("any_number")
@pytest.mark.parametrize("in_order", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("kind", ["draining", "network", "restarts"])
def test_nothing_is_lost_or_duplicated_while_workers_join_and_drain(
    kind: str, in_order: bool
) -> None:
    num_actions = 0
    for seed in range(3):
        cluster = Cluster(_scenario(seed, kind, in_order=in_order))
        simulation, launcher = cluster.simulation, _SimulatedLauncher(cluster)
        control = LauncherControl(launcher, _MIN, _MAX, 0.0)

        def follow(cluster: Cluster = cluster, control: LauncherControl = control) -> None:
            cluster.simulation.call_later(1.0, follow)
            now = cluster.simulation.now
            if cluster.dispatcher.is_running:
                control.follow(cluster.dispatcher.dispatcher.describe(now), now)
            require(len(cluster.active_workers) <= _MAX, "the maximum number of workers holds")

        simulation.call_later(1.5, follow)
        cluster.run()
        num_actions += launcher.num_actions
        assert launcher.num_workers() == _MIN
    assert num_actions > 10
