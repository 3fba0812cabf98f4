"""Keras models that are pickled in one process and loaded in another, on both back ends."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.on_devices import ROOT, once

HERE = Path(__file__).parent
SENT, RECEIVED = HERE / "keras_models_sent.py", HERE / "keras_models_received.py"
BACK_ENDS = ("jax", "torch")
# The JAX programs are small; without optimization they compile faster.
SETTINGS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def names_of_models() -> list[str]:
    listed = SENT.read_text().partition("\nMODELS = [")[2].partition("\n]\n")[0]
    return [name for name in re.findall(r"\w+", listed) if f"def {name}(" in SENT.read_text()]


# The first test starts two processes that compile all models of a back end.
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(360)]


def run(program: Path, back_end: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=ROOT,
        env={**os.environ, **SETTINGS, "KERAS_BACKEND": back_end, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Return the problems of each model in the process that received it."""

    @functools.cache
    def find(back_end: str) -> dict[str, str]:
        def exchange(folder: Path) -> dict[str, str]:
            for program in (SENT, RECEIVED):
                done = run(program, back_end, str(folder))
                if done.returncode:
                    return {"": done.stdout + done.stderr}
            return dict(json.loads((folder / "found.json").read_text()))

        return dict(once(tmp_path_factory, f"keras_models_{back_end}", exchange))

    return find


@pytest.mark.parametrize(
    ("back_end", "name"),
    [(b, n) for b in BACK_ENDS for n in names_of_models() if b == "torch" or "torch" not in n],
)
def test_received_model_equals_the_sent_one(
    back_end: str, name: str, received: Callable[[str], dict[str, str]]
) -> None:
    found = received(back_end)
    assert found.get(name, str(found)) == ""
