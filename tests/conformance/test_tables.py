"""The tables have an entry for every public source and transformation, and for every plan node."""

from __future__ import annotations

from pathlib import Path

import headrace as hr
from headrace.plan import partition_nodes
from headrace.plan.node import Node
from headrace.plan.ordering import ShardBlocks
from headrace.plan.traverse import walk
from headrace.rewrites.optimize import prepare
from tests.conformance.sources import SOURCES
from tests.conformance.steps import INPUTS, NO_STEPS, STEPS, TESTED_ELSEWHERE, Setting


def names(table: object) -> set[str]:
    """Return the public names in a table; a variant is named after a comma."""
    return {key.partition(",")[0] for key in table}  # type: ignore[attr-defined]


def test_every_public_method_is_a_source_a_step_or_listed_with_a_reason() -> None:
    methods = {name for name in dir(hr.Dataset) if not name.startswith("_")}
    functions = {name for name in hr.__all__ if name.endswith("Dataset")} - {"Dataset"}
    assert names(SOURCES) | names(STEPS) | set(NO_STEPS) == methods | functions
    assert not names(SOURCES) & names(STEPS)
    assert not names(SOURCES | STEPS) & set(NO_STEPS)
    assert set(TESTED_ELSEWHERE) <= set(STEPS)


def test_every_plan_node_is_in_a_case(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    found: set[type[Node]] = set()
    for step in STEPS.values():
        for source in INPUTS.values():
            plan = step.apply(source(setting), setting).plan
            found.update(map(type, (*walk(plan), *walk(prepare(plan).plan))))
    nodes = {
        kind
        for kind in all_nodes(Node)
        if kind.__module__.startswith("headrace.plan.")
        and kind.__module__ != partition_nodes.__name__  # of the data service
    }
    assert nodes - found == {Node, ShardBlocks}  # the latter is of static sharding


def all_nodes(kind: type[Node]) -> set[type[Node]]:
    return {kind}.union(*map(all_nodes, kind.__subclasses__()))
