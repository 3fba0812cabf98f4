"""Format of a saved directory. Directories of version 1 remain readable forever.

    dataset.json                            written first: the version, the save ID, the plan's
                                            digest, the spec of the elements
    00000000-00000-000000-<save>.arrow      a chunk file: order, stream, number in the stream
    DONE                                    written last: the chunk files, in order, each with its
                                            number of elements, bytes and schema
    ERROR                                   instead of DONE: the error message

Rule 1. Each save has its own ID, which is in the names of its chunk files and in all records. Files
        of other saves, and any other files, are ignored.
Rule 2. Once DONE exists, its chunk files are the dataset, whatever other files exist.
Rule 3. The order of chunk files is set when they are published, and is the order of the dataset.
        There are no gaps: a file is read once all files before it are published.
Rule 4. Records are JSON. This module does not handle elements: specs and schemas are plain values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from headrace.errors import DataLossError, FailedPreconditionError

__all__ = [
    "DONE",
    "ERROR",
    "METADATA",
    "ChunkRecord",
    "SaveHeader",
    "assign_order",
    "decode_done",
    "decode_error",
    "decode_header",
    "encode_done",
    "encode_error",
    "encode_header",
    "parse_public_name",
    "save_id_of",
]

METADATA = "dataset.json"
DONE = "DONE"
ERROR = "ERROR"

_FORMAT = "headrace saved dataset"
_VERSION = 1
_CHUNK_NAME = re.compile(r"(?:(\d{8,})-)?(\d{5,})-(\d{6,})-([0-9a-f]{16})\.arrow")


class SaveHeader(NamedTuple):
    """Header of a save, written before any element.

    Attributes:
        save_id: ID of the save: 16 hexadecimal digits.
        plan: Digest of the plan of the elements (`plan.identity.identity_digest`).
        spec: Spec of the elements as plain values (`element.spec.describe_spec`); None if there
            are no elements.
    """

    save_id: str
    plan: str
    spec: Any


class ChunkRecord(NamedTuple):
    """Record of a chunk file.

    Attributes:
        stream: Number of its stream.
        number: Number of the file in the stream, from 0 on.
        elements: Number of elements, at least 1; 0 if only the name is known.
        bytes: Size of the file in bytes; 0 if only the name is known.
        schema: JSON of its schema (`schema.FileSchema.describe`); "" if only the name is known.
        order: Number among all chunk files; -1 before it is set.
    """

    stream: int
    number: int
    elements: int = 0
    bytes: int = 0
    schema: str = ""
    order: int = -1

    def name(self, save_id: str) -> str:
        """Return the name under which the file is written."""
        return f"{self.stream:05}-{self.number:06}-{save_id}.arrow"

    def public_name(self, save_id: str) -> str:
        """Return the name under which the file is published."""
        if self.order < 0:
            raise ValueError(f"the order of chunk file {self[:2]} is not decided yet")
        return f"{self.order:08}-{self.name(save_id)}"


def assign_order(chunks: Iterable[ChunkRecord], first: int = 0) -> list[ChunkRecord]:
    """Return chunk files with consecutive orders, starting at `first`."""
    return [chunk._replace(order=first + place) for place, chunk in enumerate(chunks)]


def parse_public_name(name: str, save_id: str) -> ChunkRecord | None:
    """Return the record from the name of a published chunk file of this save, else None."""
    match = _CHUNK_NAME.fullmatch(name)
    if match is None or match.group(1) is None or match.group(4) != save_id:
        return None
    order, stream, number = map(int, match.groups()[:3])
    return ChunkRecord(stream, number, order=order)


def save_id_of(name: str) -> str | None:
    """Return the ID of the save that a file belongs to by its name, or None."""
    match = _CHUNK_NAME.fullmatch(name)
    return None if match is None else match.group(4)


def encode_header(header: SaveHeader) -> bytes:
    """Return the content of `dataset.json`."""
    return _encode(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "save": header.save_id,
            "plan": header.plan,
            "spec": header.spec,
        }
    )


def decode_header(data: bytes, path: str) -> SaveHeader:
    """Return the header that `encode_header` wrote.

    Raises:
        DataLossError: If it is damaged, or not a header.
        FailedPreconditionError: If it has a later version.
    """
    value = _decode(data, path)
    if value.get("format") != _FORMAT:
        raise DataLossError(f"{path!r} is not the metadata of a saved dataset")
    if value.get("version") != _VERSION:
        raise FailedPreconditionError(
            f"{path!r} has version {value.get('version')!r} of the format of saved "
            f"datasets, but this version of headrace reads {_VERSION}; update headrace"
        )
    return SaveHeader(
        _check_text(value, "save", path), _check_text(value, "plan", path), value.get("spec")
    )


def encode_done(save_id: str, chunks: Sequence[ChunkRecord]) -> bytes:
    """Return the content of `DONE`.

    Args:
        save_id: ID of the save.
        chunks: The chunk files, in order.

    Raises:
        ValueError: If the files of a stream are not numbered 0, 1, 2 ...
    """
    _check_numbers(chunks)
    forms = list(dict.fromkeys(chunk.schema for chunk in chunks))
    places = {form: place for place, form in enumerate(forms)}
    return _encode(
        {
            "save": save_id,
            "elements": sum(chunk.elements for chunk in chunks),
            "forms": [json.loads(form) for form in forms],
            "chunks": [
                [chunk.stream, chunk.number, chunk.elements, chunk.bytes, places[chunk.schema]]
                for chunk in chunks
            ],
        }
    )


def decode_done(data: bytes, path: str) -> tuple[str, tuple[ChunkRecord, ...]]:
    """Return the save ID of a `DONE` record, and the chunk files in order.

    Raises:
        DataLossError: If it is damaged.
    """
    value = _decode(data, path)
    try:
        forms = [json.dumps(form) for form in value["forms"]]
        chunks = tuple(
            ChunkRecord(
                _check_number(a),
                _check_number(b),
                _check_number(c),
                _check_number(d),
                forms[_check_number(e)],
                order,
            )
            for order, (a, b, c, d, e) in enumerate(value["chunks"])
        )
        _check_numbers(chunks)
        if sum(chunk.elements for chunk in chunks) != value["elements"]:
            raise ValueError("the number of elements in the chunk files does not match the total")
    except (LookupError, TypeError, ValueError) as error:
        raise DataLossError(f"{path!r} is damaged: {error}; save the dataset again") from error
    return _check_text(value, "save", path), chunks


def encode_error(save_id: str, error: str) -> bytes:
    """Return the content of `ERROR`."""
    return _encode({"save": save_id, "error": error})


def decode_error(data: bytes, path: str) -> tuple[str, str]:
    """Return the save ID and the error message of an `ERROR` record."""
    value = _decode(data, path)
    return _check_text(value, "save", path), _check_text(value, "error", path)


def _check_numbers(chunks: Iterable[ChunkRecord]) -> None:
    counted: dict[int, int] = {}
    for order, chunk in enumerate(chunks):
        if chunk.order != order:
            raise ValueError(f"the chunk file of order {order} is missing")
        if chunk.number != counted.get(chunk.stream, 0):
            raise ValueError(
                f"chunk file {chunk.number} of stream {chunk.stream} is out of sequence"
            )
        counted[chunk.stream] = chunk.number + 1


def _encode(value: dict[str, Any]) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _decode(data: bytes, path: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataLossError(f"{path!r} is damaged: {error}; save the dataset again") from error
    if not isinstance(value, dict):
        raise DataLossError(f"{path!r} is damaged: it is not a JSON object; save the dataset again")
    return value


def _check_text(value: dict[str, Any], key: str, path: str) -> str:
    found = value.get(key)
    if not isinstance(found, str):
        raise DataLossError(f"{path!r} is damaged: it has no {key!r}; save the dataset again")
    return found


def _check_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number")
    return value
