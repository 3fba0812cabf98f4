"""Plans in which the steps before `in_processes` are visible, for rewrites that shard a plan.

`in_processes` replaces the steps before it by a source. Worker processes of this process alone run
them, so whoever shards the plan shards these steps, too:

    Map(f, FromSource(pool: rows))
    -> Map(f, ProcessPool(rows))                    open_pools
    -> Map(f, ProcessPool(ShardElements(rows)))     a rewrite that shards
    -> Map(f, FromSource(pool: ShardElements(rows)))    close_pools
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from headrace.plan.elements import FromSource
from headrace.plan.node import Node
from headrace.plan.source import Source
from headrace.plan.traverse import transform

__all__ = ["ProcessPool", "inline_pools", "shard_in_pools"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ProcessPool(Node):
    """The same elements; the steps below it run in worker processes of this process.

    Exists only while a plan is rewritten.
    """

    kind: ClassVar[str] = "in_processes"
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True

    input: Node
    source: Source


def shard_in_pools(plan: Node, shard: Callable[[Node], Node]) -> Node:
    """Return `shard(plan)`, where steps before `in_processes` are below `ProcessPool` steps."""
    return _close_pools(shard(_open_pools(plan)))


def inline_pools(plan: Node) -> Node:
    """Return the plan without `in_processes`: with the steps before it in place of its sources."""

    def inline(node: Node) -> Node:
        return _pool_plan(node) or node

    return transform(plan, inline)


def _open_pools(plan: Node) -> Node:
    def open_pool(node: Node) -> Node:
        pool_plan = _pool_plan(node)
        if pool_plan is None:
            return node
        assert isinstance(node, FromSource)
        return ProcessPool(input=pool_plan, source=node.source, location=node.location)

    return transform(plan, open_pool)


def _close_pools(plan: Node) -> Node:
    def close_pool(node: Node) -> Node:
        if not isinstance(node, ProcessPool):
            return node
        source = node.source
        if node.input is not source.remote_plan:
            source = source.with_pool_plan(node.input)
        return FromSource(source=source, location=node.location)

    return transform(plan, close_pool)


def _pool_plan(node: Node) -> Node | None:
    """Return the plan that worker processes of this process run for a node, if they do."""
    if isinstance(node, FromSource) and node.source.is_process_pool:
        return node.source.remote_plan
    return None
