"""Requests to a dashboard, and waiting for what it shows."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

SECONDS = 60.0
"""Deadline of all waits."""


def get(
    url: str, path: str = "/", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body of a page."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=SECONDS)
    try:
        connection.request("GET", path, headers=headers or {})
        reply = connection.getresponse()
        named = {name.lower(): value for name, value in reply.getheaders()}
        return reply.status, named, reply.read().decode()
    finally:
        connection.close()


def events(url: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and data of events."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=SECONDS)
    try:
        connection.request("GET", "/events")
        reply = connection.getresponse()
        assert reply.getheader("content-type", "").startswith("text/event-stream")
        name = ""
        while line := reply.readline().decode().rstrip("\n"):
            pass  # the field `retry`
        while True:
            line = reply.readline().decode().rstrip("\n")
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))
    finally:
        connection.close()


def wait_for_status(url: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first status that meets a condition."""
    deadline = time.monotonic() + SECONDS
    latest: dict[str, Any] = {}
    for name, data in events(url):
        if name == "status":
            latest = data
            if condition(data):
                return data
        if time.monotonic() > deadline:
            break
    raise AssertionError(f"not within {SECONDS:g} s; latest: {latest}")
