"""Client and servers of different Python versions, each from its own environment."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from release.environments import Environment

__all__ = ["read", "register", "service"]

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0

_DATASET_ID = "rows"

_DATASET = "hr.Dataset.range(100).map(lambda x: x + 0 * len(str(x))).batch(10)"
_REGISTER = f"""
import sys
import headrace as hr
hr.service.register_dataset(sys.argv[1], {_DATASET}, dataset_id="{_DATASET_ID}")
"""
_OWN = f"{_DATASET}.apply(hr.service.distribute(mode, sys.argv[1], wait_timeout=20.0))"
_BY_ID = f"hr.service.from_dataset_id(mode, sys.argv[1], '{_DATASET_ID}')"
_CLIENT = """
import sys
import headrace as hr
mode = "distributed_epoch"
dataset = {dataset}
assert sorted(int(x) for batch in dataset for x in batch) == list(range(100))
"""


@contextmanager
def service(environment: Environment) -> Iterator[str]:
    """Run a dispatcher and a worker from an environment; yield the dispatcher's address."""
    command = environment.bin / "headrace"
    with _server([str(command), "dispatcher", "--port", "0"]) as address:  # noqa: SIM117
        with _server([str(command), "worker", "--dispatcher", address]):
            yield address


@contextmanager
def _server(command: list[str]) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = []
    try:
        for line in process.stdout:
            output.append(line)
            if found := re.search(r"(127\.0\.0\.1:\d+)", line):
                break
        else:
            raise RuntimeError(f"{' '.join(command)} ended: {''.join(output)}")
        yield found[1]
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def register(environment: Environment, address: str) -> None:
    """Register a dataset from an environment.

    Raises:
        RuntimeError: If the program fails.
    """
    result = environment.run("-c", _REGISTER, address)
    if result.returncode:
        raise RuntimeError(result.stderr)


def read(client: Environment, address: str, *, by_id: bool) -> str:
    """Return "" if a client reads each element once, or the last line of its error.

    Args:
        client: Environment of the client.
        address: Dispatcher.
        by_id: Whether it reads the registered dataset, rather than one of its own.
    """
    result = client.run("-c", _CLIENT.format(dataset=_BY_ID if by_id else _OWN), address)
    return "" if result.returncode == 0 else result.stderr.strip().splitlines()[-1]
