"""A local S3 server in a child process."""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import assert_no_leaks
from tests.conftest import KEPT_BY_LIBRARIES

_START_SECONDS = 60


class S3Server:
    """An S3 server on a loopback port, which keeps its objects in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the server, at the same port as before."""
        script = Path(__file__).with_name("s3_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(self._folder), str(self.port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], _START_SECONDS)
        if not ready:
            self.stop()
            raise TimeoutError(f"the S3 server did not start within {_START_SECONDS} s")
        self.port = int(output.readline())

    def stop(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def options(self) -> dict[str, Any]:
        """Storage options for the server, in the spelling of s3fs."""
        return {"endpoint_url": self.url, "key": "a", "secret": "b"}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def put(self, name: str, data: bytes) -> None:
        """Store an object `bucket/key`."""
        request = urllib.request.Request(f"{self.url}/{name}", data=data, method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            pass

    def fail(self, *statuses: int) -> None:
        """Make the next GET requests of objects fail; 0 cuts the data off."""
        self.put("-/failures", json.dumps(statuses).encode())

    def count_gets(self) -> int:
        """Return the number of GET requests of objects."""
        with urllib.request.urlopen(f"{self.url}/-/gets", timeout=30) as reply:
            return int(reply.read())


@pytest.fixture(autouse=True)
def _check_for_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check for leaks, except for the event loops and idle connections of obstore and fsspec."""
    kept = (
        ("fsspecIO", "anon_inode:[event", "pipe:[", "socket:[")
        if "s3_server" in request.fixturenames
        else ()
    )
    with assert_no_leaks(grace=10.0, allowed=(*KEPT_BY_LIBRARIES, *kept)):
        yield


@pytest.fixture
def s3_server(tmp_path: Path) -> Iterator[S3Server]:
    folder = tmp_path / "s3"
    folder.mkdir()
    server = S3Server(folder)
    yield server
    server.stop()
    shutil.rmtree(folder)
