"""One worker's part of a plan: by files, by elements, or where the user put a hint.

Each rule puts `Shard` steps into a plan as written, which work on as many workers with the same
seed: shard i of n on worker i. Together they have every element once.

    by files      Interleave(open, Shuffle(names))  ->  Interleave(open, Shuffle(Shard(names)))
    by elements   Batch(Map(f, rows))               ->  Shard(Batch(Map(f, rows)))
    by hint       Shard(rows, SHARD_HINT)           ->  Shard(rows, n, i)

The normal form then moves each `Shard` down to the numbers that it chooses among, so that a worker
touches nothing of the others' parts where that can be helped. What `cache` keeps above one is that
part alone: who reads several parts in one process has a cache of each.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import InvalidArgumentError, NotFoundError
from headrace.plan.buffering import Cache
from headrace.plan.combining import Interleave
from headrace.plan.elements import Gather, Read
from headrace.plan.node import Node
from headrace.plan.options import WithOptions
from headrace.plan.ordering import SHARD_HINT, Repeat, Shard, Shuffle
from headrace.plan.traverse import cardinality, fold, walk
from headrace.rewrites.normal import NO_OPTIONS, Normal, normalize
from headrace.sources.files import FileNamesSource

__all__ = ["has_hint", "reads_files", "shard_elements", "shard_files", "shard_hints"]

OpensFiles = Callable[[Interleave], bool]
"""Says whether the datasets that a step opens read files (`reads_files`)."""


def shard_files(plan: Node, num_shards: int, index: int, opens_files: OpensFiles) -> Node:
    """Return the plan over every `num_shards`-th of its files, from file `index` on.

    A shuffle or a repeat of the files applies to the worker's own.

    Args:
        plan: As written.
        num_shards: How many workers there are.
        index: Which of them this is.
        opens_files: Asked about steps whose input may be names of files.

    Raises:
        NotFoundError: Something in the plan is not read from files.
        InvalidArgumentError: There are fewer files than workers.
    """
    normal = normalize(plan)
    marked = _FileLists(opens_files).visit_all(normal.plan)

    def sharded(node: Node, inputs: list[Node]) -> Node:
        node_over = _over(node, inputs, num_shards, index)
        if id(node) not in marked:
            return node_over
        return _checked_shard(node_over, num_shards, index, "file")

    return _with_options(fold(normal.plan, sharded), normal)


def shard_elements(plan: Node, num_shards: int, index: int) -> Node:
    """Return every `num_shards`-th element of a plan as written, from element `index` on."""
    return Shard(input=plan, num_shards=num_shards, index=index)


def shard_hints(plan: Node, num_shards: int, index: int) -> Node:
    """Return a plan as written with each `shard(SHARD_HINT, ...)` filled in.

    Raises:
        InvalidArgumentError: There is less to shard than there are workers.
    """

    def filled(node: Node, inputs: list[Node]) -> Node:
        if isinstance(node, Shard) and node.num_shards == SHARD_HINT:
            return _checked_shard(inputs[0], num_shards, index, "element")
        return _over(node, inputs, num_shards, index)

    return fold(plan, filled, once=True)


def has_hint(plan: Node) -> bool:
    """Say whether a plan has a `shard(SHARD_HINT, ...)` that was not filled in."""
    return any(isinstance(node, Shard) and node.num_shards == SHARD_HINT for node in walk(plan))


def reads_files(plan: Node) -> bool:
    """Say whether a plan as written reads a source whose indices are files."""
    return any(_holds_files(node) for node in walk(normalize(plan).plan))


def _over(node: Node, inputs: list[Node], num_shards: int, index: int) -> Node:
    """Return a step over inputs that are one worker's."""
    made = node.over(inputs)
    if isinstance(made, Cache) and made is not node:
        # A share has elements of its own, so what keeps them has, too.
        share = f".share-{index}-of-{num_shards}" if made.filename else ""
        return made.with_parameters(key=made.key.part(num_shards, index), share=share)
    return made


def _checked_shard(input_: Node, num_shards: int, index: int, what: str) -> Shard:
    size = cardinality(input_)
    if 0 <= size < num_shards:
        raise InvalidArgumentError(
            f"the dataset has {size} {what}{'' if size == 1 else 's'} to shard, which is not "
            f"enough for the required {num_shards} shards/workers. Write more, smaller files, run "
            "fewer workers, or shard by elements (ShardingPolicy.DATA)"
        )
    return Shard(input=input_, num_shards=num_shards, index=index)


def _with_options(plan: Node, normal: Normal) -> Node:
    if normal.options is NO_OPTIONS:
        return plan
    return WithOptions(input=plan, options=normal.options)


def _holds_files(node: Node) -> bool:
    if isinstance(node, Read):
        return node.source.index_holds == "file"
    return isinstance(node, Gather) and isinstance(node.source, FileNamesSource)


class _FileLists:
    """Finds where the lists of files end that a plan reads, in its normal form.

    Args:
        opens_files: As for `shard_files`.
    """

    def __init__(self, opens_files: OpensFiles) -> None:
        self._opens_files = opens_files

    def visit_all(self, plan: Node) -> set[int]:
        """Return the `id` of each node over which a shard belongs.

        Raises:
            NotFoundError: A branch of the plan is not read from files.
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
                    f"Found an unshardable source dataset: {node.describe()} is not read from "
                    "files. ShardingPolicy.FILE shards TFRecordDataset, TextLineDataset and the "
                    "like, and datasets that `interleave` or `flat_map` opens by name; use "
                    "FILE_OR_DATA, DATA or DYNAMIC"
                )
        return marked

    def _files_of(self, node: Node) -> Node | None:
        """Return the list of files that a step reads, below what shuffles and repeats it."""
        if _holds_files(node) or (isinstance(node, Interleave) and self._opens_files(node)):
            names = node.inputs[0]
            while names.one_to_one or isinstance(names, Shuffle | Repeat):
                names = names.inputs[0]
            return names
        return None
