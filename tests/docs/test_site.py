"""Test that the documentation site builds without warnings and describes all public names."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import headrace as hr

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]


class _Ids(HTMLParser):
    """Collects the anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids |= {value for name, value in attrs if name == "id" and value}


@pytest.mark.slow  # ten seconds
def test_site_builds_without_warnings_and_describes_every_public_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    for package in [hr, hr.coordinator, hr.distribute, hr.errors, hr.io, hr.service, hr.testing]:
        ids = _Ids(tmp_path / "api" / package.__name__ / "index.html").ids
        names = {f"{package.__name__}.{name}" for name in package.__all__}
        modules = {name for name in names if (tmp_path / "api" / name).is_dir()}
        assert names - modules <= ids
    assert {"headrace.Dataset.map", "headrace.Dataset.from_tensor_slices"} <= _Ids(
        tmp_path / "api" / "headrace" / "index.html"
    ).ids

    # Pages can be read without a network.
    loaded = re.compile(r"""<(?:script|img)[^>]* src="https?:|<link[^>]* href="https?:""")
    assert [page for page in tmp_path.rglob("*.html") if loaded.search(page.read_text())] == []
