"""Builds the sdist and wheel, and checks their contents and metadata."""

from __future__ import annotations

import email.message
import email.parser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

__all__ = [
    "ROOT",
    "build",
    "metadata_of",
    "metadata_problems",
    "sdist_problems",
    "wheel_problems",
]

ROOT = Path(__file__).parents[1]
_STATIC_SUFFIXES = {".css", ".html", ".js", ".typed"}
_SDIST_FILES = {
    *("CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"),
    ".gitignore",  # hatchling adds it
}


def build(directory: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return their paths.

    Args:
        directory: Directory of the results; emptied first.

    Raises:
        CalledProcessError: If a build or the check of the long description fails.
    """
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(directory), str(ROOT)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (sdist,), (wheel,) = directory.glob("*.tar.gz"), directory.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return sdist, wheel


def metadata_of(wheel: Path) -> email.message.Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.Parser().parsestr(archive.read(name).decode())


def metadata_problems(metadata: email.message.Message, version: str) -> list[str]:
    """Return what a user of the package index would miss.

    Args:
        metadata: Metadata of the wheel.
        version: Version in the source.
    """
    problems = []
    if metadata["Version"] != version:
        problems.append(f"the wheel has version {metadata['Version']}, the source {version}")
    urls = dict(url.split(", ", 1) for url in metadata.get_all("Project-URL", []))
    for label in ("Documentation", "Source", "Changelog", "Issues"):
        if not urls.get(label, "").startswith("https://"):
            problems.append(f"[project.urls] has no https address for {label}")
    classifiers = metadata.get_all("Classifier", [])
    for start in ("Development Status ::", "Operating System ::", "Programming Language ::"):
        if not any(each.startswith(start) for each in classifiers):
            problems.append(f"no classifier begins with {start!r}")
    text = str(metadata.get_payload())
    if metadata["Description-Content-Type"] != "text/markdown" or len(text) < 1000:
        problems.append("the long description is not the README")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "#")):
            problems.append(f"the long description links to {target!r}, which is relative")
    return problems


def wheel_problems(wheel: Path) -> list[str]:
    """Return files of the package that the wheel lacks, and files that it should not have."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    return _differences("wheel", found, _package_files())


def sdist_problems(sdist: Path) -> list[str]:
    """Return files that the sdist lacks to build the wheel, and files that it should not have."""
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    return _differences("sdist", found, {f"src/{name}" for name in _package_files()} | _SDIST_FILES)


def _package_files() -> set[str]:
    source = ROOT / "src"
    return {
        str(path.relative_to(source))
        for path in (source / "headrace").rglob("*")
        if path.suffix in _STATIC_SUFFIXES | {".py"}
    }


def _differences(archive: str, found: set[str], wanted: set[str]) -> list[str]:
    return [
        *(f"the {archive} lacks {name}" for name in sorted(wanted - found)),
        *(f"the {archive} has {name}" for name in sorted(found - wanted)),
    ]
