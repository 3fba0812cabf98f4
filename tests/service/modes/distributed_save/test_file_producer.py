"""File producer: files are reported as complete only between splits."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.execution.iterator import ElementIterator
from headrace.plan.serialize import dump_plan
from headrace.saved.chunk_file import ChunkFile
from headrace.saved.directory import SavedDirectory
from headrace.saved.format import ChunkRecord, SaveHeader
from headrace.service.messages import SaveDestination
from headrace.service.modes.distributed_save.producer import FileProducer
from headrace.service.worker.pending_actions import SplitGrant
from headrace.service.worker.producer_channel import ProducerChannel
from headrace.service.worker.result_batch import ResultBatch
from headrace.service.worker.task_iterator import open_plan
from headrace.storage.files import LocalFolder
from tests.service.reading import wait_until
from tests.service.worker.core_driver import definition
from tests.service.worker.scripted_iterator import SECONDS

SAVE = "0" * 16


class Session:
    """Assigns splits to a producer and records its reports."""

    def __init__(
        self,
        path: Path,
        dataset: hr.Dataset,
        *,
        chunk_bytes: int | None = None,
        disk_full_seconds: float = 0.3,
    ) -> None:
        self.directory = SavedDirectory(path)
        self.directory.begin(SaveHeader(SAVE, "digest", None))
        self.batches: list[ResultBatch] = []
        self.failure: str | None = None
        self.ended = threading.Event()
        self.needs = threading.Semaphore(0)
        self.channel = ProducerChannel(1, self)
        plan = dump_plan(dataset.plan)
        task = definition(assigns_splits=True)

        def opened(flush: Callable[[], None]) -> ElementIterator:
            return open_plan(plan, task, partial(self.channel.next_splits, flush), worker="w:1")

        order = SaveDestination(SAVE, str(path), b"", chunk_bytes)
        self.producer = FileProducer(
            "task-1",
            opened,
            self.channel,
            destination=order,
            stream=4,
            disk_full_seconds=disk_full_seconds,
        )
        self.producer.start()

    def batch_produced(self, producer: int, batch: ResultBatch) -> None:
        self.batches.append(batch)
        self.channel.resume()

    def splits_needed(self, producer: int) -> None:
        self.needs.release()

    def producer_ended(self, producer: int, failure: str | None) -> None:
        self.failure = failure
        self.ended.set()

    def grant(self, *splits: tuple[int, int] | None) -> None:
        for each in splits:
            assert self.needs.acquire(timeout=SECONDS)
            self.channel.grant(SplitGrant(producer=1, splits=each))

    def let_wait(self) -> None:
        assert self.needs.acquire(timeout=SECONDS)
        self.channel.defer()

    def end(self) -> None:
        assert self.ended.wait(SECONDS)
        self.producer.join(SECONDS)

    def elements(self, batch: ResultBatch) -> list[Any]:
        found: list[Any] = []
        for each in batch.files:
            record = ChunkRecord(4, each.number, each.elements, each.bytes, each.schema, 0)
            folder = self.directory.folder
            folder.publish(record.name(SAVE), record.public_name(SAVE))
            chunk = ChunkFile(folder, record, SAVE).read(0, 1 << 20)
            found += [] if chunk is None else [int(row) for row in chunk.rows()]
        return found

    def leftovers(self) -> list[str]:
        return self.directory.folder.list_unpublished()


def test_all_files_are_reported_at_the_end(tmp_path: Path) -> None:
    session = Session(tmp_path, hr.Dataset.range(10).map(lambda x: x * 2))
    session.grant((0, 3), (7, 9), None)
    session.end()
    (batch,) = session.batches
    assert (batch.done_from, batch.done_to, batch.num_elements) == (0, 5, 5)
    assert session.elements(batch) == [0, 2, 4, 14, 16]
    assert session.leftovers() == []


def test_files_of_the_target_size_are_reported(tmp_path: Path) -> None:
    session = Session(tmp_path, hr.Dataset.range(1000), chunk_bytes=1000)
    session.grant((0, 1000), None)
    session.end()
    assert len(session.batches) > 3
    assert [each.done_from for each in session.batches[1:]] == [
        e.done_to for e in session.batches[:-1]
    ]
    assert [x for each in session.batches for x in session.elements(each)] == [*range(1000)]


def test_elements_without_bytes_are_written(tmp_path: Path) -> None:
    session = Session(tmp_path, hr.Dataset.from_tensor_slices(np.zeros((5, 0))))
    session.grant((0, 5), None)
    session.end()
    assert session.failure is None
    assert sum(each.num_elements for each in session.batches) == 5


def test_complete_files_are_reported_when_no_splits_are_assigned(tmp_path: Path) -> None:
    session = Session(tmp_path, hr.Dataset.range(10))
    session.grant((0, 3))
    session.let_wait()
    wait_until(lambda: bool(session.batches))
    assert session.batches[0].done_to == 3
    session.channel.grant(SplitGrant(producer=1, splits=(3, 5)))
    session.grant(None)
    session.end()
    assert session.elements(session.batches[1]) == [3, 4]


def test_elements_held_by_a_step_are_reported_when_it_is_exhausted(tmp_path: Path) -> None:
    session = Session(tmp_path, hr.Dataset.range(10).filter(lambda x: x % 2 == 0).batch(2))
    session.grant((0, 3))
    session.let_wait()
    session.channel.grant(SplitGrant(producer=1, splits=(3, 5)))
    session.grant(None)
    session.end()
    assert [each.done_to for each in session.batches] in ([5], [3, 5])
    assert sum(each.num_elements for each in session.batches) == 2


@pytest.mark.parametrize("and_waits", [False, True])
def test_elements_held_by_steps_are_reported_after_a_flush(tmp_path: Path, and_waits: bool) -> None:
    dataset = hr.Dataset.range(100).filter(lambda x: x < 60).shuffle(1000, seed=3).batch(4)
    session = Session(tmp_path, dataset.unbatch())
    session.grant((0, 8))
    assert session.needs.acquire(timeout=SECONDS)
    assert session.batches == []
    session.channel.grant(SplitGrant(producer=1, is_pause=True))
    if and_waits:
        session.let_wait()
        session.needs.release()
    session.grant((50, 70), (3, 4), None)
    session.end()
    assert [(each.done_from, each.done_to) for each in session.batches] == [(0, 8), (8, 29)]
    assert sorted(session.elements(session.batches[0])) == [*range(8)]
    assert sorted(session.elements(session.batches[1])) == [3, *range(50, 60)]


def test_splits_without_elements_are_reported(tmp_path: Path) -> None:
    session = Session(tmp_path, hr.Dataset.range(10).filter(lambda x: x < 2))
    session.grant((0, 8))
    session.let_wait()
    wait_until(lambda: bool(session.batches))
    assert sum(each.num_elements for each in session.batches) == 2
    session.channel.grant(SplitGrant(producer=1))
    session.end()
    assert session.failure is None


def test_a_failing_function_ends_the_producer(tmp_path: Path) -> None:
    def seven(x: int) -> int:
        if x == 7:
            raise ValueError("seven")
        return x

    session = Session(tmp_path, hr.Dataset.range(10).map(seven))
    session.grant((0, 10))
    session.end()
    assert session.failure is not None
    assert "seven" in session.failure
    assert session.batches == []
    assert session.leftovers() == []


class FullDisk:
    """A file on a disk with room for a number of bytes; increase `room` to free more."""

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self.room = room
        self.refused = threading.Event()

    def write(self, data: Any) -> int:
        taken = min(self.room, len(data))
        if not taken:
            self.refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= taken
        return int(self._file.write(data[:taken]))

    def close(self) -> None:
        self._file.close()


def test_a_temporarily_full_disk_loses_no_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks: list[FullDisk] = []
    create = LocalFolder.create

    def raise_disk_full(self: LocalFolder, name: str) -> Any:
        disks.append(FullDisk(create(self, name), room=100))
        return disks[-1]

    with monkeypatch.context() as patched:
        session = Session(tmp_path, hr.Dataset.range(1000), disk_full_seconds=60.0)
        patched.setattr(LocalFolder, "create", raise_disk_full)
        session.grant((0, 1000), None)
        wait_until(lambda: bool(disks))
        assert disks[0].refused.wait(SECONDS)
        assert session.batches == []
        disks[0].room = 1 << 30
        session.end()
    assert session.failure is None
    assert [x for each in session.batches for x in session.elements(each)] == [*range(1000)]


def test_a_cancelled_save_does_not_wait_for_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(open("/dev/null", "wb"), room=0)  # noqa: SIM115 - closed by its caller
    with monkeypatch.context() as patched:
        session = Session(tmp_path, hr.Dataset.range(10), disk_full_seconds=600.0)
        patched.setattr(LocalFolder, "create", lambda self, name: disk)
        session.grant((0, 10), None)
        assert disk.refused.wait(SECONDS)
        session.channel.close()
        session.end()
    assert session.failure is not None


def test_a_disk_that_stays_full_ends_the_producer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(self: object, name: str) -> Any:
        return open("/dev/full", "wb", buffering=0)

    with monkeypatch.context() as patched:
        session = Session(tmp_path, hr.Dataset.range(10))
        patched.setattr("headrace.storage.files.LocalFolder.create", raise_disk_full)
        session.grant((0, 10), None)
        session.end()
    assert session.failure is not None
    assert re.search(
        rf"cannot write '{tmp_path}/.*\.arrow': No space left .* \([\d,]+ of [\d,]+ bytes are",
        session.failure,
    )
    assert session.failure.count("cannot write") == 1


def test_a_plan_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    session = Session(tmp_path, hr.Dataset.range(3))
    session.grant((0, 3), None)
    session.end()

    def refuse(flush: Callable[[], None]) -> ElementIterator:
        raise ValueError("no such thing")

    order = SaveDestination(SAVE, str(tmp_path), b"")
    session.ended.clear()
    FileProducer("task-2", refuse, ProducerChannel(2, session), destination=order, stream=5).start()
    session.end()
    assert session.failure == "its plan cannot be opened: ValueError: no such thing"


def test_the_iterator_is_closed_at_the_end(tmp_path: Path) -> None:
    closed: list[bool] = []

    class Empty(ElementIterator):
        def next_chunk(self, limit: int) -> None:
            return None

        def get_state(self) -> None: ...

        def set_state(self, state: object) -> None: ...

        def close(self) -> None:
            closed.append(True)

    session = Session(tmp_path, hr.Dataset.range(3))
    session.grant((0, 3), None)
    session.end()
    session.ended.clear()
    order = SaveDestination(SAVE, str(tmp_path), b"")
    FileProducer(
        "task-2", lambda _: Empty(), ProducerChannel(2, session), destination=order, stream=5
    ).start()
    session.end()
    assert session.failure is None
    assert closed == [True]


def test_a_closed_producer_leaves_no_partial_file(tmp_path: Path) -> None:
    session = Session(tmp_path, hr.Dataset.range(1 << 20))
    session.grant((0, 1 << 18))
    assert session.needs.acquire(timeout=SECONDS)
    session.channel.close()
    session.end()
    assert session.leftovers() == []
