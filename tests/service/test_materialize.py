"""Materialized: what a service makes is computed once, and what is kept is what was given."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.errors import (
    AbortedError,
    CancelledError,
    DataLossError,
    FailedPreconditionError,
    InvalidElementError,
    UserFunctionError,
)
from headrace.service import (
    CrossTrainerCache,
    DispatchServer,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
)
from headrace.service.client import parts as parts_room
from headrace.service.client.parts import NOTHING, Parts
from headrace.service.client.source import RemoteSource
from tests.service import counted
from tests.service.reading import wait_until

pytestmark = pytest.mark.system

DYNAMIC = ShardingPolicy.DYNAMIC
CALLS = counted.CALLS


def doubled(number: int) -> int:
    counted.note("doubled")
    return number * 2


def waiting(number: int) -> int:
    time.sleep(0.01)
    return number


def failing(number: int) -> int:
    if number == 60:
        raise ValueError("sixty")
    return number


def opened(number: int) -> hr.Dataset:
    return hr.Dataset.range(number % 7).map(lambda each: each + 100 * number).map(doubled)


PLANS: dict[str, Any] = {
    "rows": lambda: hr.Dataset.range(210).shuffle(40).map(doubled),
    "batches": lambda: hr.Dataset.range(210).shuffle(40).map(doubled).batch(7),
    "files": lambda: hr.Dataset.range(60).interleave(opened, cycle_length=3, block_length=2),
    "values of all lengths": lambda: hr.Dataset.range(90).map(
        lambda x: {"a": np.full(x % 4, x, np.float32), "b": f"{x}"}
    ),
    "shuffled values": lambda: hr.Dataset.range(60).flat_map(opened).shuffle(30).batch(4),
    "nothing": lambda: hr.Dataset.range(0).map(doubled),
}


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with DispatchServer() as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)), WorkerServer(WorkerConfig(address)):
            yield address


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_room, "_PART_SECONDS", 0.0)


def kept(plan: hr.Dataset, service: str, url: Any, **options: Any) -> hr.Dataset:
    return plan.apply(distribute(DYNAMIC, service, materialize=url, **options))


def texts(elements: Any) -> list[str]:
    return [
        repr({name: np.asarray(leaf).tolist() for name, leaf in element.items()})
        if isinstance(element, dict)
        else repr(np.asarray(element).tolist())
        for element in elements
    ]


def first(iterator: Any, count: int) -> list[str]:
    return texts(element for _, element in zip(range(count), iterator, strict=False))


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "in any order"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_pass_is_computed_once_and_others_read_the_same(
    plan: str, is_ordered: bool, service: str, tmp_path: Path
):
    make = PLANS[plan]
    CALLS.clear()
    dataset = kept(make(), service, tmp_path, ordered=is_ordered)
    given = texts(dataset)
    calls = CALLS["doubled"]

    assert sorted(given) == sorted(texts(make())) or "batch" in plan or "shuffled" in plan
    CALLS.clear()
    assert texts(dataset) == given
    assert texts(kept(make(), service, tmp_path, ordered=is_ordered)) == given  # another program
    assert texts(dataset.repeat(2)) == given * 2
    assert CALLS["doubled"] == 0
    assert calls == sum(np.size(json.loads(text)) for text in given if "{" not in text)


def test_in_order_what_is_kept_is_the_sequence_of_one_process(service: str, tmp_path: Path):
    plan = PLANS["batches"]().with_options(hr.Options(seed=5))
    dataset = kept(plan, service, tmp_path, ordered=True)
    assert texts(dataset) == texts(dataset) == texts(plan)


@pytest.mark.usefixtures("many_parts")
@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "in any order"])
@pytest.mark.parametrize("plan", ["batches", "shuffled values"])
def test_passes_that_are_left_off_are_gone_on_with(
    plan: str, is_ordered: bool, service: str, tmp_path: Path
):
    seen: list[list[str]] = []
    for count in (3, 5, 1000):
        with iter(kept(PLANS[plan](), service, tmp_path, ordered=is_ordered)) as iterator:
            seen.append(first(iterator, count))

    whole = seen[-1]
    assert all(whole[: len(each)] == each for each in seen)
    numbers = Counter(n for text in whole for n in np.ravel(json.loads(text)).tolist())
    assert numbers == Counter(
        n for text in texts(PLANS[plan]()) for n in np.ravel(json.loads(text)).tolist()
    )


@pytest.mark.usefixtures("many_parts")
@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "in any order"])
def test_states_go_on_in_what_is_kept_and_in_what_is_not(
    is_ordered: bool, service: str, tmp_path: Path
):
    def over(folder: str) -> Any:
        return iter(kept(PLANS["batches"](), service, tmp_path / folder, ordered=is_ordered))

    with over("a") as iterator:
        before, states = [], []
        for _ in range(20):
            states.append(json.dumps(iterator.get_state()))
            before += first(iterator, 1)
    with over("a") as iterator:
        whole = texts(iterator)
    for count in (0, 1, 7, 19):
        with over("a") as iterator:
            iterator.set_state(json.loads(states[count]))
            assert texts(iterator) == whole[count:]
    # Where nothing of it is kept, the service goes on, and what it gives is not kept.
    with over("b") as iterator:
        iterator.set_state(json.loads(states[19]))
        rest = texts(iterator)
    assert sorted(n for t in before[:19] + rest for n in json.loads(t)) == [
        2 * n for n in range(210)
    ]
    assert not (tmp_path / "b").exists()


def test_a_function_that_fails_ends_the_keeping_and_the_error_comes_in_each_pass(
    service: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    dataset = kept(hr.Dataset.range(100).map(failing), service, tmp_path, ordered=True)
    for _ in range(3):
        given, errors = [], 0
        iterator = iter(dataset)
        while True:
            try:
                given.append(int(next(iterator)))
            except UserFunctionError:
                errors += 1
            except StopIteration:
                break
        assert given == [n for n in range(100) if n != 60]
        assert errors == 1
    assert "it failed" in caplog.text


def test_what_the_consumer_writes_into_its_elements_is_not_kept(service: str, tmp_path: Path):
    plan = hr.Dataset.range(64).map(lambda x: np.full(3, x)).batch(8)
    for _ in range(2):
        given = []
        for batch in kept(plan, service, tmp_path, ordered=True):
            given.append(batch.tolist())
            batch[:] = -1
        assert given == [batch.tolist() for batch in plan]


def test_other_datasets_and_other_readings_are_kept_apart(service: str, tmp_path: Path):
    for _ in range(2):
        for factor in (2, 3):
            plan = hr.Dataset.range(20).map(lambda x, factor=factor: x * factor)
            for is_ordered in (True, False):
                given = [int(x) for x in kept(plan, service, tmp_path, ordered=is_ordered)]
                assert sorted(given) == [factor * n for n in range(20)]
    assert len(list(tmp_path.iterdir())) == 4


def test_of_two_that_read_at_once_one_keeps_and_both_read_all(
    service: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    make = PLANS["batches"]
    with iter(kept(make(), service, tmp_path)) as one, iter(kept(make(), service, tmp_path)) as two:
        given = [first(one, 3), first(two, 3)]
        with caplog.at_level(logging.WARNING):
            given = [given[0] + texts(one), given[1] + texts(two)]
    assert "another reader" in caplog.text

    for each in given:
        assert sorted(n for text in each for n in json.loads(text)) == [2 * n for n in range(210)]
    assert texts(kept(make(), service, tmp_path)) in given


def test_consumers_in_order_keep_their_own_elements(service: str, tmp_path: Path):
    plan = hr.Dataset.range(90).shuffle(20, seed=3).map(doubled)
    expected = texts(plan)
    for number in range(2):
        for index in range(3):
            reading = kept(
                plan,
                service,
                tmp_path,
                ordered=True,
                job_name=f"consumers {number}",
                num_consumers=3,
                consumer_index=index,
            )
            CALLS.clear()
            assert texts(reading) == expected[index::3]
            assert bool(CALLS["doubled"]) == (number == 0)


def test_an_interruption_in_a_step_after_it_loses_nothing_and_is_gone_on_with(
    service: str, tmp_path: Path
):
    interruptions = iter([True])

    def interrupted(batch: Any) -> Any:
        if batch[0] >= 200 and next(interruptions, False):
            raise KeyboardInterrupt
        return batch

    plan = hr.Dataset.range(210).batch(5)
    iterator = iter(kept(plan, service, tmp_path, ordered=True).map(interrupted))
    given: list[str] = []
    with contextlib.suppress(KeyboardInterrupt):
        for element in iterator:
            given += texts([element])
    assert not next(interruptions, False)
    given += texts(iterator)
    assert given == texts(plan)
    assert texts(kept(plan, service, tmp_path, ordered=True)) == given


def test_a_pass_that_lost_elements_is_not_kept(
    service: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RemoteSource, "has_gaps", property(lambda self: True))
    consumer = {"job_name": "lacking", "num_consumers": 1, "consumer_index": 0}
    for options in ({}, consumer):
        for number in range(2):
            name = {"job_name": f"lacking {number}"} if options else {}
            CALLS.clear()
            dataset = kept(PLANS["rows"](), service, tmp_path, ordered=True, **(options | name))
            assert len(texts(dataset)) == 210
            assert CALLS["doubled"] == 210
    assert "it lacks elements" in caplog.text


def test_a_pass_that_others_had_read_is_not_kept_as_an_empty_one(
    service: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def read(folder: str, job_name: str) -> list[str]:
        consumer = {"num_consumers": 1, "consumer_index": 0, "job_name": job_name}
        return texts(kept(PLANS["rows"](), service, tmp_path / folder, ordered=True, **consumer))

    whole = read("a", "over")
    assert read("b", "over") == []
    assert "it lacks elements" in caplog.text
    assert sorted(read("b", "afresh")) == sorted(whole)


def test_a_reader_that_another_thread_closes_is_not_at_its_end(service: str, tmp_path: Path):
    plan = hr.Dataset.range(50).map(waiting)
    source = kept(plan, service, tmp_path, ordered=True).plan.source.seeded(1)  # type: ignore[attr-defined]
    reader = source.open(0, 1)
    found: list[Any] = []

    def read() -> None:
        with contextlib.suppress(CancelledError):
            while (chunk := reader.read(8)) is not None:
                found.append(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: len(found) > 0)
    reader.close()
    thread.join()
    assert len(texts(kept(plan, service, tmp_path, ordered=True))) == 50


def test_it_travels(service: str, tmp_path: Path):
    plan = pickle.loads(pickle.dumps(kept(PLANS["rows"](), service, tmp_path).plan))
    assert texts(hr.Dataset(plan)) == texts(kept(PLANS["rows"](), service, tmp_path))


def test_elements_that_no_file_can_hold_are_an_error_that_names_them(service: str, tmp_path: Path):
    plan = hr.Dataset.range(30).map(lambda x: np.zeros(1 << 18, np.int64 if x < 8 else np.float32))
    with (
        iter(kept(plan, service, tmp_path, ordered=True)) as iterator,
        pytest.raises(InvalidElementError, match="float32"),
    ):
        list(iterator)


def test_it_is_kept_where_fsspec_reaches(service: str):
    url = f"memory://materialized-{uuid.uuid4().hex}"
    given = texts(kept(PLANS["files"](), service, url))
    CALLS.clear()
    assert texts(kept(PLANS["files"](), service, url)) == given
    assert not CALLS["doubled"]


def test_a_record_that_is_damaged_or_gone_is_an_error_with_its_name(service: str, tmp_path: Path):
    dataset = kept(PLANS["batches"](), service, tmp_path, ordered=True)
    iterator = iter(dataset)
    first(iterator, 4)
    iterator.close()
    iterator = iter(dataset)
    first(iterator, 2)
    state = iterator.get_state()
    iterator.close()
    (record,) = tmp_path.glob("*/00000000.json")

    record.write_text("{}")
    with pytest.raises(DataLossError, match=r"00000000\.json"):
        list(dataset)
    record.unlink()
    iterator = iter(dataset)
    iterator.set_state(state)
    with pytest.raises(DataLossError, match="does not hold any more"):
        next(iterator)
    state["at"]["stream"]["hint"][0] = {"part": 0}
    iterator.set_state(state)
    with pytest.raises(FailedPreconditionError, match="does not stand"):
        next(iterator)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processing_mode": ShardingPolicy.OFF}, "OFF"),
        ({"processing_mode": ShardingPolicy.FILE}, "FILE"),
        ({"visitation": "at_most_once"}, "at_most_once"),
        ({"job_name": "shared"}, "'shared'"),
        ({"job_name": "rounds", "num_consumers": 2, "consumer_index": 0}, "ordered=True"),
        ({"job_name": "k", "cross_trainer_cache": CrossTrainerCache("a")}, "cross-trainer"),
    ],
)
def test_readings_that_are_not_alike_in_each_pass_are_refused(
    options: dict[str, Any], words: str, tmp_path: Path
):
    mode = options.pop("processing_mode", DYNAMIC)
    with pytest.raises(ValueError, match=words):
        distribute(mode, "localhost:1", materialize=tmp_path, **options)
    with pytest.raises(TypeError, match="path"):
        distribute(DYNAMIC, "localhost:1", materialize=3)  # type: ignore[arg-type]


def test_what_has_no_end_is_refused(service: str, tmp_path: Path):
    with pytest.raises(ValueError, match="infinite"):
        kept(hr.Dataset.range(3).repeat(), service, tmp_path)


def test_what_was_never_published_is_swept_and_a_part_after_another_is_not_read(tmp_path: Path):
    parts = Parts(str(tmp_path))
    lost = parts.begin(0, "")
    chunk = hr.Chunk.of_columns(np.arange(5), 5)
    lost.append(chunk)
    writer = parts.begin(0, "")
    writer.append(chunk)
    made = writer.publish({"at": None})
    with pytest.raises(AbortedError):
        lost.publish(NOTHING)
    lost.close()
    assert parts.find(0, "") == made
    assert made.elements == 5

    stale, last = parts.begin(1, made.id), parts.begin(1, made.id)
    last.publish(NOTHING)
    with pytest.raises(AbortedError):
        stale.publish(NOTHING)
    found = parts.find(1, made.id)
    assert found is not None
    assert found.is_last
    assert parts.find(1, "f" * 16) is None
    assert parts.find(2, found.id) is None
    assert len(list(tmp_path.glob("*.arrow"))) == 1
