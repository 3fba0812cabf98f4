"""Frames of `headrace top` for a dispatcher, compared with the files in `frames/`."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from headrace.cli.dispatcher_frame import render_dispatcher
from headrace.service.messages import (
    ClientStatus,
    DispatcherStatus,
    IterationStatus,
    JobStatus,
    LostWorker,
    StepStatus,
    TaskStatus,
    TrainerActivity,
    WorkerStatus,
)

FRAMES = Path(__file__).parent / "frames"

EMPTY = DispatcherStatus(workers=(), jobs=(), datasets=0, uptime_seconds=5.0)

READING = IterationStatus(
    iteration_id=2000,
    epoch=(0, 3),
    finished=False,
    elapsed_seconds=95.0,
    num_splits=1000,
    splits_assigned=614,
    splits_in_progress=24,
    splits_unassigned=386,
    splits_abandoned=1,
    progress=0.59,
    remaining_seconds=135.0,
    elements=590,
    bytes=22_000_000,
    elements_per_second=1234.0,
    bytes_per_second=45_600_000.0,
    history=(0.0, 400.0, 900.0, 1300.0, 1250.0, 10.0, 1234.0),
    wait_seconds=60.0,
    clients=tuple(
        ClientStatus(
            client_id=f"trainer{n}-17-abcdef", seconds_since_heartbeat=0.2, wait_ratio=waiting
        )
        for n, waiting in enumerate((0.62, 0.6, 0.1, 0.05))
    ),
    tasks=tuple(
        TaskStatus(task_id=4000 + n, worker_address=f"10.0.0.{n}:4001", split_wait_ratio=0.04)
        for n in range(2)
    ),
    steps=(
        StepStatus(step="map at train.py:12", seconds=80.0, busy_threads=1.8),
        StepStatus(step="gather at train.py:10", seconds=9.0, busy_threads=0.1),
    ),
)

BUSY = DispatcherStatus(
    workers=(
        WorkerStatus(
            worker_id="a",
            address="10.0.0.0:4001",
            seconds_since_heartbeat=0.3,
            tasks=1,
            elements_per_second=620.0,
            bytes_per_second=22_000_000.0,
            buffered_batches=2,
            buffered_bytes=1_500_000,
        ),
        WorkerStatus(
            worker_id="b",
            address="10.0.0.1:4001",
            seconds_since_heartbeat=12.0,
            tasks=1,
            draining=True,
            elements_per_second=614.0,
            bytes_per_second=23_600_000.0,
        ),
    ),
    jobs=(
        JobStatus(
            job_id=5000,
            name="training",
            dataset_id="1000",
            processing_mode=1,
            num_epochs=4,
            running_tasks=2,
            clients=4,
            iterations=(READING,),
        ),
        JobStatus(
            job_id=5001,
            name="",
            dataset_id="1001",
            processing_mode=0,
            num_epochs=1,
            running_tasks=0,
            clients=0,
        ),
    ),
    datasets=2,
    clients=4,
    plan_bytes=1_200_000_000,
    uptime_seconds=8000.0,
    workers_lost=1,
    recently_lost_workers=(
        LostWorker(address="10.0.0.7:4001", reason="no heartbeat for 12 s", seconds_ago=35.0),
    ),
    refused_connections=3,
    slots=3,
    occupied_slots=2,
)


def with_lower_rate(status):
    (first, *rest) = status.jobs
    before = msgspec.structs.replace(first.iterations[0], elements_per_second=900.0)
    first = msgspec.structs.replace(first, iterations=(before,))
    return msgspec.structs.replace(status, jobs=(first, *rest))


ENDLESS = msgspec.structs.replace(
    BUSY,
    jobs=(
        msgspec.structs.replace(
            BUSY.jobs[0],
            name="evil\x1b[2Jname",
            iterations=(
                msgspec.structs.replace(
                    READING,
                    num_splits=-1,
                    splits_unassigned=None,
                    progress=None,
                    remaining_seconds=None,
                ),
            ),
        ),
    ),
)


@pytest.mark.parametrize(
    ("name", "status", "previous", "width"),
    [
        ("nothing", EMPTY, None, 100),
        ("busy", BUSY, None, 120),
        ("rising", BUSY, with_lower_rate(BUSY), 120),
        ("narrow", BUSY, BUSY, 50),
        ("endless", ENDLESS, None, 120),
    ],
)
def test_frame_equals_the_stored_one(name, status, previous, width):
    path = FRAMES / f"{name}.txt"
    frame = render_dispatcher(status, previous, width)
    if os.environ.get("UPDATE_FRAMES"):
        path.write_text(frame)
    assert frame == path.read_text()


def test_job_line_shows_ordered_mode_and_number_of_consumers():
    def head(**terms):
        job = msgspec.structs.replace(BUSY.jobs[0], **terms)
        frame = render_dispatcher(msgspec.structs.replace(BUSY, jobs=(job,)), None, 120)
        return next(line for line in frame.splitlines() if line.startswith("job "))

    assert "  DYNAMIC, ordered  " in head(ordered=True)
    assert "  DYNAMIC, 3 consumers (remainder: pad)  " in head(num_consumers=3, remainder="pad")


def test_trainers_of_a_shared_epoch_are_listed_with_their_lag():
    trainers = (
        TrainerActivity(trainer_id="a", delivered=90, lag=10),
        TrainerActivity(trainer_id="b", delivered=20, lag=75, skipped=5),
    )
    tasks = tuple(msgspec.structs.replace(task, trainers=trainers) for task in READING.tasks)
    reading = msgspec.structs.replace(READING, tasks=tasks)
    job = msgspec.structs.replace(BUSY.jobs[0], iterations=(reading,))
    frame = render_dispatcher(msgspec.structs.replace(BUSY, jobs=(job,)), None, 120)
    assert "    trainers  2; elements behind: b 150 (10 skipped), a 20\n" in frame


def test_save_is_shown_with_its_path_and_without_clients():
    saving = msgspec.structs.replace(READING, clients=())
    job = msgspec.structs.replace(
        BUSY.jobs[0],
        name="",
        path="/data/out",
        iterations=(saving,),
        elements=590,
        bytes=22_000_000,
    )
    frame = render_dispatcher(msgspec.structs.replace(BUSY, jobs=(job,)), None, 120)
    assert "save into /data/out  dataset" in frame
    assert "590 elements, 22.0 MB written" in frame
    assert "waiting for the dispatcher 0%" in frame
    assert "clients " not in frame.split("save into")[1]
    assert "missing clients" not in frame


@pytest.mark.parametrize("width", [1, 2, 20, 79, 200])
def test_no_line_is_wider_than_the_terminal(width):
    assert all(
        len(line) <= max(3, width) for line in render_dispatcher(BUSY, None, width).splitlines()
    )


def test_falling_rate_is_marked():
    assert " falling" in render_dispatcher(with_lower_rate(BUSY), BUSY, 200)
    assert " rising" not in render_dispatcher(BUSY, BUSY, 200)


def test_the_number_of_wanted_workers_is_shown_if_there_are_jobs():
    status = msgspec.structs.replace(EMPTY, wanted_workers=2)
    assert render_dispatcher(status, None, 80).startswith("0 workers (2 wanted)  0 clients")
    assert "wanted" not in render_dispatcher(EMPTY, None, 80)
