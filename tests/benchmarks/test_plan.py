"""Tests of the plan: its time budget, the choice of workloads, and the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import listing, main
from benchmarks.areas import AREAS
from benchmarks.measure import FULL, LONG_ROUNDS, QUICK
from benchmarks.plan import BENCHMARKS, choose, method

ALL = choose()
ROOT = Path(__file__).resolve().parents[2]


def test_the_full_run_is_planned_within_45_minutes() -> None:
    assert sum(task.seconds(FULL) for task in ALL) < 45 * 60


def test_the_quick_run_is_planned_within_eight_minutes() -> None:
    assert sum(task.seconds(QUICK) for task in choose(headlines_only=True)) < 8 * 60


def test_planned_seconds_are_those_of_starts_and_rounds() -> None:
    task = next(task for task in ALL if task.workload.name == "TFRecord, batch(256)")
    assert [contender.needs for contender in task.workload.contenders[:2]] == [
        ("headrace",),
        ("tensorflow",),
    ]
    two = replace(task, workload=replace(task.workload, contenders=task.workload.contenders[:2]))
    effort = replace(QUICK, seconds=0.7, ramp=0.1, rounds=4, repeats=3)
    starts = 6.0 + 15.0
    assert two.seconds(effort, cores=1) == pytest.approx(starts + 4 * 2 * (0.8 + 0.5))
    assert two.seconds(effort, cores=2) == pytest.approx(starts / 2 + 4 * 2 * (0.8 + 0.5))
    slow = replace(two, workload=replace(two.workload, element_seconds=6.0))
    assert slow.seconds(effort, cores=1) == pytest.approx(starts + 2 * 2 * 6 + 4 * 2 * (6 + 0.5))
    repeated = replace(two, workload=replace(two.workload, repeated=True))
    assert repeated.seconds(effort) == pytest.approx(3 * two.seconds(effort))
    longer = replace(two, workload=replace(two.workload, long_rounds=True))
    difference = longer.seconds(effort) - two.seconds(effort)
    assert difference == pytest.approx(4 * 2 * 0.8 * (LONG_ROUNDS - 1))


def test_every_benchmark_is_in_one_area_and_no_name_means_two_things() -> None:
    assert len(set(BENCHMARKS)) == len(BENCHMARKS)
    for area in AREAS:
        assert area.name not in BENCHMARKS or area.benchmarks == (area.name,)


def test_names_of_workloads_are_unique_and_headlines_exist() -> None:
    names = [task.workload.name for task in ALL]
    assert len(set(names)) == len(names)
    assert {name for area in AREAS for name in area.headlines} <= set(names)


def test_an_area_and_a_benchmark_of_another_are_chosen_in_the_order_of_the_page() -> None:
    chosen = choose(["service", "tfrecord"])
    (service,) = (area for area in AREAS if area.name == "service")
    benchmarks = list(dict.fromkeys(task.benchmark for task in chosen))
    assert benchmarks == ["tfrecord", *service.benchmarks]


def test_a_quick_run_has_three_headlines_of_each_area_and_at_least_one_workload() -> None:
    chosen = choose(headlines_only=True)
    for area in AREAS:
        names = {task.workload.name for task in chosen if task.area is area}
        assert names
        assert names == set(area.headlines[:3]) or (not area.headlines and len(names) == 1)


def test_a_quick_run_of_a_named_benchmark_has_all_its_workloads() -> None:
    assert choose(["tfrecord"], headlines_only=True) == choose(["tfrecord"])
    assert len(choose(["files"], headlines_only=True)) < len(choose(["files"]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("servic", "did you mean service or "),
        ("xyzzy", "no benchmark or area is called 'xyzzy'; --list shows all"),
    ],
)
def test_an_unknown_name_is_an_error_with_similar_names(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_list_has_chosen_areas_benchmarks_workloads_and_contenders(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--list", "files"]) == 0
    listed = capsys.readouterr().out
    assert listed == listing(choose(["files"]), FULL) + "\n"
    assert "files: Reading and decoding files (" in listed
    assert "  tfrecord: Throughput of reading" in listed
    assert "    TFRecord, batch(256): headrace / tf.data / file read + crc32c\n" in listed
    assert "small_rows" not in listed


def test_a_reader_that_has_read_enough_of_the_list_causes_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "--list"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


#: A shell's background job, and its processes, ignore interrupts otherwise.
_INTERRUPTIBLE = """
import signal, sys
from benchmarks.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["--quick", "small_rows"]))
"""


@pytest.mark.heavy
def test_an_interrupt_is_acknowledged_and_says_that_nothing_is_stored() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTIBLE],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline().endswith(" seconds on two idle cores\n")
        assert process.stderr.readline() == "Pipelines in one process\n"
        process.send_signal(signal.SIGINT)
        assert "stopping ...\n" in process.stderr.read()
        last = process.stdout.read().splitlines()[-1]
    assert last == "interrupted: 0 of 2 workloads finished; --quick stores no results"
    assert process.returncode == 130


def test_the_method_names_workloads_with_other_rounds() -> None:
    text = method(FULL)
    assert text.startswith("5 rounds. ")
    long, repeated, one_by_one = text.split("\n* ")[1:]
    assert "JPEG, decode + resize" in long
    assert "exactly once, rows" in repeated
    assert "accelerator, tokens" in one_by_one
