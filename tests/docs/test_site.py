"""Tests of the documentation site: public names, commands, links and search.

The site is built once for all tests, by whichever test process comes first.
"""

from __future__ import annotations

import fcntl
import functools
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from playwright import sync_api
from typer.main import get_command

import headrace as hr
from headrace.cli.main import app
from tests.docs.public_names import public_packages

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]


class _Page(HTMLParser):
    """Anchors of a page, its links, and the files that a browser loads for it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif "src" in values or (tag == "link" and values.get("rel") != "canonical"):
            self.loaded.add(values.get("src") or values["href"])


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for all processes of pytest-xdist, and return its folder."""
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # of one process
        folder = folder.parent
    built = folder / "site"
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (built / "objects.inv").exists():  # written last
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=400,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    return built


@functools.cache
def _page(path: Path) -> _Page:
    return _Page(path)


def test_every_public_name_is_described(site: Path) -> None:
    for path, package in public_packages().items():
        text = (site / "api" / f"{path}.html").read_text()
        if path == "headrace":
            text += (site / "api" / "headrace.Dataset.html").read_text()
        # The text between the anchor of each name and the next anchor.
        parts = re.split(r'<h\d id="([\w.]+)" class="doc doc-heading"', text)
        described = {
            name for name, part in zip(parts[1::2], parts[2::2], strict=True) if "<p>" in part
        }
        modules = {name for name in package.__all__ if f"{path}.{name}" in public_packages()}
        assert {f"{path}.{name}" for name in package.__all__ if name not in modules} <= described
    methods = {name for name in dir(hr.Dataset) if not name.startswith("_")}
    assert {f"headrace.Dataset.{name}" for name in methods} <= _page(
        site / "api" / "headrace.Dataset.html"
    ).ids


def test_every_command_and_option_is_described(site: Path) -> None:
    text = (site / "command-line.html").read_text()
    for name, command in get_command(app).commands.items():
        _, _, part = text.partition(f'<h2 id="headrace-{name}">')
        part, _, _ = part.partition("<h2")
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert all(f"<code>{each}" in part or f" {each}" in part for each in parameter.opts)


def test_links_lead_to_pages_and_anchors(site: Path) -> None:
    broken = []
    for path in site.rglob("*.html"):
        if path.name == "404.html":  # its links start at the root of a server
            continue
        for link in _page(path).links:
            parts = urlsplit(link)
            if parts.scheme:
                if parts.scheme not in ("https", "http", "mailto") or " " in link:
                    broken.append((path.name, link))
                continue
            target = path if not parts.path else Path(posixpath.normpath(path.parent / parts.path))
            if not target.is_file() or (
                parts.fragment
                and target.suffix == ".html"
                and unquote(parts.fragment) not in _page(target).ids
            ):
                broken.append((str(path.relative_to(site)), link))
    assert broken == []


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loaded = {each for path in site.rglob("*.html") for each in _page(path).loaded}
    assert {each for each in loaded if urlsplit(each).netloc} == set()
    assert "iframe-worker.js" in loaded


@pytest.fixture
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("this test needs Chromium: install the package chromium")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def test_search_finds_terms_in_pages_opened_as_files(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator("input.md-search__input").click()
    for words, expected in {
        "hr.Dataset.interleave": {"api/headrace.Dataset.html"},
        "hr.service.distribute": {"api/headrace.service.html"},
        "visitation": {"glossary.html", "service/dynamic-sharding.html"},
        "DataLoader": {"coming-from/torch-dataloader.html"},
    }.items():
        page.locator("input.md-search__input").fill("")
        page.keyboard.type(words)
        # The address of a result contains the query.
        query = words.lower().replace(".", "+")
        page.locator(f"a.md-search-result__link[href*='?h={query}']").first.wait_for()
        links = [
            link.get_attribute("href") for link in page.locator("a.md-search-result__link").all()
        ]
        found = [urlsplit(link).path.removeprefix(f"{site}/") for link in links]
        pages = list(dict.fromkeys(found))  # without sections
        assert expected <= set(pages[:3])
