"""What `make release-check` finds in metadata, wheels and the support page."""

from __future__ import annotations

import email.parser
import re
import sys
import tarfile
import zipfile

import pytest
from release import distribution, support
from release.environments import find_pythons
from release.smoke import CHECKS

GOOD = (
    """\
Metadata-Version: 2.4
Name: headrace
Version: 1.2.3
Project-URL: Documentation, https://example.org/docs
Project-URL: Source, https://example.org/source
Project-URL: Changelog, https://example.org/changes
Project-URL: Issues, https://example.org/issues
Classifier: Development Status :: 3 - Alpha
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3.11
Description-Content-Type: text/markdown

"""
    + "[guide](https://example.org/guide) [below](#here)\n" * 40
)


def problems(text, version="1.2.3"):
    return distribution.metadata_problems(email.parser.Parser().parsestr(text), version)


def test_complete_metadata_has_no_problem():
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("Version: 1.2.3", "Version: 1.2.4", "the source 1.2.3"),
        ("Project-URL: Source", "Project-URL: Code", "no https address for Source"),
        ("https://example.org/issues", "http://example.org", "no https address for Issues"),
        ("Classifier: Operating System", "Classifier: System", "'Operating System ::'"),
        ("text/markdown", "text/plain", "not the README"),
        ("(https://example.org/guide)", "(docs/guide.md)", "links to 'docs/guide.md'"),
    ],
)
def test_a_fault_in_the_metadata_is_named(before, after, problem):
    found = problems(GOOD.replace(before, after))
    assert found
    assert all(problem in each for each in found)


def test_a_wheel_that_lacks_a_file_or_has_another_is_named(tmp_path):
    source = distribution.ROOT / "src"
    names = [
        str(path.relative_to(source))
        for path in (source / "headrace").rglob("*")
        if path.suffix in {".py", ".typed", ".css", ".html", ".js"}
    ]
    names.remove("headrace/errors.py")
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        for name in [*names, "tests/conftest.py"]:
            archive.writestr(name, "")
    assert distribution.wheel_problems(tmp_path / "a.whl") == [
        "the wheel lacks headrace/errors.py",
        "the wheel has tests/conftest.py",
    ]


def test_an_sdist_that_lacks_a_file_or_has_another_is_named(tmp_path):
    names = ["CHANGELOG.md", "LICENSE", "PKG-INFO", ".gitignore", "pyproject.toml", "notes.txt"]
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(distribution.ROOT / "src", "a/src", filter=without_caches)
        for name in names:
            archive.addfile(tarfile.TarInfo(f"a/{name}"))
    assert [each for each in distribution.sdist_problems(path) if "/" not in each] == [
        "the sdist lacks README.md",
        "the sdist has notes.txt",
        "the sdist has src",  # a directory
    ]


def without_caches(member):
    return None if "__pycache__" in member.name else member


def test_this_python_is_found():
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert version in find_pythons()


def test_the_support_page_gets_new_tables_and_keeps_its_text():
    path = distribution.ROOT / "docs" / "support.md"
    results = support.Results(
        extras={"3.11": {"": True, "torch": True}, "3.12": {"": False, "torch": None}},
        pairs={("3.11", "3.12", False): "error", ("3.11", "3.12", True): ""},
    )
    page = support.update(path.read_text(), results)
    assert "| core | yes | no |\n| `torch` | yes | – |\n\n" in page
    assert "| 3.11 | 3.12 | refused | yes |\n\n" in page
    assert support.update(page, results) == page
    without_tables = [line for line in page.splitlines() if not line.startswith("|")]
    assert without_tables == [
        line for line in path.read_text().splitlines() if not line.startswith("|")
    ]


def test_the_support_page_names_the_extras_that_are_only_imported():
    page = (distribution.ROOT / "docs" / "support.md").read_text()
    sentence = page[page.index("The packages of") : page.index("are only imported")]
    only_imported = {name for name, check in CHECKS.items() if "imports" in check.__qualname__}
    assert set(re.findall("`([a-z-]+)`", sentence)) == only_imported


def test_a_support_page_without_a_mark_is_refused():
    with pytest.raises(ValueError, match="has no line"):
        support.update("# Supported versions\n", support.Results())
