from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace.transport import inprocess, zeromq
from headrace.transport.channel import Channel, TransportServer
from headrace.transport.security import Security, new_keys
from headrace.transport.shared_memory import SharedMemoryOptions
from tests.transport.messages import TestReply, TestRequest
from tests.transport.peer import TestHandler

ROOT = Path(__file__).parents[2]


@dataclass
class TransportFixture:
    """One transport: creates its servers and channels, and closes them at the end."""

    name: str
    keys: Path | None = None
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def serve(self, handler: Any = None, *, port: int = 0) -> TransportServer:
        handler = handler or TestHandler()
        if self.name == "inprocess":
            server = inprocess.serve(handler, request_type=TestRequest, port=port)
        else:
            server = zeromq.serve(
                handler,
                request_type=TestRequest,
                port=port,
                security=Security.load(self.keys, "server") if self.keys else None,
                shared_memory=SharedMemoryOptions(segment_bytes=8 << 20, total_bytes=24 << 20),
            )
        if isinstance(handler, TestHandler):
            handler.server = server
        self._closing.callback(server.close)
        return server

    def connect(self, address: str, **options: Any) -> Channel:
        if self.name == "inprocess":
            channel = inprocess.connect(address)
        else:
            channel = zeromq.connect(
                address,
                reply_type=TestReply,
                security=Security.load(self.keys, "client") if self.keys else None,
                shared_memory=self.name == "shared-memory",
                **options,
            )
        self._closing.callback(channel.close)
        return channel

    def pair(self) -> tuple[TransportServer, Channel]:
        server = self.serve()
        return server, self.connect(server.address)

    def close(self) -> None:
        self._closing.close()


@pytest.fixture(params=["inprocess", "tcp", "shared-memory", "curve"])
def carrier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TransportFixture]:
    keys = new_keys(tmp_path / "keys") if request.param == "curve" else None
    carrier = TransportFixture(request.param, keys)
    yield carrier
    carrier.close()


@pytest.fixture(params=["tcp", "shared-memory", "curve"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TransportFixture]:
    keys = new_keys(tmp_path / "keys") if request.param == "curve" else None
    carrier = TransportFixture(request.param, keys)
    yield carrier
    carrier.close()


class Peer:
    """A server of the test messages in a separate process."""

    def __init__(self, port: int, keys: Path | None) -> None:
        arguments = [str(port)] + ([str(keys)] if keys else [])
        self.process = start_python("-m", "tests.transport.peer", *arguments)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the peer did not start"

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # Wait until the process is stopped.

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def start_python(*arguments: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(port: int = 0, keys: Path | None = None) -> Peer:
        peers.append(Peer(port, keys))
        return peers[-1]

    yield start
    for peer in peers:
        end(peer.process)


@pytest.fixture
def run_python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        processes.append(start_python(*arguments))
        return processes[-1]

    yield run
    for process in processes:
        end(process)


@pytest.fixture(scope="session", autouse=True)
def _pyzmq_collects_sent_memory() -> None:
    # pyzmq keeps one thread, with its sockets, for memory that was sent without a copy, from the
    # first such message to the end of the process. Start it here, so that no test fails for it.
    zmq.Frame(bytearray(1 << 20), copy=False)
