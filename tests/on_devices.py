"""Runs tests that need special devices or settings once, in a separate process."""

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
    """Return the result of `find`, called once for all processes of a test run.

    Args:
        factory: Creates temporary folders.
        name: Key of the result.
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
    """Run the tests of a file in a separate process.

    Args:
        file: File with the tests.
        folder: Folder for the report.
        **environment: Environment variables to add for the process.

    Returns:
        The failure messages by test function; "" if it passed.
    """
    found = outcomes_of([str(file)], folder, **environment)
    return {name.rpartition("::")[2]: words for name, words in found.items()}


def outcomes_of(
    tests: Sequence[str], folder: Path, timeout: float = 400, **environment: str
) -> dict[str, str]:
    """Run tests in one process.

    Args:
        tests: Files, or `FILE::NAME` of test functions.
        folder: Folder for the report.
        timeout: Maximum seconds for all tests together.
        **environment: Environment variables to add for the process.

    Returns:
        The failure messages by `STEM_OF_FILE::NAME` of the test function; "" if it passed.
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
        return {"": str(error)}  # for all tests of the file: a second process would wait as long
    if not report.exists():
        return {"": done.stdout + done.stderr}
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].rpartition(".")[2]
        name = f"{file}::{case.attrib['name'].partition('[')[0]}"
        words = [(part.text or "") + part.attrib.get("message", "") for part in case]
        found[name] = found.get(name, "") + "\n".join(words)
    return found
