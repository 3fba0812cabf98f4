"""Frames of `headrace top` for a coordinator, compared with the files in `frames/`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.cli.inspect import render_snapshot
from headrace.cli.status_client import ServerSnapshot, StatusSnapshot
from headrace.coordinator.status import CoordinatorStatus, RunningFunction, TrainingWorkerStatus
from headrace.parameter_server.messages import ServerStatus

FRAMES = Path(__file__).parent / "frames"

SERVER = ServerStatus(
    state_id="a",
    index=0,
    uptime_seconds=8000.0,
    requests=80_000,
    operations={"GatherIds": 40_000, "ApplyIds": 39_990, "CreateTable": 1},
    bytes_in=1_600_000_000,
    bytes_out=3_200_000_000,
    busy_seconds=800.0,
    failed=3,
    waiting_requests=2,
    shards=12,
    tables=1,
    rows=1_234_567,
    bytes_stored=45_600_000,
)

BUSY = CoordinatorStatus(
    num_waiting=1200,
    num_unfinished=1206,
    num_finished=45_678,
    staleness_gap=5,
    failure="ValueError: the loss is not finite\nand more",
    workers=(
        TrainingWorkerStatus(
            worker=0,
            address="10.0.0.1:2222",
            is_connected=True,
            seconds_in_state=7990.0,
            num_in_flight=4,
            running=(("train_step", 0.32), ("evaluate", 12.0), ("train_step", 0.1)),
            num_finished=30_000,
        ),
        TrainingWorkerStatus(
            worker=1,
            address="10.0.0.2:2222",
            is_connected=False,
            seconds_in_state=12.0,
            reason="10.0.0.2:2222 refused the connection\nfor now",
            num_finished=15_678,
            num_losses=2,
        ),
        TrainingWorkerStatus(
            worker=2,
            address="10.0.0.3:2222",
            is_connected=True,
            seconds_in_state=3.0,
            num_in_flight=2,
        ),
    ),
    uptime_seconds=8000.0,
    num_in_flight=6,
    finished_per_second=482.0,
    num_returned=45_680,
    num_failed=1,
    num_retried=3,
    num_workers_lost=2,
    max_staleness_gap=8,
    staleness=8,
    longest_running=RunningFunction(name="evaluate", worker=0, seconds=12.0, median_seconds=0.9),
    servers=("10.0.0.9:2222", "10.0.0.8:2222"),
)
SERVERS = (
    ServerSnapshot("10.0.0.9:2222", SERVER),
    ServerSnapshot("10.0.0.8:2222", None, "10.0.0.8:2222 refused the connection"),
)
NOW = StatusSnapshot(BUSY, 50.0, SERVERS)
BEFORE = StatusSnapshot(
    msgspec.structs.replace(BUSY, finished_per_second=600.0),
    48.0,
    (
        ServerSnapshot(
            "10.0.0.9:2222",
            msgspec.structs.replace(
                SERVER,
                requests=79_000,
                bytes_in=1_580_000_000,
                bytes_out=3_160_000_000,
                busy_seconds=799.0,
            ),
        ),
        SERVERS[1],
    ),
)
QUIET = StatusSnapshot(
    CoordinatorStatus(num_waiting=0, num_unfinished=0, num_finished=0, staleness_gap=0), 1.0
)


def restart_server(snapshot: StatusSnapshot) -> StatusSnapshot:
    first = snapshot.servers[0]
    assert first.status is not None
    status = msgspec.structs.replace(first.status, state_id="b", requests=10**6)
    return replace(snapshot, servers=(replace(first, status=status),))


@pytest.mark.parametrize(
    ("name", "snapshot", "previous", "width"),
    [
        ("coordinator_quiet", QUIET, None, 100),
        ("coordinator_busy", NOW, None, 120),
        ("coordinator_falling", NOW, BEFORE, 120),
        ("coordinator_narrow", NOW, BEFORE, 50),
        ("server", StatusSnapshot(SERVER, 50.0), StatusSnapshot(SERVER, 48.0), 120),
    ],
)
def test_frame_equals_the_stored_one(
    name: str, snapshot: StatusSnapshot, previous: StatusSnapshot | None, width: int
):
    path = FRAMES / f"{name}.txt"
    frame = render_snapshot(snapshot, previous, width)
    if os.environ.get("UPDATE_FRAMES"):
        path.write_text(frame)
    assert frame == path.read_text()


def test_rates_of_a_restarted_server_start_at_its_restart():
    assert render_snapshot(NOW, restart_server(BEFORE), 200) == render_snapshot(
        NOW, replace(BEFORE, servers=()), 200
    )


@pytest.mark.parametrize("width", [1, 20, 79, 200])
def test_no_line_is_wider_than_the_terminal(width: int):
    frame = render_snapshot(NOW, BEFORE, width)
    assert all(len(line) <= max(3, width) for line in frame.splitlines())


def test_short_medians_are_milliseconds():
    longest = RunningFunction(name="step", worker=0, seconds=1.0, median_seconds=0.00042)
    frame = render_snapshot(
        StatusSnapshot(msgspec.structs.replace(BUSY, longest_running=longest), 0.0), None, 120
    )
    assert "step on worker 0 for 1.0 s; median 0.42 ms" in frame


def test_long_loss_reason_is_truncated_before_the_other_columns():
    worker = msgspec.structs.replace(BUSY.workers[1], reason="no heartbeat for 10 s, " * 10)
    frame = render_snapshot(
        StatusSnapshot(msgspec.structs.replace(BUSY, workers=(worker,)), 0.0), None, 120
    )
    [line] = [line for line in frame.splitlines() if line.startswith("1 at ")]
    assert line.endswith("...          0  15,678       2      12 s")


def test_control_characters_in_function_names_are_escaped():
    longest = RunningFunction(name="evil\x1b[2Jname", worker=0, seconds=1.0)
    frame = render_snapshot(
        StatusSnapshot(msgspec.structs.replace(BUSY, longest_running=longest), 0.0), None, 120
    )
    assert "\x1b" not in frame
    assert "evil?[2Jname" in frame
