from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import headrace as hr
from headrace.errors import NotFoundError
from headrace.plan.fingerprint import fingerprint
from headrace.plan.identity import identity
from headrace.plan.serialize import dump_plan, load_plan
from headrace.storage.names import expand_names
from headrace.storage.options import NO_OPTIONS, StorageOptions
from tests.sources.test_mds_samples import COLUMNS, sample, write_directory


class VaultFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory that can be used with a key only."""

    protocol = "vault"
    store: dict[str, Any] = {}  # noqa: RUF012 - as in the base class
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("vault:/")))

    def __init__(self, key: str = "", **kwargs: Any) -> None:
        if key != "open sesame":
            raise PermissionError("wrong key")
        super().__init__(**kwargs)


fsspec.register_implementation("vault", VaultFileSystem, clobber=True)
OPTIONS = {"key": "open sesame"}


@pytest.fixture
def files() -> None:
    system = VaultFileSystem(**OPTIONS)
    for number in range(2):
        system.pipe_file(f"/v/{number}.txt", b"line %d\n" % number)


@pytest.mark.usefixtures("files")
def test_options_apply_to_the_index_and_the_shards_of_mds_directories(tmp_path: Path) -> None:
    write_directory(tmp_path, COLUMNS, [[sample(number) for number in range(3)]])
    VaultFileSystem(**OPTIONS).put(f"{tmp_path}/*", "/mds/")

    samples = hr.MDSDataset("vault://mds", storage_options=OPTIONS)

    assert [row["text"] for row in samples] == ["text 0", "text 1", "text 2"]


@pytest.mark.usefixtures("files")
def test_options_are_passed_to_fsspec() -> None:
    lines = hr.TextLineDataset("vault://v/*.txt", storage_options=OPTIONS)

    assert list(lines) == [b"line 0", b"line 1"]
    with pytest.raises(PermissionError, match="wrong key"):
        hr.TextLineDataset("vault://v/*.txt")
    names = hr.Dataset.list_files("vault://v/*", shuffle=False, storage_options=OPTIONS)
    by_name = hr.TextLineDataset(names, storage_options=OPTIONS, num_parallel_reads=2)
    assert sorted(by_name) == [b"line 0", b"line 1"]
    assert list(load_plan(dump_plan(lines.plan)).source.paths) == list(names)


@pytest.mark.usefixtures("files")
def test_options_are_no_part_of_states_and_fingerprints() -> None:
    before = hr.TextLineDataset("vault://v/*.txt", storage_options=OPTIONS)
    after = hr.TextLineDataset("vault://v/*.txt", storage_options={**OPTIONS, "use_cache": 1})
    without = hr.TextLineDataset(before.plan.source.paths)  # type: ignore[attr-defined]

    assert fingerprint(before.plan) == fingerprint(after.plan) == fingerprint(without.plan)
    assert identity(before.plan) == identity(after.plan) == identity(without.plan)
    iterator = iter(before)
    next(iterator)
    restored = iter(after)
    restored.set_state(iterator.get_state())
    assert next(restored) == b"line 1"


@pytest.mark.usefixtures("files")
def test_options_are_not_shown() -> None:
    dataset = hr.TextLineDataset("vault://v/*.txt", storage_options=OPTIONS)
    interleaved = hr.TextLineDataset(
        "vault://v/*.txt", storage_options=OPTIONS, num_parallel_reads=2
    )

    for each in (dataset, interleaved):
        shown = f"{each.explain()} {each!r} {each.plan!r} {iter(each).get_state()}"
        assert "sesame" not in shown
    assert "sesame" not in repr(dataset.plan.source)  # type: ignore[attr-defined]
    assert repr(StorageOptions(OPTIONS)) == "StorageOptions(...)"


def test_options_are_pickled_and_equal() -> None:
    cache = hr.StorageCache("/scratch", 1000)
    options = StorageOptions({"key": "a", "cache": cache})
    copy = pickle.loads(pickle.dumps(options))

    assert copy == options == NO_OPTIONS
    assert (copy.system, copy.cache) == ({"key": "a"}, cache)


@pytest.mark.parametrize("options", [3, "key", {3: 4}, {"cache": "/scratch"}])
def test_wrong_options_are_refused(options: Any) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        hr.TextLineDataset("x", storage_options=options)


def test_wrong_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="local path, but got 's3://x'"):
        hr.StorageCache("s3://x", 1000)
    with pytest.raises(ValueError, match="max_bytes"):
        hr.StorageCache("/scratch", 0)


def test_names_are_expanded_in_order(tmp_path: Path) -> None:
    for name in ("b0", "a1", "a0", "[x]"):
        (tmp_path / name).write_bytes(b"")

    def expand(*patterns: str) -> list[str]:
        names = expand_names("filenames", [f"{tmp_path}/{pattern}" for pattern in patterns])
        return [name.removeprefix(f"{tmp_path}/") for name in names]

    assert expand("b*", "a?") == ["b0", "a0", "a1"]
    assert expand("{b,a}0", "gone") == ["b0", "a0", "gone"]
    assert expand("{b,a}[0-9]") == ["b0", "a0", "a1"]
    assert expand("[x]") == ["[x]"]
    with pytest.raises(NotFoundError, match=r"z\*"):
        expand("a*", "z*")
    assert expand_names("urls", "https://h/a{0..1}?q=*") == ("https://h/a0?q=*", "https://h/a1?q=*")


def test_every_dataset_expands_patterns(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text(f'{{"n": {number}}}\n')
        (tmp_path / f"{number}.bin").write_bytes(b"%d" % number)
        with hr.io.TFRecordWriter(tmp_path / f"{number}.tfrecord") as writer:
            writer.write(b"%d" % number)

    datasets = {
        "jsonl": hr.JsonLinesDataset,
        "tfrecord": hr.TFRecordDataset,
        "bin": lambda names: hr.FixedLengthRecordDataset(names, 1),
    }
    for extension, make in datasets.items():
        elements = [
            int(element["n"] if isinstance(element, dict) else element)
            for pattern in ("?", "{1..0}")
            for element in make(f"{tmp_path}/{pattern}.{extension}")
        ]
        assert elements == [0, 1, 1, 0]
        with pytest.raises(NotFoundError, match=r"No files matched pattern: .*x\*"):
            make(f"{tmp_path}/x*.{extension}")
