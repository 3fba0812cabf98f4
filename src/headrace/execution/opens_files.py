"""Whether a step opens files: only a call of its function tells."""

from __future__ import annotations

from typing import Any

from headrace.execution.build import start
from headrace.plan.combining import Interleave
from headrace.plan.node import Node
from headrace.plan.traverse import walk
from headrace.plan.user_function import UserFunction, step_name
from headrace.rewrites.shard import reads_files

__all__ = ["opens_files"]


def opens_files(node: Interleave) -> bool:
    """Say whether the dataset that a step opens for its first element reads files.

    The function is called once, as are those below it. For `rewrites.shard`.
    """
    found = _first(node.input)
    if found is None:
        return False
    function = UserFunction(node.fn, step_name(node), contain_exits=True)
    try:
        dataset = function(found[0])
    except BaseException as error:
        raise function.blame(error, 0, found[0]) from error
    plan = getattr(dataset, "plan", None)
    if not isinstance(plan, Node):
        return False  # an error of its own when it is read
    return reads_files(plan) or any(
        isinstance(step, Interleave) and opens_files(step) for step in walk(plan)
    )


def _first(plan: Node) -> list[Any] | None:
    iterator = start(plan, seed=0)
    try:
        chunk = iterator.next_chunk(1)
        return None if chunk is None else chunk.rows()
    finally:
        iterator.close()
