"""Whether all readers of a plan get the same elements in the same order."""

from __future__ import annotations

from headrace.plan.determinism import find_unordered_steps
from headrace.plan.elements import FromSource, ReadIndices
from headrace.plan.node import Node
from headrace.plan.source import Source
from headrace.plan.traverse import merged_options, transform, walk
from headrace.plan.user_function import step_name
from headrace.rewrites.canonicalize import canonicalize

__all__ = ["explain_reader_differences", "find_sources", "with_deterministic_order"]


def find_sources(plan: Node) -> list[Source]:
    """Return the sources of a plan."""
    return [node.source for node in walk(plan) if isinstance(node, FromSource | ReadIndices)]


def with_deterministic_order(plan: Node) -> Node:
    """Return a plan whose steps are all ordered, regardless of the user's option.

    The option only affects speed. Readers that use different parts of the same elements must get
    the same ones.
    """
    deterministic = merged_options(plan).deterministic

    def make_ordered(node: Node) -> Node:
        return (
            node.with_parameters(deterministic=True)
            if node.allows_unordered(deterministic)
            else node
        )

    return transform(plan, make_ordered)


def explain_reader_differences(plan: Node) -> str:
    """Return why two readers get different elements or orders, with a fix; "" if they do not.

    Seeds that are not set are not considered.
    """
    canonical = canonicalize(plan)
    unordered_steps = find_unordered_steps(canonical.plan, canonical.options.deterministic)
    step = next(
        (step_name(node) for node in walk(canonical.plan) if id(node) in unordered_steps), ""
    )
    if step:
        return (
            f"{step} is unordered (deterministic=False), so readers may get different orders; "
            "make it deterministic"
        )
    if all(map(_is_same_for_all_readers, find_sources(plan))):
        return ""
    return (
        "a dataset of the data service delivers each element to only one reader, in arbitrary "
        "order; use `distribute(..., ordered=True)` without `job_name`"
    )


def _is_same_for_all_readers(source: Source) -> bool:
    is_local = source.replay_buffers is None
    is_shared = getattr(source, "job_name", None) is not None
    return is_local or (source.has_order and source.has_ordered_partition and not is_shared)
