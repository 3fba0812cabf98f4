"""What a saved directory holds. This is a format: directories of version 1 are read for ever.

    dataset.json                            written first: the version, which save this is, the
                                            plan's digest, the spec of the elements
    00000000-00000-000000-<save>.arrow      a chunk file: order, stream, number in the stream
    DONE                                    written last: the chunk files, in order, each with its
                                            elements, bytes and form
    ERROR                                   instead of DONE: what went wrong

Rule 1. Each save has an id of its own, in the names of its chunk files and in all records. What
        belongs to another save, and any other file, is ignored.
Rule 2. Once there is DONE, its chunk files are the dataset, whatever else lies there.
Rule 3. The order of chunk files is decided when they are published, and is that of the dataset from
        then on. It has no gaps: a file is read once those before it are there.
Rule 4. Records are JSON. Nothing here knows elements: specs and forms are plain values.
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
    "Begun",
    "ChunkRecord",
    "decode_begun",
    "decode_done",
    "decode_error",
    "encode_begun",
    "encode_done",
    "encode_error",
    "ordered",
    "parse_public_name",
    "save_of",
]

METADATA = "dataset.json"
DONE = "DONE"
ERROR = "ERROR"

_FORMAT = "headrace saved dataset"
_VERSION = 1
_CHUNK_NAME = re.compile(r"(?:(\d{8,})-)?(\d{5,})-(\d{6,})-([0-9a-f]{16})\.arrow")


class Begun(NamedTuple):
    """What is written before any element.

    Attributes:
        save: Id of this save: 16 hexadecimal digits.
        plan: Digest of the plan whose elements these are (`plan.identity_digest`).
        spec: Spec of the elements as plain values (`element.spec.describe_spec`); None where there
            is none, because there are no elements.
    """

    save: str
    plan: str
    spec: Any


class ChunkRecord(NamedTuple):
    """One chunk file.

    Attributes:
        stream: Number of its stream.
        number: Its number in the stream, from 0 on.
        elements: How many elements it holds, at least one; 0 where only its name was seen.
        bytes: How large the file is; 0 likewise.
        form: How its elements are columns (`form.Form.describe`), as JSON; "" likewise.
        order: Which of all chunk files it is; -1 before that was decided.
    """

    stream: int
    number: int
    elements: int = 0
    bytes: int = 0
    form: str = ""
    order: int = -1

    def name(self, save: str) -> str:
        """Return the name under which the file is written."""
        return f"{self.stream:05}-{self.number:06}-{save}.arrow"

    def public_name(self, save: str) -> str:
        """Return the name under which the file is published."""
        if self.order < 0:
            raise ValueError(f"the order of chunk file {self[:2]} was not decided yet")
        return f"{self.order:08}-{self.name(save)}"


def ordered(chunks: Iterable[ChunkRecord], first: int = 0) -> list[ChunkRecord]:
    """Return chunk files as those of order `first` and so on."""
    return [chunk._replace(order=first + place) for place, chunk in enumerate(chunks)]


def parse_public_name(name: str, save: str) -> ChunkRecord | None:
    """Return what the name of a file says; None: it is no published chunk file of this save."""
    match = _CHUNK_NAME.fullmatch(name)
    if match is None or match.group(1) is None or match.group(4) != save:
        return None
    order, stream, number = map(int, match.groups()[:3])
    return ChunkRecord(stream, number, order=order)


def save_of(name: str) -> str | None:
    """Return the id of the save to which a file belongs by its name; None: to no save."""
    match = _CHUNK_NAME.fullmatch(name)
    return None if match is None else match.group(4)


def encode_begun(begun: Begun) -> bytes:
    """Return the content of `dataset.json`."""
    return _encode({"format": _FORMAT, "version": _VERSION, **begun._asdict()})


def decode_begun(data: bytes, path: str) -> Begun:
    """Return what `encode_begun` wrote.

    Raises:
        DataLossError: It is damaged, or of something else.
        FailedPreconditionError: It is of a later version.
    """
    value = _decode(data, path)
    if value.get("format") != _FORMAT:
        raise DataLossError(f"{path!r} is not the record of a saved dataset")
    if value.get("version") != _VERSION:
        raise FailedPreconditionError(
            f"{path!r} is of a dataset that was saved in version {value.get('version')!r} of the "
            f"format, and this version of headrace reads {_VERSION}; update headrace"
        )
    return Begun(_text(value, "save", path), _text(value, "plan", path), value.get("spec"))


def encode_done(save: str, chunks: Sequence[ChunkRecord]) -> bytes:
    """Return the content of `DONE`.

    Args:
        save: Id of the save.
        chunks: The chunk files, in order.

    Raises:
        ValueError: The numbers of a stream are not 0, 1, 2 ..., each once.
    """
    _check_numbers(chunks)
    forms = list(dict.fromkeys(chunk.form for chunk in chunks))
    places = {form: place for place, form in enumerate(forms)}
    return _encode(
        {
            "save": save,
            "elements": sum(chunk.elements for chunk in chunks),
            "forms": [json.loads(form) for form in forms],
            "chunks": [
                [chunk.stream, chunk.number, chunk.elements, chunk.bytes, places[chunk.form]]
                for chunk in chunks
            ],
        }
    )


def decode_done(data: bytes, path: str) -> tuple[str, tuple[ChunkRecord, ...]]:
    """Return whose `DONE` this is, and the chunk files in order.

    Raises:
        DataLossError: It is damaged.
    """
    value = _decode(data, path)
    try:
        forms = [json.dumps(form) for form in value["forms"]]
        chunks = tuple(
            ChunkRecord(_number(a), _number(b), _number(c), _number(d), forms[_number(e)], order)
            for order, (a, b, c, d, e) in enumerate(value["chunks"])
        )
        _check_numbers(chunks)
        if sum(chunk.elements for chunk in chunks) != value["elements"]:
            raise ValueError("the chunk files do not hold as many elements as it says")
    except (LookupError, TypeError, ValueError) as error:
        raise DataLossError(f"{path!r} is damaged: {error}; save the dataset again") from error
    return _text(value, "save", path), chunks


def encode_error(save: str, error: str) -> bytes:
    """Return the content of `ERROR`."""
    return _encode({"save": save, "error": error})


def decode_error(data: bytes, path: str) -> tuple[str, str]:
    """Return whose `ERROR` this is, and what went wrong."""
    value = _decode(data, path)
    return _text(value, "save", path), _text(value, "error", path)


def _check_numbers(chunks: Iterable[ChunkRecord]) -> None:
    counted: dict[int, int] = {}
    for order, chunk in enumerate(chunks):
        if chunk.order != order:
            raise ValueError(f"the chunk file of order {order} is missing")
        if chunk.number != counted.get(chunk.stream, 0):
            raise ValueError(
                f"chunk file {chunk.number} of stream {chunk.stream} does not follow the one before"
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
        raise DataLossError(f"{path!r} is damaged: it holds no record; save the dataset again")
    return value


def _text(value: dict[str, Any], key: str, path: str) -> str:
    found = value.get(key)
    if not isinstance(found, str):
        raise DataLossError(f"{path!r} is damaged: it has no {key!r}; save the dataset again")
    return found


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number")
    return value
