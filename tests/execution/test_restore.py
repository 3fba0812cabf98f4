"""Every pipeline continues from every state with the same elements, and raises no error twice."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import HeadraceError

from .battery import assert_restores_everywhere, elements_of, read_with_states, saved
from .pipelines import PIPELINES, SOURCES, STEPS, failing, nested, odd_or_half

Dataset = hr.Dataset


@pytest.mark.parametrize("name", PIPELINES)
def test_every_state_continues_with_the_same_elements(name):
    assert_restores_everywhere(PIPELINES[name])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("lower", STEPS)
def test_every_step_above_every_other_continues_with_the_same_elements(source, lower):
    for upper, step in STEPS.items():

        def make(step=step):
            return step(STEPS[lower](SOURCES[source]()))

        try:
            assert_restores_everywhere(make, most=12, seed=len(upper))
        except AssertionError as error:
            raise AssertionError(f"{upper} above {lower} above {source}: {error}") from error


@pytest.mark.parametrize("steps", [(), ("filter",), ("flat_map",), ("shuffle",), ("failing map",)])
def test_states_do_not_depend_on_settings_that_only_affect_speed(steps):
    def make(threads, ahead, cycle_threads):
        dataset = Dataset.range(40)
        for step in steps:
            dataset = STEPS[step](dataset)
        if ahead is not None:
            dataset = dataset.prefetch(ahead)
        dataset = dataset.map(odd_or_half, num_parallel_calls=threads)
        dataset = dataset.interleave(nested, 3, 2, num_parallel_calls=cycle_threads)
        return dataset if ahead is None else dataset.prefetch(ahead)

    assert_restores_everywhere(
        lambda: make(None, None, None),
        others=[lambda: make(2, 3, None), lambda: make(4, None, 2), lambda: make(None, 1, 3)],
        most=40,
    )
    assert_restores_everywhere(
        lambda: make(3, hr.AUTOTUNE, 2), others=[lambda: make(None, None, None)], most=40
    )


@pytest.mark.parametrize("ahead", [(None, 2), (2, None), (1, hr.AUTOTUNE)])
def test_a_prefetch_between_two_concatenates_changes_neither_states_nor_draws(ahead):
    def make(*ahead):
        dataset = Dataset.range(3).filter(lambda x: x != 1)
        for step, size in zip((3, 4), ahead, strict=True):
            dataset = dataset.concatenate(Dataset.range(step).map(odd_or_half))
            dataset = dataset if size is None else dataset.prefetch(1).prefetch(size)
        dataset = Dataset.range(2).map(odd_or_half).concatenate(dataset)
        drawn = dataset.flat_map(lambda x: Dataset.range(5).shuffle(5))
        return drawn.with_options(hr.Options(seed=3))

    assert list(make(*ahead)) == list(make(None, None))
    assert_restores_everywhere(lambda: make(None, None), others=[lambda: make(*ahead)])
    assert_restores_everywhere(lambda: make(*ahead), others=[lambda: make(None, None)])


@pytest.mark.parametrize(
    "name", ["generated batches, mapped", "drawn flat_map", "concatenate, interleave", "training"]
)
def test_a_state_is_restored_in_another_process(name):
    with iter(PIPELINES[name]()) as iterator:
        elements, states = read_with_states(iterator, 100)
    position = len(elements) // 2
    program = (
        "import json, sys\n"
        "from tests.execution.battery import elements_of\n"
        "from tests.execution.pipelines import PIPELINES\n"
        f"with iter(PIPELINES[{name!r}]()) as iterator:\n"
        "    iterator.set_state(json.load(sys.stdin))\n"
        "    print(repr([x.tolist() for x in elements_of(iterator, 100)]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        input=json.dumps(states[position]),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert result.stderr == ""
    assert result.stdout.strip() == repr([x.tolist() for x in elements[position:]])


def test_a_state_without_hints_is_still_valid():
    def without_hints(state):
        if isinstance(state, dict):
            return {key: without_hints(value) for key, value in state.items() if key != "hint"}
        return [without_hints(item) for item in state] if isinstance(state, list) else state

    make = PIPELINES["generated batches, zipped"]
    with iter(make()) as iterator:
        elements, states = read_with_states(iterator, 30)
    for position in (0, 1, 7, 30):
        with iter(make()) as restored:
            restored.set_state(without_hints(states[position]))
            rest = [batch.tolist() for batch, _ in elements_of(restored, len(elements) - position)]
            assert rest == [batch.tolist() for batch, _ in elements[position:]]


def test_an_unordered_map_neither_loses_nor_repeats_elements_from_any_state():
    def make():
        return Dataset.range(60).map(odd_or_half, num_parallel_calls=3, deterministic=False)

    elements = assert_restores_everywhere(make, ordered=False)
    assert sorted(elements) == sorted(odd_or_half(x) for x in range(60))


def test_a_file_cache_is_read_from_every_state(tmp_path: Path):
    def make():
        return Dataset.range(9).map(odd_or_half).batch(2).cache(tmp_path / "cache").repeat(2)

    assert_restores_everywhere(make)
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_records_and_lines_are_restored_within_a_file(tmp_path: Path):
    for number in range(3):
        with hr.io.TFRecordWriter(str(tmp_path / f"{number}.tfrecord")) as writer:
            for record in range(7):
                writer.write(b"%d-%d" % (number, record))
        (tmp_path / f"{number}.txt").write_bytes(b"".join(b"%d\n" % n for n in range(5)))

    def records():
        files = Dataset.list_files(str(tmp_path / "*.tfrecord"), seed=1)
        return files.interleave(hr.TFRecordDataset, cycle_length=2).shuffle(4, seed=5)

    def lines():
        return hr.TextLineDataset([str(tmp_path / "0.txt"), str(tmp_path / "2.txt")])

    assert len(assert_restores_everywhere(records)) == 21
    assert len(assert_restores_everywhere(lines)) == 10


def test_a_restore_that_skips_elements_calls_no_function_for_them():
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    def make():
        return Dataset.range(100).map(note).take(90).skip(10).shard(2, 1)

    with iter(make()) as iterator:
        next(iterator)
        state = saved(iterator)
    with iter(make()) as restored:
        restored.set_state(state)
        calls.clear()
        assert [int(next(restored)) for _ in range(3)] == [13, 15, 17]
    assert calls == [13, 15, 17]


@settings(max_examples=60)
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=5),
    source=st.sampled_from(sorted(SOURCES)),
    position=st.integers(0, 60),
    visited=st.integers(0, 60),
)
def test_any_pipeline_restores_anywhere(steps, source, position, visited):
    def make():
        dataset = SOURCES[source]()
        for step in steps:
            dataset = STEPS[step](dataset)
        return dataset

    with iter(make()) as first:
        list(elements_of(first, position))
        state = saved(first)
        want = [int(x) for x in elements_of(first, 60)]
    with iter(make()) as fresh, iter(make()) as used:
        list(elements_of(used, visited))
        for second in (fresh, used):
            second.set_state(state)
            assert saved(second) == state
            assert [int(x) for x in elements_of(second, 60)] == want


def test_the_failing_map_of_these_tests_fails():
    with pytest.raises(KeyError):
        failing(3)


def test_the_state_after_an_error_of_the_index_plan_is_after_the_error():
    ragged = hr.Dataset.range(5).batch(2).batch(3)
    for dataset in (ragged, ragged.unbatch(), hr.Dataset.range(1).flat_map(lambda x: ragged)):
        iterator = iter(dataset)
        with pytest.raises(hr.errors.InvalidElementError):
            next(iterator)
        state = iterator.get_state()
        assert list(iterator) == []
        again = iter(dataset)
        again.set_state(state)
        assert list(again) == []


# --- an error that was raised is not raised again after a restore ---------------------------------


def outcomes(iterator):
    found = []
    while len(found) < 100:
        try:
            found.append(str(next(iterator)))
        except StopIteration:
            return found
        except HeadraceError as error:
            found.append(type(error).__name__)
    raise AssertionError("it does not end")


def without_hints(value):
    if isinstance(value, dict):
        return {key: without_hints(v) for key, v in value.items() if key != "hint"}
    return [without_hints(v) for v in value] if isinstance(value, list) else value


def broken():
    raise ValueError("broken")


def missing_file(folder):
    (folder / "a.txt").write_text("1\n2\n")
    names = [str(folder / name) for name in ("a.txt", "none.txt", "a.txt", "none.txt")]
    return hr.TextLineDataset(names)


def missing_first_file(folder):
    (folder / "a.txt").write_text("1\n2\n")
    return hr.TextLineDataset([str(folder / "none.txt"), str(folder / "a.txt")])


def wrong_compression(folder):
    (folder / "a.txt").write_text("1\n2\n")
    return hr.TextLineDataset([str(folder / "a.txt")] * 2, compression_type="GZIP")


def damaged_records(folder):
    path = folder / "a.tfrecord"
    with hr.io.TFRecordWriter(str(path)) as writer:
        for number in range(5):
            writer.write(b"%d" % number)
    data = bytearray(path.read_bytes())
    size = struct.calcsize("<QI") + 1 + 4
    data[12] ^= 1  # the first record
    data[3 * size + 12] ^= 1
    path.write_bytes(data)
    return hr.TFRecordDataset([str(path)] * 2)


def generator_that_fails_first(folder):
    def generate():
        raise ValueError
        yield 0

    return Dataset.from_generator(generate)


def generator_that_fails_later(folder):
    def generate():
        yield from range(3)
        raise ValueError

    return Dataset.from_generator(generate).repeat(2)


SOURCES_THAT_RAISE = [
    missing_file,
    missing_first_file,
    wrong_compression,
    damaged_records,
    generator_that_fails_first,
    generator_that_fails_later,
]
STEPS_OVER_ERRORS = {
    "bare": lambda ds: ds,
    "prefetch": lambda ds: ds.prefetch(2),
    "filter": lambda ds: ds.filter(lambda x: x is not None),
    "flat_map": lambda ds: Dataset.range(2).flat_map(lambda i: ds),
}


@pytest.mark.parametrize("steps", STEPS_OVER_ERRORS)
@pytest.mark.parametrize("source", SOURCES_THAT_RAISE)
@pytest.mark.parametrize("hints", [True, False])
def test_an_error_at_the_start_or_later_is_raised_once(source, steps, hints, tmp_path):
    dataset = STEPS_OVER_ERRORS[steps](source(tmp_path))
    iterator = iter(dataset)
    states, found = [], []
    while True:
        states.append(json.loads(json.dumps(iterator.get_state())))
        try:
            found.append(str(next(iterator)))
        except StopIteration:
            break
        except HeadraceError as error:
            found.append(type(error).__name__)
    assert any(text.endswith("Error") for text in found)
    for position, state in enumerate(states):
        other = iter(dataset)
        other.set_state(state if hints else without_hints(state))
        assert outcomes(other) == found[position:], (position, state["position"])


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.from_generator(broken).repeat(),
        Dataset.range(2).filter(lambda x: broken() is x).repeat(),
    ],
    ids=["generator", "filter"],
)
def test_an_epoch_with_only_errors_does_not_count_as_empty(dataset):
    first, again = iter(dataset), iter(dataset)
    for _ in range(5):
        with pytest.raises(HeadraceError):
            next(first)
        again.set_state(json.loads(json.dumps(first.get_state())))
        for _ in range(3):
            with pytest.raises(HeadraceError):
                next(again)
