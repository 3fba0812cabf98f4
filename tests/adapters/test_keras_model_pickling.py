"""Keras models that are sent to another process, on both back ends."""

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

from tests.on_devices import ROOT, names_of_tests, once, outcomes

HERE = Path(__file__).parent
SENT, RECEIVED = HERE / "keras_models_sent.py", HERE / "keras_models_received.py"
PICKLED = HERE / "keras_models_pickled.py"
BACK_ENDS = ("jax", "torch")
# Programs of JAX are small here, and are compiled faster where they are not optimised.
SETTINGS = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def names_of_models() -> list[str]:
    listed = SENT.read_text().partition("\nMODELS = [")[2].partition("\n]\n")[0]
    return [name for name in re.findall(r"\w+", listed) if f"def {name}(" in SENT.read_text()]


# Two processes compile all models of a back end when the first test asks for them.
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


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Return the failures of the tests that need one process, by their names."""

    @functools.cache
    def find(back_end: str) -> dict[str, str]:
        return dict(
            once(
                tmp_path_factory,
                f"keras_models_pickled_{back_end}",
                lambda folder: outcomes(PICKLED, folder, KERAS_BACKEND=back_end, **SETTINGS),
            )
        )

    return find


@pytest.mark.parametrize(
    ("back_end", "name"),
    [(b, n) for b in BACK_ENDS for n in names_of_models() if b == "torch" or "torch" not in n],
)
def test_received_model_is_as_it_was(
    back_end: str, name: str, received: Callable[[str], dict[str, str]]
) -> None:
    found = received(back_end)
    assert found.get(name, str(found)) == ""


@pytest.mark.parametrize(
    ("back_end", "name"),
    [
        (b, n)
        for b in BACK_ENDS
        for n in names_of_tests(PICKLED)
        if b == "torch" or "torch" not in n
    ],
)
def test_in_one_process(back_end: str, name: str, pickled: Callable[[str], dict[str, str]]) -> None:
    found = pickled(back_end)
    assert found.get(name, str(found)) == ""


def test_other_back_ends_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import keras\n"
        "from headrace.adapters.keras_training.model_pickling import dump_model, load_objects\n"
        "from headrace.errors import FailedPreconditionError\n"
        "model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])\n"
        "for refuse, value in ((dump_model, model), (load_objects, b'')):\n"
        "    try:\n"
        "        refuse(value)\n"
        "    except FailedPreconditionError as error:\n"
        "        print(error)\n"
    )
    done = run(program, "numpy")
    assert done.stdout.count("KERAS_BACKEND") == 2, done.stderr
    assert "'numpy'" in done.stdout
