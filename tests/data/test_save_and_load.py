"""Dataset.save and Dataset.load, as users see them."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import headrace as hr
from headrace.data import unfinished_source
from headrace.data.saving import save_dataset
from headrace.errors import (
    AbortedError,
    AlreadyExistsError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidElementError,
    NotFoundError,
    UserFunctionError,
)
from headrace.execution.threads import WaitWarning
from headrace.saved.format import encode_done
from headrace.service import LocalCluster, ShardingPolicy, distribute
from tests.execution.battery import assert_restores_everywhere
from tests.saved.strategies import bits, random_structure
from tests.saved.streams import SAVE, begun, publish, saved, write_stream

Dataset = hr.Dataset


def rows_of(dataset: Any) -> list[Any]:
    return [bits(row) for row in dataset]


def numbers_of(dataset: Any) -> list[int]:
    return [int(np.ravel(row)[0]) for row in dataset]


def varying(x: Any) -> Any:
    return {"n": x, "tokens": np.arange(int(x) % 5), "text": f"row {int(x)}"}


@pytest.mark.parametrize("round_", range(10))
def test_random_dataset_is_loaded_as_saved(tmp_path: Path, round_: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    make = random_structure(rng)
    rows = [make(rng) for _ in range(50)]
    dataset = Dataset.from_generator(lambda: iter(rows))
    dataset.save(tmp_path)

    for wait in (False, True):
        assert rows_of(Dataset.load(tmp_path, wait=wait)) == [bits(row) for row in rows]


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(1000),
        Dataset.range(100).map(varying),
        Dataset.range(100).map(varying).prefetch(3),
        Dataset.range(100).batch(7),
        Dataset.range(100).shuffle(10, 1, False).filter(lambda x: bool(x % 2)),
        Dataset.from_tensor_slices({"a": np.eye(9, dtype=">f4"), "b": ["é"] * 9}),
        Dataset.range(0),
    ],
    ids=["range", "varying", "prefetch", "batches", "filtered", "slices", "empty"],
)
def test_one_epoch_is_saved_and_loaded(tmp_path: Path, dataset: Any) -> None:
    dataset.save(tmp_path / "new" / "directory")
    loaded = Dataset.load(tmp_path / "new" / "directory")

    assert rows_of(loaded) == rows_of(dataset)
    assert loaded.cardinality() == len(rows_of(dataset))
    assert rows_of(loaded.repeat(2)) == 2 * rows_of(dataset)


def test_spec_and_length_of_a_loaded_dataset_are_known_without_reading(tmp_path: Path) -> None:
    dataset = Dataset.range(30).map(varying)
    dataset.save(tmp_path)
    for name in os.listdir(tmp_path):
        if name.endswith(".arrow"):
            (tmp_path / name).unlink()
    loaded = Dataset.load(tmp_path)

    assert len(loaded) == 30
    assert loaded.element_spec == dataset.element_spec
    assert Dataset.load(tmp_path, wait=True).element_spec == dataset.element_spec


def test_functions_run_once_for_each_element(tmp_path: Path) -> None:
    calls: list[int] = []

    def seen(x: Any) -> Any:
        calls.append(int(x))
        return str(x)

    Dataset.range(20).map(seen).save(tmp_path)

    assert calls == list(range(20))


def test_loaded_elements_are_writable_copies(tmp_path: Path) -> None:
    Dataset.range(50).map(lambda x: (np.full(4, x), np.arange(int(x) % 3))).save(tmp_path / "f")
    Dataset.range(50).map(lambda x: np.full(4, int(x))).save(tmp_path / "r")
    for path in (tmp_path / "f", tmp_path / "r"):
        loaded = Dataset.load(path)
        before = rows_of(loaded)
        for row in loaded:
            for leaf in row if isinstance(row, tuple) else (row,):
                leaf[...] = -1
        assert rows_of(loaded) == before


def test_each_save_is_a_new_epoch(tmp_path: Path) -> None:
    dataset = Dataset.range(100).shuffle(100).with_options(hr.Options(seed=3))
    again = Dataset.range(100).shuffle(100).with_options(hr.Options(seed=3))
    dataset.save(tmp_path / "0")
    dataset.save(tmp_path / "1")

    for name in ("0", "1"):
        assert rows_of(Dataset.load(tmp_path / name)) == rows_of(again)


def test_loaded_dataset_is_shuffled_like_one_in_memory(tmp_path: Path) -> None:
    array = np.arange(600).reshape(300, 2)
    memory = Dataset.from_tensor_slices(array)
    memory.save(tmp_path)

    def steps(dataset: Any) -> Any:
        return dataset.shuffle(300, seed=4).skip(7).batch(16)

    assert rows_of(steps(Dataset.load(tmp_path))) == rows_of(steps(memory))


@pytest.fixture
def memory() -> Iterator[str]:
    url = f"memory://saved-{uuid.uuid4().hex}"
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


def test_a_dataset_is_saved_and_loaded_by_url(tmp_path: Path, memory: str) -> None:
    dataset = Dataset.range(40).map(varying)
    for url in (memory, f"file://{tmp_path}"):
        dataset.save(url)
        for wait in (False, True):
            assert rows_of(Dataset.load(url, wait=wait)) == rows_of(dataset)
        with pytest.raises(
            AlreadyExistsError, match=f"{url.removeprefix('file://')}' already contains"
        ):
            dataset.save(url)


def test_loaded_dataset_can_be_saved(tmp_path: Path) -> None:
    Dataset.range(40).map(varying).save(tmp_path / "0")
    loaded = Dataset.load(tmp_path / "0")
    loaded.filter(lambda row: row["n"] % 2 == 0).save(tmp_path / "1")

    assert len(Dataset.load(tmp_path / "1")) == 20


# --- places ---------------------------------------------------------------------------------------


def in_files(path: Path, dataset: Any, chunk_bytes: int) -> Path:
    if not path.exists():
        save_dataset(dataset.plan, 0, path, chunk_bytes)
    return path


LOADED: dict[str, Callable[[Path], Any]] = {
    "rows": lambda path: Dataset.load(in_files(path, Dataset.range(50), 2000)),
    "shuffled batches": lambda path: (
        Dataset.load(in_files(path, Dataset.range(50), 2000)).shuffle(20, seed=1).batch(4)
    ),
    "files": lambda path: Dataset.load(in_files(path, Dataset.range(30).map(varying), 1)),
    "shuffled files": lambda path: (
        Dataset.load(in_files(path, Dataset.range(30).map(varying), 1))
        .shuffle(9, seed=2)
        .map(lambda row: row["tokens"])
        .repeat(2)
    ),
    "unfinished": lambda path: Dataset.load(
        in_files(path, Dataset.range(30).map(varying), 1), wait=True
    ),
    "streams": lambda path: Dataset.load(
        in_files(path, Dataset.range(30).map(varying), 1),
        reader_func=lambda streams: streams.interleave(lambda stream: stream.shuffle(5, seed=1)),
    ),
}


@pytest.mark.catalogue("LD15")
@pytest.mark.parametrize("name", LOADED)
def test_state_resumes_at_every_position(tmp_path: Path, name: str) -> None:
    assert_restores_everywhere(lambda: LOADED[name](tmp_path / "d"))


def test_state_of_an_unfinished_dataset_fits_the_finished_one(tmp_path: Path) -> None:
    rows = [varying(n) for n in np.arange(12)]
    directory = begun(tmp_path, rows[0])
    first = publish(directory, write_stream(directory, 0, rows[:4], each=2))
    iterator = iter(Dataset.load(tmp_path, wait=True))
    read = [next(iterator) for _ in range(3)]
    state = iterator.get_state()
    iterator.close()

    rest = write_stream(directory, 2, rows[8:], each=2)
    rest += write_stream(directory, 0, rows[4:8], each=3, number=2)
    directory.finish(SAVE, first + publish(directory, rest, 2))
    resumed = iter(Dataset.load(tmp_path, wait=True))
    resumed.set_state(state)

    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7]
    assert [int(row["n"]) for row in [*read, *resumed]] == order
    assert [int(row["n"]) for row in Dataset.load(tmp_path)] == order


# --- streams --------------------------------------------------------------------------------------


def test_reader_func_gets_a_dataset_for_each_stream(tmp_path: Path) -> None:
    saved(tmp_path, [np.int64(n) for n in range(4)], [], [np.int64(n) for n in range(10, 13)])

    def in_turn(streams: Any) -> Any:
        assert len(streams) == 2  # one wrote nothing
        return streams.interleave(lambda stream: stream, cycle_length=3)

    loaded = Dataset.load(tmp_path, reader_func=in_turn)
    assert numbers_of(loaded) == [0, 10, 1, 11, 2, 12, 3]
    assert loaded.element_spec == hr.ArraySpec((), np.int64)

    one_by_one = Dataset.load(tmp_path, reader_func=lambda s: s.flat_map(lambda x: x.take(2)))
    assert numbers_of(one_by_one) == [0, 1, 10, 11]

    def mixed(streams: Any) -> Any:
        return streams.shuffle(3).interleave(lambda stream: stream.shuffle(4), cycle_length=3)

    assert sorted(numbers_of(Dataset.load(tmp_path, reader_func=mixed))) == [
        *range(4),
        *range(10, 13),
    ]


def test_streams_are_read_as_they_appear(tmp_path: Path) -> None:
    directory = begun(tmp_path, np.int64(0))
    first = publish(directory, write_stream(directory, 0, [np.int64(0)]))
    loaded = Dataset.load(
        tmp_path, wait=True, reader_func=lambda s: s.interleave(lambda x: x, cycle_length=4)
    )
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.extend(numbers_of(loaded)))
    reader.start()
    second = publish(directory, write_stream(directory, 1, [np.int64(1)]), 1)
    directory.finish(SAVE, first + second)
    reader.join(20)

    assert sorted(found) == [0, 1]


@pytest.mark.parametrize(
    ("reader_func", "message"),
    [(3, "`reader_func` must be"), (lambda streams: 3, "`reader_func` must return a Dataset")],
)
def test_invalid_reader_func_is_rejected(tmp_path: Path, reader_func: Any, message: str) -> None:
    saved(tmp_path, [np.int64(1)])
    with pytest.raises(TypeError, match=message):
        Dataset.load(tmp_path, reader_func=reader_func)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.catalogue("SV10", "LD12")
def test_load_without_a_saved_dataset_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "stray.arrow").touch()
    for path in (tmp_path, tmp_path / "no"):
        with pytest.raises(NotFoundError, match=f"no saved dataset in '{path}'; create one with"):
            Dataset.load(path)


def test_saving_an_infinite_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"infinite and cannot be saved: limit it with take\(n\)"):
        Dataset.range(3).repeat().save(tmp_path / "d")
    assert os.listdir(tmp_path) == []


def test_save_does_not_overwrite_a_saved_dataset(tmp_path: Path) -> None:
    Dataset.range(3).save(tmp_path)
    calls: list[Any] = []

    with pytest.raises(AlreadyExistsError, match="already contains a saved dataset of 3 elements"):
        Dataset.range(4).map(lambda x: calls.append(x) or x).save(tmp_path)
    assert calls == []
    assert numbers_of(Dataset.load(tmp_path)) == [0, 1, 2]


def test_save_error_for_varying_elements_names_the_component(tmp_path: Path) -> None:
    rows = [{"x": np.zeros(2)}, {"x": np.zeros(2)}, {"x": np.zeros((2, 2))}]

    with pytest.raises(InvalidElementError, match=r"cannot save component \['x'\]: it is"):
        Dataset.from_generator(lambda: iter(rows)).save(tmp_path)
    with pytest.raises(FailedPreconditionError, match=r"it again: InvalidElementError: .*'x'"):
        Dataset.load(tmp_path)


def failing(x: Any) -> Any:
    if x == 5:
        raise KeyError(int(x))
    return x


@pytest.mark.parametrize("first", [0, 5])
def test_failed_save_is_reported_and_can_be_repeated(tmp_path: Path, first: int) -> None:
    with pytest.raises(UserFunctionError):
        Dataset.range(first, 8).map(failing).save(tmp_path)
    for wait in (False, True):
        with pytest.raises(FailedPreconditionError, match=r"(?s)save it again: .*") as caught:
            list(Dataset.load(tmp_path, wait=wait))
        assert "KeyError: 5" in str(caught.value).splitlines()[-1], (
            "what went wrong is what one reads last"
        )
    assert sorted(os.listdir(tmp_path)) == ["ERROR", "dataset.json"]

    Dataset.range(8).save(tmp_path)
    assert numbers_of(Dataset.load(tmp_path)) == list(range(8))


def test_other_files_in_the_directory_are_kept_and_ignored(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    Dataset.range(8).save(tmp_path)
    assert numbers_of(Dataset.load(tmp_path)) == list(range(8))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_interrupted_save_can_be_repeated(tmp_path: Path) -> None:
    at = [5]

    def interrupted(x: Any) -> Any:
        if x == at[0]:
            raise KeyboardInterrupt
        return x

    dataset = Dataset.range(9).map(interrupted)
    with pytest.raises(KeyboardInterrupt):
        dataset.save(tmp_path)
    with pytest.raises(FailedPreconditionError, match=r"and save it again: KeyboardInterrupt$"):
        Dataset.load(tmp_path)
    at[0] = -1
    dataset.save(tmp_path)
    assert numbers_of(Dataset.load(tmp_path)) == list(range(9))


def test_later_of_two_concurrent_saves_wins(tmp_path: Path) -> None:
    dataset = Dataset.range(4).map(failing)

    def slow() -> Iterator[Any]:
        yield np.int64(0)
        if not other:
            other.append(1)
            Dataset.from_generator(slow).save(tmp_path)
        yield np.int64(1)

    other: list[int] = []
    with pytest.raises(AbortedError, match="another process started a save there"):
        save_dataset(Dataset.from_generator(slow).plan, 0, tmp_path, 1)

    assert numbers_of(Dataset.load(tmp_path)) == [0, 1]
    assert len(dataset) == 4


def test_error_without_pyarrow_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Dataset.range(3).save(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for act in (lambda: Dataset.load(tmp_path), lambda: Dataset.range(3).save(tmp_path / "d")):
        with pytest.raises(FailedPreconditionError, match=r"pip install 'headrace\[arrow\]'"):
            act()


# --- while it is saved, by another process --------------------------------------------------------

WRITER = """
import sys
import numpy as np
import headrace as hr
from headrace.data.saving import save_dataset

path, count, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def rows():
    for number in range(count):
        if pause and number and number % pause == 0:
            sys.stdin.readline()
        yield {"n": np.int64(number), "tokens": np.arange(number % 5)}

save_dataset(hr.Dataset.from_generator(rows).plan, 0, path, 1)
print("saved", flush=True)
"""


def start_writer(path: Path, count: int, pause: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(count), str(pause)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def until(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true after {seconds:g} s"
        time.sleep(0.01)


def files_in(path: Path) -> int:
    return len(list(path.glob("*.arrow")))


@pytest.mark.heavy
def test_a_dataset_is_loaded_while_another_process_saves_it(tmp_path: Path) -> None:
    path = tmp_path / "d"
    found: list[int] = []

    def load() -> None:
        for row in Dataset.load(path, wait=True):
            found.append(int(row["n"]))

    reader = threading.Thread(target=load)
    reader.start()  # before there is anything
    writer = start_writer(path, 400, pause=200)
    try:
        until(lambda: len(found) > 60)
        with pytest.raises(FailedPreconditionError, match=r"not finished: it has \d+ chunk files"):
            Dataset.load(path)
        assert len(found) < 200
        writer.communicate(b"go on\n", timeout=40)
        reader.join(40)
    finally:
        writer.kill()
        writer.wait()
    assert found == list(range(400))
    assert rows_of(Dataset.load(path)) == rows_of(Dataset.load(path, wait=True))


@pytest.mark.heavy
def test_killed_save_is_not_loaded_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "d"
    writer = start_writer(path, 400, pause=200)
    try:
        until(lambda: files_in(path) > 3)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    left = set(os.listdir(path))
    with pytest.raises(
        FailedPreconditionError, match=r"not finished: .* save it again if the saving process"
    ):
        Dataset.load(path)
    with pytest.raises(AlreadyExistsError, match="an unfinished save of another pipeline"):
        Dataset.range(3).save(path)
    assert set(os.listdir(path)) == left

    again = start_writer(path, 50)
    assert again.communicate(timeout=40)[0] == b"saved\n"

    assert [int(row["n"]) for row in Dataset.load(path)] == list(range(50))
    assert not (left - {"dataset.json"}) & set(os.listdir(path))


def test_long_wait_is_logged_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moments = iter(range(0, 1 << 20, 6))
    monkeypatch.setattr(
        unfinished_source, "WaitWarning", lambda text: WaitWarning(text, lambda: next(moments))
    )
    directory = begun(tmp_path, np.int64(0))
    publish(directory, write_stream(directory, 0, [np.int64(0)]))
    iterator = iter(Dataset.load(tmp_path, wait=True).prefetch(2))
    with caplog.at_level(logging.WARNING, "headrace"):
        assert next(iterator) == 0
        until(lambda: len(caplog.messages) > 0)
    iterator.close()  # though a thread waits

    assert caplog.messages[0].startswith(
        f"waiting for more of the saved dataset '{tmp_path}', which is not finished (1 chunk files"
        " so far): no element for"
    )


@pytest.mark.parametrize("wait", [False, True])
def test_damaged_save_id_is_not_taken_for_an_unfinished_save(tmp_path: Path, wait: bool) -> None:
    dataset = Dataset.range(100).batch(10)
    dataset.save(tmp_path)
    header = tmp_path / "dataset.json"
    value = json.loads(header.read_text())
    found = ("0" if value["save"][0] != "0" else "1") + value["save"][1:]
    header.write_text(json.dumps({**value, "save": found}))

    with pytest.raises(DataLossError) as caught:
        Dataset.load(tmp_path, wait=wait, wait_timeout=0.1)
    for words in (str(header), found, value["save"], "save the dataset again"):
        assert words in str(caught.value)

    dataset.save(tmp_path)  # the remedy
    assert len(list(Dataset.load(tmp_path, wait=wait))) == 10


def test_late_done_file_of_a_replaced_save_is_no_damage(tmp_path: Path) -> None:
    directory = begun(tmp_path, np.int64(0))
    (tmp_path / "DONE").write_bytes(encode_done("0" * 16, []))

    with pytest.raises(FailedPreconditionError, match="0 chunk files and a DONE file of another"):
        Dataset.load(tmp_path)
    waiting = iter(Dataset.load(tmp_path, wait=True))
    publish(directory, write_stream(directory, 0, [np.int64(7)]))
    assert next(waiting) == 7
    waiting.close()


def test_wait_without_a_save_times_out(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceededError, match="for a dataset to be saved in"):
        Dataset.load(tmp_path / "nothing", wait=True, wait_timeout=0.05)
    directory = begun(tmp_path, np.int64(0))
    publish(directory, write_stream(directory, 0, [np.int64(0)]))
    whole = Dataset.load(tmp_path, wait=True, wait_timeout=0.1)
    streams = Dataset.load(
        tmp_path, wait=True, wait_timeout=0.1, reader_func=lambda s: s.flat_map(lambda x: x)
    )
    for loaded in (whole, streams):
        iterator = iter(loaded)
        assert next(iterator) == 0
        for _ in range(1 if loaded is whole else 2):  # the stream, and that there are others
            with pytest.raises(DeadlineExceededError, match="and nothing was written"):
                next(iterator)
        assert list(iterator) == []


@pytest.mark.parametrize(
    ("seconds", "kind"), [("1", TypeError), (0, ValueError), (True, TypeError)]
)
def test_wait_timeout_must_be_a_number_of_seconds(
    tmp_path: Path, seconds: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="`wait_timeout` must be"):
        Dataset.load(tmp_path, wait=True, wait_timeout=seconds)


def test_waiting_reader_receives_the_outcome_of_the_save(tmp_path: Path) -> None:
    for number, (act, error, message) in enumerate(
        [
            (lambda d: d.fail(SAVE, "KeyError: 3"), FailedPreconditionError, "again: KeyError: 3"),
            (lambda d: begun(d.url, save="a" * 16), AbortedError, "saved again while it was read"),
            (lambda d: d.folder.remove("dataset.json"), NotFoundError, "was removed while it was"),
        ]
    ):
        directory = begun(tmp_path / str(number), np.int64(0))
        publish(directory, write_stream(directory, 0, [np.int64(0)]))
        iterator = iter(Dataset.load(tmp_path / str(number), wait=True))
        assert next(iterator) == 0
        act(directory)
        with pytest.raises(error, match=message):
            next(iterator)
        assert list(iterator) == []


# --- over the service -----------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("wait", [False, True])
def test_workers_share_a_loaded_dataset(tmp_path: Path, wait: bool) -> None:
    save_dataset(Dataset.range(500).plan, 0, tmp_path / "rows", 1000)
    save_dataset(Dataset.range(100).map(varying).plan, 0, tmp_path / "files", 1000)
    rows = Dataset.load(tmp_path / "rows", wait=wait)
    files = Dataset.load(tmp_path / "files", wait=wait).map(lambda row: row["n"])
    with LocalCluster(num_workers=2, processes=False) as cluster:
        for dataset, count in ((rows, 500), (files, 100)):
            shared = dataset.apply(distribute(ShardingPolicy.DYNAMIC, cluster.target))
            assert sorted(numbers_of(shared)) == list(range(count))
            copies = dataset.apply(distribute(ShardingPolicy.OFF, cluster.target))
            assert sorted(numbers_of(copies)) == sorted([*range(count)] * 2)


@pytest.mark.system
def test_elements_from_the_service_can_be_saved(tmp_path: Path) -> None:
    with LocalCluster(num_workers=2, processes=False) as cluster:
        remote = Dataset.range(100).apply(distribute(ShardingPolicy.DYNAMIC, cluster.target))
        remote.save(tmp_path)

    assert sorted(numbers_of(Dataset.load(tmp_path))) == list(range(100))
