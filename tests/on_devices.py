"""Tests that need devices or settings of their own, run once in a process that has them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def names_of_tests(file: Path) -> list[str]:
    """Return the names of the test functions of a file, without importing it."""
    return re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)


def once(factory: pytest.TempPathFactory, name: str, find: Callable[[Path], Any]) -> Any:
    """Return what `find` finds, which is called once for all processes of a run of the tests.

    Args:
        factory: Makes folders.
        name: Of what is found, among all that is.
        find: Called with a folder; returns a JSON value.
    """
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    found = shared / f"{name}.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            text = json.dumps(find(factory.mktemp(name)))
            found.write_text(text)
    return json.loads(found.read_text())


def outcomes(file: Path, folder: Path, **environment: str) -> dict[str, str]:
    """Run the tests of a file in a process of its own.

    Args:
        file: Its tests.
        folder: For a report.
        **environment: Variables that the process has besides this one's.

    Returns:
        For each test function what its failures say; "" if there are none.
    """
    found = outcomes_of([str(file)], folder, **environment)
    return {name.rpartition("::")[2]: words for name, words in found.items()}


def outcomes_of(
    tests: Sequence[str], folder: Path, timeout: float = 400, **environment: str
) -> dict[str, str]:
    """Run tests in one process.

    Args:
        tests: Files, or `FILE::NAME` of test functions.
        folder: For a report.
        timeout: Seconds that they may take together.
        **environment: Variables that the process has besides this one's.

    Returns:
        By `STEM_OF_FILE::NAME` what the failures of a test function say; "" if there are none.
    """
    report = folder / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"),
        *("-p", "no:cacheprovider", f"--junitxml={report}", f"--rootdir={ROOT}"),
        *tests,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {"": str(error)}  # of all its tests: another one would wait as long
    if not report.exists():
        return {"": done.stdout + done.stderr}
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].rpartition(".")[2]
        name = f"{file}::{case.attrib['name'].partition('[')[0]}"
        words = [(part.text or "") + part.attrib.get("message", "") for part in case]
        found[name] = found.get(name, "") + "\n".join(words)
    return found
