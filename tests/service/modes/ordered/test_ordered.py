"""Ordered reading with real processes: the sequence of a single process, even if workers die."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, UserFunctionError
from headrace.service import (
    DispatcherConfig,
    DispatchServer,
    LocalCluster,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
    from_dataset_id,
    register_dataset,
)

pytestmark = pytest.mark.system

FILES, LINES = 30, 80
DYNAMIC = ShardingPolicy.DYNAMIC


def decode(line: bytes) -> np.ndarray:
    time.sleep(0.0004)
    return np.full(8, int(line))


def doubled(number: int) -> int:
    time.sleep(0.001)
    return number * 2


def is_kept(value: np.ndarray) -> bool:
    return bool(value[0] % 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lines")
    for number in range(FILES):
        lines = "\n".join(str(number * LINES + line) for line in range(LINES - number % 7))
        (path / f"{number:03}.txt").write_text(lines + "\n")
    return str(path)


def lines_in(folder: str, cycle: int = 3) -> hr.Dataset:
    names = hr.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    return names.interleave(hr.TextLineDataset, cycle_length=cycle, block_length=2)


PLANS: dict[str, Any] = {
    "files": lambda folder: lines_in(folder).map(decode).batch(7),
    "filtered": lambda folder: lines_in(folder).map(decode).filter(is_kept).batch(7),
    "shuffled": lambda folder: lines_in(folder).shuffle(10_000, seed=5).map(decode).batch(7),
    "shuffled a little": lambda folder: lines_in(folder, 5).shuffle(50, seed=5).map(decode),
    "rows": lambda _: hr.Dataset.range(1200).shuffle(100, seed=3).map(doubled),
    "batches": lambda _: hr.Dataset.range(2400).shuffle(100, seed=3).map(doubled).batch(16),
    "repeated": lambda _: hr.Dataset.range(400).filter(lambda x: x % 3 > 0).batch(3).repeat(3),
}


def text_of(elements: Any) -> list[str]:
    return [repr(np.asarray(element).tolist()) for element in elements]


def numbers_in(elements: list[str]) -> list[str]:
    return re.findall(r"\d+", " ".join(elements))


def digest_of(elements: list[str]) -> str:
    return hashlib.sha256("\n".join(elements).encode()).hexdigest()


@pytest.mark.parametrize("plan", PLANS)
def test_the_sequence_is_that_of_a_single_process_if_workers_are_killed(
    plan: str, folder: str
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    dataset = PLANS[plan](folder)
    expected = text_of(dataset)
    kills = sorted(chance.sample(range(1, len(expected) * 3 // 4), 2))
    got: list[str] = []
    with LocalCluster(num_workers=2) as cluster:
        killed = 0
        for element in dataset.apply(distribute(DYNAMIC, cluster.target, ordered=True)):
            got += text_of([element])
            if killed < len(kills) and len(got) >= kills[killed]:
                cluster.add_worker()
                cluster.kill_worker(killed)
                killed += 1
    assert killed == 2
    assert got[:5] == expected[:5]
    assert digest_of(got) == digest_of(expected)


def test_both_stages_share_one_seed_and_each_epoch_has_its_own_order(service: str) -> None:
    """Without a seed: an index shuffle on workers, and a shuffle of values in the client."""
    for make in (
        lambda: hr.Dataset.range(300).shuffle(40).batch(4),
        lambda: hr.Dataset.range(20).interleave(hr.Dataset.range).shuffle(30),
    ):
        dataset = make().apply(distribute(DYNAMIC, service, ordered=True))
        once, again = text_of(dataset), text_of(dataset)
        assert Counter(numbers_in(once)) == Counter(numbers_in(again))
        assert once != again, "another order in each iteration"
        seeded = make().with_options(hr.Options(seed=7))
        ordered = seeded.apply(distribute(DYNAMIC, service, ordered=True))
        assert text_of(ordered) == text_of(seeded)


def failing(number: int) -> int:
    if number % 10 == 3:
        raise ValueError(f"no {number}")
    return number


def outcomes_of(dataset: hr.Dataset, state: Any = None) -> list[str]:
    """Return the elements and errors in order, starting from a state if one is given."""
    iterator, found = iter(dataset), []
    if state is not None:
        iterator.set_state(state)
    while True:
        try:
            found.append(str(np.asarray(next(iterator)).tolist()))
        except StopIteration:
            return found
        except UserFunctionError as error:
            message = re.search(r"no \d+", str(error))
            found.append(message[0] if message else str(error))


def opened_unless_absent(number: int) -> hr.Dataset:
    if number % 4 == 1:
        raise ValueError(f"no {number}")
    return hr.Dataset.range(number * 5, number * 5 + number % 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hr.Dataset.range(60).map(failing),
        lambda: hr.Dataset.range(60).map(failing, num_parallel_calls=3),
        lambda: hr.Dataset.range(12).interleave(
            lambda x: hr.Dataset.range(x * 5, x * 5 + 5).map(failing), cycle_length=3
        ),
        lambda: (
            hr.Dataset.range(12)
            .interleave(lambda x: hr.Dataset.range(x * 5, x * 5 + 5), cycle_length=3)
            .map(failing)
        ),
        lambda: hr.Dataset.range(12).interleave(opened_unless_absent, cycle_length=3),
        lambda: hr.Dataset.range(300).filter(lambda x: x % 2 > 0).map(failing).batch(4),
        lambda: (
            hr.Dataset.range(12)
            .interleave(lambda x: hr.Dataset.range(x * 5, x * 5 + 5), cycle_length=3)
            .take(40)
            .map(failing)
        ),
        lambda: (
            hr.Dataset.range(12)
            .interleave(lambda x: hr.Dataset.range(x * 5, x * 5 + 5), cycle_length=3)
            .shuffle(20, seed=3)
            .map(failing)
            .batch(3)
        ),
    ],
    ids=[
        *("map", "parallel map", "in files", "over files", "missing file", "batches of splits"),
        *("over the first rows of files", "over shuffled files"),
    ],
)
def test_errors_are_raised_at_the_positions_of_their_elements(make: Any, service: str) -> None:
    ordered = make().apply(distribute(DYNAMIC, service, ordered=True))
    assert outcomes_of(ordered) == outcomes_of(make())


def slowly_failing(number: int) -> int:
    time.sleep(0.001)
    return failing(number)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_errors_in_worker_batches_lose_and_duplicate_no_row(
    is_shuffled: bool,
) -> None:
    """A batch lacks its failed rows; the rows of later batches do not move."""
    dataset = hr.Dataset.range(1203)
    if is_shuffled:
        dataset = dataset.shuffle(50, seed=3)
    rows = [int(row) for row in dataset]
    expected: list[str] = []
    for start in range(0, len(rows), 8):
        batch = rows[start : start + 8]
        expected += [f"no {row}" for row in batch if row % 10 == 3]
        expected += [str([row for row in batch if row % 10 != 3])]
    remote = dataset.map(slowly_failing).batch(8)
    with LocalCluster(num_workers=2) as cluster:
        got: list[str] = []
        iterator = iter(remote.apply(distribute(DYNAMIC, cluster.target, ordered=True)))
        while True:
            try:
                got.append(str(next(iterator).tolist()))
            except StopIteration:
                break
            except UserFunctionError as error:
                got += re.findall(r"no \d+", str(error))[:1]
            if len(got) in (60, 130):
                cluster.add_worker()
                cluster.kill_worker(len(got) // 130)
    assert got == expected


def test_reading_elements_twice_in_order_is_rejected(service: str) -> None:
    dataset = hr.Dataset.range(9).interleave(hr.Dataset.range, cycle_length=3).enumerate()
    with pytest.raises(FailedPreconditionError, match="move both after `distribute`"):
        dataset.cache().repeat(2).apply(distribute(DYNAMIC, service, ordered=True))


def test_the_order_survives_a_dispatcher_restart(tmp_path: Path) -> None:
    config = DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True)
    dispatcher = DispatchServer(config)
    address = dispatcher.target.removeprefix("tcp://")
    port = int(address.rsplit(":", 1)[1])
    dataset = hr.Dataset.range(1500).map(doubled)
    with WorkerServer(WorkerConfig(address)) as first, WorkerServer(WorkerConfig(address)):
        iterator = iter(dataset.apply(distribute(DYNAMIC, address, ordered=True)))
        got = [int(next(iterator)) for _ in range(200)]
        dispatcher.stop()
        again = DispatcherConfig(work_dir=str(tmp_path), fault_tolerant_mode=True, port=port)
        with DispatchServer(again):
            got += [int(next(iterator)) for _ in range(200)]
            first.stop()
            got += [int(each) for each in iterator]
    assert got == [2 * number for number in range(1500)]


def test_a_registered_dataset_is_read_in_order_by_its_id(service: str, folder: str) -> None:
    dataset = lines_in(folder).map(decode).batch(5)
    name = register_dataset(service, dataset)
    assert text_of(from_dataset_id(DYNAMIC, service, name, ordered=True)) == text_of(dataset)
    first_elements = hr.Dataset.range(100).filter(lambda x: x % 2 > 0).take(7)
    name = register_dataset(service, first_elements)
    assert len(list(from_dataset_id(DYNAMIC, service, name))) == 7


STEPS_OF_THE_WHOLE_STREAM: dict[str, Any] = {
    "take": (lambda ds: ds.take(10), 10),
    "skip": (lambda ds: ds.skip(10), 90),
    "enumerate": (lambda ds: ds.enumerate().map(lambda number, _: number), 100),
    "scan": (lambda ds: ds.scan(np.int64(0), lambda state, x: (state + 1, state)), 100),
    "batch": (lambda ds: ds.batch(7, drop_remainder=True), 14),
}


@pytest.mark.parametrize("step", STEPS_OF_THE_WHOLE_STREAM)
def test_unordered_whole_stream_steps_behave_as_in_a_single_process(
    step: str, service: str
) -> None:
    add, count = STEPS_OF_THE_WHOLE_STREAM[step]
    dataset = add(hr.Dataset.range(200).filter(lambda x: x % 2 > 0))
    got = list(dataset.apply(distribute(DYNAMIC, service)))
    assert len(got) == count == len(list(dataset))
    if step in ("enumerate", "scan"):
        assert sorted(map(int, got)) == list(range(count))


@pytest.mark.parametrize(("step", "terms"), [("take", {}), ("ordered reading", {"ordered": True})])
def test_whole_stream_steps_are_rejected_for_several_clients(
    step: str, terms: dict[str, Any]
) -> None:
    dataset = hr.Dataset.range(10_000).filter(lambda x: x % 2 > 0).take(4000)
    with LocalCluster(num_workers=1, processes=False) as cluster:
        shared = distribute(DYNAMIC, cluster.target, "job", **terms)
        first, second = iter(dataset.apply(shared)), iter(dataset.apply(shared))
        next(first)
        with pytest.raises(FailedPreconditionError, match=rf"{step}.* needs the whole stream"):
            next(second)
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("mode", "visitation"),
    [(ShardingPolicy.OFF, None), (ShardingPolicy.DATA, None), (DYNAMIC, "at_most_once")],
)
def test_ordered_reading_requires_exactly_once(
    mode: ShardingPolicy, visitation: str | None
) -> None:
    with pytest.raises(ValueError, match="ordered=True"):
        distribute(mode, "localhost:1", ordered=True, visitation=visitation)


def opened(number: int) -> hr.Dataset:
    return hr.Dataset.range(number % 7 + 2).map(lambda each: each + 100 * number)


RESUMED: dict[str, Any] = {
    "batches": lambda: hr.Dataset.range(300).shuffle(30).map(lambda x: x + 1).batch(7),
    "rows": lambda: hr.Dataset.range(60).map(lambda x: x + 1),
    "files": lambda: (
        hr.Dataset.range(30)
        .interleave(opened, cycle_length=3, block_length=2)
        .filter(lambda x: x % 2 == 0)
        .batch(5)
    ),
    "shuffled": lambda: hr.Dataset.range(30).interleave(opened, cycle_length=4).shuffle(30),
    "repeated": lambda: hr.Dataset.range(20).filter(lambda x: x % 3 == 0).batch(2).repeat(3),
}


@pytest.mark.parametrize("plan", RESUMED)
def test_other_workers_and_a_single_process_resume_from_a_position(plan: str, service: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    make = RESUMED[plan]
    iterator = iter(make().apply(distribute(DYNAMIC, service, ordered=True)))
    states, elements = [json.dumps(iterator.get_state())], []
    for element in iterator:
        elements += text_of([element])
        states.append(json.dumps(iterator.get_state()))
    with LocalCluster(num_workers=1, processes=False) as other:
        resumed = make().apply(distribute(DYNAMIC, other.target, ordered=True))
        for number in [0, *chance.sample(range(len(states)), 3)]:
            state = json.loads(states[number])
            assert len(states[number]) < 4096
            remote = iter(resumed)
            remote.set_state(state)
            middle = []
            for _ in range(min(3, len(elements) - number)):
                middle += text_of([next(remote)])
            after = remote.get_state()
            remote.close()
            local = iter(make())
            local.set_state(after)
            assert middle + text_of(local) == elements[number:]
            local.set_state(state)
            assert text_of(local) == elements[number:]


def test_the_service_resumes_from_a_position_of_a_single_process(service: str) -> None:
    make = RESUMED["batches"]
    iterator = iter(make())
    first = [next(iterator) for _ in range(11)]
    state = iterator.get_state()
    remote = iter(make().apply(distribute(DYNAMIC, service, ordered=True)))
    remote.set_state(state)
    assert text_of(remote) == text_of(iterator)
    assert len(first) == 11


def test_explain_shows_the_steps_of_both_stages(service: str) -> None:
    dataset = hr.Dataset.range(30).interleave(opened, cycle_length=4).shuffle(30).batch(2)
    text = dataset.apply(distribute(DYNAMIC, service, ordered=True)).explain()
    assert "order: as in a single process" in text
    assert re.search(r"both +interleave .*the client interleaves them", text)
    assert re.search(r"client +shuffle", text)
    assert "as workers finish" in dataset.apply(distribute(DYNAMIC, service)).explain()


def test_a_step_that_opens_datasets_in_the_client_is_rejected_by_name(service: str) -> None:
    dataset = hr.Dataset.range(9).filter(lambda x: x > 2).interleave(opened, cycle_length=2)
    with pytest.raises(FailedPreconditionError, match=r"interleave .*move that step after"):
        dataset.apply(distribute(DYNAMIC, service, ordered=True))
    assert len(list(dataset.apply(distribute(DYNAMIC, service)))) == len(list(dataset))


def left_over_and_failing(dataset: hr.Dataset) -> hr.Dataset:
    return dataset.filter(lambda x: x % 10 != 5).take(20).map(failing)


@pytest.mark.parametrize("number", [3, 4, 5, 13])
def test_an_error_before_a_position_in_sampled_datasets_is_not_repeated(
    number: int, service: str
) -> None:
    dataset = left_over_and_failing(hr.Dataset.range(40))
    expected = outcomes_of(dataset)
    ordered = dataset.apply(distribute(DYNAMIC, service, ordered=True))
    with iter(ordered) as iterator:
        for _ in range(number):
            with contextlib.suppress(UserFunctionError):
                next(iterator)
        state = iterator.get_state()
    for resumed in (ordered, dataset):
        assert outcomes_of(resumed, state) == expected[number:]
