"""A small S3 server with scheduled failures, run as a child process by the tests.

It keeps objects in a folder, so that they survive a restart, and ignores signatures. `PUT
/-/failures` with a JSON list of statuses makes the next GET requests of objects fail: with that
status, or after half of the data if the status is 0.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.sax.saxutils import escape

failures: list[int] = []
num_gets = [0]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.path == "/-/failures":
            failures[:] = json.loads(data)
        elif data or self._object().parent != self.root:
            path = self._object()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._reply(200, headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def do_DELETE(self) -> None:
        self._object().unlink(missing_ok=True)
        self._reply(204)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        names = re.findall("<Key>(.*?)</Key>", text)
        for name in names:
            (self._object() / name).unlink(missing_ok=True)
        deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self._reply(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def do_HEAD(self) -> None:
        self._send_object()

    def do_GET(self) -> None:
        if self.path == "/-/gets":
            self._reply(200, str(num_gets[0]).encode())
        elif "list-type" in self.path:
            self._list()
        else:
            num_gets[0] += 1
            self._send_object()

    def _object(self) -> Path:
        return self.root / urllib.parse.unquote(self.path.partition("?")[0]).lstrip("/")

    def _send_object(self) -> None:
        failure = failures.pop(0) if failures and self.command == "GET" else None
        if failure:
            self._reply(failure, b"<Error><Code>Injected</Code></Error>")
            return
        path = self._object()
        if not path.is_file():
            self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "Last-Modified": "Sat, 01 Jan 2028 00:00:00 GMT",
        }
        status = 200
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1, len(data))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
            data, status = data[int(first) : stop], 206
        self._reply(status, data, headers, is_cut=failure == 0)

    def _list(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        bucket = self.root / url.path.strip("/")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        names = sorted(
            str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()
        )
        contents, folders = [], {}
        for name in names:
            rest = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
            else:
                contents.append(
                    f"<Contents><Key>{escape(name)}</Key><ETag>x</ETag><LastModified>"
                    "2028-01-01T00:00:00.000Z</LastModified>"
                    f"<Size>{(bucket / name).stat().st_size}</Size></Contents>"
                )
        prefixes = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders
        )
        text = f"<ListBucketResult>{''.join(contents)}{prefixes}</ListBucketResult>"
        self._reply(200, text.encode(), {"Content-Type": "application/xml"})

    def _reply(
        self,
        status: int,
        data: bytes = b"",
        headers: dict[str, str] | None = None,
        is_cut: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
        if is_cut:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    Handler.root = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
