"""Shards from the pieces of a checkpoint, whatever the shards were that it was saved from.

    shard = assembled_shard(spec, pieces, arrays_of)
    table = assembled_table(spec, pieces, arrays_of)

`arrays_of(piece)` returns the arrays of a piece; it is called once for each, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataLossError
from headrace.parameter_server.checkpoint_format import Piece, standing
from headrace.parameter_server.dtypes import dtype_named
from headrace.parameter_server.operations import ShardSpec, TableSpec
from headrace.parameter_server.saved import Saved, SavedShard, SavedTable
from headrace.parameter_server.sums import shard_of_ids

__all__ = ["assembled_shard", "assembled_table"]

Arrays = Mapping[str, NDArray[Any]]
ArraysOf = Callable[[Piece], Arrays]


def assembled_shard(
    spec: ShardSpec, pieces: Sequence[Piece], arrays_of: ArraysOf, renamed: Mapping[str, str]
) -> Saved[SavedShard]:
    """Return a shard of a variable.

    Args:
        spec: Which rows of it.
        pieces: Of the variable.
        arrays_of: Returns the arrays of a piece.
        renamed: New names of optimizers.

    Raises:
        DataLossError: Not all of its rows are there.
    """
    found: dict[str, NDArray[Any]] = {}
    firsts: dict[str, float] = {}
    value = found["value"] = np.empty(spec.shape, dtype_named(spec.dtype))
    rows = spec.shape[0] if spec.shape else 1
    filled = 0
    for piece in standing(pieces):
        if _is_elsewhere(spec, rows, piece):
            continue
        arrays = arrays_of(piece)
        there, taken = _places(spec, rows, piece, arrays)
        if piece.row is not None:
            filled += there.stop - there.start
        for name, array in _renamed(arrays, renamed, ("rows",)):
            part = array[taken] if array.ndim else array
            if name not in found:
                first = firsts[name] = _first(piece, name, renamed)
                shape = (*value.shape[:1], *array.shape[1:])
                # Zeros cost no time until they are touched.
                found[name] = (
                    np.full(shape, first, array.dtype) if first else np.zeros(shape, array.dtype)
                )
            if spec.shape:
                found[name][there] = part
            else:
                found[name][...] = part
    if filled < rows:
        raise DataLossError(
            f"of the {rows} rows of {spec.name} that begin at row {spec.row} of {spec.variable}, "
            f"the checkpoint has {filled}"
        )
    return Saved(SavedShard(spec=spec, slot_firsts=firsts), found)


def _is_elsewhere(spec: ShardSpec, rows: int, piece: Piece) -> bool:
    """Whether a piece is known to have no row of the shard, so that it need not be read."""
    if piece.row is None or piece.rows is None:
        return False
    return piece.row + piece.rows <= spec.row or piece.row >= spec.row + rows


def _places(spec: ShardSpec, rows: int, piece: Piece, arrays: Arrays) -> tuple[Any, Any]:
    """Return where in the shard a piece goes, and which part of the piece goes there."""
    if piece.row is None:
        local = arrays["rows"] - spec.row
        mine = (local >= 0) & (local < rows)
        return local[mine], mine
    value = arrays["value"]
    length = len(value) if value.ndim else 1
    start = max(0, piece.row - spec.row)
    stop = max(start, min(rows, piece.row + length - spec.row))
    first = start + spec.row - piece.row
    return slice(start, stop), slice(first, first + stop - start)


def assembled_table(
    spec: TableSpec, pieces: Sequence[Piece], arrays_of: ArraysOf, renamed: Mapping[str, str]
) -> Saved[SavedTable]:
    """Return a shard of a table: the ids that fall to it; see `assembled_shard`."""
    firsts: dict[str, float] = {}
    step = 0
    #: Where the state of an id is: of those that stand there several times the last counts.
    layers: list[dict[str, NDArray[Any]]] = []
    waiting: dict[str, dict[str, NDArray[Any]]] = {}
    for piece in standing(pieces):
        arrays = arrays_of(piece)
        step = max(step, piece.step)
        mine = shard_of_ids(arrays["ids"], spec.shards) == spec.index
        layer: dict[str, NDArray[Any]] = {}
        without = [each for each in arrays if "/" in each and each not in piece.slot_firsts]
        for name, array in _renamed(arrays, renamed, without):
            if name.startswith("waiting_"):
                continue
            if name == "removed":
                layer[name] = np.asarray(array)
                continue
            layer[name] = array[mine]
            if "/" in name:
                firsts[name] = _first(piece, name, renamed)
        layers.append(layer)
        if "waiting_ids" in arrays:
            due = shard_of_ids(arrays["waiting_ids"], spec.shards) == spec.index
            waiting[piece.shard] = {
                name: array[due] for name, array in arrays.items() if name.startswith("waiting_")
            }
    whole = _last_of_each(layers, firsts)
    for name in ("waiting_ids", "waiting_seen", "waiting_touched"):
        parts = [each[name] for each in waiting.values()]
        whole[name] = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return Saved(SavedTable(spec=spec, step=step, slot_firsts=firsts), whole)


def _last_of_each(
    layers: Sequence[Mapping[str, NDArray[Any]]], firsts: Mapping[str, float]
) -> dict[str, NDArray[Any]]:
    """Return the rows of all layers, of each id the last, without those that were removed."""
    kept: list[NDArray[np.bool_]] = [np.ones(len(layer["ids"]), bool) for layer in layers]
    later = np.zeros(0, np.int64)
    for number in range(len(layers) - 1, -1, -1):
        ids = layers[number]["ids"]
        if len(later):
            kept[number] &= ~np.isin(ids, later)
        gone = [later, ids, *([layers[number]["removed"]] if "removed" in layers[number] else [])]
        later = np.unique(np.concatenate(gone)) if number else later
    examples = {
        name: array for layer in layers for name, array in layer.items() if name != "removed"
    }
    return {
        name: np.concatenate(
            [
                layer[name][keep]
                if name in layer
                else np.full((int(keep.sum()), *like.shape[1:]), firsts[name], like.dtype)
                for layer, keep in zip(layers, kept, strict=True)
            ]
        )
        for name, like in examples.items()
    }


def _renamed(
    arrays: Arrays, renamed: Mapping[str, str], without: Sequence[str]
) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in arrays.items():
        if name not in without:
            optimizer, slash, slot = name.rpartition("/")
            yield f"{renamed.get(optimizer, optimizer)}{slash}{slot}", array


def _first(piece: Piece, name: str, renamed: Mapping[str, str]) -> float:
    for old, first in piece.slot_firsts.items():
        optimizer, slash, slot = old.rpartition("/")
        if f"{renamed.get(optimizer, optimizer)}{slash}{slot}" == name:
            return first
    return 0.0
