"""A server on loopback that imitates the Kubernetes API with a recorded list of pods."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

RECORDED = Path(__file__).parent / "recorded"
CERTIFICATE = RECORDED / "server.pem"
TOKEN = "a-token-of-the-service-account"


@dataclass
class RecordedApi:
    """Replies of the server, which a test may change while it runs.

    Attributes:
        pods: All pods.
        refusals: Replies to send first: a status and a message each.
        requests: Received requests: the path, and the headers by lower-case name.
    """

    pods: list[dict[str, Any]]
    refusals: list[tuple[int, str]] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    address: str = ""

    def answer(self, target: str) -> tuple[int, dict[str, Any]]:
        if self.refusals:
            status, message = self.refusals.pop(0)
            return status, {"kind": "Status", "status": "Failure", "message": message}
        path = urlsplit(target)
        parts = path.path.strip("/").split("/")
        wanted = dict(
            pair.split("=") for pair in parse_qs(path.query)["labelSelector"][0].split(",")
        )
        assert parts[:2] == ["api", "v1"]
        assert parts[-1] == "pods"
        found = [
            pod
            for pod in self.pods
            if wanted.items() <= pod["metadata"]["labels"].items()
            and (len(parts) == 3 or pod["metadata"]["namespace"] == parts[3])
        ]
        return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}


@contextmanager
def serving_recorded_pods(*, encrypted: bool = False) -> Iterator[RecordedApi]:
    """Serve until the block ends."""
    api = RecordedApi(json.loads((RECORDED / "pods.json").read_text())["items"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): text for name, text in self.headers.items()}
            api.requests.append((self.path, headers))
            status, answer = api.answer(self.path)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if encrypted:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        api.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()
