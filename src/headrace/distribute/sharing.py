"""What becomes of specs and batch sizes where rows are shared by replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.distribute.feeds import Step, no_batch
from headrace.element.spec import BYTES, STR, ArraySpec, Spec, leaf_spec
from headrace.element.structure import Structure, flatten, unflatten
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.plan.batching import Batch, PaddedBatch
from headrace.plan.combining import Zip
from headrace.plan.node import Node
from headrace.plan.ordering import Repeat, Shuffle, Skip, Take
from headrace.plan.traverse import element_spec, fold
from headrace.rewrites.read_alike import sources

__all__ = [
    "check_is_batched",
    "check_keeps_order",
    "empty_step",
    "global_batch_size",
    "spec_in_form_of",
    "spec_in_turn",
    "spec_of_pieces",
    "spec_of_step",
]


def check_is_batched(plan: Node) -> None:
    """Raise unless the elements have rows, as far as the plan tells without being run.

    Raises:
        InvalidArgumentError: A leaf is a scalar; the message names it.
    """
    spec = element_spec(plan)
    if spec is None:
        return
    leaves, structure = flatten(spec)
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if not leaf.shape:
            raise InvalidArgumentError(no_batch(path, f"a scalar ({leaf})"))


def check_keeps_order(plan: Node) -> None:
    """Raise unless each reading gives the same batches in the same order after a place.

    Raises:
        FailedPreconditionError: It does not: the batch of which a part was used may come at any
            time, or elsewhere.
    """
    if not all(source.has_order for source in sources(plan)):
        raise FailedPreconditionError(
            "there is no state here: a part of a batch was used, and the rest of it is for the "
            "next step, but the data service gives batches in no order, so that another may be the "
            "next one. Read with `ordered=True`, make batches for one replica in "
            "distribute_datasets_from_function, or ask after a step that used its batches up"
        )


def global_batch_size(plan: Node) -> int | None:
    """Return how many rows the batches of a plan have, but for smaller last ones; None: unknown."""
    found = fold(plan, _size_at, once=True)
    if found is not None:
        return found
    spec = element_spec(plan)
    if spec is None:
        return None
    leaves, _ = flatten(spec)
    rows = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    return rows.pop() if len(rows) == 1 else None


def _size_at(node: Node, inputs: list[int | None]) -> int | None:
    if isinstance(node, Batch | PaddedBatch):
        return node.size
    if isinstance(node, Zip):
        return inputs[0] if len(set(inputs)) == 1 else None
    keeps_rows = node.is_transparent or isinstance(node, Repeat | Shuffle | Skip | Take)
    return inputs[0] if keeps_rows and len(inputs) == 1 else None


def spec_of_pieces(spec: Spec, replicas: int | None) -> Spec:
    """Return the spec of what one of so many replicas gets of each batch; None: lengths vary."""

    def piece(leaf: ArraySpec) -> ArraySpec:
        rows = leaf.shape[0] if leaf.shape else None
        fits = replicas is not None and rows is not None and rows % replicas == 0
        return _with_rows(leaf, rows // replicas if fits and rows and replicas else None)

    return map_leaves(piece, spec)


def spec_in_turn(spec: Spec) -> Spec:
    """Return the spec of elements that a replica gets as they are, or without rows."""
    return map_leaves(lambda leaf: _with_rows(leaf, None), spec)


def spec_of_step(structure: Structure, columns: Sequence[Sequence[Any]]) -> Spec:
    """Return what a replica gets in a step that has rows, and in others with any number of them."""
    return spec_in_turn(unflatten(structure, [leaf_spec(values[0]) for values in columns]))


def spec_in_form_of(own: Spec | None, spec: Spec) -> Spec:
    """Return a spec that came from another process, in this one's classes where they are known.

    Those that no module holds come as others of that name, which have fields and nothing else.
    """
    if own is None:
        return spec
    form, (leaves, theirs) = flatten(own)[1], flatten(spec)
    return unflatten(form, leaves) if form.paths == theirs.paths else spec


def _with_rows(leaf: ArraySpec, rows: int | None) -> ArraySpec:
    return ArraySpec((rows, *leaf.shape[1:]), leaf.dtype, leaf.name) if leaf.shape else leaf


def empty_step(spec: Spec, replicas: int) -> Step:
    """Return a step in which no replica gets a row: axes of unknown length are 0, as is the first.

    A scalar has no rows; it is 0 or empty.
    """
    leaves, structure = flatten(spec)
    return structure, [[_empty(leaf)] * replicas for leaf in leaves]


def _empty(leaf: ArraySpec) -> Any:
    if leaf.dtype in (BYTES, STR):
        nothing: Any = b"" if leaf.dtype == BYTES else ""
        return np.empty(_shape(leaf), object) if leaf.shape else nothing
    made = np.zeros(_shape(leaf), leaf.dtype)
    return made if leaf.shape else made[()]


def _shape(leaf: ArraySpec) -> tuple[int, ...]:
    return (0, *[length or 0 for length in leaf.shape[1:]]) if leaf.shape else ()
