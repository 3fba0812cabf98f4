"""Worker processes, started once per module; scenarios are sent to them by name."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]


class WorkerFailedError(Exception):
    """Error of a scenario on a worker: class name and message of the exception."""

    def __init__(self, kind, text, trace):
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


class Scenarios:
    """Scenarios of a module that is not imported in this process."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return SimpleNamespace(__module__=self._module, __qualname__=name)


class Worker:
    """A process that calls scenarios and replies with their results."""

    def __init__(self, **environment):
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.distribute.worker_process"],
                stdin=theirs,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
                process_group=0,
            )
        self.link = ours
        self.stopped = False

    def ask(self, environment, scenario, *args):
        send(self.link, (environment, scenario.__module__, scenario.__qualname__, args))

    def answer(self, timeout=45.0):
        """Return the result or error of the scenario; None if the process has ended."""
        self.link.settimeout(timeout)
        found = receive(self.link)
        if found is None:
            return None
        return found[1] if found[0] else WorkerFailedError(*found[1])

    def signal(self, number):
        os.kill(self.process.pid, number)

    def close(self):
        self.link.close()
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Workers:
    """A number of processes; each call forms a cluster of the first of them."""

    def __init__(self, count, **environment):
        self.workers = [Worker(**environment) for _ in range(count)]
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]

    def environment(self, rank, count, addresses=None, task=None):
        cluster = {"worker": (addresses or self.addresses)[:count]}
        config = {"cluster": cluster, "task": task or {"type": "worker", "index": rank}}
        return {"TF_CONFIG": json.dumps(config)}

    def start(self, scenario, *args, count=None):
        count = count or len(self.workers)
        for rank, worker in enumerate(self.workers[:count]):
            worker.ask(self.environment(rank, count), scenario, *args)

    def answers(self, count=None):
        return [worker.answer() for worker in self.workers[: count or len(self.workers)]]

    def run(self, scenario, *args, count=None):
        """Return the results of a scenario on each worker; raise the first error."""
        found = self.errors(scenario, *args, count=count)
        for each in found:
            if isinstance(each, WorkerFailedError):
                raise each
        return found

    def errors(self, scenario, *args, count=None):
        """Return the result or error of a scenario on each worker."""
        self.start(scenario, *args, count=count)
        return self.answers(count)

    def close(self):
        threads = [threading.Thread(target=worker.close) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def send(link, value):
    data = pickle.dumps(value)
    link.sendall(struct.pack(">I", len(data)) + data)


def receive(link):
    header = exactly(link, 4)
    return None if header is None else pickle.loads(exactly(link, *struct.unpack(">I", header)))


def exactly(link, size):
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return data
