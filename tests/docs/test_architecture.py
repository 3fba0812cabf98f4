"""Tests that ARCHITECTURE.md and the design pages name existing functions, classes and files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIAGRAMS = re.findall(r"```mermaid\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(), re.S)
#: "Class.method", "module.function", and messages such as GetSplit.
NAMES = sorted(set(re.findall(r"\b[A-Za-z]\w+\.\w+\b|\b[A-Z]\w+[A-Z]\w+\b", "".join(DIAGRAMS))))


def _defined() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "src" / "headrace").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found |= {node.name, f"{path.stem}.{node.name}"}
                found |= {
                    f"{node.name}.{each.name}"
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                }
            elif isinstance(node, ast.FunctionDef):
                found.add(f"{path.stem}.{node.name}")
        package = path.parent.name
        found.add(f"{package}.{path.stem}")
    return found | {"service.client", "service.worker", "service.dispatcher"}


DEFINED = _defined()


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_diagram_exists(name: str) -> None:
    assert name in DEFINED


def test_there_are_three_diagrams() -> None:
    assert len(DIAGRAMS) == 3
    assert len(NAMES) > 40


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/design/*.md")), ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    files = [path.as_posix() for top in ("src", "tests", "benchmarks", "examples", "docs", "deploy")
             for path in (ROOT / top).rglob("*.py")]  # fmt: skip
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    assert [each for each in sorted(named) if not any(f.endswith(f"/{each}") for f in files)] == []
