"""A separate process that runs the coordination service of a JAX program.

    python -m headrace.frameworks.jax_coordinator PROCESSES HOST

JAX terminates every process of a program, without notifying its code, when the process that runs
the coordination service ends. Therefore the service runs in a separate process. It prints the
service's address, and a second address: each user keeps a connection to it open. When all of these
connections are closed, the process ends.
"""

from __future__ import annotations

import importlib
import os
import selectors
import socket
import subprocess
import sys
import time

__all__ = ["HEARTBEAT_SECONDS", "keep_alive", "main", "start_coordinator"]

_STARTUP_TIMEOUT_SECONDS = 120.0
"""Seconds to wait for all users to connect."""
HEARTBEAT_SECONDS = 86_400
"""JAX's heartbeat timeout: a day, so that a paused process is not declared dead."""


def start_coordinator(processes: int, host: str) -> tuple[str, str]:
    """Start the process; return the address of the service, and the one for `keep_alive`.

    Raises:
        RuntimeError: If the process did not start.
    """
    # In its own session: a signal to this process or its group does not end it.
    child = subprocess.Popen(
        [sys.executable, "-m", "headrace.frameworks.jax_coordinator", str(processes), host],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        addresses = child.stdout.readline().split()
        error_output = "" if len(addresses) == 2 else child.stderr.read()[-2000:]
        child.wait()  # the service continues in a process that it forked
    if len(addresses) != 2:
        raise RuntimeError(f"the JAX coordinator process did not start: {error_output}")
    return addresses[0], addresses[1]


def keep_alive(address: str) -> None:
    """Keep the coordinator process alive for as long as this process lives.

    Raises:
        OSError: If it is not reachable.
    """
    host, _, port = address.rpartition(":")
    # Detached: a socket object would be closed, or warn that it was not, when the process ends.
    socket.create_connection((host.strip("[]"), int(port)), 10.0).detach()


def main() -> None:
    """Run the coordination service until no process holds a connection."""
    if os.fork():
        os._exit(0)
    _jax = importlib.import_module("jaxlib._jax")  # the only part of JAX that this process needs
    processes, host = int(sys.argv[1]), sys.argv[2]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        with socket.create_server((host, 0), family=family) as port_probe:
            port = port_probe.getsockname()[1]
        url_host = f"[{host}]" if ":" in host else host
        address = f"{url_host}:{port}"
        service = _jax.get_distributed_runtime_service(
            address,
            processes,
            heartbeat_timeout=HEARTBEAT_SECONDS,
            shutdown_timeout=1,
            recoverable=True,  # the end of one process does not end the others
        )
        print(address, f"{url_host}:{listener.getsockname()[1]}", flush=True)
        null_device = os.open(os.devnull, os.O_RDWR)
        os.dup2(null_device, 1)
        os.dup2(null_device, 2)
        _serve_until_unused(listener, processes)
        service.shutdown()


def _serve_until_unused(listener: socket.socket, expected: int) -> None:
    """Return when all accepted connections are closed and no further ones are expected."""
    deadline = time.monotonic() + _STARTUP_TIMEOUT_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        num_accepted = num_open = 0
        while num_open or (num_accepted < expected and time.monotonic() < deadline):
            timeout = None if num_open else max(0.0, deadline - time.monotonic())
            for key, _ in selector.select(timeout):
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                    num_accepted, num_open = num_accepted + 1, num_open + 1
                    continue
                user = key.fileobj
                assert isinstance(user, socket.socket)
                if not user.recv(64):
                    selector.unregister(user)
                    user.close()
                    num_open -= 1


if __name__ == "__main__":
    main()
