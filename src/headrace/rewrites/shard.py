"""The part of a plan that one worker reads: sharded by files, by elements, or at the user's hint.

Each rule inserts `ShardElements` steps into a plan as written. All workers use the same seed, and
worker i reads shard i of n. Together they read every element once.

    by files      Interleave(open, Shuffle(names))  ->  Interleave(open, Shuffle(Shard(names)))
    by elements   Batch(Map(f, rows))               ->  Shard(Batch(Map(f, rows)))
    by hint       Shard(rows, SHARD_HINT)           ->  Shard(rows, n, i)

The canonical form then moves each `ShardElements` down to the indices it selects from, so that a
worker avoids reading the others' elements where possible. A `cache` above one holds only that
shard: a process that reads several shards has a separate cache for each.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import InvalidArgumentError, NotFoundError
from headrace.plan.buffering import Cache
from headrace.plan.combining import Interleave
from headrace.plan.elements import GatherIndices, ReadIndices
from headrace.plan.node import Node
from headrace.plan.options import WithOptions
from headrace.plan.ordering import SHARD_HINT, Repeat, ShardElements, Shuffle
from headrace.plan.traverse import cardinality, fold, walk
from headrace.rewrites.canonicalize import NO_OPTIONS, CanonicalPlan, canonicalize
from headrace.sources.text_files import FileNamesSource

__all__ = ["has_hint", "reads_files", "shard_elements", "shard_files", "shard_hints"]

OpensFiles = Callable[[Interleave], bool]
"""Returns whether the datasets that a step opens read files (`reads_files`)."""


def shard_files(plan: Node, num_shards: int, index: int, opens_files: OpensFiles) -> Node:
    """Return the plan over every `num_shards`-th of its files, from file `index` on.

    A shuffle or repeat of the files applies to the worker's own files.

    Args:
        plan: The plan as written.
        num_shards: Number of workers.
        index: Index of this worker.
        opens_files: Called for steps whose input may be file names.

    Raises:
        NotFoundError: If a part of the plan is not read from files.
        InvalidArgumentError: If there are fewer files than workers.
    """
    canonical = canonicalize(plan)
    marked = _FileLists(opens_files).visit_all(canonical.plan)

    def shard_node(node: Node, inputs: list[Node]) -> Node:
        node_over = _shard_inputs(node, inputs, num_shards, index)
        if id(node) not in marked:
            return node_over
        return _shard_elements_of(node_over, num_shards, index, "file")

    return _with_options_of(fold(canonical.plan, shard_node), canonical)


def shard_elements(plan: Node, num_shards: int, index: int) -> Node:
    """Return every `num_shards`-th element of a plan as written, from element `index` on."""
    return ShardElements(input=plan, num_shards=num_shards, index=index)


def shard_hints(plan: Node, num_shards: int, index: int) -> Node:
    """Return a plan as written with each `shard(SHARD_HINT, ...)` filled in.

    Raises:
        InvalidArgumentError: If there are fewer elements to shard than workers.
    """

    def fill_hint(node: Node, inputs: list[Node]) -> Node:
        if isinstance(node, ShardElements) and node.num_shards == SHARD_HINT:
            return _shard_elements_of(inputs[0], num_shards, index, "element")
        return _shard_inputs(node, inputs, num_shards, index)

    return fold(plan, fill_hint, once=True)


def has_hint(plan: Node) -> bool:
    """Return whether a plan has a `shard(SHARD_HINT, ...)` that is not filled in."""
    return any(
        isinstance(node, ShardElements) and node.num_shards == SHARD_HINT for node in walk(plan)
    )


def reads_files(plan: Node) -> bool:
    """Return whether a plan as written reads a source whose indices are files."""
    return any(_reads_files(node) for node in walk(canonicalize(plan).plan))


def _shard_inputs(node: Node, inputs: list[Node], num_shards: int, index: int) -> Node:
    """Return a step over the inputs of one shard."""
    result = node.with_inputs(inputs)
    if isinstance(result, Cache) and result is not node:
        # A shard has different elements, so it needs a separate cache.
        suffix = f".shard-{index}-of-{num_shards}" if result.filename else ""
        return result.with_parameters(
            key=result.key.shard_key(num_shards, index), shard_suffix=suffix
        )
    return result


def _shard_elements_of(input_: Node, num_shards: int, index: int, kind: str) -> ShardElements:
    size = cardinality(input_)
    if 0 <= size < num_shards:
        raise InvalidArgumentError(
            f"the dataset has {size} {kind}{'' if size == 1 else 's'} to shard, which is not "
            f"enough for the required {num_shards} shards/workers. Write more, smaller files, run "
            "fewer workers, or shard by elements (ShardingPolicy.DATA)"
        )
    return ShardElements(input=input_, num_shards=num_shards, index=index)


def _with_options_of(plan: Node, canonical: CanonicalPlan) -> Node:
    if canonical.options is NO_OPTIONS:
        return plan
    return WithOptions(input=plan, options=canonical.options)


def _reads_files(node: Node) -> bool:
    if not isinstance(node, ReadIndices | GatherIndices):
        return False
    return node.source.index_kind == "file" or isinstance(node.source, FileNamesSource)


class _FileLists:
    """Finds the file lists in the canonical form of a plan.

    Args:
        opens_files: As for `shard_files`.
    """

    def __init__(self, opens_files: OpensFiles) -> None:
        self._opens_files = opens_files

    def visit_all(self, plan: Node) -> set[int]:
        """Return the `id` of each node that must be sharded.

        Raises:
            NotFoundError: If a branch of the plan is not read from files.
        """
        marked: set[int] = set()
        pending = [plan]
        while pending:
            node = pending.pop()
            files = self._files_of(node)
            if files is not None:
                marked.add(id(files))
            elif node.inputs:
                pending += node.inputs
            else:
                raise NotFoundError(
                    f"Found an unshardable source dataset: {node.describe()} does not read "
                    "files. ShardingPolicy.FILE shards TFRecordDataset, TextLineDataset and "
                    "similar datasets, and datasets that `interleave` or `flat_map` opens by "
                    "file name; use FILE_OR_DATA, DATA or DYNAMIC"
                )
        return marked

    def _files_of(self, node: Node) -> Node | None:
        """Return the list of files that a step reads, below its shuffles and repeats."""
        if _reads_files(node) or (isinstance(node, Interleave) and self._opens_files(node)):
            names = node.inputs[0]
            while names.one_to_one or isinstance(names, Shuffle | Repeat):
                names = names.inputs[0]
            return names
        return None
