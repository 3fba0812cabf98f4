"""Optimizers of a checkpoint: slots are saved with variables, and counts of steps with the slots.

An optimizer need not be in the `Checkpoint`: its slots are restored with the variables, so its
count is as well. What differs is the name: only one that is in the `Checkpoint` may have another
name than when it was saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.errors import InvalidArgumentError
from headrace.parameter_server.checkpoint_folder import Read
from headrace.parameter_server.checkpoint_format import Entry, OptimizerEntry, Piece
from headrace.parameter_server.checkpoint_tree import Leaf
from headrace.parameter_server.counter import counters_of, steps_of
from headrace.parameter_server.current import Cluster
from headrace.parameter_server.optimizer import Optimizer

__all__ = ["check_renames", "renamed_counters", "renames", "restored_counters"]


def renames(found: Iterable[Leaf], entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the names of optimizers here, by those that they had when they were saved."""
    return {
        entry.name: leaf.value.name
        for leaf in found
        if isinstance(leaf.value, Optimizer)
        and isinstance(entry := entries.get(leaf.path), OptimizerEntry)
    }


def check_renames(
    read: Read, pieces: Iterable[Piece], renamed: Mapping[str, str], restored: Mapping[str, str]
) -> None:
    """Check that the slots of two optimizers are not restored under one name.

    Args:
        read: The checkpoint.
        pieces: Those that are restored now.
        renamed: Names of optimizers here, by their names in the checkpoint.
        restored: The same, for slots that were restored from this checkpoint before.

    Raises:
        InvalidArgumentError: They would be, or an optimizer came after its slots.
    """
    saved = _with_slots(pieces)
    for old, new in renamed.items():
        if new != old and new in saved - renamed.keys():
            raise InvalidArgumentError(
                f"the checkpoint {read.path!r} has slots of an optimizer {new!r} that is not in "
                f"this Checkpoint, and the optimizer that was saved as {old!r} has that name here: "
                f"add the other optimizer to the Checkpoint, or give this one name={old!r}"
            )
        if restored.get(old, new) != new:
            raise InvalidArgumentError(
                f"the optimizer {new!r} was saved as {old!r} in the checkpoint {read.path!r}, and "
                f"its slots were restored with the variables before: set it in the Checkpoint "
                f"before the variables, or give it name={old!r}"
            )


def restored_counters(
    cluster: Cluster,
    read: Read,
    due: Iterable[Leaf],
    pieces: Iterable[Piece],
    renamed: Mapping[str, str],
    restored: dict[str, str],
) -> dict[str, int]:
    """Return what the servers must count on from; optimizers ask them from now on.

    Args:
        cluster: Of the servers.
        read: The checkpoint.
        due: Objects that are restored now.
        pieces: Those that are restored now.
        renamed: Names of optimizers here, by their names in the checkpoint.
        restored: Optimizers whose count was restored from this checkpoint before, likewise; those
            of now are added.
    """
    saved = steps_of(read.manifest.counters)
    counts = {}
    for old in sorted(_with_slots(pieces) - restored.keys()):
        if old in saved:
            counts[renamed.get(old, old)] = saved[old]
        restored[old] = renamed.get(old, old)
    for leaf in due:
        entry = read.manifest.entries[leaf.path]
        if isinstance(leaf.value, Optimizer) and isinstance(entry, OptimizerEntry):
            counts[leaf.value.name_in(cluster)] = entry.iterations
    for name in counts:
        cluster.optimizers.restored(name)
    return counters_of(counts)


def renamed_counters(counters: Mapping[str, int], renamed: Mapping[str, str]) -> dict[str, int]:
    """Return the counters of a checkpoint under the names that optimizers have here."""
    counts = steps_of(counters)
    kept = {name: count for name, count in counts.items() if name not in renamed}
    moved = {renamed[name]: count for name, count in counts.items() if name in renamed}
    return counters_of(kept | moved)


def _with_slots(pieces: Iterable[Piece]) -> set[str]:
    """Return the names of optimizers that have slots."""
    return {slot.rpartition("/")[0] for piece in pieces for slot in piece.slot_firsts}
