"""Shared datasets, and evaluation by shards: each element is delivered to one worker."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.coordinator import (
    ClosureWorker,
    ClusterCoordinator,
)
from headrace.coordinator.cluster import Workers
from headrace.data.iterator import DatasetIterator
from headrace.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    UserFunctionError,
)
from tests.coordinator.in_process import SECONDS, coordinating, note, noted, take_next


@pytest.mark.catalogue("2.9.6", "4.3.7")
@pytest.mark.parametrize("size", [0, 1, 6, 25, 100])
@pytest.mark.parametrize("each", [1, 3])
def test_an_epoch_delivers_each_element_once(coordinator: ClusterCoordinator, size: int, each: int):
    shared = coordinator.create_shared_dataset(hr.Dataset.range(size))

    def take(elements: Any, count: int) -> None:
        for _ in range(count):
            note(int(next(elements)))

    for _ in range(2):
        noted.clear()
        steps = coordinator.run_epoch(take, (shared, each))
        assert sorted(noted) == list(range(size))
        assert size // each - 2 <= steps <= size // each
    assert coordinator.done()


def test_unread_elements_of_a_call_go_to_another(coordinator: ClusterCoordinator):
    shared = coordinator.create_shared_dataset(hr.Dataset.range(60))

    def take(elements: Any) -> None:
        first = int(next(elements))
        note(first)
        for _ in range(first % 4):
            element = elements.get_next_as_optional()
            if element.has_value():
                note(int(element.get_value()))

    assert coordinator.run_epoch(take, (shared,)) >= 15
    assert sorted(noted) == list(range(60))


def test_a_function_may_capture_the_shared_dataset(coordinator: ClusterCoordinator):
    shared = coordinator.create_shared_dataset(hr.Dataset.range(40))

    def take() -> None:
        for _ in range(3):
            note(int(next(shared)))

    coordinator.run_epoch(take)
    assert sorted(noted) == list(range(40))


def test_large_elements_are_delivered_unchanged(coordinator: ClusterCoordinator):
    rows = np.arange(6 * 40_000, dtype=np.float32).reshape(6, 40_000)
    shared = coordinator.create_shared_dataset(hr.Dataset.from_tensor_slices({"x": rows}))
    coordinator.run_epoch(lambda it: [note(next(it)["x"]) for _ in range(2)], (shared,))
    np.testing.assert_array_equal(sorted(noted, key=lambda row: row[0]), rows)


def test_an_error_in_an_epoch_is_raised(coordinator: ClusterCoordinator):
    shared = coordinator.create_shared_dataset(hr.Dataset.range(50))
    with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
        coordinator.run_epoch(lambda it: 1 / (int(next(it)) - 20), (shared,))
    coordinator.join(SECONDS)
    broken = hr.Dataset.range(50).map(lambda n: 1 // (int(n) - 7))
    with pytest.raises(UserFunctionError, match="ZeroDivisionError"):
        coordinator.run_epoch(take_next, (coordinator.create_shared_dataset(broken),))
    coordinator.join(SECONDS)


def test_a_shared_dataset_requires_run_epoch(coordinator: ClusterCoordinator):
    shared = coordinator.create_shared_dataset(hr.Dataset.range(5))
    with pytest.raises(FailedPreconditionError, match="run_epoch"):
        coordinator.schedule(take_next, (shared,))
    with pytest.raises(FailedPreconditionError, match="run_epoch"):
        iter(shared)
    with pytest.raises(
        ValueError, match="requires exactly one shared dataset in `args`, but found 0"
    ):
        coordinator.run_epoch(take_next, (3,))
    with pytest.raises(TypeError, match="`dataset`"):
        coordinator.create_shared_dataset([1, 2])  # type: ignore[arg-type]


def _note_until(elements: Any, last: int) -> None:
    element = int(next(elements))
    if element == last:
        raise ValueError("once")
    note(element)


def test_another_program_resumes_an_epoch_with_the_unused_elements(
    coordinator: ClusterCoordinator,
):
    dataset = hr.Dataset.range(300).shuffle(300, seed=4)
    shared = coordinator.create_shared_dataset(dataset)
    assert shared.get_state() == {"version": 1, "epoch": 0}
    last = [int(element) for element in DatasetIterator(dataset.plan)][200]
    with pytest.raises(UserFunctionError, match="once"):
        coordinator.run_epoch(_note_until, (shared, last))
    before = list(noted)
    assert len(before) >= 150
    state = json.loads(json.dumps(shared.get_state()))
    with coordinating(1) as other:
        again = other.create_shared_dataset(hr.Dataset.range(300).shuffle(300, seed=4))
        again.set_state(state)
        assert again.get_state() == state
        assert other.run_epoch(_note_until, (again, -1)) == 300 - len(before)
        assert sorted(noted) == list(range(300))
        # The next epoch has the order that it would have had in the first program.
        assert again.get_state() == {"version": 1, "epoch": 1}
        noted.clear()
        assert other.run_epoch(_note_until, (again, -1)) == 300
        assert noted == [int(element) for element in DatasetIterator(dataset.plan, 1)]


def test_the_state_of_a_shared_dataset_can_be_saved_during_an_epoch(
    coordinator: ClusterCoordinator, tmp_path: Any
):
    shared = coordinator.create_shared_dataset(hr.Dataset.range(400))
    checkpoint = hr.Checkpoint(data=shared)
    _saves[:] = [lambda: (list(noted), checkpoint.save(tmp_path / "here"))]
    assert coordinator.run_epoch(_note_and_save, (shared,)) == 400
    before, path = _saved.pop()
    again = coordinator.create_shared_dataset(hr.Dataset.range(400))
    hr.Checkpoint(data=again).restore(path).assert_consumed()
    noted.clear()
    steps = coordinator.run_epoch(_note_until, (again, -1))
    # Elements in use when the state was saved are delivered again.
    assert 0 <= steps - (400 - len(before)) <= 2 * 64
    assert set(before) | set(noted) == set(range(400))
    assert steps == len(set(noted))
    with pytest.raises(InvalidArgumentError, match="must be the state of a shared dataset"):
        again.set_state({"position": 1})


_saves: list[Any] = []
_saved: list[Any] = []


def _note_and_save(elements: Any) -> None:
    note(int(next(elements)))
    if len(noted) >= 200 and _saves:
        _saved.append(_saves.pop()())


def test_evaluation_by_shards_counts_each_element_once(coordinator: ClusterCoordinator):
    data = hr.Dataset.range(1024)

    def shard_fn(shard: hr.Dataset) -> tuple[int, int]:
        elements = [int(each) for each in shard]
        return sum(elements), len(elements)

    def merge(parts: list[tuple[int, int]]) -> float:
        return sum(total for total, _ in parts) / sum(count for _, count in parts)

    assert coordinator.evaluate(shard_fn, data, 128, merge) == 511.5
    automatic = coordinator.evaluate(shard_fn, data, "auto", list)
    assert [count for _, count in automatic] == [128] * 8  # four for each of two workers
    assert merge(automatic) == 511.5
    assert len(coordinator.evaluate(shard_fn, data.take(3), "auto", list)) == 3
    with pytest.raises((TypeError, ValueError), match="`num_shards`"):
        coordinator.evaluate(shard_fn, data, "many", list)  # type: ignore[arg-type]


def test_evaluation_of_a_shuffled_dataset_counts_each_element_once(coordinator: ClusterCoordinator):
    def elements(shard: hr.Dataset) -> list[int]:
        return [int(each) for each in shard]

    data = hr.Dataset.range(100).shuffle(100)
    assert sorted(coordinator.evaluate(elements, data, 4, np.concatenate)) == [*range(100)]


def test_an_address_without_a_port_is_rejected(
    coordinator: ClusterCoordinator,
):
    with pytest.raises(ValueError, match=r"`address`: address='localhost' must have the form"):
        coordinator.add_worker("localhost")
    assert coordinator.schedule(lambda: 3).fetch(SECONDS) == 3
    with pytest.raises(ValueError, match="worker 1: address='localhost' must have the form"):
        ClusterCoordinator(Workers(["localhost:1", "localhost"]))


_FORGETFUL = """
import sys
from headrace.coordinator import ClusterCoordinator
from headrace.coordinator.cluster import Workers

coordinator = ClusterCoordinator(Workers([sys.argv[1]]))
assert coordinator.schedule(lambda: 1).fetch(30) == 1
{then}
"""


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("", ""),
        (
            "coordinator.schedule(lambda: __import__('time').sleep(0.5))",
            "the program exits with 1 unfinished scheduled functions, which are cancelled; call "
            "coordinator.join() to wait for them",
        ),
    ],
)
def test_a_program_that_exits_without_close_logs_unfinished_functions(then: str, words: str):
    with ClosureWorker(0) as worker:
        ended = subprocess.run(
            [sys.executable, "-c", _FORGETFUL.format(then=then), worker.address],
            check=True,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert ended.stderr.strip() == words


def test_returned_metrics_are_merged(coordinator: ClusterCoordinator) -> None:
    rng = np.random.default_rng(7)
    true, predicted = rng.integers(0, 2, 60), rng.random(60)
    rows = hr.Dataset.from_tensor_slices((true, predicted)).batch(7)
    whole = hr.metrics.AUC(50)
    whole.update_state(true, predicted)

    def measured(shard: hr.Dataset) -> hr.metrics.AUC:
        area = hr.metrics.AUC(50, name="area")
        for labels, scores in shard:
            area.update_state(labels, scores)
        return area

    found = coordinator.evaluate(measured, rows, 4, hr.metrics.AUC(50).merge)
    assert found.result() == whole.result()
    returned = coordinator.schedule(measured, (rows,)).fetch()
    assert (returned.name, returned.sums().tolist()) == ("area", whole.sums().tolist())
    sums = coordinator.evaluate(lambda shard: measured(shard).sums(), rows, 4, list)
    for others in (sums, np.stack(sums), whole, whole.sums(), [whole]):
        assert hr.metrics.AUC(50).merge(others).result() == whole.result()
    # Updates of a captured metric would be lost on the worker.
    with pytest.raises(FailedPreconditionError, match="captured Variable"):
        coordinator.schedule(lambda: whole.update_state([1], [0.5]))
