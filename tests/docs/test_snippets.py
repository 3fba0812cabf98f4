"""The Python in README and the guides runs, each block on its own, and the picture is drawn."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.heavy
@pytest.mark.parametrize("block", BLOCKS)
def test_a_snippet_runs(block: str, tmp_path: Path):
    script = tmp_path / "snippet.py"
    script.write_text(block)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=55,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_have_snippets():
    assert len(BLOCKS) >= 7


def test_the_picture_is_the_one_that_its_source_draws():
    drawn = runpy.run_path(str(ROOT / "docs" / "architecture.py"))["draw"]()
    assert (ROOT / "docs" / "architecture.svg").read_text() == drawn


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "ARCHITECTURE.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
