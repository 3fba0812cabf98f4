"""Samples in tar archives: formats, grouping, positions, damage, the data service."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import DataLossError, FailedPreconditionError, HeadraceError, NotFoundError
from headrace.service import LocalCluster, ShardingPolicy, distribute
from headrace.sources import tar_index, tar_samples
from headrace.sources.tar_index import Shard, index_shards, split_name
from headrace.sources.tar_members import TarMembers
from headrace.sources.tar_samples import TarSamplesSource
from headrace.testing.conformance import assert_equal, check_source, read_all
from tests.sources.tar_shards import make_tar, numbered_files, reference, write_tar

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tar_index, "PART_SIZE", 12_000)
    monkeypatch.setattr(tar_index, "DEFAULT_FOLDER", str(tmp_path / "default_index"))


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return [
        write_tar(tmp_path / f"s{k}.tar", numbered_files(range(20 * k, 20 * k + count)))
        for k, count in enumerate((20, 1, 0, 15))
    ]


def source_of(*names: str) -> TarSamplesSource:
    return TarSamplesSource(index_shards(names, None))


def outcomes(dataset: hr.Dataset[Any]) -> list[Any]:
    """Return the key of each element, and the errors where they were raised."""
    found: list[Any] = []
    with iter(dataset) as iterator:
        while len(found) < 400:
            try:
                found.append(next(iterator)["__key__"])
            except StopIteration:
                return found
            except HeadraceError as error:
                found.append(error)
    raise AssertionError(f"it does not end: {found[-3:]}")


# --- contents -------------------------------------------------------------------------------------


def test_source_has_the_samples_of_all_parts(shards: list[str]) -> None:
    source = source_of(*shards)

    assert source.size == len(source.paths) > 6
    assert set(source.paths) == set(shards)
    assert source.index_kind == "file"
    check_source(source, reference(*shards))


@pytest.mark.parametrize("block_size", [1, 600, 5000])
def test_size_of_blocks_and_chunks_does_not_matter(
    shards: list[str], monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    monkeypatch.setattr(tar_samples, "_BLOCK_SIZE", block_size)
    monkeypatch.setattr(tar_samples, "_CHUNK_BYTES", block_size)

    check_source(source_of(*shards[1:]), reference(*shards[1:]))


def test_consecutive_files_with_one_key_are_a_sample(tmp_path: Path) -> None:
    names = ["a/1.jpg", "a/1.Seg.PNG", "b/1.jpg", "a/1.jpg", "README", "a/.hidden", "a/1.cls",
             "a.b/2.txt", "a.b/3."]  # fmt: skip
    path = write_tar(tmp_path / "x.tar", [(name, name.encode()) for name in names])

    assert list(hr.WebDataset(path)) == [
        {"__key__": "a/1", "jpg": b"a/1.jpg", "seg.png": b"a/1.Seg.PNG"},
        {"__key__": "b/1", "jpg": b"b/1.jpg"},
        {"__key__": "a/1", "jpg": b"a/1.jpg", "cls": b"a/1.cls"},
        {"__key__": "a.b/2", "txt": b"a.b/2.txt"},
        {"__key__": "a.b/3", "": b"a.b/3."},
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./a/b.c.D", ("./a/b", "c.d")),
        ("a.b/c", None),
        (".a", None),
        ("a/.b.c", None),
        ("", None),
    ],
)
def test_names_are_split_at_the_first_dot_of_the_base_name(
    name: str, expected: tuple[str, str] | None
) -> None:
    assert split_name(name) == expected


@pytest.mark.parametrize("format_", FORMATS)
def test_all_header_formats_are_read(tmp_path: Path, format_: int) -> None:
    names = ["a" * 96 + ".txt", "b" * 120 + "/" + "b" * 90 + ".txt"]
    if format_ != tarfile.USTAR_FORMAT:
        names += ["c" * 300 + ".txt", "dir/" * 200 + "d" * 200 + ".json", "größe.txt"]
    files = [(name, name.encode() * 20) for name in names]
    path = write_tar(tmp_path / "x.tar", files, format_=format_)

    assert [sample["__key__"] for sample in reference(path)] == [
        n.rpartition(".")[0] for n in names
    ]
    check_source(source_of(path), reference(path))


@given(
    sizes=st.lists(st.sampled_from([0, 1, 511, 512, 513, 3000, 70_000, 200_000]), max_size=8),
    format_=st.sampled_from(FORMATS),
    block_size=st.integers(1, 9000),
    kinds=st.lists(st.sampled_from("fdls"), min_size=8, max_size=8),
)
def test_members_are_those_of_the_standard_library(
    sizes: list[int], format_: int, block_size: int, kinds: list[str]
) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=format_) as tar:
        for number, (size, kind) in enumerate(zip(sizes, kinds, strict=False)):
            member = tarfile.TarInfo(f"{number}.x" if kind != "l" else f"{'long' * 24}/{number}.x")
            if kind in "ds":
                member.type = {"d": tarfile.DIRTYPE, "s": tarfile.SYMTYPE}[kind]
                member.linkname = "t" * 150 if kind == "s" and format_ else ""
                tar.addfile(member)
            else:
                member.size = size
                tar.addfile(member, io.BytesIO(os.urandom(size)))
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        expected = [(m.name, tar.extractfile(m).read()) for m in tar if m.isreg()]  # type: ignore[union-attr]

    for can_seek in (False, True):
        stream = io.BytesIO(archive.getvalue())
        members = TarMembers(stream, "x", 0, block_size, can_seek)
        found = []
        while (member := members.next()) is not None:
            found.append((member.name, members.read(member)))
        assert found == expected
        archive.seek(0)
        members = TarMembers(archive, "x", 0, block_size, can_seek)
        names = []
        while (member := members.next()) is not None:
            names.append(member.name)
        assert names == [name for name, _ in expected]


@pytest.mark.parametrize("format_", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_sizes_over_8_gib_are_read(tmp_path: Path, format_: int) -> None:
    size = 9 << 30
    large = tarfile.TarInfo("a.bin")
    large.size = size
    header = large.tobuf(format_)
    path = tmp_path / "x.tar"
    with open(path, "wb") as file:
        file.write(header)
        file.seek(size, os.SEEK_CUR)  # a hole
        file.write(make_tar([("b.bin", b"x")]))

    source = source_of(str(path))

    assert source.shards[0].starts == (0, len(header) + size)
    assert read_all(source.open(1, 2)) == [{"__key__": "b", "bin": b"x"}]


def test_old_headers_with_signed_checksums_are_read(tmp_path: Path) -> None:
    archive = bytearray(make_tar([("ä.txt", b"x")], tarfile.GNU_FORMAT))
    header = archive[:148] + b" " * 8 + archive[156:512]
    signed = sum(byte - 256 if byte > 127 else byte for byte in header)
    archive[148:156] = b"%06o\0 " % signed
    (tmp_path / "x.tar").write_bytes(archive)

    assert list(hr.WebDataset(tmp_path / "x.tar")) == [{"__key__": "ä", "txt": b"x"}]


def test_folders_between_samples_belong_to_no_part(tmp_path: Path) -> None:
    path = str(tmp_path / "x.tar")
    with tarfile.open(path, "w") as tar:
        for name, data in numbered_files(range(30)):
            for member_name, content in ((f"d{name}/", None), (name, data)):
                member = tarfile.TarInfo(member_name)
                member.type = tarfile.REGTYPE if content else tarfile.DIRTYPE
                member.size = len(content or b"")
                tar.addfile(member, io.BytesIO(content or b""))
    source = source_of(path)

    assert source.size > 3
    check_source(source, reference(path))


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz"])
def test_compressed_archives_are_one_part(tmp_path: Path, suffix: str) -> None:
    path = write_tar(tmp_path / f"x.{suffix}", numbered_files(range(30)), mode="w:gz")
    source = source_of(path)

    assert source.size == 1
    check_source(source, reference(path))


def test_archives_by_url_are_divided_if_there_is_a_folder_for_the_index(tmp_path: Path) -> None:
    import fsspec  # noqa: PLC0415 - only this test needs it

    expected = reference(write_tar(tmp_path / "x.tar", numbered_files(range(30))))
    url = "memory://tar_samples/x.tar"
    fsspec.filesystem("memory").pipe_file(url, (tmp_path / "x.tar").read_bytes())

    whole = hr.WebDataset("memory://tar_samples/*.tar")
    divided = hr.WebDataset(url, index_dir=tmp_path / "index")

    assert whole.plan.source.size == 1
    assert divided.plan.source.size > 2
    check_source(whole.plan.source, expected)
    check_source(divided.plan.source, expected)
    assert len(os.listdir(tmp_path / "index")) == 1
    with pytest.raises(NotFoundError, match="memory://tar_samples/y"):
        hr.WebDataset("memory://tar_samples/y.tar", index_dir=tmp_path)
    assert isinstance(outcomes(hr.WebDataset("memory://tar_samples/y.tar"))[0], NotFoundError)


# --- decoding -------------------------------------------------------------------------------------


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_files_are_decoded_by_extension(tmp_path: Path) -> None:
    value = {"a": [1, 2], "b": None, "c": [{"d": 1.5}, "x"], "e": [[1], [2, 3]], "f": True, "g": []}
    path = write_tar(
        tmp_path / "x.tar",
        [
            ("1.cls", b"7\n"),
            ("1.index", b"-3"),
            ("1.txt", "größe".encode()),
            ("1.meta.json", json.dumps(value).encode()),
            ("1.npy", npy(np.arange(6.0).reshape(2, 3).T)),
            ("1.jpg", b"\xff\xd8"),
        ],
    )
    expected = {
        "__key__": "1",
        "cls": np.int64(7),
        "index": np.int64(-3),
        "txt": "größe",
        "meta.json": {
            "a": np.array([1, 2]),
            "b": None,
            "c": ({"d": np.float64(1.5)}, "x"),
            "e": (np.array([1]), np.array([2, 3])),
            "f": np.True_,
            "g": np.array([]),
        },
        "npy": np.arange(6.0).reshape(2, 3).T,
        "jpg": b"\xff\xd8",
    }

    check_source(TarSamplesSource((Shard(path),), decode=True), [expected])
    assert_equal(list(hr.WebDataset(path, decode=True)), [expected])


def test_functions_replace_decoders(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.cls", b"x"), ("1.jpg", b"ab"), ("1.txt", b"t")])

    dataset = hr.WebDataset(path, decode={"cls": lambda data: data * 2, "jpg": len})

    assert list(dataset) == [{"__key__": "1", "cls": b"xx", "jpg": np.int64(2), "txt": "t"}]
    assert list(hr.WebDataset(path, decode=False)) == list(hr.WebDataset(path))
    with pytest.raises(TypeError, match=r"decode\['cls'\]"):
        hr.WebDataset(path, decode={"cls": 3})  # type: ignore[dict-item]


def test_undecodable_file_is_reported_and_the_next_sample_follows(tmp_path: Path) -> None:
    bad = [("cls", b"x"), ("cls", b"9" * 30), ("json", b"{"), ("txt", b"\xff"), ("npy", b"NUMPY"),
           ("npy", npy(np.array([None]))), ("json", b"9" * 30)]  # fmt: skip
    files = [(f"{number}.{extension}", data) for number, (extension, data) in enumerate(bad)]
    path = write_tar(tmp_path / "x.tar", [*files, ("good.cls", b"5")])

    found = outcomes(hr.WebDataset(path, decode=True))

    for number, (error, (name, _)) in enumerate(zip(found[:-1], files, strict=True)):
        assert type(error) is DataLossError
        assert f"{path!r}: {name!r} at byte {1024 * number + 512} " in str(error)
    assert found[-1] == "good"


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parallel_reads", [None, 2])
def test_dataset_is_restored_at_every_sample(
    shards: list[str], num_parallel_reads: int | None
) -> None:
    def create() -> hr.Dataset[Any]:
        return hr.WebDataset(shards, num_parallel_reads=num_parallel_reads, decode={"bin": len})

    expected = [int(sample["cls"]) for sample in create()]
    assert sorted(expected) == [*range(21), *range(60, 75)]
    with iter(create()) as iterator:
        for position in range(len(expected) + 1):
            state = json.loads(json.dumps(iterator.get_state()))
            with iter(create()) as restored:
                restored.set_state(state)
                assert [int(sample["cls"]) for sample in restored] == expected[position:]
            next(iterator, None)


@pytest.mark.parametrize("position", [[0], [9, 0], [0, -1], [0, 0.5], "x", 3])
def test_invalid_positions_are_rejected(shards: list[str], position: object) -> None:
    with pytest.raises(ValueError, match="position must be"):
        source_of(shards[0]).open(0, 2, position)


def test_position_outside_of_its_part_is_reported(shards: list[str]) -> None:
    source = source_of(shards[0])
    with pytest.raises(FailedPreconditionError, match=r"byte 512 of .* is not in part 1"):
        source.open(1, 2, [1, 512]).read(1)
    with pytest.raises(DataLossError, match="the tar header at byte 100 is damaged"):
        source.open(0, 1, [0, 100]).read(1)


def test_file_that_changed_after_its_index_was_built_is_reported(shards: list[str]) -> None:
    source = source_of(shards[0])
    write_tar(Path(shards[0]), numbered_files(range(8)))

    found = outcomes(hr.Dataset.from_source(source))

    assert len(found) == source.size
    assert all(isinstance(error, FailedPreconditionError) for error in found)
    with iter(hr.Dataset.from_source(source_of(shards[3]))) as iterator:
        next(iterator)
        state = iterator.get_state()
    with pytest.raises(FailedPreconditionError, match="its arguments have changed"):
        iter(hr.Dataset.from_source(source_of(shards[0]))).set_state(state)


def test_archive_rewritten_with_the_same_size_is_reported(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", numbered_files(range(20)))
    source = source_of(path)
    size = os.path.getsize(path)
    for content in (numbered_files(range(2)), [("1.bin", bytes(size - 3000))]):
        write_tar(tmp_path / "x.tar", content)
        os.truncate(path, size)

        errors = outcomes(hr.Dataset.from_source(source))[-source.size :]

        assert {type(error) for error in errors} <= {DataLossError, str}
        assert f"no tar header at byte {source.shards[0].starts[1]}" in str(errors)


def test_error_is_raised_again_after_a_restore(shards: list[str]) -> None:
    path = Path(shards[0])
    archive = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        at = tar.getmembers()[15].offset  # the first file of sample 5
    archive[at] ^= 1
    path.write_bytes(archive)
    source = source_of(*shards[:2])
    reader = source.open(0, source.size)

    chunk = reader.read(100)
    assert chunk is not None
    assert chunk.size == 4
    position = reader.get_position()

    for again in (reader, source.open(0, source.size, position)):
        with pytest.raises(DataLossError, match=f"the tar header at byte {at} "):
            again.read(1)
        assert [row["__key__"] for row in read_all(again)] == ["0020"]


def test_interrupted_read_is_repeated(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reader = source_of(*shards).open(0, 3)
    first = reader.read(2)
    read, remaining = TarMembers.read, [4]

    def failing_read(members: TarMembers, member: Any) -> bytes:
        remaining[0] -= 1
        if not remaining[0]:
            raise MemoryError
        return read(members, member)

    monkeypatch.setattr(TarMembers, "read", failing_read)
    position = reader.get_position()
    with pytest.raises(MemoryError):
        reader.read(5)
    assert reader.get_position() == position
    assert first is not None
    assert [*first.rows(), *read_all(reader)] == read_all(source_of(*shards).open(0, 3))


# --- damage ---------------------------------------------------------------------------------------


def damaged(kind: str) -> tuple[bytes, int, str]:
    """Return a damaged archive of ten samples, how many come before the damage, and the error."""
    archive = bytearray(make_tar(numbered_files(range(10)), tarfile.USTAR_FORMAT))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = tar.getmembers()
    at = members[15].offset  # the first file of sample 5
    end = members[-1].offset_data + 512
    match kind:
        case "data":
            return archive[: at + 700], 4 + 1, f"ends at byte {at + 700}"
        case "header":
            return archive[: at + 100], 4, f"truncated: it ends at byte {at + 100}"
        case "marker":
            return archive[:end], 9, f"truncated: it ends at byte {end}"
        case "checksum":
            archive[at + 10] ^= 1
            return archive, 4, f"header at byte {at} is damaged .its checksum"
        case "size":
            archive[at + 124 : at + 136] = b"-1".ljust(12, b"\0")
        case "kind":
            archive[at + 156] = ord("S")
        case "digits":
            archive[at + 124 : at + 136] = b"z" * 12
    archive[at + 148 : at + 156] = b" " * 8
    archive[at + 148 : at + 156] = b"%06o\0 " % sum(archive[at : at + 512])
    messages = {"size": "size is negative", "kind": f"sparse file at byte {at}", "digits": f"{at}"}
    return archive, 4, messages[kind]


@pytest.mark.parametrize("kind", ["data", "header", "marker", "checksum", "size", "kind", "digits"])
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_samples_before_damage_are_returned_and_the_next_file_follows(
    tmp_path: Path, shards: list[str], kind: str, suffix: str
) -> None:
    archive, count, message = damaged(kind)
    path = tmp_path / f"damaged.{suffix}"
    path.write_bytes(archive if suffix == "tar" else gzip.compress(archive))

    found = outcomes(hr.WebDataset([path, shards[1]]))

    assert found[:count] == [f"{number:04d}" for number in range(count)]
    assert type(found[count]) is DataLossError
    with pytest.raises(DataLossError, match=message):
        raise found[count]
    assert repr(str(path)) in str(found[count])
    assert found[count + 1 :] == ["0020"]


def test_damaged_pax_headers_are_reported(tmp_path: Path) -> None:
    archive = make_tar([("a" * 200 + ".txt", b"x")])
    for before, after, message in (
        (b"path=", b"path:", "no value"),
        (b" path=", b"xpath=", "damaged"),
        (b"path=" + b"a" * 9, b"GNU.sparse.map=", "sparse"),
    ):
        assert before in archive
        path = tmp_path / "x.tar"
        changed = archive.replace(before, after, 1)
        if len(changed) > len(archive):
            changed = archive.replace(b"path=" + b"a" * 11, b"GNU.sparse.map="[:16] + b"a", 1)
        path.write_bytes(changed)
        (error,) = outcomes(hr.WebDataset(path))
        assert type(error) is DataLossError
        assert message in str(error)


def test_second_file_with_one_name_is_reported_and_the_next_sample_follows(tmp_path: Path) -> None:
    names = ["a.txt", "b.txt", "b.TXT", "b.cls", "c.__key__", "c.x", "d.txt"]
    path = write_tar(tmp_path / "x.tar", [(name, b"") for name in names])

    first, duplicate, reserved, last = outcomes(hr.WebDataset(path))

    assert (first, last) == ("a", "d")
    assert f"{path!r} has a second file 'txt' of the sample 'b' at byte 1024" in str(duplicate)
    assert "'__key__' of the sample 'c' at byte 2048" in str(reserved)


def test_damaged_compression_is_reported(tmp_path: Path) -> None:
    data = gzip.compress(make_tar(numbered_files(range(30), size=5000)))
    (tmp_path / "x.tar.gz").write_bytes(data[: len(data) * 2 // 3])

    *keys, error = outcomes(hr.WebDataset(tmp_path / "x.tar.gz"))

    assert keys == [f"{number:04d}" for number in range(len(keys))]
    assert keys
    assert type(error) is DataLossError


def test_files_without_samples_have_no_rows(tmp_path: Path, shards: list[str]) -> None:
    (tmp_path / "empty.tar").touch()
    (tmp_path / "folder").mkdir()

    assert list(hr.WebDataset([tmp_path / "empty.tar", shards[2]])) == []
    with pytest.raises(NotFoundError, match=r"missing\.tar"):
        hr.WebDataset(tmp_path / "missing.tar")
    with pytest.raises(FailedPreconditionError, match="folder"):
        hr.WebDataset(tmp_path / "folder")
    (tmp_path / "text.tar").write_text("no archive" * 100)
    (error,) = outcomes(hr.WebDataset(tmp_path / "text.tar"))
    assert "is not a tar archive" in str(error)
    assert "missing" in str(outcomes(hr.WebDataset([tmp_path / "missing.tar"] * 300))[0])


# --- names ----------------------------------------------------------------------------------------


def test_archives_are_named_by_patterns_lists_and_datasets(
    shards: list[str], tmp_path: Path
) -> None:
    def keys(urls: Any, **options: Any) -> list[str]:
        return [sample["__key__"] for sample in hr.WebDataset(urls, **options)]

    expected = keys(shards)

    assert keys(f"{tmp_path}/s{{0..3}}.tar") == keys(f"{tmp_path}/s*.tar") == expected
    assert keys(f"{tmp_path}/s{{3,1}}.tar") == keys([shards[3], shards[1]])
    assert keys(hr.Dataset.from_tensor_slices(shards)) == expected
    assert sorted(keys(shards, num_parallel_reads=3)) == expected
    assert sorted(keys(hr.Dataset.from_tensor_slices(shards), num_parallel_reads=2)) == expected
    with pytest.raises(NotFoundError):
        hr.WebDataset(f"{tmp_path}/z*.tar")


def test_unsupported_names_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"command 'pipe:cat x\.tar'"):
        hr.WebDataset("pipe:cat x.tar")
    with pytest.raises(ValueError, match="compression is not supported"):
        hr.WebDataset("x.tar.zst")


# --- index ----------------------------------------------------------------------------------------


def test_index_is_read_from_the_cache(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_dir = tmp_path / "a" / "index"
    first = index_shards(shards, index_dir)
    assert len(os.listdir(index_dir)) == 2  # of those larger than a part
    with monkeypatch.context() as context:
        context.setattr(tar_index, "_find_starts", None)
        assert index_shards(shards, index_dir) == first

    write_tar(Path(shards[0]), numbered_files(range(18)))
    assert index_shards(shards, index_dir) != first


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"starts": [0]}', None], ids=lambda value: str(value)
)
def test_unusable_cached_index_is_built_again(
    shards: list[str], tmp_path: Path, content: bytes | None
) -> None:
    expected = index_shards(shards[:1], tmp_path / "index")
    (path,) = (tmp_path / "index").iterdir()
    if content is None:
        found = json.loads(path.read_text())
        content = json.dumps({**found, "starts": [0, 1 << 40]}).encode()
    path.write_bytes(content)

    assert index_shards(shards[:1], tmp_path / "index") == expected
    assert json.loads(path.read_text())["starts"] == list(expected[0].starts)


def test_index_that_cannot_be_stored_is_no_error(shards: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    for index_dir in (tmp_path / "file" / "index", "unknown-scheme://index"):
        assert index_shards(shards, index_dir) == index_shards(shards, tmp_path / "index")


# --- data service ---------------------------------------------------------------------------------


def test_workers_of_a_data_service_share_the_parts(shards: list[str], tmp_path: Path) -> None:
    dataset = hr.WebDataset(shards, index_dir=tmp_path / "index", decode=True)
    expected = [sample["__key__"] for sample in reference(*shards)]
    with LocalCluster(num_workers=2, processes=False) as cluster:

        def keys(mode: Any, **options: Any) -> list[str]:
            distributed = dataset.apply(distribute(mode, cluster.target, **options))
            return [sample["__key__"] for sample in distributed]

        assert sorted(keys(ShardingPolicy.DYNAMIC)) == expected
        assert keys(ShardingPolicy.DYNAMIC, ordered=True) == expected
