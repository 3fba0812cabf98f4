"""Files of HTTP servers that stall, refuse or send garbage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.errors import FailedPreconditionError, NotFoundError, UnavailableError
from headrace.storage import file_systems
from headrace.storage.files import file_error, open_file

pytestmark = pytest.mark.system

DATA = bytes(range(256)) * 40


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    #: What happens to the next GET requests: "stall", "garbage" or a status.
    faults: list[str | int]
    stalled: threading.Event

    def do_HEAD(self) -> None:
        self._reply(200, b"", len(DATA))

    def do_GET(self) -> None:
        fault = self.faults.pop(0) if self.faults else 206
        if fault == "stall":
            self.stalled.wait(60)
            self.close_connection = True
        elif fault == "garbage":
            self.wfile.write(b"\x00\xff" * 5000)
            self.close_connection = True
        elif fault == 206:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            data = DATA[first : last + 1]
            self._reply(206, data, len(data), f"bytes {first}-{last}/{len(DATA)}")
        else:
            self._reply(int(fault), b"", 0)

    def _reply(self, status: int, data: bytes, length: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(length))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.faults, Handler.stalled = [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/x"
    Handler.stalled.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _check_for_leaks() -> None:
    """Replace the check: fsspec keeps its thread and idle connections."""


@pytest.mark.parametrize("fault", ["stall", "garbage"])
def test_reading_continues_after_a_broken_reply(
    fault: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_systems, "_HTTP_TIMEOUT_SECONDS", 0.5)
    Handler.faults = [fault]
    stream = open_file(url)
    assert stream.read(-1) == DATA
    stream.close()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, FailedPreconditionError), (404, NotFoundError), (400, UnavailableError)],
)
def test_statuses_are_errors_of_files(status: int, kind: type[Exception], url: str) -> None:
    Handler.faults = [status]
    stream = open_file(url)
    with pytest.raises(OSError, match=str(status)) as failed:
        stream.read(-1)
    stream.close()
    assert len(str(failed.value)) < 600
    assert isinstance(file_error(url, failed.value), kind)
