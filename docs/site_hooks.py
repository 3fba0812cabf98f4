"""Pages of the documentation site that are not files in docs/; MkDocs calls these hooks.

* A file outside docs/ that a page or the navigation links to, such as a manifest or the changelog,
  becomes part of the site, under `repository/`.
* The comparison with other libraries is a part of README.md, which is not on the site itself.
* The design pages have an index.
* Each page has its first paragraph as description, and a weight in searches.
* Headings of the API reference have the names that a reader types.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
README = "README.md"
COMPARISON = "comparison.md"
DESIGN_INDEX = "design/index.md"
OUTSIDE = "repository/"

#: Pages with the contents of sections of README.md; links to other sections go to the start page.
SECTIONS = {
    "#install": "install.md",
    "#when-not-to-use-it": COMPARISON,
    "#comparison": COMPARISON,
}

#: Weights in searches by the start of a path; 1 for other pages.
WEIGHTS = {
    "glossary": 3,
    "porting": 2,
    "api/": 2,
    "design/": 0.3,
    "reliability": 0.3,
    "testing": 0.3,
    OUTSIDE: 0.3,
}

#: A relative link of Markdown: its text with the parenthesis, its target, its anchor.
LINK = re.compile(r"(\]\()([^()\s#:]+)(#[^()\s]*)?(?=\))")
#: The first paragraph of a page: lines of text, not a heading, list, table, picture or code.
PARAGRAPH = re.compile(r"(?:\A|\n)\n?((?:(?![#*|!<\s\-\d`]).+\n?)+)")

#: The beginning of the full name in the heading of a class, function or attribute.
HEADING = re.compile(r'(<span class="doc doc-object-name [\w-]+">)headrace\.')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in docs/."""
    files.append(File.generated(config, COMPARISON, content=_comparison()))
    design = [file for file in files if file.src_uri.startswith("design/")]
    design.sort(key=lambda file: file.src_uri)
    files.append(File.generated(config, DESIGN_INDEX, content=_design_index(design)))
    for uri in _uris(config.nav):
        if uri.startswith(OUTSIDE):
            _add_outside(files, config, uri.removeprefix(OUTSIDE))
    _add_linked_files(files, config)
    replace_in_nav(config.nav, "design/*", [DESIGN_INDEX, *(file.src_uri for file in design)])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Describe the page, and rewrite relative links to the paths of their targets on the site."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    for start, weight in WEIGHTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": weight}
    if paragraph := PARAGRAPH.search(markdown):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", paragraph[1])
        page.meta["description"] = " ".join(text.replace('"', "'").split())
    source = _source(page.file)
    if source is None:
        return markdown
    here, there = posixpath.dirname(source), posixpath.dirname(page.file.src_uri)

    def rewrite_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match[2]))
        if not (ROOT / target).exists():  # MkDocs warns
            return match[0]
        uri = posixpath.relpath(_uri(target, match[3]), there or ".")
        return f"{match[1]}{uri}{match[3] or ''}"

    return LINK.sub(rewrite_link, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show names of the API as a reader types them after `import headrace as hr`."""
    return HEADING.sub(r"\1hr.", html)


def replace_in_nav(nav: Any, name: str, value: list[Any]) -> None:
    """Put `value` in the place of `name` in the navigation."""
    for section in nav:
        for title, entry in section.items() if isinstance(section, dict) else ():
            if entry == name:
                section[title] = value
            elif isinstance(entry, list):
                replace_in_nav(entry, name, value)


def _uris(nav: Any) -> list[str]:
    """Return the paths in a navigation."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav or ()
    return [uri for entry in entries for uri in _uris(entry)]


def _add_outside(files: Files, config: MkDocsConfig, path: str) -> File:
    file = File.generated(
        config, _uri(path), abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV
    )
    files.append(file)
    return file


def _add_linked_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    pages = [file for file in files if file.is_documentation_page()]
    while pages:
        page = pages.pop()
        source = _source(page)
        if source is None:
            continue
        for _, target, _ in LINK.findall(page.content_string):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
            if files.get_file_from_path(_uri(path)) is None and (ROOT / path).is_file():
                file = _add_outside(files, config, path)
                if file.is_documentation_page():
                    pages.append(file)


def _uri(path: str, anchor: str = "") -> str:
    """Return the path on the site of a file of the repository."""
    if path == README:
        return SECTIONS.get(anchor, "index.md")
    if path == "docs/design":
        return DESIGN_INDEX
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}{path}"


def _source(file: File) -> str | None:
    """Return the path in the repository of a file on the site; None if it is generated."""
    if file.src_uri == COMPARISON:
        return README
    if file.src_uri.startswith(OUTSIDE):
        return file.src_uri.removeprefix(OUTSIDE)
    source = f"docs/{file.src_uri}"
    return source if (ROOT / source).is_file() else None


def _comparison() -> str:
    """Return the sections of README.md that compare Headrace with other libraries."""
    sections = (ROOT / README).read_text().split("\n## ")
    chosen = {section.partition("\n")[0]: section for section in sections}
    texts = [f"## {chosen[title]}" for title in ("When not to use it", "Comparison")]
    return "\n".join(["# Compare with other libraries", "", *texts])


def _design_index(pages: list[File]) -> str:
    """Return a list of links to the design pages."""
    links = [
        f"* [{page.content_string.partition(chr(10))[0].removeprefix('# ')}]"
        f"({posixpath.basename(page.src_uri)})"
        for page in pages
    ]
    return "\n".join(["# Design decisions", "", *links])
