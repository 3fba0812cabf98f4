"""Lines of text files."""

from __future__ import annotations

from headrace.sources.record_files import Cut, RecordFilesSource

__all__ = ["TextLineSource", "cut_lines"]


def cut_lines(block: bytes, at_end: bool, name: str, offset: int) -> Cut:
    """Cut a block into lines without their ends; the last line of a file needs no end."""
    lines = block.split(b"\n")
    rest = lines.pop()
    used = len(block) - len(rest)
    if at_end and rest:
        lines.append(rest)
        used = len(block)
    if b"\r" in block:
        # A line that ended in "\r\n". A lone "\r" at the end of a file is part of its last line.
        ended = len(lines) - (1 if at_end and rest else 0)
        lines[:ended] = [line.removesuffix(b"\r") for line in lines[:ended]]
    return Cut(lines, used)


class TextLineSource(RecordFilesSource):
    r"""Lines of text files as `bytes`, without `\n` or `\r\n` at the end; an index is a file."""

    cut = staticmethod(cut_lines)
