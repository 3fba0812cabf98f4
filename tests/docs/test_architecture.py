"""Tests that ARCHITECTURE.md and the design pages name existing functions, classes and files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = (ROOT / "ARCHITECTURE.md").read_text().partition("## Three paths")[2].partition("\n## ")[0]
#: "Class.method", "module.function", and messages such as GetSplit.
NAMES = sorted(set(re.findall(r"`([A-Za-z]\w+\.\w+|[A-Z]\w+[A-Z]\w+)`", PATHS)))


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
def test_a_name_in_a_path_exists(name: str) -> None:
    assert name in DEFINED


def test_there_are_three_paths() -> None:
    assert len(re.findall(r"^1\. ", PATHS, re.MULTILINE)) == 3
    assert len(NAMES) > 40


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/design/*.md")), ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    files = [path.as_posix() for top in ("src", "tests", "benchmarks", "examples", "docs", "deploy")
             for path in (ROOT / top).rglob("*.py")]  # fmt: skip
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    assert [each for each in sorted(named) if not any(f.endswith(f"/{each}") for f in files)] == []
