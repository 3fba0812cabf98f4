"""The recipe of the image: linted, pinned, without root, and with what the build copies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.charts import ROOT

RECIPE = ROOT / "deploy" / "Containerfile"
LINES = RECIPE.read_text().replace("\\\n", " ").splitlines()


def lint(path: Path) -> str:
    """Return the findings of hadolint."""
    program = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [program, "--no-color", path], check=False, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr


def instructions(name: str) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in LINES if line.startswith(f"{name} ")]


def test_recipe_has_no_findings():
    assert lint(RECIPE) == ""


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("FROM python", "DL3006"),
        ("FROM python:latest", "DL3007"),
        ("ENTRYPOINT headrace", "DL3025"),
        ("RUN pip install headrace", "DL3042"),
    ],
)
def test_linter_finds(line, rule, tmp_path):
    path = tmp_path / "Containerfile"
    path.write_text(f"{RECIPE.read_text()}\n{line}\n")
    assert rule in lint(path)


def test_process_is_the_command_without_a_shell_or_root():
    # The command is process 1 and receives SIGTERM itself.
    assert instructions("ENTRYPOINT") == ['["headrace"]']
    assert instructions("USER") == ["10001:10001"]
    assert LINES.index("USER 10001:10001") > LINES.index("FROM python:${PYTHON}-slim")
    assert not instructions("ADD")
    for line in instructions("RUN"):
        assert line.count("pip install") == line.count("--no-cache-dir") == 1


def test_versions_are_pinned():
    (python,) = instructions("ARG")
    assert python == "PYTHON=3.12"
    assert all(line.startswith("python:${PYTHON}-slim") for line in instructions("FROM"))
    assert "--constraint constraints.txt" in " ".join(instructions("RUN"))


def test_copied_files_exist():
    lines = [line for line in instructions("COPY") if "--from" not in line]
    copied = [source for line in lines for source in line.split()[:-1]]
    assert len(copied) > 3
    for source in copied:
        assert (ROOT / source).exists(), source
