"""`ignore_errors`: dropped elements, their number, limits and the file of dropped elements."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, UnavailableError, UserFunctionError
from headrace.execution.build import build_iterator
from headrace.execution.iterator import InstrumentedIterator
from headrace.plan.elements import GatherIndices
from headrace.service import LocalCluster, ShardingPolicy, distribute

Dataset = hr.Dataset


def failing(x):
    if x % 3 == 1:
        raise KeyError(int(x))
    return x


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize(
    "make",
    [
        lambda data: data.map(failing),
        lambda data: data.map(failing, num_parallel_calls=3),
        lambda data: data.map(failing).prefetch(4),
        lambda data: data.filter(lambda x: failing(x) == x),
        lambda data: data.flat_map(lambda x: Dataset.from_tensors(x).map(failing)),
        lambda data: data.interleave(lambda x: Dataset.from_tensors(failing(x)), 4),
        lambda data: data.scan(0, lambda total, x: (total, failing(x))),
    ],
)
def test_failed_elements_are_dropped_and_counted(make):
    iterator = iter(make(Dataset.range(20)).ignore_errors())
    assert [int(x) for x in iterator] == [x for x in range(20) if x % 3 != 1]
    assert iterator.num_ignored_errors == 7


def test_the_end_of_an_epoch_logs_the_number_and_the_last_error(caplog):
    dataset = Dataset.range(9).map(failing).ignore_errors()
    with caplog.at_level(logging.WARNING, "headrace"):
        list(dataset)
        assert len(caplog.records) == 1
        assert "dropped 3 elements" in caplog.text
        assert "for element 7" in caplog.text
        caplog.clear()
        list(Dataset.range(9).ignore_errors())
        assert not caplog.records
        list(Dataset.range(9).map(failing).ignore_errors(log_warning=True))
        assert len(caplog.records) == 4


def test_the_next_error_after_the_limit_is_raised_and_reading_continues():
    iterator = iter(Dataset.range(12).map(failing).ignore_errors(limit=2))
    found = []
    with pytest.raises(
        FailedPreconditionError, match=r"dropped 2 elements.*element 7: 7"
    ) as caught:
        found.extend(iterator)
    assert isinstance(caught.value.__cause__, UserFunctionError)
    assert next(iterator) == 8
    assert iterator.num_ignored_errors == 2


def test_the_number_is_part_of_the_state():
    dataset = Dataset.range(30).map(failing).ignore_errors(limit=8)
    iterator = iter(dataset)
    for _ in range(10):
        next(iterator)
    state, count = iterator.get_state(), iterator.num_ignored_errors
    for restored in (iter(dataset), iterator):
        restored.set_state(state)
        next(restored)
        assert restored.num_ignored_errors in (count, count + 1)
        with pytest.raises(FailedPreconditionError, match="dropped 8 elements"):
            list(restored)
        assert restored.num_ignored_errors == 8


def test_dead_letters_name_error_step_position_and_element(tmp_path):
    path = tmp_path / "new" / "letters.jsonl"
    paths = Dataset.from_tensor_slices([f"{n}.jpg" for n in range(5)]).enumerate()

    def load(number, name):
        failing(number)
        return name

    list(paths.map(load).ignore_errors(dead_letter=path))
    first, second = lines(path)
    assert first["error"] == "KeyError"
    assert first["position"] == 1
    assert first["step"].startswith("map (test_ignoring_errors.py:")
    assert first["element"] == "(1, '1.jpg')"
    assert "raised KeyError for element 1: 1" in first["message"]
    assert "Traceback" not in first["message"]
    assert first["time"] <= second["time"]


def test_dead_letters_before_a_state_are_not_written_again(tmp_path):
    path = tmp_path / "letters.jsonl"
    dataset = Dataset.range(30).map(failing).ignore_errors(dead_letter=path)
    iterator = iter(dataset)
    for _ in range(10):
        next(iterator)
    state = iterator.get_state()
    iterator.close()
    restored = iter(dataset)
    restored.set_state(state)
    list(restored)
    assert [line["position"] for line in lines(path)] == list(range(1, 30, 3))


def test_a_spec_that_is_inferred_writes_no_dead_letter(tmp_path):
    path = tmp_path / "letters.jsonl"
    dataset = Dataset.range(1, 9).map(failing).ignore_errors(dead_letter=path)
    assert dataset.element_spec == hr.ArraySpec((), np.int64)
    assert not path.exists()


def test_several_processes_append_to_one_file(tmp_path):
    path = tmp_path / "letters.jsonl"
    program = (
        "import headrace as hr\n"
        "data = hr.Dataset.range(300).map(lambda x: 1 // 0)\n"
        f"list(data.ignore_errors(dead_letter={str(path)!r}))\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert sorted(line["position"] for line in lines(path)) == sorted([*range(300)] * 2)


def test_worker_in_the_name_is_replaced_by_host_and_process(tmp_path):
    list(Dataset.range(3).map(failing).ignore_errors(dead_letter=tmp_path / "{worker}.jsonl"))
    (found,) = tmp_path.iterdir()
    assert "{" not in found.name
    assert len(lines(found)) == 1


def test_a_dead_letter_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    iterator = iter(Dataset.range(6).map(failing).ignore_errors(dead_letter=file / "letters"))
    assert next(iterator) == 0
    with pytest.raises(FailedPreconditionError, match=r"dead letter file '.*file/letters'"):
        next(iterator)
    assert next(iterator) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 0}, "limit.*at least 1"),
        ({"log_warning": 3}, "log_warning.*bool"),
        ({"dead_letter": "s3://bucket/letters"}, "dead_letter.*URL.*append"),
        ({"dead_letter": 3}, "dead_letter.*path"),
    ],
)
def test_wrong_arguments_are_rejected(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Dataset.range(3).ignore_errors(**arguments)


class _Stuck(InstrumentedIterator):
    """Fails forever, without moving on, after two elements."""

    failure: Exception = OSError("the disk is gone")

    def next_chunk(self, limit):
        if self.get_state() >= 2:
            raise self.failure
        return super().next_chunk(1)


class _Unavailable(_Stuck):
    failure = UnavailableError("no worker answers")


@pytest.mark.parametrize(("kind", "most"), [(_Stuck, 1), (_Unavailable, 0)])
def test_an_input_that_does_not_move_on_raises_its_error(kind, most):
    iterator = build_iterator(
        Dataset.range(9).ignore_errors().plan,
        instrument=lambda node, step: kind(step) if isinstance(node, GatherIndices) else step,
    )
    assert sum(iterator.next_chunk(1).size for _ in range(2)) == 2
    for _ in range(3):
        with pytest.raises(type(kind.failure)):
            iterator.next_chunk(1)
    assert iterator.get_state()["ignored"] <= most


def test_interruptions_are_not_dropped():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Dataset.range(3).map(interrupted).ignore_errors())


def nested(x):
    return Dataset.range(int(x) % 4 + 1).map(lambda y: y + 10 * int(x))


PLANS = {
    "map": lambda: Dataset.range(30).map(failing).ignore_errors(),
    "interleave": lambda: Dataset.range(9).interleave(nested, 3).map(failing).ignore_errors(),
    "repeat": lambda: (
        Dataset.range(9).interleave(nested, 3).map(failing).ignore_errors().shuffle(4, 1).repeat(2)
    ),
    "datasets": lambda: Dataset.range(9).flat_map(lambda x: nested(failing(x))).ignore_errors(),
}


@pytest.mark.parametrize("name", PLANS)
def test_workers_drop_the_elements_of_one_process(name, caplog):
    expected = [int(x) for x in PLANS[name]()]
    caplog.clear()
    with LocalCluster(num_workers=2, processes=False) as cluster:

        def read(mode, **options):
            dataset = PLANS[name]().apply(distribute(mode, cluster.target, **options))
            return [int(x) for x in dataset]

        assert read(ShardingPolicy.DYNAMIC, ordered=True) == expected
        assert sorted(read(ShardingPolicy.DYNAMIC)) == sorted(expected)
        assert sorted(read(ShardingPolicy.OFF)) == sorted(expected * 2)
    assert "dropped" in caplog.text


def test_a_line_that_does_not_fit_is_not_left_in_the_file(tmp_path):
    path = tmp_path / "letters"
    script = (
        "import resource\n"
        "import headrace as hr\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        "data = hr.Dataset.range(9).map(lambda x: 1 // 0)\n"
        f"data = data.ignore_errors(dead_letter={str(path)!r})\n"
        "try:\n"
        "    list(data)\n"
        "except hr.errors.FailedPreconditionError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "bytes fit into the dead letter file" in result.stdout
    assert path.read_bytes().endswith(b"}\n")
    assert lines(path) != []
