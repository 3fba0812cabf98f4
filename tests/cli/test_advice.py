"""Tests of the bottleneck of an epoch, which follows from the wait times of clients and tasks."""

from __future__ import annotations

import pytest

from headrace.cli.dispatcher_frame import find_bottleneck, find_save_bottleneck
from headrace.service.messages import ClientStatus, IterationStatus, StepStatus, TaskStatus


def make_iteration(clients=(0.0,), tasks=(0.0,), split_waits=(), **fields):
    split_waits = split_waits or (0.0,) * len(tasks)
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
                    split_wait_ratio=split_waits[n],
                )
                for n, waiting in enumerate(tasks)
            ),
            "steps": (StepStatus(step="map at train.py:12", seconds=30.0),),
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("iteration", "location", "advice"),
    [
        (make_iteration(clients=(0.9, 0.8)), "map at train.py:12, on the workers", "add workers"),
        (make_iteration(clients=(0.9,), steps=()), "the workers", "add workers"),
        (make_iteration(tasks=(0.9, 0.7)), "the clients", "training is slower"),
        (make_iteration(clients=(0.5,), tasks=(0.6,)), "the connection between", "network"),
        (make_iteration(clients=(0.3,), tasks=(1.0,)), "the clients", "fewer workers"),
        (make_iteration(clients=(1.0,), tasks=(0.3,)), "map at train.py:12", "faster"),
        (make_iteration(), "nothing", ""),
        (
            make_iteration(clients=(0.9,), split_waits=(0.8,), splits_unassigned=0),
            "the last splits",
            "ends",
        ),
        (
            make_iteration(clients=(0.9,), split_waits=(0.8,), splits_unassigned=9),
            "split assignment",
            "larger",
        ),
        (make_iteration(tasks=()), "missing workers", "start one"),
        (make_iteration(clients=()), "missing clients", "reconnects"),
    ],
)
def test_bottleneck_of_an_epoch_is_located_with_advice(iteration, location, advice):
    found = find_bottleneck(iteration)
    assert location in found.location
    assert advice in found.advice


@pytest.mark.parametrize(
    ("iteration", "location"),
    [
        (make_iteration(clients=()), "map at train.py:12, on the workers"),
        (make_iteration(clients=(), steps=()), "the workers"),
        (make_iteration(clients=(), tasks=(0.6, 0.4)), "the dispatcher"),
        (make_iteration(clients=(), tasks=()), "missing workers"),
        (make_iteration(clients=(), split_waits=(0.9,), splits_unassigned=0), "the last splits"),
    ],
)
def test_bottleneck_of_a_save_does_not_need_clients(iteration, location):
    assert location in find_save_bottleneck(iteration).location


def test_finished_or_just_started_epoch_has_no_bottleneck():
    assert find_bottleneck(make_iteration(finished=True)) is None
    assert find_bottleneck(make_iteration(clients=(1.0,), elapsed_seconds=1.0)) is None
    assert find_save_bottleneck(make_iteration(clients=(), finished=True)) is None
    assert find_save_bottleneck(make_iteration(clients=(), elapsed_seconds=1.0)) is None
