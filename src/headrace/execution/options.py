"""Options have no iterator of their own: they change the context of what is below them."""

from __future__ import annotations

from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, make_iterator
from headrace.plan.options import WithOptions

__all__: list[str] = []


@make_iterator.register(WithOptions)
def _make_with_options(node: WithOptions, context: Context) -> ElementIterator:
    return make_iterator(node.input, context.with_options(node.options).below(0))
