"""Tests that the examples in public docstrings pass, and that every public name has one.

Examples may use `hr` and `np` without importing them, and write files to the working directory,
which is initially empty.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pytest

import headrace as hr
from tests.docs.public_names import FRAMEWORKS, documented, is_missing, members, public_packages

os.environ.setdefault("KERAS_BACKEND", "torch" if is_missing("headrace.jax") else "jax")

PACKAGES = public_packages()
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

#: Classes whose public methods each need an example; other classes need one example in all.
METHODS = (hr.Dataset, hr.DatasetIterator)

#: Package whose examples run on a Ray cluster, in tests/ray/page_cases.py.
RAY_PACKAGE = "headrace.ray"

#: Public names whose examples need a cluster. Add none.
WITHOUT_EXAMPLE = {
    "headrace.distribute.KubernetesClusterResolver",
    "headrace.distribute.RayClusterResolver",
}


@pytest.fixture(scope="module")
def _frameworks() -> None:
    """Import the frameworks, which keep threads and files open, before the leak check of a test."""
    for path, framework in FRAMEWORKS.items():
        if not is_missing(path):
            importlib.import_module(framework)
    # The first call opens a pipe for signals.
    pyarrow.csv.read_csv(pyarrow.BufferReader(b"a\n1\n"))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # torch, by Keras
@pytest.mark.usefixtures("_frameworks")
@pytest.mark.parametrize("path", [path for path in PACKAGES if path != RAY_PACKAGE])
def test_docstring_examples_pass(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_missing(path):
        pytest.skip(f"{FRAMEWORKS[path]} is not installed")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    finder = doctest.DocTestFinder(recurse=False)
    for name, value in _with_members(path):
        # `module=False` because wrapped functions would not count as members of the module.
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        for test in finder.find(value, name, module=False, globs={"hr": hr, "np": np}):  # type: ignore[arg-type]
            runner.run(test)
    assert runner.failures == 0


@pytest.mark.usefixtures("_frameworks")
def test_every_public_name_has_an_example_or_is_an_exception() -> None:
    paths = [path for path in PACKAGES if not is_missing(path)]
    names = {name: value for path in paths for name, value in documented(path, PACKAGES[path])}
    for kind in METHODS:
        for name, value in members(kind):
            names[f"headrace.{kind.__name__}.{name}"] = value
    without = {name for name, value in names.items() if ">>>" not in (value.__doc__ or "")}
    missing = tuple(f"{path}." for path in PACKAGES if is_missing(path))
    assert without == {name for name in WITHOUT_EXAMPLE if not name.startswith(missing)}


def _with_members(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the public names of the package and the methods of its classes, each object once."""
    seen: set[int] = set()
    for name, value in documented(path, PACKAGES[path]):
        methods = members(value) if inspect.isclass(value) else ()
        for full, each in [
            (name, value),
            *((f"{name}.{short}", other) for short, other in methods),
        ]:
            if id(each) not in seen:
                seen.add(id(each))
                yield full, each
