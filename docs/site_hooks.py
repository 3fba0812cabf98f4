"""Pages of the documentation site that are not files in docs/; MkDocs calls these hooks.

* The start page is README.md.
* Each public package has a page of the API reference with the names in its `__all__`, which
  mkdocstrings fills with their docstrings.
* The design pages have an index.
* A file outside docs/ that a page links to, such as a manifest or a source file, becomes part of
  the site, under `repository/`.

`FencedExamples` is an extension of Griffe, which reads the docstrings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
START = "README.md"
DESIGN_INDEX = "design/index.md"

#: A relative link of Markdown: its text with the parenthesis, its target, its anchor.
LINK = re.compile(r"(\]\()([^()\s#:]+)(#[^()\s]*)?(?=\))")
#: A doctest at the left margin of a docstring, up to the next empty line.
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Puts doctests outside an `Examples` section into code blocks, not Markdown quotes."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in docs/."""
    api_pages = _api_pages()
    for uri, text in api_pages.items():
        files.append(File.generated(config, uri, content=text))
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / START)))
    design = [file for file in files if file.src_uri.startswith("design/")]
    design.sort(key=lambda file: file.src_uri)
    files.append(File.generated(config, DESIGN_INDEX, content=_design_index(design)))
    _add_linked_files(files, config)
    if config.nav is None:
        raise ValueError("mkdocs.yml must have a `nav`; the API reference is added to it")
    config.nav += [
        {"API reference": list(api_pages)},
        {"Design": [DESIGN_INDEX, *(file.src_uri for file in design)]},
    ]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite relative links to the paths that their targets have on the site."""
    if _is_generated(page.file):
        return markdown
    source = _source(page.file)
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if not (ROOT / target).exists():  # MkDocs warns
            return match[0]
        uri = posixpath.relpath(_uri(target), folder or ".")
        return f"{match[1]}{uri}{match[3] or ''}"

    return LINK.sub(rewrite_link, markdown)


def _add_linked_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    pages = [file for file in files if file.is_documentation_page()]
    while pages:
        page = pages.pop()
        if _is_generated(page):
            continue
        folder = posixpath.dirname(_source(page))
        for _, target, _ in LINK.findall(page.content_string):
            path = posixpath.normpath(posixpath.join(folder, target))
            if files.get_file_from_path(_uri(path)) is None and (ROOT / path).is_file():
                file = File.generated(
                    config,
                    _uri(path),
                    abs_src_path=str(ROOT / path),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
                files.append(file)
                if file.is_documentation_page():
                    pages.append(file)


def _uri(path: str) -> str:
    """Return the path on the site of a file of the repository."""
    if path == START:
        return "index.md"
    if path == "docs/design":
        return DESIGN_INDEX
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def _source(file: File) -> str:
    """Return the path in the repository of a file on the site."""
    if file.src_uri == "index.md":
        return START
    inside = file.src_uri.removeprefix("repository/")
    return inside if inside != file.src_uri else f"docs/{file.src_uri}"


def _is_generated(file: File) -> bool:
    return file.src_uri.startswith("api/") or file.src_uri == DESIGN_INDEX


def _design_index(pages: list[File]) -> str:
    """Return a list of links to the design pages."""
    links = [
        f"* [{page.content_string.partition(chr(10))[0].removeprefix('# ')}]"
        f"({posixpath.basename(page.src_uri)})"
        for page in pages
    ]
    return "\n".join(["# Design", "", *links])


def _api_pages() -> dict[str, str]:
    """Return the text of each page of the API reference by its file name.

    Pages are those of `headrace`, of every module in its `__all__`, and of every module in theirs.
    """
    top = griffe.load("headrace", search_paths=[str(ROOT / "src")])
    pages: dict[str, str] = {}
    packages: list[tuple[str, griffe.Object | griffe.Alias]] = [("headrace", top)]
    while packages:
        path, package = packages.pop(0)
        names = sorted(str(name) for name in package.exports or ())
        modules = [name for name in names if package[name].is_module]
        packages += [(f"{path}.{name}", package[name]) for name in modules]
        pages[f"api/{path}.md"] = _api_page(path, package, names, modules)
    return pages


def _api_page(
    path: str, package: griffe.Object | griffe.Alias, names: list[str], modules: list[str]
) -> str:
    """Return the text of the page of one public package."""
    lines = [f"# {path}", ""]
    if package.docstring is not None:
        lines += [package.docstring.value.partition("\n\n")[0], ""]
    if modules:
        lines += [f"* [{path}.{name}]({path}.{name}.md)" for name in modules] + [""]
    for name in names:
        if name not in modules:
            lines += [f"::: {path}.{name}", ""]
    return "\n".join(lines)
