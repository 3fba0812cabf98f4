"""Tar archives for tests, written and read with the standard library."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Files = Iterable[tuple[str, bytes]]


def make_tar(files: Files, format_: int = tarfile.PAX_FORMAT, mode: str = "w") -> bytes:
    """Return an archive of these files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode=mode, format=format_) as tar:  # type: ignore[call-overload]
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive.getvalue()


def write_tar(path: Path, files: Files, **options: Any) -> str:
    """Write an archive of these files; return its name."""
    path.write_bytes(make_tar(files, **options))
    return str(path)


def numbered_files(numbers: Iterable[int], size: int = 700) -> list[tuple[str, bytes]]:
    """Return the three files of each of these samples; their sizes differ."""
    return [
        (f"{number:04d}.{extension}", data)
        for number in numbers
        for extension, data in (
            ("bin", bytes([number % 256]) * (size + 37 * number % 1000)),
            ("cls", b"%d" % number),
            ("json", b'{"number": %d}' % number),
        )
    ]


def reference(*paths: str) -> list[dict[str, Any]]:
    """Return the samples of archives as the standard library reads them."""
    samples: list[dict[str, Any]] = []
    for path in paths:
        key = None
        with tarfile.open(path) as tar:
            for member in tar:
                found = re.fullmatch(r"((?:.*/)?[^./][^./]*)\.([^/]*)", member.name, re.DOTALL)
                if not member.isreg() or not found:
                    continue
                if found[1] != key:
                    key = found[1]
                    samples.append({"__key__": key})
                file = tar.extractfile(member)
                assert file is not None
                samples[-1][found[2].lower()] = file.read()
    return samples
