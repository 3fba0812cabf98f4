from __future__ import annotations

import os
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError, NotFoundError, UnavailableError
from headrace.storage import retrying
from headrace.storage.file_systems import _to_fsspec, _to_obstore, convert_error
from headrace.storage.files import open_file, open_folder, read_file_version
from headrace.storage.options import StorageOptions
from tests.storage.conftest import S3Server

pytestmark = pytest.mark.system


def test_patterns_of_urls_are_listed_and_read(s3_server: S3Server) -> None:
    for number in range(3):
        s3_server.put(f"bucket/train/{number}.txt", b"a%d\nb%d\n" % (number, number))
    s3_server.put("bucket/train/deep/3.txt", b"")

    lines = hr.TextLineDataset("s3://bucket/train/*.txt", storage_options=s3_server.options)
    some = hr.TextLineDataset("s3://bucket/train/{2,0}.txt", storage_options=s3_server.options)
    names = hr.Dataset.list_files(
        "s3://bucket/**/*.txt", shuffle=False, storage_options=s3_server.options
    )

    assert list(lines) == [b"a0", b"b0", b"a1", b"b1", b"a2", b"b2"]
    assert list(some) == [b"a2", b"b2", b"a0", b"b0"]
    assert list(names) == [
        *(f"s3://bucket/train/{number}.txt" for number in range(3)),
        "s3://bucket/train/deep/3.txt",
    ]
    for missing in ("s3://bucket/none/*", "s3://bucket/train/9.txt"):
        with pytest.raises(NotFoundError, match=missing.replace("*", r"\*")):
            list(hr.TextLineDataset(missing, storage_options=s3_server.options))
    with pytest.raises(FailedPreconditionError, match="is a folder"):
        list(hr.TextLineDataset("s3://bucket/train", storage_options=s3_server.options))


def test_every_format_reads_objects(s3_server: S3Server, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"x": list(range(100))}), tmp_path / "x.parquet", row_group_size=30)
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        (tmp_path / "a.txt").write_text("text")
        archive.add(tmp_path / "a.txt", "a.txt")
    with hr.io.TFRecordWriter(tmp_path / "x.tfrecord") as writer:
        writer.write(b"record")
    (tmp_path / "x.csv").write_text("n\n1\n2\n")
    (tmp_path / "x.jsonl").write_text('{"n": 3}\n')
    (tmp_path / "x.bin").write_bytes(b"abcd")
    for path in tmp_path.glob("x.*"):
        s3_server.put(f"bucket/{path.name}", path.read_bytes())
    options = s3_server.options

    def url(name: str) -> str:
        return f"s3://bucket/{name}"

    parquet = hr.ParquetDataset(url("*.parquet"), storage_options=options)
    assert [int(row["x"]) for row in parquet] == list(range(100))
    assert list(hr.TFRecordDataset(url("x.tfrecord"), storage_options=options)) == [b"record"]
    assert list(hr.CsvDataset(url("?.csv"), storage_options=options)) == [{"n": 1}, {"n": 2}]
    assert list(hr.JsonLinesDataset(url("x.jsonl"), storage_options=options)) == [{"n": 3}]
    fixed = hr.FixedLengthRecordDataset(url("x.bin"), 2, storage_options=options)
    assert list(fixed) == [b"ab", b"cd"]
    index = tmp_path / "index"
    for samples in (
        hr.WebDataset(url("x.tar"), index_dir=index, storage_options=options),
        hr.WebDataset(url("*.tar"), num_parallel_reads=2, storage_options=options),
    ):
        assert list(samples) == [{"__key__": "a", "txt": b"text"}]


def test_image_folder_is_read_from_an_object_store(s3_server: S3Server) -> None:
    pytest.importorskip("PIL")
    for name in ("cat", "dog"):
        s3_server.put(f"bucket/i/{name}/1.png", hr.io.encode_png(np.zeros((3, 2, 3), np.uint8)))

    images = hr.Dataset.from_image_folder("s3://bucket/i", storage_options=s3_server.options)

    assert [(image["image"].shape, int(image["label"])) for image in images] == [
        ((3, 2, 3), 0),
        ((3, 2, 3), 1),
    ]


def test_any_range_of_an_object_can_be_read(s3_server: S3Server) -> None:
    content = os.urandom(1_500_000)
    s3_server.put("bucket/x", content)
    options = StorageOptions(s3_server.options)
    stream = open_file("s3://bucket/x", "", 1000, options)

    assert stream.read(3) == content[1000:1003]
    assert stream.read(1 << 20) == content[1003 : 1003 + (1 << 20)]
    assert stream.read(1 << 30) == content[1003 + (1 << 20) :]
    assert stream.read(5) == b""
    assert stream.seek(-4, os.SEEK_END) == len(content) - 4  # type: ignore[attr-defined]
    assert stream.read() == content[-4:]  # type: ignore[call-arg]
    stream.close()
    assert read_file_version("s3://bucket/x", options)[0] == len(content)


def test_folder_of_an_object_store_is_written_and_read(s3_server: S3Server) -> None:
    folder = open_folder("s3://bucket/f", StorageOptions(s3_server.options))

    folder.write("small", b"1")
    with folder.create("large") as file:
        file.write(b"22")
    folder.publish("large", "public")

    assert folder.read("small") == b"1"
    assert folder.list_published() == ["public"]
    assert folder.read(folder.find_name("large", "public")) == b"22"
    folder.remove("small")
    assert folder.list_unpublished() == ["large"]


def test_lost_connections_and_server_errors_are_retried(s3_server: S3Server) -> None:
    content = os.urandom(3 << 20)
    s3_server.put("bucket/x", content)
    stream = open_file("s3://bucket/x", options=StorageOptions(s3_server.options))

    s3_server.fail(503, 0, 429)
    assert stream.read(1 << 20) == content[: 1 << 20]
    s3_server.fail(0)
    assert stream.read(2 << 20) == content[1 << 20 :]
    stream.close()


@pytest.mark.parametrize("status", [400, 403, 404])
def test_permanent_errors_are_not_retried(s3_server: S3Server, status: int) -> None:
    s3_server.put("bucket/x", b"line\n")
    lines = iter(hr.TextLineDataset("s3://bucket/x", storage_options=s3_server.options))

    s3_server.fail(status)
    with pytest.raises(UnavailableError, match=rf"(?s)'s3://bucket/x'.*at byte 0: .*{status}"):
        next(lines)
    assert s3_server.count_gets() == 1


def test_a_server_that_restarts_interrupts_no_read(s3_server: S3Server) -> None:
    content = b"".join(b"line %07d\n" % number for number in range(300_000))
    s3_server.put("bucket/x", content)
    lines = iter(hr.TextLineDataset("s3://bucket/x", storage_options=s3_server.options))
    found = [next(lines)]

    s3_server.stop()
    threading.Timer(0.5, s3_server.start).start()
    found += lines

    assert b"\n".join(found) + b"\n" == content


def test_the_last_error_names_url_offset_and_attempts(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "DEADLINE_SECONDS", 0.3)
    s3_server.put("bucket/x", bytes(200_000))
    stream = open_file("s3://bucket/x", options=StorageOptions(s3_server.options))
    assert len(stream.read(100_000)) == 100_000

    s3_server.stop()
    with pytest.raises(
        UnavailableError,
        match=r"'s3://bucket/x' cannot be read at byte 100000: \d attempts failed in 0 s; last",
    ):
        stream.read(1 << 20)
    s3_server.start()
    assert len(stream.read(1 << 20)) == 100_000
    stream.close()


def test_unknown_option_is_named_without_its_value(s3_server: S3Server) -> None:
    options = {**s3_server.options, "sekret": "hidden"}

    with pytest.raises(ValueError, match=r"'sekret'.*`storage_options`") as raised:
        hr.TextLineDataset("s3://bucket/*", storage_options=options)
    assert "hidden" not in str(raised.value)
    with pytest.raises(
        ValueError, match=r"storage_options\['key'\] must be a str, but is of type i"
    ):
        list(hr.TextLineDataset("s3://bucket/x", storage_options={**s3_server.options, "key": 3}))


def test_error_without_credentials_names_where_to_pass_them() -> None:
    error = type("GenericError", (Exception,), {"__module__": "obstore.exceptions"})
    message = str(convert_error(error("PUT http://169.254.169.254/latest/api/token: 403")))
    assert message.startswith("PUT http://169.254.169.254/")
    assert "pass them in `storage_options`" in message


def test_workers_of_a_service_get_the_options(s3_server: S3Server) -> None:
    lines = [b"%06d" % number for number in range(3_000_000 // 7)]
    s3_server.put("bucket/x.txt", b"\n".join(lines))
    dataset = hr.TextLineDataset("s3://bucket/*.txt", storage_options=s3_server.options)

    with hr.service.LocalCluster(num_workers=2, processes=False) as cluster:
        remote = dataset.apply(
            hr.service.distribute(hr.service.ShardingPolicy.DYNAMIC, cluster.target)
        )
        assert sorted(remote) == lines


def test_options_of_fsspec_and_obstore_mean_the_same() -> None:
    theirs = {"key": "k", "secret": "s", "token": "t", "endpoint_url": "http://x", "anon": False}
    ours = {
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "aws_session_token": "t",
        "aws_endpoint": "http://x",
        "aws_skip_signature": False,
    }
    expected = {
        "access_key_id": "k",
        "secret_access_key": "s",
        "session_token": "t",
        "endpoint": "http://x",
        "skip_signature": False,
        "client_options": {"allow_http": True},
    }
    assert _to_obstore("s3", theirs) == _to_obstore("s3", ours) == expected
    assert _to_fsspec("s3", theirs) == _to_fsspec("s3", ours) == theirs
    regional = {"region": "r", "client_kwargs": {"endpoint_url": "e"}}
    assert _to_obstore("s3", regional) == {"region": "r", "endpoint": "e"}
    assert _to_fsspec("s3", regional) == {
        "client_kwargs": {"region_name": "r", "endpoint_url": "e"}
    }
    assert _to_fsspec("gs", {"skip_signature": True}) == {"token": "anon"}
    assert _to_obstore("gs", {"token": "anon"}) == {"skip_signature": True}
    assert _to_obstore("az", {"azure_account_key": "k"}) == {"account_key": "k"}


def test_forked_process_does_not_wait_for_threads_of_obstore(s3_server: S3Server) -> None:
    s3_server.put("bucket/x", b"line")
    assert list(hr.TextLineDataset("s3://bucket/x", storage_options=s3_server.options))

    child = os.fork()
    if not child:
        code = 1
        try:
            list(hr.TextLineDataset("s3://bucket/x", storage_options=s3_server.options))
        except ImportError as error:  # s3fs is not installed
            code = 0 if "forked" in str(error) else 2
        except BaseException:
            code = 3
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if not done[0]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)
