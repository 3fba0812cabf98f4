"""Elements of one worker of five, and their order, under each static policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from headrace.service import (
    SHARD_HINT,
    DispatcherConfig,
    DispatchServer,
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
)
from headrace.transport import inprocess

Dataset = hr.Dataset
OFF, DYNAMIC, FILE = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC, ShardingPolicy.FILE
DATA, EITHER, HINT = ShardingPolicy.DATA, ShardingPolicy.FILE_OR_DATA, ShardingPolicy.HINT
Read = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=["localhost", "localhost:%port%", "localhost:%port_w%"])
def read(request: pytest.FixtureRequest) -> Iterator[Read]:
    """Return a function that reads a dataset with only worker `slot` of five known as local."""
    with ExitStack() as stack:
        config = DispatcherConfig(worker_addresses=[request.param] * 5, deployment_mode="COLOCATED")
        dispatcher = stack.enter_context(DispatchServer(config))
        address = dispatcher.target.removeprefix("tcp://")
        workers = [stack.enter_context(WorkerServer(WorkerConfig(address))) for _ in range(5)]

        def read(dataset: Dataset, mode: ShardingPolicy, slot: int, **options: Any) -> list[Any]:
            others = [each.address for each in workers if each is not workers[slot]]
            known = {each: inprocess._servers.pop(each) for each in others}
            try:
                shared = dataset.apply(distribute(mode, dispatcher.target, **options))
                with iter(shared) as reader:
                    return [_plain(each) for each in reader]
            finally:
                inprocess._servers.update(known)

        yield read


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value if isinstance(value, bytes) else value.tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a pattern of ten files of ten records."""
    folder: Path = tmp_path_factory.mktemp("shards")
    for number in range(10):
        with hr.io.TFRecordWriter(folder / f"{number:02d}.tfrecord") as writer:
            for record in range(10):
                writer.write(f"{number}.{record}".encode())
    return f"{folder}/*.tfrecord"


def records(*ids: tuple[int, int]) -> list[bytes]:
    return [f"{number}.{record}".encode() for number, record in ids]


TWO_FILES = records(*((n, r) for n in (3, 8) for r in range(10)))
TWO_OF_EACH = records(*((n, r) for n in range(10) for r in (3, 8)))
IN_TURN = records(*((n, r) for r in range(10) for n in (3, 8)))


@pytest.mark.catalogue("AS1", "AS2", "AS24-26")
def test_a_range_is_sharded_by_element(read: Read) -> None:
    for mode in (DATA, EITHER):
        assert read(Dataset.range(20), mode, 1) == [1, 6, 11, 16]
        assert read(Dataset.range(20), mode, 3) == [3, 8, 13, 18]
        assert read(Dataset.range(0), mode, 1) == []
    with pytest.raises(NotFoundError, match="Found an unshardable source dataset"):
        read(Dataset.range(20), FILE, 1)


@pytest.mark.catalogue("AS20")
def test_batches_are_sharded_as_a_whole(read: Read) -> None:
    for mode in (DATA, EITHER):
        assert read(Dataset.range(20).batch(3), mode, 1) == [[3, 4, 5], [18, 19]]


@pytest.mark.catalogue("AS3")
@pytest.mark.parametrize("index", [SHARD_HINT, 0, 5])
def test_a_hint_takes_the_slot_of_the_worker_for_any_index(read: Read, index: int) -> None:
    hinted = Dataset.range(20).shard(num_shards=SHARD_HINT, index=index)
    assert read(hinted, HINT, 1) == [1, 6, 11, 16]


@pytest.mark.catalogue("AS4", "AS5")
def test_a_shard_without_hint_is_unchanged(read: Read) -> None:
    assert read(Dataset.range(20).shard(1, 0), HINT, 1) == list(range(20))
    with pytest.raises(ValueError, match="index"):
        Dataset.range(20).shard(5, index=SHARD_HINT)


@pytest.mark.catalogue("AS6")
@pytest.mark.parametrize("mode", [OFF, EITHER])
def test_hints_are_rejected_by_other_policies(read: Read, mode: ShardingPolicy) -> None:
    with pytest.raises(FailedPreconditionError, match="HINT"):
        read(Dataset.range(20).shard(SHARD_HINT, 0), mode, 1, target_workers="LOCAL")


@pytest.mark.catalogue("AS7", "AS15")
def test_without_sharding_each_worker_reads_everything(read: Read, files: str) -> None:
    assert read(Dataset.range(20), OFF, 1, target_workers="LOCAL") == list(range(20))
    everything = Dataset.list_files(files, shuffle=False).flat_map(hr.TFRecordDataset)
    found = read(everything, OFF, 3, target_workers="LOCAL")
    assert found == records(*((n, r) for n in range(10) for r in range(10)))


@pytest.mark.catalogue("AS10-12")
def test_files_are_sharded_before_they_are_shuffled(read: Read, files: str) -> None:
    in_order = Dataset.list_files(files, shuffle=False).flat_map(hr.TFRecordDataset)
    shuffled = Dataset.list_files(files, shuffle=True).flat_map(hr.TFRecordDataset)
    for mode in (FILE, EITHER):
        assert read(in_order, mode, 3) == TWO_FILES
        assert sorted(read(shuffled, mode, 3)) == sorted(TWO_FILES)
    assert read(in_order, DATA, 3) == TWO_OF_EACH


@pytest.mark.catalogue("AS13", "AS14")
def test_options_choose_between_file_and_element_shards(read: Read, files: str) -> None:
    names = Dataset.list_files(files, shuffle=False)
    by_element = names.flat_map(hr.TFRecordDataset).shard(SHARD_HINT, SHARD_HINT)
    assert read(by_element, HINT, 3) == TWO_OF_EACH
    by_file = names.shard(SHARD_HINT, SHARD_HINT).flat_map(hr.TFRecordDataset)
    assert read(by_file, HINT, 3) == TWO_FILES


@pytest.mark.catalogue("AS17", "AS19")
def test_too_few_files_raise_an_error_with_both_numbers(read: Read, files: str) -> None:
    files_of = Dataset.list_files(files, shuffle=False).take(4)
    for mode in (FILE, EITHER):
        for slot in (0, 3, 4):
            with pytest.raises(InvalidArgumentError, match=r"4 files.*the required 5 shards"):
                read(files_of.flat_map(hr.TFRecordDataset), mode, slot)
    expected = records(*((n, r) for n in range(4) for r in (3, 8)))
    assert read(files_of.flat_map(hr.TFRecordDataset), DATA, 3) == expected


@pytest.mark.catalogue("AS21-23")
def test_every_branch_of_a_plan_is_sharded(read: Read, files: str) -> None:
    def branch() -> Dataset:
        return (
            Dataset.list_files(files, shuffle=False)
            .interleave(hr.TFRecordDataset, cycle_length=10, num_parallel_calls=2)
            .prefetch(4)
        )

    assert read(branch(), EITHER, 3) == IN_TURN
    zipped = Dataset.zip(branch(), branch())
    assert read(zipped, EITHER, 3) == [(each, each) for each in IN_TURN]
    assert read(branch().concatenate(branch()), EITHER, 3) == IN_TURN * 2


@pytest.mark.catalogue("AS32")
def test_every_policy_reads_its_shard_to_the_end(read: Read, files: str) -> None:
    data = Dataset.list_files(files, shuffle=False).flat_map(hr.TFRecordDataset)
    for mode in ShardingPolicy:
        assert read(data, mode, 3, target_workers="LOCAL")


@pytest.mark.catalogue("AS8")
def test_a_single_worker_reads_everything() -> None:
    with DispatchServer(DispatcherConfig(worker_addresses=["localhost"])) as dispatcher:
        address = dispatcher.target.removeprefix("tcp://")
        with WorkerServer(WorkerConfig(address)):
            data = Dataset.range(20).apply(distribute(EITHER, dispatcher.target))
            assert [int(each) for each in data] == list(range(20))
