"""Caches in memory and in files: the first complete epoch, and copies of it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.element.chunk import Chunk
from headrace.errors import DataLossError, FailedPreconditionError, UserFunctionError
from headrace.execution.build import build_iterator
from headrace.execution.cache_store import FileStore, FileStoreWriter

from .battery import assert_restores_everywhere
from .contract import assert_keeps_contract, copied

Dataset = hr.Dataset


def odd_or_half(x):
    return x * 2 if x % 2 else x // 2


def values(iterator, most: int = 1000) -> list[int]:
    found: list[int] = []
    while len(found) < most and (chunk := iterator.next_chunk(most - len(found))) is not None:
        found += [int(row) for row in chunk.rows()]
    return found


CACHED = {
    "plain": lambda: Dataset.range(9).map(odd_or_half).cache(),
    "repeated": lambda: Dataset.range(9).map(odd_or_half).cache().repeat(3),
    "shuffled": lambda: Dataset.range(9).shuffle(9).cache().repeat(3),
    "shuffled values": lambda: Dataset.range(14).filter(lambda x: x % 3 > 0).shuffle(5).cache(),
    "twice": lambda: Dataset.range(9).cache().map(odd_or_half).cache().repeat(2),
    "nested": lambda: Dataset.range(3).flat_map(lambda x: Dataset.range(5).shuffle(5).cache()),
    "nothing": lambda: Dataset.range(0).map(odd_or_half).cache().repeat(2),
}


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("shared", [True, False])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_a_cache_continues_from_any_state(name, shared, seed):
    dataset = CACHED[name]()

    def make():
        # In another process nothing is cached yet.
        return build_iterator((dataset if shared else CACHED[name]()).plan, seed=7)

    assert_keeps_contract(make, seed, restores=6)


def test_a_cache_that_another_run_filled_does_not_override_a_state():
    def make():
        return Dataset.range(20).shuffle(20).map(odd_or_half).cache()

    first = build_iterator(make().plan, seed=1)
    head = values(first, 7)
    state = copied(first.get_state())
    rest = values(first)
    dataset = make()
    others = values(build_iterator(dataset.plan, seed=2))
    assert others != head + rest
    again = build_iterator(dataset.plan, seed=1)
    again.set_state(state)
    assert values(again) == rest
    assert values(build_iterator(dataset.plan, seed=3)) == others  # and the cache is what it was


def test_a_state_of_cached_elements_has_the_seed_of_the_run_that_filled_the_cache():
    def make():
        return Dataset.range(20).shuffle(20).map(odd_or_half).cache()

    dataset = make()
    held = values(build_iterator(dataset.plan, seed=1))
    served = build_iterator(dataset.plan, seed=2)
    assert values(served, 5) == held[:5]
    elsewhere = build_iterator(make().plan, seed=2)
    elsewhere.set_state(copied(served.get_state()))
    assert values(elsewhere) == held[5:]


def test_a_cache_without_random_steps_serves_any_run():
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    dataset = Dataset.range(9).map(note).cache()
    first = build_iterator(dataset.plan, seed=1)
    head = values(first, 4)
    state = copied(first.get_state())
    values(build_iterator(dataset.plan, seed=2))
    calls.clear()
    again = build_iterator(dataset.plan, seed=1)
    again.set_state(state)
    assert head + values(again) == list(range(9))
    assert calls == []


def test_an_incomplete_epoch_is_not_cached():
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    dataset = Dataset.range(9).map(note).cache()
    first = build_iterator(dataset.plan, seed=1)
    values(first, 5)
    first.close()
    assert values(build_iterator(dataset.plan, seed=1)) == list(range(9))
    assert calls == [*range(5), *range(9)]


def test_an_epoch_with_an_error_is_not_cached():
    failing = {3}

    def fails_once(x):
        if x in failing:
            failing.remove(int(x))
            raise ValueError(int(x))
        return x

    dataset = Dataset.range(6).map(fails_once).cache()
    first, seen = build_iterator(dataset.plan, seed=1), []
    while True:
        try:
            chunk = first.next_chunk(2)
        except UserFunctionError:
            seen.append("error")
            continue
        if chunk is None:
            break
        seen += chunk.rows()
    assert seen == [0, 1, 2, "error", 4, 5]
    assert values(build_iterator(dataset.plan, seed=1)) == list(range(6))


def test_elements_are_copies():
    dataset = Dataset.range(3).map(lambda x: np.full(2, x)).cache()
    for _ in range(3):
        found = []
        for row in dataset:
            found.append(row.tolist())
            row -= 100
        assert found == [[0, 0], [1, 1], [2, 2]]


def test_a_cache_file_of_another_pipeline_is_rejected(tmp_path: Path):
    path = tmp_path / "cache"
    list(Dataset.range(5).map(odd_or_half).cache(path))
    with pytest.raises(FailedPreconditionError, match="another pipeline"):
        list(Dataset.range(6).map(odd_or_half).cache(path))
    with pytest.raises(FailedPreconditionError, match="another pipeline"):
        list(Dataset.range(5).map(odd_or_half).batch(2).cache(path))
    assert list(Dataset.range(5).map(odd_or_half).cache(path)) == [0, 2, 1, 6, 2]


def test_a_cache_file_is_read_and_filled_from_any_state(tmp_path: Path):
    def make():
        dataset = Dataset.range(9).shuffle(4).map(odd_or_half).cache(tmp_path / "cache").repeat(3)
        return build_iterator(dataset.plan, seed=7)

    for seed in range(5):
        assert_keeps_contract(make, seed, restores=8)
        (tmp_path / "cache").unlink(missing_ok=True)
    assert list(tmp_path.iterdir()) == []


def test_a_state_before_the_first_element_contains_the_seed_of_the_cache():
    def make():
        return Dataset.range(12).filter(lambda x: bool(x >= 0)).shuffle(12).cache()

    first, used = iter(make()), iter(make())
    state = first.get_state()
    want = list(first)
    list(used)  # fills its own cache, in another order
    used.set_state(state)
    assert list(used) == want
    filled = make()
    want = list(filled)
    again = iter(filled)
    state = again.get_state()
    assert list(again) == want
    again.set_state(state)
    assert list(again) == want


def test_an_initial_state_stays_valid_when_other_iterators_fill_the_cache():
    dataset = Dataset.range(12).filter(lambda x: bool(x >= 0)).shuffle(12).cache()
    first = iter(dataset)
    state = first.get_state()
    list(dataset)  # fills the cache, in another order
    assert first.get_state() == state
    want = list(first)
    again = iter(dataset)
    again.set_state(state)
    assert list(again) == want


@pytest.mark.parametrize("cycle", [1, 2])
def test_nested_datasets_that_share_a_cache_get_the_elements_of_the_first_to_fill_it(cycle):
    def make():
        kept = Dataset.range(6).shuffle(6).cache()
        return Dataset.range(4).interleave(lambda x: kept, cycle_length=cycle)

    assert_restores_everywhere(lambda: make().with_options(hr.Options(seed=1)))


def test_a_state_above_a_cache_does_not_depend_on_an_unused_seed():
    def make():
        kept = Dataset.from_generator(lambda: iter(range(9))).cache()
        return kept.flat_map(lambda x: Dataset.range(int(x) % 4).shuffle(4))

    first, used = iter(make()), iter(make())
    state = first.get_state()
    want = [int(x) for x in first]
    list(used)
    used.set_state(state)
    assert [int(x) for x in used] == want


@pytest.mark.parametrize("position", [0, 5, 12, 17])
@pytest.mark.parametrize(
    "above", [lambda ds: ds.repeat(2), lambda ds: ds.cache().repeat(2), lambda ds: ds.repeat(3)]
)
def test_epochs_after_a_restore_have_the_elements_of_the_state(position, above):
    def make():
        return above(Dataset.range(12).filter(lambda x: bool(x >= 0)).shuffle(12).cache())

    first, used = iter(make()), iter(make())
    for _ in range(position):
        next(first)
    state = first.get_state()
    want = list(first)
    list(used)  # its cache holds another order
    used.set_state(state)
    assert list(used) == want


@pytest.mark.parametrize("before", [0, 2, 4, 6])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_state_before_a_later_cached_input_contains_the_seed_of_its_cache(before, epochs):
    def make():
        parts = Dataset.range(4).map(odd_or_half), Dataset.range(20).shuffle(20).cache()
        return parts[0].concatenate(parts[1]).repeat(epochs)

    dataset = make()
    values(build_iterator(dataset.plan, seed=1))  # fills the cache
    first = build_iterator(dataset.plan, seed=2)
    head = values(first, before)
    state = copied(first.get_state())
    rest = values(first)
    assert head + rest == values(build_iterator(dataset.plan, seed=1))
    for seed in (1, 2):
        elsewhere = build_iterator(make().plan, seed=seed)
        if seed == 1:
            values(elsewhere, 9)  # a used one, which has decided on other elements
        elsewhere.set_state(state)
        assert elsewhere.get_state() == state
        assert values(elsewhere) == rest


def test_a_state_before_a_cache_is_valid_whichever_iterator_fills_it():
    def make():
        return Dataset.range(4).map(odd_or_half).concatenate(Dataset.range(20).shuffle(20).cache())

    want = values(build_iterator(make().plan, seed=1))
    dataset = make()
    first = build_iterator(dataset.plan, seed=1)
    head = values(first, 2)
    state = copied(first.get_state())
    values(build_iterator(dataset.plan, seed=2))
    assert head + values(first) == want
    again = build_iterator(dataset.plan, seed=3)
    again.set_state(state)
    assert head + values(again) == want


# --- cache files: complete or absent; other files are rejected ------------------------------------


def test_a_second_process_reads_the_cache_file_and_not_the_source(tmp_path: Path):
    calls = []

    def note(x):
        calls.append(int(x))
        return {"x": np.full(3, x), "name": b"n\0"}

    def make():
        return Dataset.range(5).map(note).cache(str(tmp_path / "cache"))

    first, second = list(make()), list(make())
    assert calls == [0, 1, 2, 3, 4]
    assert [e["x"].tolist() for e in first] == [e["x"].tolist() for e in second]
    assert second[0]["name"] == b"n\0"


def test_an_incomplete_epoch_leaves_no_file(tmp_path: Path):
    with iter(Dataset.range(1000).map(lambda x: str(x)).cache(tmp_path / "cache")) as iterator:
        next(iterator)
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_or_foreign_cache_file_is_rejected(tmp_path: Path):
    path = tmp_path / "cache"
    path.write_bytes(b"something else entirely")
    with pytest.raises(DataLossError, match="not a cache file"):
        list(Dataset.range(3).cache(path))
    path.unlink()
    list(Dataset.range(3).cache(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataLossError, match="is cut off; remove it"):
        list(Dataset.range(3).cache(path))


def store_of(path: Path, identity: str = "this", seed: int = 7) -> None:
    store = FileStoreWriter(str(path), seed, identity)
    store.append(Chunk.of_rows([np.int64(value) for value in range(5)]))
    store.complete()
    store.close()


def read_whole(path: Path) -> None:
    store = FileStore.find(str(path), "this")
    assert store is not None
    try:
        assert store.read(0, 10) is not None
    finally:
        store.close()


def test_a_cache_file_is_only_used_by_the_plan_that_wrote_it(tmp_path: Path):
    path = tmp_path / "cache"
    store_of(path)

    found = FileStore.find(str(path), "this")
    assert found is not None
    assert found.seed == 7
    chunk = found.read(3, 10)
    found.close()
    assert chunk is not None
    assert chunk.rows() == [3, 4]
    with pytest.raises(
        FailedPreconditionError, match=r"cache.* another pipeline: this, .*remove the file"
    ):
        FileStore.find(str(path), "that")
    assert FileStore.find(str(tmp_path / "absent"), "this") is None


def test_a_cache_file_of_another_version_is_rejected(tmp_path: Path):
    path = tmp_path / "cache"
    path.write_bytes(b"HRCACHE1" + bytes(100))

    with pytest.raises(
        FailedPreconditionError, match="it has format 1, but this version reads format 4; remove it"
    ):
        FileStore.find(str(path), "this")


@pytest.mark.parametrize("size", [0, 3, 10, 17, 19, 21, 40])
def test_a_truncated_cache_file_is_reported_as_damaged(tmp_path: Path, size: int):
    path = tmp_path / "cache"
    store_of(path)
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(DataLossError, match="remove it"):
        FileStore.find(str(path), "this")


def test_each_flipped_bit_of_a_cache_file_is_found(tmp_path: Path):
    path = tmp_path / "cache"
    store_of(path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises((DataLossError, FailedPreconditionError), match="remove it"):
            read_whole(path)


@pytest.mark.parametrize("step", ["cache", "snapshot"])
def test_a_damaged_element_is_reported_with_file_and_position(tmp_path: Path, step: str):
    dataset = Dataset.range(5).batch(1)
    dataset = getattr(dataset, step)(tmp_path / "stored")
    list(dataset)
    (path,) = [each for each in tmp_path.rglob("*") if each.is_file()]
    whole = bytearray(path.read_bytes())
    whole[-20] ^= 1
    path.write_bytes(whole)
    with pytest.raises(DataLossError) as caught:
        list(dataset)
    assert re.fullmatch(
        f"{step} file {path} is damaged: the frame at byte \\d+ does not match its checksums; "
        "remove it, so that it is written again",
        str(caught.value),
    )


@pytest.mark.parametrize("name", ["memory://cache", "s3://bucket/cache", "file:///tmp/cache"])
def test_a_cache_file_with_a_url_is_rejected_immediately(name: str):
    with pytest.raises(ValueError, match="a path on a local disk, but is the URL"):
        Dataset.range(3).cache(name)


def test_an_unwritable_cache_file_is_named_as_the_user_wrote_it(tmp_path):
    (tmp_path / "file").write_text("no folder")
    name = str(tmp_path / "file" / "cache")
    with pytest.raises(FailedPreconditionError, match="write access") as caught:
        list(Dataset.range(3).cache(name))
    assert f"cannot write cache file '{name}': " in str(caught.value)
