"""The order in which steps of a Keras model are delivered, without a model."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import threading

import pytest

import headrace as hr
from headrace.adapters.keras_training.step_results import run_steps

STEPS = 40
_release = threading.Event()


def _step(number: int) -> int:
    if number == 0:
        _release.wait(30)
    return number


def test_results_behind_a_slow_step_are_kept_without_a_busy_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _release.clear()
    with hr.distribute.LocalCluster(num_workers=2, num_ps=1, processes=False) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
        with hr.coordinator.ClusterCoordinator(strategy) as coordinator:
            waits = []
            wait_for_any = coordinator.wait_for_any

            def counted(values: list[hr.coordinator.RemoteValue]) -> None:
                waits.append(len(values))
                wait_for_any(values)

            monkeypatch.setattr(coordinator, "wait_for_any", counted)
            delivered: list[int] = []

            def deliver(number: int) -> bool:
                delivered.append(number)
                return True

            timer = threading.Timer(0.3, _release.set)
            timer.start()
            steps = (coordinator.schedule(_step, args=(number,)) for number in range(STEPS))
            run_steps(coordinator, steps, deliver)
            timer.join()
        strategy.close()
    assert delivered == list(range(STEPS))
    # Each wait ends with a step that was already running.
    assert 0 < len(waits) <= STEPS
