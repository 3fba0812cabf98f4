from __future__ import annotations

from pathlib import Path

from headrace.plan.source import IndexedSource
from headrace.sources.files import FileNamesSource
from headrace.testing.conformance import check_source


def test_file_names_are_a_source(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.csv"):
        (tmp_path / name).touch()

    source = FileNamesSource.matching([f"{tmp_path}/*.txt"])

    assert isinstance(source, IndexedSource)
    assert source.patterns == (f"{tmp_path}/*.txt",)
    check_source(source, [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"])
