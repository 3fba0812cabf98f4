from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from headrace.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from headrace.storage.compression import check_compression
from headrace.storage.files import create_file, open_file, read_file_version
from headrace.storage.names import as_names, expand_braces, match_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "c.csv", "sub/d.txt", "[odd].txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path


@pytest.fixture
def memory() -> Iterator[str]:
    system = fsspec.filesystem("memory")
    system.mkdir("/rivers", create_parents=True)
    for name in ("b.txt", "a.txt"):
        with system.open(f"/rivers/{name}", "wb") as file:
            file.write(name.encode())
    yield "memory://rivers"
    system.rm("/rivers", recursive=True)


def names_in(folder: Path, names: tuple[str, ...]) -> list[str]:
    return [os.path.relpath(name, folder) for name in names]


def test_patterns_match_sorted_files_without_folders(folder: Path) -> None:
    assert names_in(folder, match_files(f"{folder}/*")) == [
        "[odd].txt",
        "a.txt",
        "b.txt",
        "c.csv",
    ]
    assert names_in(folder, match_files(folder / "?.txt")) == ["a.txt", "b.txt"]
    assert names_in(folder, match_files([f"{folder}/**/*.txt", folder / "a.txt"])) == [
        "[odd].txt",
        "a.txt",
        "b.txt",
        "sub/d.txt",
    ]
    assert names_in(folder, match_files(f"file://{folder}/c*")) == ["c.csv"]


def test_existing_name_is_not_a_pattern(folder: Path) -> None:
    assert names_in(folder, match_files(folder / "[odd].txt")) == ["[odd].txt"]


def test_url_patterns_give_urls_that_open(memory: str) -> None:
    names = match_files(f"{memory}/*.txt")

    assert [name.rpartition("/")[2] for name in names] == ["a.txt", "b.txt"]
    stream = open_file(names[0])
    assert stream.read(100) == b"a.txt"
    stream.close()
    assert match_files(f"{memory}/a.txt") == (f"{memory}/a.txt",)


def test_pattern_without_matches_is_named(folder: Path, memory: str) -> None:
    with pytest.raises(NotFoundError, match=r"No files matched pattern: .*\*\.none"):
        match_files(f"{folder}/*.none")
    with pytest.raises(NotFoundError, match=r"No such file: .*gone"):
        match_files([f"{folder}/*.txt", f"{folder}/gone"])
    with pytest.raises(NotFoundError, match=r"No such file: .*gone"):
        match_files(f"{memory}/gone")


@pytest.mark.parametrize(
    "name",
    [
        "a/b",
        b"a/b",
        Path("a/b"),
        np.str_("a/b"),
        np.bytes_(b"a/b"),
        np.array("a/b"),
        np.array(b"a/b"),
        np.array("a/b", object),
    ],
)
def test_names_may_have_any_supported_type(name: object) -> None:
    for given in (name, [name], (name,), iter([name])):
        names = as_names("filenames", given)  # type: ignore[arg-type]
        assert names == ("a/b",)
        assert type(names[0]) is str


@pytest.mark.parametrize("dtype", [object, "U", "S"])
def test_array_of_names_is_a_sequence(dtype: object) -> None:
    assert as_names("filenames", np.array(["a", "b"], dtype)) == ("a", "b")  # type: ignore[call-overload]


def test_open_file_is_refused_with_its_name(folder: Path) -> None:
    with open(folder / "a.txt") as text, open(folder / "a.txt", "rb") as binary:
        for opened in (text, binary, [text]):
            with pytest.raises(TypeError, match=r"an open file .*pass its name, '.*a\.txt'"):
                as_names("filenames", opened)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"an open file .BytesIO.; pass the file's name"):
        as_names("filenames", io.BytesIO(b"a"))  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [3, None, [["a"]], ["a", 3], [np.array(["a"])]])
def test_other_types_of_names_are_refused(names: object) -> None:
    with pytest.raises(TypeError, match="filenames must"):
        as_names("filenames", names)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", ["", [], ["a", ""]])
def test_empty_names_are_refused(names: object) -> None:
    with pytest.raises(ValueError, match="empty"):
        as_names("filenames", names)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("plain", ["plain"]),
        ("{a,b}", ["a", "b"]),
        ("s{0..2}.tar", ["s0.tar", "s1.tar", "s2.tar"]),
        ("s{08..10}", ["s08", "s09", "s10"]),
        ("s{2..0}", ["s2", "s1", "s0"]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
        ("x{a,{b,c}d}", ["xa", "xbd", "xcd"]),
        ("{,un}known", ["known", "unknown"]),
        ("{a,a}", ["a"]),
        ("{}", ["{}"]),
        ("{name}.txt", ["{name}.txt"]),
        ("{a..c}", ["{a..c}"]),
        ("{a,b", ["{a,b"]),
    ],
)
def test_braces_are_expanded_as_in_a_shell(pattern: str, names: list[str]) -> None:
    assert expand_braces(pattern) == names


def test_braces_with_too_many_names_are_refused() -> None:
    for pattern in ("{0..99999999999}", "{0..9999}{0..9999}"):
        with pytest.raises(ValueError, match="more than 1048576 names"):
            expand_braces(pattern)


def test_patterns_with_braces_match_files(folder: Path, memory: str) -> None:
    assert names_in(folder, match_files(f"{folder}/{{a,b}}.txt")) == ["a.txt", "b.txt"]
    assert names_in(folder, match_files(f"{folder}/{{a,c}}.*")) == ["a.txt", "c.csv"]
    assert len(match_files(f"{memory}/{{a,b}}.txt")) == 2
    with pytest.raises(NotFoundError, match=r"No such file: .*z\.txt"):
        match_files(f"{folder}/{{a,z}}.txt")


def test_existing_file_with_braces_in_its_name_is_not_expanded(folder: Path) -> None:
    (folder / "{x,y}").write_bytes(b"")
    assert names_in(folder, match_files(folder / "{x,y}")) == ["{x,y}"]


def test_pattern_that_matches_only_folders_is_explained(folder: Path) -> None:
    with pytest.raises(NotFoundError, match=r"matches folders .1. .*write '.*/s\*/\*'"):
        match_files(f"{folder}/s*")
    with pytest.raises(NotFoundError, match=r"it is a folder, not a file; write '.*/sub/\*'"):
        match_files(f"{folder}/sub")


def test_missing_folder_of_a_pattern_is_named(folder: Path) -> None:
    with pytest.raises(NotFoundError, match=rf"the folder '{folder}/gone' does not exist"):
        match_files(f"{folder}/gone/*/x.jpg")
    with pytest.raises(NotFoundError, match=rf"nothing in the folder '{folder}' matches"):
        match_files(f"{folder}/*.jpg")


def test_file_in_a_missing_folder_cannot_be_created(folder: Path) -> None:
    with pytest.raises(NotFoundError, match=rf"'{folder}/gone' does not exist; create it first"):
        create_file(f"{folder}/gone/x")


def test_url_with_an_unknown_scheme_is_named() -> None:
    for use in (match_files, open_file, create_file):
        with pytest.raises(ValueError, match=r"'foo://x/a': .*Protocol not known: foo"):
            use("foo://x/a")


def test_pattern_instead_of_a_name_gives_a_hint(folder: Path) -> None:
    for name in ("*.txt", "{a,b}.txt"):
        with pytest.raises(NotFoundError, match=r"use Dataset\.list_files"):
            open_file(str(folder / name))


@pytest.mark.parametrize("compression_type", ["gzip", "GZ", 3, "bz2"])
def test_unknown_compressions_are_refused(compression_type: object) -> None:
    with pytest.raises(
        ValueError, match=f'"GZIP" or "ZLIB" .in capitals., got {compression_type!r}'
    ):
        check_compression(compression_type)  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("remote", [False, True])
def test_files_open_at_any_offset_of_their_content(
    tmp_path: Path, memory: str, compression: str, remote: bool
) -> None:
    content = os.urandom(100) * 3000
    name = f"{memory}/x" if remote else str(tmp_path / "x")
    stored = {"": bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}[compression](content)
    with create_file(name) as file:
        file.write(stored)

    for offset in (0, 1, 299_999, 300_000):
        stream = open_file(name, compression, offset)
        pieces = list(iter(lambda stream=stream: stream.read(1000), b""))
        stream.close()
        stream.close()
        assert b"".join(pieces) == content[offset:]
        assert all(len(piece) <= 1000 for piece in pieces)
    with pytest.raises(DataLossError, match="has 300000 bytes, but 300001 had been read"):
        open_file(name, compression, 300_001)


def test_gzip_files_may_have_several_members_and_padding(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two") + bytes(9))
    stream = open_file(str(path), "GZIP")

    assert b"".join(iter(lambda: stream.read(3), b"")) == b"one two"
    stream.close()


@pytest.mark.parametrize("damage", ["cut", "flipped", "trailer"])
def test_damaged_stream_returns_valid_data_and_then_an_error(tmp_path: Path, damage: str) -> None:
    content = os.urandom(50_000)
    stored = bytearray(gzip.compress(content))
    if damage == "cut":
        del stored[40_000:]
    elif damage == "trailer":
        stored[-6] ^= 1
    else:
        stored[20_000:20_100] = bytes(range(100))
    path = tmp_path / "x.gz"
    path.write_bytes(stored)
    stream = open_file(str(path), "GZIP")
    good = bytearray()

    def drain() -> None:
        while piece := stream.read(1 << 20):
            good.extend(piece)

    with pytest.raises(DataLossError, match=r"x\.gz: the GZIP stream"):
        drain()
    stream.close()
    assert len(good) > 15_000
    assert content.startswith(good[:15_000])
    if damage != "flipped":
        assert content.startswith(good)


def test_files_that_cannot_be_opened_are_explained(folder: Path) -> None:
    with pytest.raises(NotFoundError, match=r"No such file: .*gone"):
        open_file(str(folder / "gone"))
    with pytest.raises(FailedPreconditionError, match="is a folder"):
        open_file(str(folder))
    with pytest.raises(NotFoundError, match=r"No such file: .*gone"):
        read_file_version(str(folder / "gone"))
    with pytest.raises(FailedPreconditionError, match="is a folder"):
        read_file_version(str(folder))
    with pytest.raises(NotFoundError, match="does not exist; create it first"):
        create_file(str(folder / "gone" / "file"))
    with pytest.raises(UnavailableError, match="cannot open"):
        open_file(str(folder / ("x" * 300)))


def test_version_of_a_file_changes_with_its_contents(tmp_path: Path) -> None:
    file_system = fsspec.filesystem("memory")
    for name in (str(tmp_path / "x"), "memory://file_versions/x"):
        file_system.pipe_file("memory://file_versions/x", b"one")
        (tmp_path / "x").write_bytes(b"one")
        size, version = read_file_version(name)
        assert size == 3
        assert read_file_version(name) == (3, version)

        file_system.pipe_file("memory://file_versions/x", b"four")
        (tmp_path / "x").write_bytes(b"four")
        assert read_file_version(name)[0] == 4
        assert read_file_version(name)[1] != version
    with pytest.raises(FailedPreconditionError, match="is a folder"):
        read_file_version("memory://file_versions")
