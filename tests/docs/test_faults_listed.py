"""Tests that docs/testing.md names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "testing.md").read_text())


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_named_test_exists(file: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / file).read_text()


def test_faults_are_listed() -> None:
    assert len(NAMED) > 30
