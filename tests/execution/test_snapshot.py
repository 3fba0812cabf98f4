"""`snapshot`: the first complete epoch, stored for later programs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

import headrace as hr
from headrace.element.frame_file import FrameWriter
from headrace.errors import FailedPreconditionError
from headrace.service import LocalCluster, ShardingPolicy, distribute

from .battery import assert_restores_everywhere

Dataset = hr.Dataset


def numbers(iterator):
    return [int(x) for x in iterator]


def files(path):
    return sorted(each.relative_to(path).name for each in path.rglob("*") if each.is_file())


def test_a_second_dataset_with_the_same_steps_reads_the_first_epoch(tmp_path):
    def make():
        return Dataset.range(500).shuffle(100).map(lambda x: x + 1).snapshot(tmp_path)

    dataset = make()
    first = numbers(dataset)
    assert numbers(dataset) == first
    assert numbers(make()) == first  # the shuffle drew once
    assert files(tmp_path) == ["elements"]


@pytest.mark.parametrize(
    "changed",
    [
        lambda: Dataset.range(9).map(lambda x: x + 2),
        lambda: Dataset.range(10).map(lambda x: x + 1),
        lambda: Dataset.range(9).map(lambda x: x + 1).take(5),
    ],
)
def test_a_changed_pipeline_is_stored_separately(tmp_path, changed):
    first = Dataset.range(9).map(lambda x: x + 1)
    assert numbers(first.snapshot(tmp_path)) == numbers(first)
    assert numbers(changed().snapshot(tmp_path)) == numbers(changed())
    assert files(tmp_path) == ["elements"] * 2


def test_a_value_that_a_function_uses_is_part_of_the_name(tmp_path):
    def make(factor):
        return Dataset.range(9).map(lambda x: x * factor).snapshot(tmp_path)

    assert numbers(make(2))[-1] == 16
    assert numbers(make(3))[-1] == 24


def test_an_incomplete_epoch_is_not_read(tmp_path):
    dataset = Dataset.range(900).map(lambda x: x + 1).snapshot(tmp_path)
    with iter(dataset) as iterator:
        next(iterator)
    assert files(tmp_path) == []
    assert numbers(dataset) == list(range(1, 901))


def test_two_writers_at_once_both_finish(tmp_path):
    dataset = Dataset.range(300).map(lambda x: x + 1).snapshot(tmp_path)
    one, other = iter(dataset), iter(dataset)
    pairs = [(next(one), next(other)) for _ in range(300)]
    assert numbers(one) == numbers(other) == []
    assert all(a == b for a, b in pairs)
    assert files(tmp_path) == ["elements"]
    assert numbers(dataset) == list(range(1, 301))


def test_another_program_reads_it(tmp_path):
    program = (
        "import sys\nimport headrace as hr\n"
        "def fn(x):\n"
        "    print('called', file=sys.stderr)\n"
        "    return x + 1\n"
        f"print(sum(hr.Dataset.range(9).map(fn).snapshot({str(tmp_path)!r})))\n"
    )
    results = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        for _ in range(2)
    ]
    assert [result.stdout.strip() for result in results] == ["45", "45"]
    assert [result.stderr.count("called") for result in results] == [9, 0]


def test_states_are_exact_before_and_after_it_is_complete(tmp_path):
    def make():
        return Dataset.range(20).map(lambda x: x + 1).batch(3).snapshot(tmp_path).repeat(2)

    assert_restores_everywhere(make)


@pytest.mark.parametrize("failing_write", [1, 3])
def test_a_full_disk_is_an_error_that_names_the_file_and_no_element_is_lost(
    tmp_path, monkeypatch, failing_write
):
    append, written = FrameWriter.append, []

    def fail(self, chunk):
        written.append(chunk)
        if len(written) == failing_write:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, chunk)

    dataset = Dataset.range(500).map(lambda x: x + 1).snapshot(tmp_path)
    monkeypatch.setattr(FrameWriter, "append", fail)
    iterator, found = iter(dataset), []
    with pytest.raises(FailedPreconditionError, match=r"snapshot .*elements': No space left"):
        found.extend(map(int, iterator))
    state = iterator.get_state()
    assert found + numbers(iterator) == list(range(1, 501))
    restored = iter(dataset)
    restored.set_state(state)
    assert found + numbers(restored) == list(range(1, 501))
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: data.snapshot("x", "GZIP"), "compression.*'GZIP'"),
        (lambda data: data.snapshot("x", reader_func=iter), "reader_func.*not supported"),
        (lambda data: data.snapshot("x", shard_func=iter), "shard_func.*not supported"),
        (lambda data: data.snapshot("gs://bucket"), "path.*URL"),
        (lambda data: data.snapshot(""), "path.*empty"),
        (lambda data: data.repeat().snapshot("x"), "infinite.*before repeat"),
    ],
)
def test_wrong_arguments_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make(Dataset.range(3))


def test_workers_store_copies_and_dynamic_sharding_is_refused(tmp_path):
    dataset = Dataset.range(9).map(lambda x: x + 1).snapshot(tmp_path)
    with LocalCluster(num_workers=2, processes=False) as cluster:
        with pytest.raises(FailedPreconditionError, match=r"snapshot .*distributed_save"):
            dataset.apply(distribute(ShardingPolicy.DYNAMIC, cluster.target))
        copies = dataset.apply(distribute(ShardingPolicy.OFF, cluster.target))
        assert sorted(numbers(copies)) == sorted(numbers(dataset) * 2)
    assert files(tmp_path) == ["elements"]


def test_partial_files_of_killed_processes_are_removed(tmp_path):
    dataset = Dataset.range(3000).map(lambda x: x + 1).snapshot(tmp_path)
    running = iter(dataset)
    next(running)
    (locked,) = tmp_path.glob("*/elements.partial-*")
    abandoned, new = (locked.with_name(f"elements.partial-{name}") for name in "ab")
    for path in (abandoned, new):
        path.write_bytes(b"")
    for path in (abandoned, locked):
        os.utime(path, (1, 1))

    iterator = iter(dataset)
    next(iterator)
    assert not abandoned.exists()
    assert new.exists()
    assert locked.exists()
    iterator.close()
    assert len(numbers(running)) == 2999
    assert files(tmp_path) == ["elements", new.name]
