"""The syntax of CSV files: headers, and the ends of records."""

from __future__ import annotations

import csv
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_flag
from headrace.errors import DataLossError
from headrace.storage.compression import Compression
from headrace.storage.files import open_file
from headrace.storage.options import NO_OPTIONS, StorageOptions

__all__ = ["CsvSyntax", "find_last_record_end", "find_record_ends", "read_header", "read_start"]

_MAX_HEADER_BYTES = 16 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class CsvSyntax:
    """The syntax of CSV files.

    Args:
        delimiter: Character between values.
        quote: Character around values that contain delimiters; "" if there is none.
        header: Whether the first record of each file contains the names of the columns.
        newlines_in_values: Whether quoted values may contain line breaks.
    """

    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    newlines_in_values: bool = False

    def __post_init__(self) -> None:
        _check_character("delimiter", self.delimiter)
        if self.quote != "":
            _check_character("quote", self.quote)
        check_flag("header", self.header, or_none=False)
        check_flag("newlines_in_values", self.newlines_in_values, or_none=False)
        if self.delimiter == self.quote:
            raise ValueError(f"`delimiter` and `quote` must differ, but both are {self.quote!r}")

    def split_row(self, text: str) -> tuple[str, ...]:
        """Return the values of one row."""
        rows = csv.reader(
            text.splitlines(keepends=True),
            delimiter=self.delimiter,
            quotechar=self.quote or None,
            quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
        )
        return tuple(next(rows, []))

    def ends_inside_quotes(self, block: bytes) -> bool:
        """Return whether the last value of complete records has an opening quote only."""
        quote = self.quote.encode()
        if not quote or quote not in block:
            return False
        if self.newlines_in_values:
            return block.count(quote) % 2 == 1
        line = block[block.rfind(b"\n", 0, -1) + 1 :]
        position = 0
        while True:
            if line.startswith(quote, position):
                # A doubled quote continues the value.
                position = line.find(quote, position + 1)
                while line.startswith(quote, position + 1) and position >= 0:
                    position = line.find(quote, position + 2)
                if position < 0:
                    return True
            position = line.find(self.delimiter.encode(), position) + 1
            if not position:
                return False


def _check_character(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a string, but got {value!r}")
    if len(value) != 1 or not value.isascii() or value in "\r\n":
        raise ValueError(f"`{name}` must be one ASCII character and no line break, got {value!r}")


def find_record_ends(data: bytes, syntax: CsvSyntax, name: str, offset: int) -> NDArray[np.int64]:
    """Return the offset after each complete record in data that starts with a record.

    Args:
        data: Data of a file.
        syntax: Syntax of the file.
        name: Name of the file, for messages.
        offset: Offset of the data in the file.

    Raises:
        DataLossError: If quotes within values make the ends ambiguous.
    """
    values = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(values == ord("\n"))
    if _has_quotes(data, syntax):
        quotes = np.flatnonzero(values == ord(syntax.quote))
        _check_opening_quotes(values, quotes[::2], syntax, name, offset)
        # A line break ends a record if the number of quotes before it is even.
        ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return ends + 1


def find_last_record_end(data: bytes, syntax: CsvSyntax, name: str, offset: int) -> int:
    """Return the last value of `find_record_ends`, or 0 if no record is complete.

    Raises:
        DataLossError: If quotes within values make it ambiguous.
    """
    if not _has_quotes(data, syntax):
        return data.rfind(b"\n") + 1
    ends = find_record_ends(data, syntax, name, offset)
    return int(ends[-1]) if len(ends) else 0


def _has_quotes(data: bytes, syntax: CsvSyntax) -> bool:
    """Return whether line breaks may be quoted."""
    return syntax.newlines_in_values and bool(syntax.quote) and syntax.quote.encode() in data


def _check_opening_quotes(
    values: NDArray[np.uint8], quotes: NDArray[np.int64], syntax: CsvSyntax, name: str, offset: int
) -> None:
    """Check that quotes that open a value follow a delimiter, a line break or a quote."""
    quotes = quotes[quotes > 0]
    allowed = np.frombuffer(f"\r\n{syntax.delimiter}{syntax.quote}".encode(), np.uint8)
    is_valid = np.isin(values[quotes - 1], allowed)
    if not is_valid.all():
        position = offset + int(quotes[np.argmin(is_valid)])
        raise DataLossError(
            f"{name!r} has a quote within a value at byte {position}, so the ends of records are "
            "ambiguous; quote the value and double the quotes in it, or pass "
            "newlines_in_values=False"
        )


def read_header(
    name: str,
    compression: Compression,
    syntax: CsvSyntax,
    options: StorageOptions = NO_OPTIONS,
) -> tuple[tuple[str, ...], int]:
    """Return the first record of a file, and the offset of its first row.

    The record is the header if the file has one, else the first row; it is empty if the file is.

    Raises:
        DataLossError: If the record is damaged, or too large.
    """
    size = 4096
    while True:
        data = read_start(name, compression, size, options)
        start = len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0
        ends = find_record_ends(data[start:], syntax, name, start)
        if len(ends) or len(data) < size:
            break
        if size >= _MAX_HEADER_BYTES:
            raise DataLossError(f"{name!r} has no line break in its first {size} bytes")
        size *= 16
    stop = start + int(ends[0]) if len(ends) else len(data)
    try:
        first = syntax.split_row(data[start:stop].decode())
    except (UnicodeDecodeError, csv.Error) as error:
        advice = (
            '; it is a GZIP file: pass compression_type="GZIP"'
            if data.startswith(b"\x1f\x8b")
            else ""
        )
        raise DataLossError(f"the first line of {name!r} is invalid: {error}{advice}") from error
    return first, stop if syntax.header else start


def read_start(
    name: str, compression: Compression, size: int, options: StorageOptions = NO_OPTIONS
) -> bytes:
    """Return the first `size` bytes of a file, or all if there are fewer."""
    stream = open_file(name, compression, options=options)
    try:
        data = b""
        while len(data) < size and (block := stream.read(size - len(data))):
            data += block
        return data
    finally:
        stream.close()
