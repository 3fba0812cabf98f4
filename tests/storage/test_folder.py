"""Conformance tests of local and remote folders."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from headrace.errors import FailedPreconditionError, NotFoundError
from headrace.storage.files import Folder, open_folder


@pytest.fixture(params=["local", "file URL", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    if request.param != "memory":
        prefix = "file://" if request.param == "file URL" else ""
        yield open_folder(f"{prefix}{tmp_path / 'new'}")
        return
    url = f"memory://folder-{uuid.uuid4().hex}"
    yield open_folder(url)
    fsspec.filesystem("memory").rm(url, recursive=True)


def filled(folder: Folder, name: str, data: bytes) -> None:
    with folder.create(name) as file:
        file.write(data)


def test_missing_folder_is_empty(tmp_path: Path) -> None:
    for folder in (open_folder(tmp_path / "no"), open_folder("memory://no-such-folder")):
        assert folder.list_published() == []
        assert folder.list_unpublished() == []
        with pytest.raises(NotFoundError, match=r"No such file: .*x'"):
            folder.read("x")


def test_file_is_visible_once_published(folder: Folder) -> None:
    filled(folder, "b", b"two")
    filled(folder, "a", b"one")
    assert (folder.list_published(), folder.list_unpublished()) == ([], ["a", "b"])

    folder.publish("a", "1-a")
    folder.publish("a", "1-a")

    assert folder.list_published() == ["1-a"]
    assert "b" in folder.list_unpublished()
    assert folder.read(folder.find_name("a", "1-a")) == b"one"


def test_small_file_replaces_another(folder: Folder) -> None:
    folder.write("record", b"first")
    folder.write("record", b"second")

    assert folder.read("record") == b"second"


def test_published_and_unpublished_files_can_be_removed(folder: Folder) -> None:
    for name in ("a", "b"):
        filled(folder, name, b"x")
    folder.publish("a", "1-a")
    for name in ("1-a", "a", "b", "was never there"):
        folder.remove(name)

    assert (folder.list_published(), folder.list_unpublished()) == ([], [])


def test_tree_lists_the_files_in_all_folders(folder: Folder) -> None:
    for below, name in (("", "b"), ("a", "1"), ("a/b c", "2"), ("", "a-0")):
        # A file by its own name, without the rules of publishing.
        path = folder.path(below).removeprefix("file://")
        system = fsspec.core.url_to_fs(path)[0]
        system.makedirs(path, exist_ok=True)
        system.pipe_file(f"{path.rstrip('/')}/{name}", b"x")

    assert folder.list_tree() == ["a-0", "a/1", "a/b c/2", "b"]
    assert folder.read("a/b c/2") == b"x"


def test_missing_folder_has_no_tree(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"No such file: .*no'"):
        open_folder(tmp_path / "no").list_tree()
    assert open_folder("memory://no-such-folder").list_tree() == []


def test_folder_can_be_pickled(folder: Folder) -> None:
    folder.write("record", b"data")

    assert pickle.loads(pickle.dumps(folder)).read("record") == b"data"


def test_paths_of_files_can_be_opened(folder: Folder) -> None:
    folder.write("record", b"data")

    with fsspec.open(folder.path("record"), "rb") as file:
        assert file.read() == b"data"
    assert folder.is_local == os.path.exists(folder.path("record"))


def test_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FailedPreconditionError, match="a parent of it is a file"):
            open_folder(path).write("x", b"")


def test_unknown_file_system_is_named() -> None:
    with pytest.raises(ValueError, match=r"'nosuch://x': .*fsspec has no file system"):
        open_folder("nosuch://x")
