"""What bounds a pass follows from who waits for whom."""

from __future__ import annotations

import pytest

from headrace.cli.dispatcher_frame import find_bottleneck, find_save_bottleneck
from headrace.service.messages import ClientStatus, IterationStatus, StepStatus, TaskStatus


def reading(clients=(0.0,), tasks=(0.0,), units=(), **fields):
    units = units or (0.0,) * len(tasks)
    return IterationStatus(
        **{
            "iteration_id": 2000,
            "epoch": (0,),
            "finished": False,
            "elapsed_seconds": 60.0,
            "clients": tuple(
                ClientStatus(client_id=f"c{n}", seconds_since_heartbeat=0.1, wait_ratio=waiting)
                for n, waiting in enumerate(clients)
            ),
            "tasks": tuple(
                TaskStatus(
                    task_id=n,
                    worker_address=f"w{n}:1",
                    client_wait_ratio=waiting,
                    split_wait_ratio=units[n],
                )
                for n, waiting in enumerate(tasks)
            ),
            "steps": (StepStatus(step="map at train.py:12", seconds=30.0),),
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("given", "by", "advice"),
    [
        (reading(clients=(0.9, 0.8)), "map at train.py:12, on the workers", "add workers"),
        (reading(clients=(0.9,), steps=()), "the workers", "add workers"),
        (reading(tasks=(0.9, 0.7)), "the clients", "training takes the time"),
        (reading(clients=(0.5,), tasks=(0.6,)), "the way between", "network"),
        (reading(clients=(0.3,), tasks=(1.0,)), "the clients", "fewer workers"),
        (reading(clients=(1.0,), tasks=(0.3,)), "map at train.py:12", "faster"),
        (reading(), "nothing", ""),
        (reading(clients=(0.9,), units=(0.8,), splits_unassigned=0), "the last units", "ends"),
        (reading(clients=(0.9,), units=(0.8,), splits_unassigned=9), "dealing of units", "larger"),
        (reading(tasks=()), "nobody who works", "start one"),
        (reading(clients=()), "nobody who reads", "come back"),
    ],
)
def test_the_bound_and_what_would_help(given, by, advice):
    found = find_bottleneck(given)
    assert by in found.location
    assert advice in found.advice


@pytest.mark.parametrize(
    ("given", "by"),
    [
        (reading(clients=()), "map at train.py:12, on the workers"),
        (reading(clients=(), steps=()), "the workers"),
        (reading(clients=(), tasks=(0.6, 0.4)), "the dispatcher"),
        (reading(clients=(), tasks=()), "nobody who works"),
        (reading(clients=(), units=(0.9,), splits_unassigned=0), "the last units"),
    ],
)
def test_a_save_is_not_bound_by_nobody_who_reads(given, by):
    assert by in find_save_bottleneck(given).location


def test_of_a_pass_that_is_over_or_has_just_begun_nothing_is_said():
    assert find_bottleneck(reading(finished=True)) is None
    assert find_bottleneck(reading(clients=(1.0,), elapsed_seconds=1.0)) is None
    assert find_save_bottleneck(reading(clients=(), finished=True)) is None
    assert find_save_bottleneck(reading(clients=(), elapsed_seconds=1.0)) is None
