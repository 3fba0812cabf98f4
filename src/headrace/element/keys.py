"""Keys of elements: short bytes that are equal for equal elements, to find repeated ones.

Elements are equal if their structures, dtypes, shapes and bits are. So NaNs with equal bits are
equal, 0.0 and -0.0 differ, and so do 1 and 1.0, or b"a" and "a".
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from headrace.element.chunk import Chunk
from headrace.element.structure import Structure, flatten

__all__ = ["ElementKeys"]

_MAX_PLAIN = 15
"""Longest data that is its own key, so that no data equals the 16-byte digest of other data."""


class ElementKeys:
    """Computes keys of at most 16 bytes; only keys of one instance can be compared.

    The data of an element are a number for its structure and dtypes, the lengths of all axes and
    strings, and the values. Data of more than 15 bytes are replaced by a digest of 16 bytes. Equal
    digests of different data are as unlikely as equal random 128-bit numbers.
    """

    def __init__(self) -> None:
        #: Number of each structure with dtypes; without shapes, as each element may have another.
        self._forms: dict[Hashable, bytes] = {}
        self._text_forms: dict[type, bytes] = {}

    def of_chunk(self, chunk: Chunk, start: int = 0) -> list[bytes]:
        """Return the keys of the elements of a chunk from index `start` on."""
        if chunk.is_columnar and start < chunk.size:
            leaves, structure = flatten(chunk.slice(start, chunk.size).columns())
            if leaves and not any(leaf.dtype.hasobject for leaf in leaves):
                return self._of_columns(leaves, structure)
        return list(map(self.of_element, chunk.rows()[start:]))

    def _of_columns(self, leaves: Sequence[Any], structure: Structure) -> list[bytes]:
        size = len(leaves[0])
        head = self._form(structure, [(leaf.dtype, leaf.ndim - 1) for leaf in leaves])
        head += b"".join([_lengths(leaf.shape[1:]) for leaf in leaves])
        parts = [
            np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).reshape(size, leaf.nbytes // size)
            for leaf in leaves
        ]
        data = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).tobytes()
        width = len(data) // size
        if not width:
            return [_shorten(head)] * size
        rows = np.frombuffer(data, np.dtype((np.void, width))).tolist()
        if len(head) + width <= _MAX_PLAIN:
            return [head + row for row in rows]
        return [blake2b(head + row, digest_size=16).digest() for row in rows]

    def of_element(self, element: Any) -> bytes:
        """Return the key of an element."""
        kind = type(element)
        if kind is str or kind is bytes:
            text = _encode_text(element) if kind is str else element
            head = self._text_forms.get(kind) or self._text_form(kind)
            return _shorten(head + len(text).to_bytes(8, "little") + text)
        leaves, structure = flatten(element)
        forms: list[Hashable] = []
        lengths: list[bytes] = []
        values: list[bytes] = []
        for leaf in leaves:
            if isinstance(leaf, bytes | str):
                forms.append(type(leaf))
                data = leaf if isinstance(leaf, bytes) else _encode_text(leaf)
                lengths.append(_lengths((len(data),)))
                values.append(data)
            elif leaf.dtype.hasobject:
                items = leaf.ravel().tolist()
                is_text = bool(items) and isinstance(items[0], str)
                items = list(map(_encode_text, items)) if is_text else items
                forms.append((is_text, leaf.ndim))
                lengths.append(_lengths((*leaf.shape, *map(len, items))))
                values.extend(items)
            else:
                forms.append((leaf.dtype, leaf.ndim))
                lengths.append(_lengths(leaf.shape))
                values.append(leaf.tobytes())
        return _shorten(b"".join((self._form(structure, forms), *lengths, *values)))

    def _text_form(self, kind: type) -> bytes:
        """Return the form of a bare str or bytes."""
        form = self._text_forms[kind] = self._form(flatten("")[1], [kind])
        return form

    def _form(self, structure: Structure, forms: Sequence[Hashable]) -> bytes:
        form = (structure, *forms)
        number = self._forms.get(form)
        if number is None:
            number = self._forms[form] = len(self._forms).to_bytes(4, "little")
        return number


def _lengths(lengths: tuple[int, ...]) -> bytes:
    return b"".join([length.to_bytes(8, "little") for length in lengths])


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _shorten(data: bytes) -> bytes:
    return data if len(data) <= _MAX_PLAIN else blake2b(data, digest_size=16).digest()
