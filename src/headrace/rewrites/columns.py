"""Marking of user functions that can be applied to whole columns with the same result.

The proof (`plan/column_proof.py`) is made here for the spec that the plan promises, and again
during execution for the actual columns (`execution/elementwise.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.element.spec import ArraySpec, Spec
from headrace.plan.column_proof import prove
from headrace.plan.elementwise import Filter, Map, TakeWhile
from headrace.plan.node import Node
from headrace.plan.random_map import RandomMap
from headrace.plan.traverse import element_spec

__all__ = ["infer_columnar_spec", "mark_columnar"]


def mark_columnar(node: Node, spec_of: Callable[[Node], Spec | None] = element_spec) -> Node:
    """Mark a step whose function is elementwise.

    Args:
        node: The step.
        spec_of: Returns the spec of an input.
    """
    match node:
        case RandomMap():
            return node  # its function takes a generator, not the word that the input holds
        case Map(output_spec=None):
            result = infer_columnar_spec(node.fn, spec_of(node.input))
            return node if result is None else node.with_parameters(output_spec=result)
        case Filter(columnar=False) | TakeWhile(columnar=False):
            result_spec = infer_columnar_spec(node.predicate, spec_of(node.input))
            if isinstance(result_spec, ArraySpec) and result_spec == ArraySpec((), np.bool_):
                return node.with_parameters(columnar=True)
    return node


def infer_columnar_spec(fn: Callable[..., Any], spec: Spec | None) -> Spec | None:
    """Return the spec of `fn`'s result if `fn` is elementwise on elements of `spec`, else None."""
    proof = prove(fn, spec)
    return None if proof is None else proof.result
