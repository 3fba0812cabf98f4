"""Parts of a plan for several workers: together every element once, each file with one worker."""

from __future__ import annotations

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from headrace.execution.build import build_iterator, opens_files
from headrace.plan.identity import identity
from headrace.plan.ordering import SHARD_HINT
from headrace.rewrites.shard import shard_elements, shard_files, shard_hints

Dataset = hr.Dataset
WORKERS = 5
SEED = 7


def elements(plan, epochs=(0,)):
    iterator = build_iterator(plan, seed=SEED, epochs=epochs)
    found = []
    try:
        while (chunk := iterator.next_chunk(64)) is not None:
            found += [row.decode() if isinstance(row, bytes) else row for row in chunk.rows()]
    finally:
        iterator.close()
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a pattern of ten files of ten records."""
    folder = tmp_path_factory.mktemp("shards")
    for number in range(10):
        with hr.io.TFRecordWriter(folder / f"{number:02d}.tfrecord") as writer:
            for record in range(10):
                writer.write(f"{number}.{record}".encode())
    return f"{folder}/*.tfrecord"


def records(*numbers):
    return [f"{number}.{record}" for number in numbers for record in range(10)]


def by_files(dataset, index, workers=WORKERS):
    return elements(shard_files(dataset.plan, workers, index, opens_files))


def by_hint(dataset, index, workers=WORKERS):
    return elements(shard_hints(dataset.plan, workers, index))


@pytest.mark.catalogue("2.3.1", "3.12.1-4", "3.12.21", "3.12.22")
def test_a_worker_reads_every_nth_file_from_its_index_on(files):
    names = Dataset.list_files(files, shuffle=False)
    assert by_files(names.flat_map(hr.TFRecordDataset), 3) == records(3, 8)
    assert by_files(names.flat_map(lambda name: hr.TFRecordDataset(name)).prefetch(2), 3) == (
        records(3, 8)
    )
    assert by_files(hr.TFRecordDataset(list(names.as_numpy_iterator())), 3) == records(3, 8)


@pytest.mark.catalogue("3.12.5-8")
def test_interleaved_files_stay_interleaved(files):
    turns = Dataset.list_files(files, shuffle=False).interleave(
        hr.TFRecordDataset, cycle_length=10, num_parallel_calls=2
    )
    assert by_files(turns, 3) == [f"{n}.{record}" for record in range(10) for n in (3, 8)]


@pytest.mark.catalogue("2.3.2", "3.12.11")
def test_shuffled_names_are_sharded_before_they_are_shuffled(files):
    shuffled = Dataset.list_files(files, shuffle=True, seed=4).map(lambda name: name)
    found = [by_files(shuffled.flat_map(hr.TFRecordDataset), index) for index in range(WORKERS)]
    for index, own in enumerate(found):
        assert sorted(own) == sorted(records(index, index + 5))
    assert any(own != records(index, index + 5) for index, own in enumerate(found))


def test_repeated_names_stay_with_their_worker(files):
    twice = Dataset.list_files(files, shuffle=False).repeat(2).flat_map(hr.TFRecordDataset)
    assert by_files(twice, 1, workers=3) == records(1, 4, 7, 1, 4, 7)


@pytest.mark.catalogue("3.12.9", "3.12.10")
def test_each_branch_is_sharded(files):
    one = Dataset.list_files(files, shuffle=False).flat_map(hr.TFRecordDataset)
    pairs = by_files(Dataset.zip(one, one), 3)
    assert pairs == [(record.encode(), record.encode()) for record in records(3, 8)]
    assert by_files(one.concatenate(one), 3) == records(3, 8, 3, 8)


def test_filtered_file_names_are_sharded(files):
    names = Dataset.list_files(files, shuffle=False).filter(lambda name: name[-10] in "13579")
    found = [by_files(names.flat_map(hr.TFRecordDataset), index, workers=2) for index in range(2)]
    assert found == [records(1, 5, 9), records(3, 7)]


def test_nested_files_are_sharded_by_outer_files(files):
    folders = Dataset.from_tensors(np.array(files)).flat_map(
        lambda pattern: Dataset.list_files(str(pattern), shuffle=False)
    )
    nested = folders.flat_map(hr.TFRecordDataset)
    assert by_files(nested, 0, workers=10) == records(0)


def test_a_map_that_loads_whole_files_is_sharded_by_names(files):
    names = Dataset.list_files(files, shuffle=False).map(lambda name: name[-11:-9])
    assert by_files(names, 2) == ["02", "07"]


@pytest.mark.catalogue("2.3.3", "3.12.19")
def test_a_source_that_reads_no_files_is_rejected_by_name(files):
    with pytest.raises(NotFoundError, match=r"Found an unshardable source dataset.*FILE_OR_DATA"):
        by_files(Dataset.range(20).map(str), 1)
    one = Dataset.list_files(files, shuffle=False).flat_map(hr.TFRecordDataset)
    with pytest.raises(NotFoundError, match="unshardable"):
        by_files(Dataset.zip(one, Dataset.range(100)), 1)
    with pytest.raises(NotFoundError, match="unshardable"):
        by_files(Dataset.range(3).flat_map(lambda n: Dataset.range(n)), 1)


def test_too_few_files_are_rejected_on_every_worker(files):
    four = Dataset.list_files(files, shuffle=False).take(4).flat_map(hr.TFRecordDataset)
    for index in range(WORKERS):
        with pytest.raises(
            InvalidArgumentError, match=r"has 4 files.*not enough for the required 5"
        ):
            by_files(four, index)


@pytest.mark.parametrize("shard", [by_files, by_hint])
def test_each_shard_has_its_own_cache_file(files, tmp_path, shard):
    read = []

    def noted(record):
        read.append(record.decode())
        return record

    def cached():
        names = Dataset.list_files(files, shuffle=False)
        names = names.shard(SHARD_HINT, 0) if shard is by_hint else names
        return names.flat_map(hr.TFRecordDataset).map(noted).cache(tmp_path / "kept")

    for _ in range(2):
        assert shard(cached(), 0) == records(0, 5)
        assert shard(cached(), 4) == records(4, 9)
    assert read == records(0, 5, 4, 9)
    assert {path.name for path in tmp_path.glob("kept*")} == {
        "kept.shard-0-of-5",
        "kept.shard-4-of-5",
    }


def test_a_state_does_not_depend_on_the_cache_file_of_a_shard(files):
    """States saved before shards had separate cache files remain readable."""
    names = Dataset.list_files(files, shuffle=False)
    plan = names.flat_map(hr.TFRecordDataset).cache("/tmp/kept").plan
    shard = shard_files(plan, 5, 0, opens_files)
    for saved in (plan, shard):
        assert [entry[1] for entry in identity(saved) if entry[0] == "cache"] == [
            identity(plan)[-1][1]
        ]


@pytest.mark.parametrize("shard", [by_files, by_hint])
def test_in_one_process_each_shard_has_its_own_cache_for_all_epochs(files, shard):
    read = []

    def noted(record):
        read.append(record.decode())
        return record

    names = Dataset.list_files(files, shuffle=False).shard(SHARD_HINT, 0)
    if shard is by_files:
        names = Dataset.list_files(files, shuffle=False)
    cached = names.flat_map(hr.TFRecordDataset).map(noted).cache()
    assert shard(cached, 3) == shard(cached, 3) == records(3, 8)
    assert shard(cached, 4) == records(4, 9)
    assert shard(cached, 3, workers=4) == records(3, 7)
    assert shard(cached, 3) == records(3, 8)
    assert read == records(3, 8, 4, 9, 3, 7)


def test_options_of_the_plan_are_kept(files):
    options = hr.Options()
    options.seed = 3
    names = Dataset.list_files(files, shuffle=False).shuffle(10).with_options(options)
    plan = shard_files(names.flat_map(hr.TFRecordDataset).plan, 2, 0, opens_files)
    first, second = (elements_without_seed(plan) for _ in range(2))
    assert first == second


def elements_without_seed(plan):
    iterator = build_iterator(plan)
    try:
        found = []
        while (chunk := iterator.next_chunk(64)) is not None:
            found += chunk.rows()
        return found
    finally:
        iterator.close()


@pytest.mark.catalogue("3.12.13", "3.12.14", "3.12.16")
def test_elements_are_sharded_in_turn_and_batches_stay_whole():
    def part(dataset, index=1):
        return elements(shard_elements(dataset.plan, WORKERS, index))

    assert part(Dataset.range(20)) == [1, 6, 11, 16]
    batches = part(Dataset.range(20).batch(3))
    assert [batch.tolist() for batch in batches] == [[3, 4, 5], [18, 19]]
    assert part(Dataset.range(0)) == []


@pytest.mark.catalogue("3.12.25")
def test_shuffled_elements_are_in_one_shard_each():
    shuffled = Dataset.range(100).shuffle(30)
    parts = [elements(shard_elements(shuffled.plan, 3, index)) for index in range(3)]
    assert sorted(number for part in parts for number in part) == list(range(100))


def test_a_function_is_called_only_for_the_elements_of_the_shard():
    seen = []
    mapped = Dataset.range(20).map(lambda x: seen.append(int(x)) or x)
    assert elements(shard_elements(mapped.plan, WORKERS, 1)) == [1, 6, 11, 16]
    assert seen == [1, 6, 11, 16]


@pytest.mark.catalogue("3.12.29")
@pytest.mark.parametrize("index", [SHARD_HINT, 0, 5])
def test_a_hint_is_filled_in_whatever_its_index_is(index):
    hinted = Dataset.range(20).shard(SHARD_HINT, index).map(lambda x: x * 2)
    assert elements(shard_hints(hinted.plan, WORKERS, 1)) == [2, 12, 22, 32]


def test_a_hint_below_files_shards_files_and_above_them_records(files):
    names = Dataset.list_files(files, shuffle=False)
    before = names.shard(SHARD_HINT, 0).flat_map(hr.TFRecordDataset)
    assert elements(shard_hints(before.plan, WORKERS, 3)) == records(3, 8)
    after = names.flat_map(hr.TFRecordDataset).shard(SHARD_HINT, 0)
    expected = [f"{number}.{record}" for number in range(10) for record in (3, 8)]
    assert elements(shard_hints(after.plan, WORKERS, 3)) == expected


@pytest.mark.catalogue("3.12.30")
def test_a_plain_shard_is_not_a_hint():
    plain = Dataset.range(20).shard(1, 0)
    assert elements(shard_hints(plain.plan, WORKERS, 1)) == list(range(20))


def test_too_few_elements_at_the_hint_are_rejected(files):
    four = Dataset.list_files(files, shuffle=False).take(4)
    hinted = four.shard(SHARD_HINT, 0).flat_map(hr.TFRecordDataset)
    with pytest.raises(InvalidArgumentError, match="not enough for the required 5 shards/workers"):
        shard_hints(hinted.plan, WORKERS, 1)


@pytest.mark.catalogue("2.3.6")
def test_a_hint_without_a_service_is_rejected():
    hinted = Dataset.range(20).shard(SHARD_HINT, 0)
    assert hinted.cardinality() == hr.UNKNOWN_CARDINALITY
    with pytest.raises(FailedPreconditionError, match=r"ShardingPolicy\.HINT`"):
        list(hinted)


def test_the_hint_is_not_a_valid_index():
    with pytest.raises(ValueError, match=r"`index` must be at least 0|between 0 and 4"):
        Dataset.range(20).shard(5, SHARD_HINT)
