"""An error that was raised does not come again after a restore, wherever it came."""

from __future__ import annotations

import json
import struct

import pytest

import headrace as hr
from headrace.errors import HeadraceError

Dataset = hr.Dataset


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


SOURCES = [
    missing_file,
    missing_first_file,
    wrong_compression,
    damaged_records,
    generator_that_fails_first,
    generator_that_fails_later,
]
STEPS = {
    "bare": lambda ds: ds,
    "prefetch": lambda ds: ds.prefetch(2),
    "filter": lambda ds: ds.filter(lambda x: x is not None),
    "flat_map": lambda ds: Dataset.range(2).flat_map(lambda i: ds),
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("hints", [True, False])
def test_an_error_at_the_beginning_or_later_comes_once(source, steps, hints, tmp_path):
    dataset = STEPS[steps](source(tmp_path))
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
    for place, state in enumerate(states):
        other = iter(dataset)
        other.set_state(state if hints else without_hints(state))
        assert outcomes(other) == found[place:], (place, state["at"])


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.from_generator(broken).repeat(),
        Dataset.range(2).filter(lambda x: broken() is x).repeat(),
    ],
    ids=["generator", "filter"],
)
def test_a_pass_of_errors_alone_is_no_empty_one_before_a_restore_and_after(dataset):
    first, again = iter(dataset), iter(dataset)
    for _ in range(5):
        with pytest.raises(HeadraceError):
            next(first)
        again.set_state(json.loads(json.dumps(first.get_state())))
        for _ in range(3):
            with pytest.raises(HeadraceError):
                next(again)
