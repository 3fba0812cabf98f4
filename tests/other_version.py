"""A real server process that reports other versions than this process has.

python -m tests.other_version PYTHON HEADRACE WIRE dispatcher|worker ...    as `headrace` does
python -m tests.other_version PYTHON HEADRACE WIRE closure-worker [COORDINATOR]
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace import versions

ROOT = Path(__file__).parents[1]
RELEASE, MINE = versions.own_versions().headrace, versions.own_versions().python
_SECONDS = 60.0


@contextmanager
def other_version(
    *arguments: str,
    python: str = MINE,
    headrace: str = versions.own_versions().headrace,
    wire: int = versions.WIRE_FORMAT,
) -> Iterator[str]:
    """Run a server with other versions until the block ends; yield its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.other_version", python, headrace, str(wire), *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(r"(127\.0\.0\.1:\d+)", line):
                    yield found[1]
                    break
            else:
                raise AssertionError(f"the server ended with {process.wait()}")
        finally:
            process.terminate()
            process.wait(_SECONDS)


def main(python: str, headrace: str, wire: str, command: str, *arguments: str) -> None:
    """Set the versions before anything else is imported, then serve."""
    versions._this_process = versions.Versions(headrace=headrace, python=python)
    versions.WIRE_FORMAT = int(wire)
    if command == "closure-worker":
        coordinator = importlib.import_module("headrace.coordinator")
        with coordinator.ClosureWorker(0, coordinator=next(iter(arguments), None)) as worker:
            print(f"listening at {worker.address}", flush=True)
            sys.stdin.read()
        return
    importlib.import_module("headrace.cli.main").app([command, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
