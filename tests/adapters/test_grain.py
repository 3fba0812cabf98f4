"""Grain pipelines over Headrace datasets, and Grain datasets as Headrace datasets."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from grain import experimental

import headrace as hr
from headrace.element.ownership import take_ownership
from headrace.service import ShardingPolicy, distribute
from headrace.sources.stateful_iterable import StatefulIterableSource
from headrace.testing import assert_no_leaks, check_source

Dataset = hr.Dataset


def plain(element: Any) -> Any:
    """Return an element as Python values, for comparison."""
    if isinstance(element, dict):
        return {name: plain(part) for name, part in element.items()}
    if isinstance(element, tuple | list):
        return [plain(part) for part in element]
    return element.tolist() if hasattr(element, "tolist") else element


def rows_of(elements: Any) -> list[Any]:
    return [plain(element) for element in elements]


def check_every_state(dataset: Any) -> None:
    """Check that reading continues exactly from the state at each element, through JSON."""
    iterator = iter(dataset)
    first_state = iterator.get_state()
    expected, states = [], [first_state]
    for element in iterator:
        expected.append(plain(element))
        states.append(json.loads(json.dumps(iterator.get_state())))
    restored = iter(dataset)
    for count, state in enumerate(states):
        restored.set_state(state)
        assert rows_of(restored) == expected[count:], f"{count=}"
    fresh = iter(dataset)
    fresh.set_state(states[len(states) // 2])
    assert rows_of(fresh) == expected[len(states) // 2 :]
    for each in (iterator, restored, fresh):
        each.close()


# --- hr.grain.iter_dataset ------------------------------------------------------------------------

PIPELINES: dict[str, Callable[[], Any]] = {
    "no step": lambda: shuffled(),
    "map and batch": lambda: shuffled().map(lambda x: x * 2).batch(4),
    "filter": lambda: shuffled().filter(lambda x: x % 3 > 0),
    "random map": lambda: shuffled().seed(3).random_map(lambda x, rng: x + rng.integers(9)),
    "mix": lambda: grain.IterDataset.mix([shuffled(), shuffled(100)], [0.7, 0.3]).batch(3),
    "repeat": lambda: experimental.RepeatIterDataset(
        hr.grain.iter_dataset(Dataset.range(7)), num_epochs=2
    ),
    "epochs": lambda: hr.grain.iter_dataset(Dataset.range(9).shuffle(9).repeat(2)).batch(2),
    "window shuffle": lambda: experimental.WindowShuffleIterDataset(
        shuffled(), window_size=5, seed=1
    ),
    "nested": lambda: hr.grain.iter_dataset(
        Dataset.from_tensor_slices({"x": np.eye(7), "y": (np.arange(7), np.ones(7))}).batch(2)
    ),
}


def shuffled(start: int = 0) -> Any:
    return hr.grain.iter_dataset(Dataset.range(start, start + 23).shuffle(23, seed=5))


@pytest.mark.parametrize("name", PIPELINES)
def test_grain_pipelines_resume_at_every_element(name: str) -> None:
    check_every_state(PIPELINES[name]())


def test_elements_are_those_of_the_dataset() -> None:
    dataset = Dataset.range(10).shuffle(10, seed=2, reshuffle_each_iteration=False).batch(3)
    assert rows_of(hr.grain.iter_dataset(dataset)) == rows_of(dataset)


def test_a_prefetching_thread_resumes_at_every_element() -> None:
    check_every_state(
        experimental.ThreadPrefetchIterDataset(shuffled().batch(2), prefetch_buffer_size=3)
    )


def test_each_iteration_draws_a_new_order_that_a_state_repeats() -> None:
    pipeline = hr.grain.iter_dataset(Dataset.range(30).shuffle(30))
    first, second = iter(pipeline), iter(pipeline)
    state = second.get_state()
    orders = rows_of(first), rows_of(second)
    assert orders[0] != orders[1]
    first.set_state(state)
    assert rows_of(first) == orders[1]


def test_closing_a_pipeline_ends_threads_and_reading() -> None:
    with assert_no_leaks():
        iterator = iter(hr.grain.iter_dataset(Dataset.range(99).prefetch(3)).batch(2))
        next(iterator)
        iterator.close()
        iterator.close()
        with pytest.raises(ValueError, match="closed iterator"):
            next(iterator)


def test_grain_checkpoint_handler_saves_and_restores(tmp_path: Path) -> None:
    pipeline = hr.grain.iter_dataset(Dataset.range(20).shuffle(20)).batch(3)
    iterator, handler = iter(pipeline), grain.checkpoint.CheckpointHandler()
    next(iterator)
    handler.save(tmp_path, iterator)
    restored = handler.restore(tmp_path, iter(pipeline))
    assert rows_of(restored) == rows_of(iterator)


def test_states_of_other_datasets_and_values_are_rejected() -> None:
    iterator = iter(hr.grain.iter_dataset(Dataset.range(5)))
    other = iter(hr.grain.iter_dataset(Dataset.range(6)))
    with pytest.raises(hr.errors.FailedPreconditionError, match="step 1"):
        iterator.set_state(other.get_state())
    with pytest.raises(TypeError, match="result of `get_state`"):
        iterator.set_state({"next_index": 3})
    with pytest.raises(TypeError, match=r"must be a headrace\.Dataset, but got range"):
        hr.grain.iter_dataset(range(3))


@pytest.mark.system
@pytest.mark.parametrize("ordered", [False, True])
def test_data_workers_feed_a_grain_pipeline_that_resumes(ordered: bool) -> None:
    dataset = Dataset.range(40).map(lambda x: x * 2)
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        remote = dataset.apply(
            distribute(ShardingPolicy.DYNAMIC, service=cluster.target, ordered=ordered)
        )
        pipeline = hr.grain.iter_dataset(remote).map(lambda x: x + 1)
        expected = [2 * k + 1 for k in range(40)]
        for count in (0, 1, 7, 39, 40):
            iterator = iter(pipeline)
            first = [plain(next(iterator)) for _ in range(count)]
            state = json.loads(json.dumps(iterator.get_state()))
            iterator.close()
            restored = iter(pipeline)
            restored.set_state(state)
            rows = first + rows_of(restored)
            restored.close()
            assert (rows if ordered else sorted(rows)) == expected, f"{count=}"
        with pytest.raises(ValueError, match="mp_prefetch cannot divide"):
            hr.grain.iter_dataset(remote).set_slice(slice(0, None, 2))


def test_mp_prefetch_gives_each_process_its_elements() -> None:
    parts = []
    for process in range(3):
        pipeline = pickle.loads(pickle.dumps(hr.grain.iter_dataset(Dataset.range(10))))
        pipeline.set_slice(slice(process, None, 3))
        parts.append(rows_of(pipeline))
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


# --- hr.grain.source ------------------------------------------------------------------------------

TABLE = np.arange(40).reshape(20, 2)
INDEXED: dict[str, Callable[[], Dataset[Any]]] = {
    "arrays": lambda: Dataset.from_tensor_slices({"x": TABLE, "y": np.arange(20)}),
    "shuffle": lambda: Dataset.from_tensor_slices(TABLE).shuffle(7, seed=3),
    "shuffle with a seed in the options": lambda: (
        Dataset.range(30).shuffle(30).with_options(hr.Options(seed=5))
    ),
    "batches": lambda: Dataset.from_tensor_slices(TABLE).shuffle(20, seed=3).batch(3),
    "repeat": lambda: Dataset.range(5).shuffle(5, seed=1).repeat(3),
    "shard": lambda: Dataset.range(30).shard(4, 1).skip(1),
    "zip": lambda: Dataset.zip(Dataset.range(5), Dataset.range(5).shuffle(5, seed=1)),
    "concatenate": lambda: Dataset.range(5).concatenate(Dataset.range(20, 23)),
    "enumerate": lambda: Dataset.range(4).enumerate(),
    "map in parallel": lambda: Dataset.range(9).map(lambda x: x * 2, 2).prefetch(2),
    "map of batches": lambda: Dataset.range(9).batch(4).map(lambda x: x.sum()),
    "random access": lambda: Dataset.from_random_access(["a", "bb", "c"]).shuffle(3, seed=0),
}


@pytest.mark.parametrize("name", INDEXED)
def test_a_source_has_the_elements_of_its_dataset_by_index(name: str) -> None:
    dataset = INDEXED[name]()
    expected = rows_of(dataset)
    with assert_no_leaks():
        source = hr.grain.source(dataset)
        assert isinstance(source, grain.sources.RandomAccessDataSource)
        assert len(source) == len(expected)
        indices = np.random.default_rng(0).permutation(len(source))
        assert [plain(source[index]) for index in indices] == [expected[i] for i in indices]
        assert plain(source[-1]) == expected[-1]
        copy = pickle.loads(pickle.dumps(source)) if "map" not in name else source
        assert [plain(copy[k]) for k in range(len(copy))] == expected
        assert repr(copy) == repr(source)


def test_a_source_is_read_by_several_threads() -> None:
    source = hr.grain.source(Dataset.range(200).shuffle(200, seed=4).map(lambda x: x * 3))
    expected = [plain(source[k]) for k in range(200)]
    together = threading.Barrier(4)

    def read(first: int) -> list[Any]:
        together.wait()
        return [plain(source[k]) for k in range(first, 200)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [expected[first:] for first in range(4)]


def test_grain_loads_and_resumes_a_source() -> None:
    loader = grain.load(
        hr.grain.source(Dataset.range(20).shuffle(20, seed=1)),
        shuffle=True, seed=3, num_epochs=1, batch_size=4,
    )  # fmt: skip
    iterator = iter(loader)
    first = next(iterator)
    state = iterator.get_state()
    rest = rows_of(iterator)
    assert sorted(sum(rest, plain(first))) == list(range(20))
    restored = iter(loader)
    restored.set_state(state)
    assert rows_of(restored) == rest
    other = grain.load(
        hr.grain.source(Dataset.range(20).shuffle(20, seed=2)),
        shuffle=True, seed=3, num_epochs=1, batch_size=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="data source"):
        iter(other).set_state(state)


def test_a_failed_element_of_a_source_raises_and_others_are_read() -> None:
    source = hr.grain.source(Dataset.range(4).map(lambda x: 6 // int(x)))
    with pytest.raises(hr.errors.UserFunctionError, match="ZeroDivisionError"):
        source[0]
    assert [plain(source[k]) for k in (3, 1, 2)] == [2, 6, 3]
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"index {index} of a source with 4 elements"):
            source[index]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset.range(9).filter(lambda x: x > 2), r"filter \(test_grain"),
        (Dataset.range(9).map(str).batch(2), r"batch \(test_grain"),
        (Dataset.from_generator(lambda: iter([1])), r"GeneratorSource \(test_grain"),
        (Dataset.range(9).flat_map(Dataset.range).map(abs), r"flat_map|interleave"),
        (Dataset.range(9).repeat(), "a dataset with an end: remove `repeat`"),
        (Dataset.range(9).shuffle(9), r"shuffle \(test_grain.* has no seed"),
        (Dataset.range(9).shuffle(9, reshuffle_each_iteration=False), "has no seed"),
    ],
)
def test_a_dataset_without_random_access_is_rejected(dataset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hr.grain.source(dataset)


def test_a_source_of_something_else_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"must be a headrace\.Dataset, but got list"):
        hr.grain.source([1, 2])


# --- Dataset.from_pipeline ------------------------------------------------------------------------

MAP_DATASETS: dict[str, Callable[[], Any]] = {
    "range": lambda: grain.MapDataset.range(17),
    "shuffle, map and filter": lambda: (
        grain.MapDataset.range(20)
        .seed(3)
        .shuffle()
        .map(lambda x: {"x": np.full(2, x), "y": x * x})
        .filter(lambda row: row["y"] % 3)
    ),
    "first elements filtered": lambda: (
        grain.MapDataset.range(9).filter(lambda x: x > 3).map(lambda x: np.full(3, x))
    ),
    "repeat": lambda: grain.MapDataset.range(6).shuffle(seed=4).repeat(3),
    "batch": lambda: grain.MapDataset.range(20).batch(3),
    "mix": lambda: grain.MapDataset.mix(
        [grain.MapDataset.range(9), grain.MapDataset.range(50, 70)], [0.3, 0.7]
    ),
}


@pytest.mark.parametrize("name", MAP_DATASETS)
def test_grain_map_datasets_are_read_like_grain_reads_them(name: str) -> None:
    original = MAP_DATASETS[name]()
    dataset = Dataset.from_pipeline(original)
    assert rows_of(dataset) == rows_of(original)
    check_every_state(dataset)


def test_endless_repetition_of_a_grain_dataset_reshuffles() -> None:
    endless = grain.MapDataset.range(5).shuffle(seed=1).repeat()
    expected = [int(endless[index]) for index in range(17)]
    assert rows_of(Dataset.from_pipeline(endless).take(17)) == expected


def test_the_spec_of_a_filtered_grain_dataset_is_that_of_its_items() -> None:
    dataset = Dataset.from_pipeline(MAP_DATASETS["first elements filtered"]())
    assert dataset.batch(2).element_spec.dtype == np.int64
    assert next(iter(dataset.batch(2))).tolist() == [[4] * 3, [5] * 3]


ITER_DATASETS: dict[str, Callable[[], Any]] = {
    "range": lambda: grain.MapDataset.range(11).to_iter_dataset(),
    "shuffle, filter and batch": lambda: (
        grain.MapDataset.range(23)
        .shuffle(seed=2)
        .to_iter_dataset()
        .filter(lambda x: x % 5)
        .batch(3)
    ),
    "mix": lambda: grain.IterDataset.mix(
        [
            grain.MapDataset.range(9).to_iter_dataset(),
            grain.MapDataset.range(50, 70).to_iter_dataset(),
        ],
        [0.3, 0.7],
    ),
    "window shuffle": lambda: experimental.WindowShuffleIterDataset(
        grain.MapDataset.range(19).to_iter_dataset(), window_size=4, seed=1
    ),
    "data loader": lambda: grain.load(range(17), shuffle=True, seed=1, num_epochs=1, batch_size=4),
    "empty": lambda: grain.MapDataset.range(0).to_iter_dataset(),
}


@pytest.mark.parametrize("name", ITER_DATASETS)
def test_grain_iter_datasets_resume_from_their_own_states(name: str) -> None:
    original = ITER_DATASETS[name]()
    dataset = Dataset.from_pipeline(original)
    assert rows_of(dataset) == rows_of(original)
    for made in (dataset, dataset.batch(2, drop_remainder=True), dataset.repeat(2)):
        check_every_state(made)


@pytest.mark.parametrize("name", [name for name in ITER_DATASETS if name != "data loader"])
def test_sources_of_grain_iter_datasets_keep_their_contract(name: str) -> None:
    original = ITER_DATASETS[name]()
    check_source(StatefulIterableSource(original), list(map(take_ownership, original)))


def test_a_restored_grain_iter_dataset_reads_no_earlier_element() -> None:
    calls: list[int] = []

    def note(x: int) -> int:
        calls.append(int(x))
        return x

    dataset = Dataset.from_pipeline(grain.MapDataset.range(50).to_iter_dataset().map(note))
    with iter(dataset) as iterator:
        for _ in range(30):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
    calls.clear()
    with iter(dataset) as restored:
        restored.set_state(state)
        assert int(next(restored)) == 30
    assert calls == [30]


def fail_at_7(x: Any) -> Any:
    if x == 7:
        raise ValueError("seven")
    return object() if x == 3 else x


def outcomes(iterator: Iterator[Any]) -> list[Any]:
    """Return elements, and the types of errors."""
    found: list[Any] = []
    while True:
        try:
            found.append(plain(next(iterator)))
        except StopIteration:
            return found
        except hr.errors.HeadraceError as error:
            found.append(type(error).__name__)


def test_errors_of_a_grain_iter_dataset_come_in_their_turn() -> None:
    original = grain.MapDataset.range(10).to_iter_dataset().map(fail_at_7)
    dataset = Dataset.from_pipeline(original)
    expected = [0, 1, 2, "InvalidElementError", 4, 5, 6, "UserFunctionError"]
    for limit in (1, 4):
        source = dataset.plan.source  # type: ignore[attr-defined]
        reader, found = source.open(0, 1), []
        while True:
            restored = source.open(0, 1, json.loads(json.dumps(reader.get_position())))
            reader.close()
            reader = restored
            try:
                chunk = reader.read(limit)
            except hr.errors.HeadraceError as error:
                found.append(type(error).__name__)
                continue
            if chunk is None:
                break
            found += rows_of(chunk.rows())
        assert found == expected, f"{limit=}"
    assert outcomes(iter(dataset)) == expected
    with pytest.raises(
        hr.errors.UserFunctionError, match="of FilterIterDataset raised: ValueError: s"
    ):
        list(Dataset.from_pipeline(original.filter(lambda x: x is None)))


def test_an_interrupted_read_of_a_grain_iter_dataset_loses_nothing() -> None:
    interruptions = iter([5])

    def interrupt(x: Any) -> Any:
        if x == 5 and next(interruptions, None):
            raise KeyboardInterrupt
        return x

    original = grain.MapDataset.range(9).to_iter_dataset().map(interrupt)
    iterator = iter(Dataset.from_pipeline(original).batch(4))
    rows = plain(next(iterator))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert rows + [x for batch in rows_of(iterator) for x in batch] == list(range(9))


@pytest.mark.system
@pytest.mark.parametrize(
    "make", [MAP_DATASETS["shuffle, map and filter"], ITER_DATASETS["shuffle, filter and batch"]]
)
@pytest.mark.parametrize("ordered", [False, True])
def test_data_workers_read_grain_datasets(make: Callable[[], Any], ordered: bool) -> None:
    dataset = Dataset.from_pipeline(make())
    expected = rows_of(dataset)
    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        remote = dataset.apply(
            distribute(ShardingPolicy.DYNAMIC, service=cluster.target, ordered=ordered)
        )
        found = rows_of(remote)
    assert (found if ordered else sorted(found, key=str)) == (
        expected if ordered else sorted(expected, key=str)
    )
