"""Tests of `hr.jax` on 8 devices (`jax_on_8_devices.py`) and in two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.on_devices import names_of_tests, once, outcomes

FILE = Path(__file__).with_name("jax_on_8_devices.py")

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    flags = "--xla_force_host_platform_device_count=8"
    named = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    found: dict[str, str] = once(
        tmp_path_factory, FILE.stem, lambda folder: outcomes(FILE, folder, **named)
    )
    return found


@pytest.mark.parametrize("name", names_of_tests(FILE))
def test_on_8_devices(name: str, found: dict[str, str]) -> None:
    assert found.get(name, str(found)) == ""


# --- two processes ------------------------------------------------------------------------------

PROGRAM = Path(__file__).with_name("jax_in_two_processes.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each scenario in each of two processes."""
    found: list[dict[str, Any]] = once(tmp_path_factory, PROGRAM.stem, run_both)
    return found


def run_both(folder: Path) -> list[dict[str, Any]]:
    """Run the program in two processes; return their results by scenario."""
    (folder / "a.txt").write_text("".join(f"{number}\n" for number in range(12)))
    (folder / "b.txt").write_text("".join(f"{number}\n" for number in range(12, 32)))
    with socket.socket() as jax_socket, socket.socket() as worker_socket:
        jax_socket.bind(("127.0.0.1", 0))
        worker_socket.bind(("127.0.0.1", 0))
        port, worker_port = jax_socket.getsockname()[1], worker_socket.getsockname()[1]
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *map(str, (number, port, folder, worker_port))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for number in range(2)
    ]
    try:
        printed = [process.communicate(timeout=150)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    marked = [
        [line for line in text.splitlines() if line.startswith("scenario ")] for text in printed
    ]
    assert [process.returncode for process in running] == [0, 0], "\n".join(printed)
    return [dict(json.loads(line.partition(" ")[2]) for line in lines) for lines in marked]


def test_the_whole_array_is_the_batch_of_one_process(results):
    for each in results:
        whole = each["array sharded by DATA"]
        assert whole == [list(range(n, n + 8)) for n in range(0, 24, 8)]


def test_processes_shuffle_in_the_same_order_without_a_seed(results):
    first, second = (each["shuffled without a seed"] for each in results)
    assert first == second
    assert sorted(first[0] + first[1]) == list(range(16))


def test_each_process_has_the_rows_of_its_devices_in_a_mesh(results):
    first, second = (each["over a 2-D mesh"] for each in results)
    assert first == [[[8], [[0, [0, 1]], [2, [2, 3]]]], [[8], [[0, [8, 9]], [2, [10, 11]]]]]
    assert second == [[[8], [[4, [4, 5]], [6, [6, 7]]]], [[8], [[4, [12, 13]], [6, [14, 15]]]]]


def test_processes_that_share_a_batch_shard_read_the_same_rows(results):
    first, second = (each["tensor parallel over processes"] for each in results)
    assert first == second
    assert sorted(n for _, parts in first for _, part in parts for n in part) == list(range(16))


def test_a_partial_batch_raises_on_all_processes(results):
    for each in results:
        assert "1, 1, 1, 1, 0, 0, 0 and 0 rows" in each["partial batch"]


def test_processes_read_different_files(results):
    for process, each in enumerate(results):
        start, device = 12 * process, 4 * process
        assert each["files"] == [
            [[8], [[device + n, [start + step + n]] for n in range(4)]] for step in (0, 4, 8)
        ]


def test_datasets_with_worker_processes_are_shared_by_processes_like_local_ones(results):
    for each in results:
        assert each["files in worker processes"] == each["files"]
        rows = [row for batch in each["shuffled in worker processes"] for row in batch]
        assert sorted(rows) == [*range(-15, 1)]


def test_files_of_unequal_length_raise_or_end_with_the_shortest_or_longest(results):
    for process, each in enumerate(results):
        error = each["files of unequal length"]
        assert error.startswith("InvalidArgumentError: processes [0] have no rows left")
        assert each["files of unequal length, dropped"] == each["files"]
        padded = each["files of unequal length, padded"]
        assert len(padded) == 5
        numbers = [
            row
            for _, x, mask in padded
            for (_, [row]), (_, [real]) in zip(x, mask, strict=True)
            if real
        ]
        assert numbers == (list(range(12)) if process == 0 else list(range(12, 32)))


def test_fewer_files_than_pipelines_raise_on_all_before_the_first_batch(results):
    for each in results:
        assert "1 file to shard" in each["too few files"]


def test_a_failed_or_closed_process_ends_the_other_which_names_it(results):
    assert results[1]["one fails"].startswith("UserFunctionError")
    assert results[0]["one fails"].startswith("AbortedError: process 1 failed")
    assert results[0]["one closes"].startswith("AbortedError: process 1 closed")


def test_a_strategy_uses_a_program_that_the_user_formed_in_any_rank_order(results):
    second, first = (each["strategy over both processes"] for each in results)
    assert first == [[0, 1, 2, 3], [[n, [n]] for n in range(4)], 8.0, 1, True]
    assert second == [[4, 5, 6, 7], [[n, [n]] for n in range(4, 8)], 8.0, 1, True]


def test_a_sharding_of_one_process_does_not_involve_others(results):
    assert [each["separate shardings"] for each in results] == [[1], [2]]


def test_states_resume_in_all_processes(results):
    for each in results:
        _, rest, again = each["resumed"]
        assert rest == again
        assert len(rest) == 2


def test_states_of_two_file_reading_processes_and_of_one_are_exchangeable(results):
    first, second = (each["resumed with other processes"] for each in results)
    assert first[0] == second[0]
    for _, rest, *_ in (first, second):
        assert rest == [*range(4, 12), *range(16, 32)]
    assert sorted(first[2] + second[2]) == list(range(8, 16))
    assert sorted(first[3] + second[3]) == list(range(16, 32))
    assert (first[4], second[4]) == (first[3], second[3])


def test_input_that_differs_between_processes_is_rejected(results):
    for each in results:
        assert "deterministic=False" in each["unordered step"]
        assert "padded_batch" in each["unequal lengths of the second axis"]
