"""Iterator states that releases have written, which later ones must restore.

    python -m tests.data.golden_states RELEASE

adds `states/RELEASE.json`, with the states of the cases that the release knows. Run it with the
code of that release. A file never changes; neither do cases, as their states belong to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import headrace as hr
from headrace.service import DispatchServer, WorkerConfig, WorkerServer

__all__ = ["CASES", "FOLDER", "ON_A_SERVICE", "as_json", "directory_of_files", "load"]

FOLDER = Path(__file__).parent / "states"
SAVED = Path(__file__).parents[1] / "saved/format_1/rows"
Dataset = hr.Dataset


def double(x: Any) -> Any:
    return 2 * x


def is_even(x: Any) -> bool:
    return int(x) % 2 == 0


def is_low(_: Any, x: Any) -> bool:
    return int(x) < 8


def count_up(x: Any) -> Dataset[Any]:
    return Dataset.range(int(x) % 3 + 2)


def row(x: Any) -> Any:
    return np.arange(int(x) % 5)


def add(total: Any, x: Any) -> Any:
    return total + x, total + x


def remainder(x: Any) -> int:
    return int(x) % 3


def pairs(_: Any, group: Dataset[Any]) -> Dataset[Any]:
    return group.batch(2)


def squares() -> Iterator[Any]:
    return (np.int64(n * n) for n in range(12))


NUMBERS = Dataset.range(12)

CASES: dict[str, Callable[[], Dataset[Any]]] = {
    "map and batch": lambda: NUMBERS.map(double).batch(5),
    "filter": lambda: NUMBERS.filter(is_even).prefetch(2),
    "shuffle": lambda: NUMBERS.shuffle(12, seed=3),
    "shuffle of values": lambda: NUMBERS.filter(is_even).shuffle(3, seed=3),
    "repeat": lambda: NUMBERS.take(5).shuffle(5, seed=1).repeat(2).skip(1),
    "enumerate": lambda: NUMBERS.enumerate().take_while(is_low),
    "unbatch": lambda: NUMBERS.batch(5).unbatch(),
    "scan": lambda: NUMBERS.scan(np.int64(0), add),
    "zip": lambda: Dataset.zip((NUMBERS, NUMBERS.map(double))),
    "concatenate": lambda: NUMBERS.take(3).concatenate(NUMBERS.skip(9)),
    "flat_map": lambda: NUMBERS.take(4).flat_map(count_up),
    "interleave": lambda: NUMBERS.take(4).interleave(count_up, cycle_length=2),
    "padded_batch": lambda: NUMBERS.map(row).padded_batch(3),
    "group_by_window": lambda: NUMBERS.group_by_window(remainder, pairs, 4),
    "buckets": lambda: NUMBERS.map(row).bucket_by_sequence_length(len, [2, 4], [2, 2, 2]),
    "sample": lambda: Dataset.sample_from_datasets([NUMBERS, NUMBERS], [0.3, 0.7], seed=5),
    "generator": lambda: Dataset.from_generator(squares),
    "random": lambda: Dataset.random(seed=4).take(6),
    "cache": lambda: NUMBERS.map(double).cache(),
    "text": lambda: hr.TextLineDataset(["a.txt", "b.txt"]).shuffle(3, seed=1),
    "TFRecord": lambda: hr.TFRecordDataset("a.tfrecord").batch(2),
    "saved": lambda: Dataset.load(SAVED).take(7),
}
ON_A_SERVICE: dict[str, Callable[[str], Dataset[Any]]] = {
    "ordered": lambda target: NUMBERS.map(double).apply(
        hr.service.distribute("distributed_epoch", target, ordered=True)
    ),
    "unordered": lambda target: NUMBERS.map(double).apply(
        hr.service.distribute("distributed_epoch", target, visitation="exactly_once")
    ),
    "steps after distribute": lambda target: (
        NUMBERS.map(double)
        .apply(hr.service.distribute("distributed_epoch", target, ordered=True))
        .batch(5)
    ),
}


@contextlib.contextmanager
def directory_of_files() -> Iterator[None]:
    """Work in a directory with the files of the cases."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("a.txt").write_text("one\ntwo\nthree\n")
            Path("b.txt").write_text("four\nfive\n")
            with hr.io.TFRecordWriter("a.tfrecord") as writer:
                for n in range(5):
                    writer.write(b"record %d" % n)
            yield
        finally:
            os.chdir(before)


def as_json(value: Any) -> Any:
    """Return an element as JSON, for comparison."""
    if isinstance(value, tuple | list):
        return [as_json(each) for each in value]
    if isinstance(value, bytes):
        return value.decode()
    return as_json(value.tolist()) if isinstance(value, np.ndarray | np.generic) else value


def load() -> list[tuple[str, str, dict[str, Any]]]:
    """Return release, case, and its elements with the states, for all files."""
    return [
        (path.stem, name, case)
        for path in sorted(FOLDER.glob("*.json"))
        for name, case in json.loads(path.read_text()).items()
    ]


def _record(dataset: Dataset[Any]) -> dict[str, Any]:
    """Return the elements, and the states before the first, a middle one and the end."""
    elements, states = [], []
    with iter(dataset) as iterator:
        states.append(iterator.get_state())
        for element in iterator:
            elements.append(as_json(element))
            states.append(iterator.get_state())
    positions = sorted({0, len(elements) // 2 + 1, len(elements)})
    return {"elements": elements, "states": {str(n): states[n] for n in positions}}


def _main(release: str) -> None:
    found = {}
    with (
        directory_of_files(),
        DispatchServer() as server,
        WorkerServer(WorkerConfig(dispatcher_address=server.target.split("://")[1])),
    ):
        for name, make in CASES.items():
            found[name] = _record(make())
        for name, make_on in ON_A_SERVICE.items():
            found[name] = _record(make_on(server.target))
    FOLDER.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in found.items())
    (FOLDER / f"{release}.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    # By its name, which states hold for functions.
    from tests.data import golden_states

    golden_states._main(sys.argv[1])
