"""Saving and restoring of the objects of a checkpoint, on servers and in this process.

1. Every server writes its shards; this process writes its own arrays.
2. The manifest is written; from then on the checkpoint exists.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.distribute.current_strategy import get_strategy
from headrace.distribute.variable import Variable
from headrace.errors import (
    DataLossError,
    HeadraceError,
    InvalidArgumentError,
    NotFoundError,
    describe_error,
)
from headrace.parameter_server.checkpoint_format import (
    Answers,
    ArrayEntry,
    Entry,
    LoadedCheckpoint,
    Manifest,
    OptimizerEntry,
    ShardPiece,
    StateDictEntry,
    StateEntry,
    TableEntry,
    TensorFile,
    ValueEntry,
    VariableEntry,
    compute_checksum,
    encode,
    write_tensors,
)
from headrace.parameter_server.checkpoint_requests import request_files
from headrace.parameter_server.checkpoint_tree import (
    Leaf,
    as_local_array,
    assign,
    decode_state,
    describe,
    describe_holders,
    describe_state_dict,
    encode_state,
    has_state,
    is_array,
    is_restored_in_place,
    is_state_dict,
    is_variable,
    list_leaves,
    state_mismatch,
    to_array,
    to_array_like,
    write_mismatch,
)
from headrace.parameter_server.cluster_registry import ServerCluster
from headrace.parameter_server.messages import RestorePhase, RestoreShards, SaveShards, ShardsSaved
from headrace.parameter_server.optimizer import (
    COUNTING_SERVER,
    Optimizer,
    counter_values,
    step_counts,
)
from headrace.parameter_server.shard_files import assemble_shard
from headrace.parameter_server.specs import ShardSpec, TableSpec
from headrace.parameter_server.table import EmbeddingTable
from headrace.parameter_server.variable import ServerVariable
from headrace.storage.files import Folder

__all__ = [
    "LeafRestore",
    "SaveResult",
    "SavedUpTo",
    "answers_for_server",
    "apply_restores",
    "find_optimizer_renames",
    "find_server_objects",
    "is_checkpoint_writer",
    "prepare_restore",
    "rename_counters",
    "restore_objects",
    "restore_on_servers",
    "save_objects",
]


class SavedUpTo(NamedTuple):
    """State that was saved of a server: state id, mark, and number of writes."""

    state_id: str
    mark: int
    writes: int


class SaveResult(NamedTuple):
    """Result of a save: what was saved of each server, and the bytes that the servers wrote."""

    marks: dict[int, SavedUpTo]
    bytes: int


def save_objects(
    objects: dict[str, Any],
    folder: Folder,
    name: str,
    *,
    marks: Mapping[int, SavedUpTo] | None = None,
    continues: tuple[str, ...] = (),
    forget_earlier_marks: bool = False,
) -> SaveResult:
    """Save objects, completely or the changes since marks; the manifest is written last.

    Nothing is written if `is_checkpoint_writer` is false.
    """
    leaves = list_leaves(objects)
    stem = f"{name}.{secrets.token_hex(4)}"
    cluster, on_servers = find_server_objects(leaves.values())
    # Before the servers save, so that data read and written during the save may be duplicated but
    # not lost.
    states = {path: describe(leaf, {}) for path, leaf in leaves.items() if has_state(leaf)}
    arrays: dict[str, NDArray[Any]] = {}
    for path, leaf in leaves.items():
        if is_state_dict(leaf):
            states[path], inside = describe_state_dict(leaf)
            arrays |= inside
    answers: dict[int, ShardsSaved] = {}
    if cluster is not None:

        def build_request(server: int, state_id: str) -> SaveShards:
            since = (marks or {}).get(server)
            return SaveShards(
                url=folder.url,
                file_prefix=f"{stem}.{server}",
                shards=_shard_names_on(server, on_servers, ServerVariable),
                tables=_shard_names_on(server, on_servers, EmbeddingTable),
                since=since.mark if since and since.state_id == state_id else None,
                forget_earlier_marks=forget_earlier_marks,
                state_id=state_id,
            )

        answers = request_files(cluster.servers, range(len(cluster.servers)), build_request)
    counters: dict[str, int] = {}
    recorded_answers: Answers = {}
    for answer in answers.values():
        counters |= answer.counters
        recorded_answers |= answer.answers
    entries = {
        path: states[path] if path in states else describe(leaf, counters)
        for path, leaf in leaves.items()
    }
    local_arrays = {
        path: array
        for path, leaf in leaves.items()
        if (array := as_local_array(leaf.value)) is not None
    }
    for path, array in local_arrays.items():
        entry = entries[path]
        assert isinstance(entry, ArrayEntry)
        entries[path] = msgspec.structs.replace(entry, checksum=compute_checksum({path: array}))
    arrays |= local_arrays
    if not is_checkpoint_writer(leaves.values()):
        return SaveResult({}, 0)
    local = f"{stem}.local.safetensors" if arrays else ""
    if arrays:
        write_tensors(folder, local, arrays)
    manifest = Manifest(
        entries=entries,
        pieces=tuple(piece for answer in answers.values() for piece in answer.pieces),
        local=local,
        continues=continues,
        counters=counters,
        coordinator_term=max((answer.coordinator_term for answer in answers.values()), default=0),
        answers=recorded_answers,
        holders=describe_holders(objects),
    )
    _check_files(folder, manifest, answers)
    folder.write(f"{name}.json", encode(manifest))
    return SaveResult(
        {
            server: SavedUpTo(answer.state_id, answer.mark, answer.writes)
            for server, answer in answers.items()
        },
        sum(answer.bytes for answer in answers.values()),
    )


def is_checkpoint_writer(found: Iterable[Leaf]) -> bool:
    """Return whether this process writes a checkpoint: of several workers, only the first does.

    The others only read their variables, a collective operation for variables with a copy on each
    replica.
    """
    strategies = [
        get_strategy(),
        # Variables on parameter servers have no strategy.
        *(getattr(leaf.value, "strategy", None) for leaf in found),
    ]
    return all(getattr(each, "first_replica", 0) == 0 for each in strategies)


def _shard_names_on(server: int, found: Iterable[Leaf], kind: Any) -> tuple[str, ...]:
    """Return the distinct names of the shards on a server."""
    return tuple(
        dict.fromkeys(
            part.spec.name
            for leaf in found
            if isinstance(leaf.value, kind)
            for part in leaf.value.placed
            if part.server == server
        )
    )


def _check_files(folder: Folder, manifest: Manifest, answers: Mapping[int, ShardsSaved]) -> None:
    """Reject files that servers wrote elsewhere, for example to their own disks.

    Raises:
        InvalidArgumentError: If a file is missing.
    """
    published = set(folder.list_published())
    for server, answer in answers.items():
        for piece in answer.pieces:
            if piece.file not in published:
                raise InvalidArgumentError(
                    f"parameter server {server} wrote {piece.file!r}, but this program does not "
                    f"find it in {folder.url!r}; save to a path or URL that the servers and this "
                    "program share"
                )


def find_server_objects(found: Iterable[Leaf]) -> tuple[ServerCluster | None, list[Leaf]]:
    """Return the variables and tables on parameter servers, and their cluster.

    Optimizers are named in that cluster.
    """
    found = list(found)
    on_servers = [leaf for leaf in found if isinstance(leaf.value, ServerVariable | EmbeddingTable)]
    clusters = {id(leaf.value.cluster): leaf.value.cluster for leaf in on_servers}
    if len(clusters) > 1:
        raise ValueError(
            f"all objects of a Checkpoint must be in one cluster, but are in "
            f"{len(clusters)} clusters"
        )
    cluster = next(iter(clusters.values()), None)
    if cluster is not None:
        for leaf in found:
            if isinstance(leaf.value, Optimizer):
                leaf.value.name_in(cluster)
    return cluster, on_servers


# --- restoring -----------------------------------------------------------------------------------


def restore_objects(
    loaded: LoadedCheckpoint, found: Mapping[str, Leaf], paths: list[Leaf], restored: dict[str, str]
) -> None:
    """Restore some of the objects.

    Args:
        loaded: The checkpoint.
        found: All objects of the `Checkpoint`.
        paths: Objects to restore now.
        restored: Current names of optimizers whose slots were already restored, by their saved
            names.
    """
    entries = loaded.manifest.entries
    # All values of this process are read and checked before anything is changed.
    local = TensorFile(loaded.folder, loaded.manifest.local) if loaded.manifest.local else None
    changes = [
        change
        for leaf in paths
        if (change := prepare_restore(leaf, entries[leaf.path], loaded, local)) is not None
    ]
    cluster, on_servers = find_server_objects(found.values())
    due_paths = {leaf.path for leaf in paths}
    if cluster is None:
        with apply_restores(changes):
            return
    # Copied back only after success.
    all_restored = dict(restored)
    placed = [
        (leaf, entry)
        for leaf in on_servers
        if leaf.path in due_paths
        and isinstance(entry := entries[leaf.path], VariableEntry | TableEntry)
    ]
    names = {(_piece_kind(entry), entry.name) for _, entry in placed}
    pieces = [piece for piece in loaded.pieces if (piece.kind, piece.owner) in names]
    renamed = find_optimizer_renames(found.values(), entries)
    _check_renames(loaded, pieces, renamed, all_restored)
    counters = _restore_counters(cluster, loaded, paths, pieces, renamed, all_restored)
    restore_on_servers(
        cluster, loaded, placed, renamed, counters, local_restores=apply_restores(changes)
    )
    restored.update(all_restored)


def restore_on_servers(
    cluster: ServerCluster,
    loaded: LoadedCheckpoint,
    placed_shards: Iterable[tuple[Leaf, VariableEntry | TableEntry]],
    optimizer_renames: dict[str, str],
    counters: dict[str, int],
    *,
    only: int | None = None,
    answers: Answers | None = None,
    local_restores: AbstractContextManager[None] | None = None,
) -> None:
    """Make the servers read the contents that they should have.

    Args:
        cluster: Cluster of the servers.
        loaded: The checkpoint.
        placed_shards: Variables and tables, each with its entry in the checkpoint.
        optimizer_renames: New names of optimizers.
        counters: Values for the counters of server 0.
        only: Restore only this server, which is empty, and do not react to another restart of it.
        answers: Answers by write key of executed writes.
        local_restores: Changes objects of this process between the servers' prepare and commit, and
            undoes that if the commit fails.

    Raises:
        DataLossError: If a part is missing or damaged. Nothing was changed on any server.
    """
    token = secrets.token_hex(8)
    shards: dict[int, list[tuple[ShardSpec, str]]] = {}
    tables: dict[int, list[tuple[TableSpec, str]]] = {}
    for leaf, entry in placed_shards:
        # The record of a handle says where its shards are.
        for part in leaf.value.placed:
            by_server: Any = shards if isinstance(entry, VariableEntry) else tables
            by_server.setdefault(part.server, []).append((part.spec, entry.name))
    server_indices = {*shards, *tables, *({COUNTING_SERVER} if counters else ())}
    if only is not None:
        server_indices = {only}  # even if it gets nothing, so that it counts as restored

    def build_request(phase: RestorePhase, server: int, state_id: str) -> RestoreShards:
        own_shards, own_tables = tuple(shards.get(server, ())), tuple(tables.get(server, ()))
        needed = {("shard", name) for _, name in own_shards} | {
            ("table", name) for _, name in own_tables
        }
        return RestoreShards(
            url=loaded.folder.url,
            shards=own_shards,
            tables=own_tables,
            pieces=tuple(piece for piece in loaded.pieces if (piece.kind, piece.owner) in needed),
            optimizer_renames=optimizer_renames,
            counters=counters if server == COUNTING_SERVER else {},
            coordinator_term=loaded.manifest.coordinator_term,
            answers=answers or {},
            state_id=state_id,
            is_recovery=only is not None,
            phase=phase,
            token=token,
        )

    def request_all(phase: RestorePhase) -> None:
        request_files(
            cluster.servers,
            sorted(server_indices),
            functools.partial(build_request, phase),
            handles_restart=only is None,
        )

    if only is None and server_indices:
        try:
            request_all("prepare")
        except (DataLossError, NotFoundError):
            with contextlib.suppress(HeadraceError):
                request_all("discard")  # frees the contents that other servers have read
            raise
    with contextlib.ExitStack() as stack:
        if local_restores is not None:
            try:
                stack.enter_context(local_restores)
            except Exception:
                if server_indices:
                    with contextlib.suppress(HeadraceError):
                        request_all("discard")
                raise
        request_all("commit")


def _piece_kind(entry: VariableEntry | TableEntry) -> str:
    """Return the kind of the pieces of an entry."""
    return "shard" if isinstance(entry, VariableEntry) else "table"


def answers_for_server(server: int, placed_shards: Iterable[Any], answers: Answers) -> Answers:
    """Return the answers of writes to the shards and counters of a server."""
    own = {
        f"{_piece_kind(entry)} {part.spec.name}"
        for leaf, entry in placed_shards
        for part in leaf.value.placed
        if part.server == server
    }
    return {
        target: found
        for target, found in answers.items()
        if target in own or (server == COUNTING_SERVER and target.startswith("counter "))
    }


# --- restore of the objects of this process: all or nothing ---------------------------------------

# 1. Saved values are read and compared with the objects (`prepare_restore`); an error changes
# nothing.
# 2. The objects get their values one by one (`apply_restores`); if one rejects its value, those
# before it get their previous values back.
# 3. The servers, which have read their contents, install them; if that fails, 2 is undone as well.
#
# Not undone: objects with a `set_state` (iterators), which come last in 2, and contents that one
# server has installed when another one fails in 3.

_log = logging.getLogger(__name__)


class LeafRestore(NamedTuple):
    """An object, and the function that restores its saved value."""

    leaf: Leaf
    apply: Callable[[], object]


@contextlib.contextmanager
def apply_restores(restores: Iterable[LeafRestore]) -> Iterator[None]:
    """Apply changes; undo them if one of them or the body fails."""
    with contextlib.ExitStack() as undo:
        for change in sorted(restores, key=lambda change: has_state(change.leaf)):
            undo.callback(_undo_restores, change.leaf.path, _build_undo(change.leaf))
            change.apply()
        yield
        undo.pop_all()


def _undo_restores(path: str, undo: Callable[[], object]) -> None:
    try:
        undo()
    except Exception as error:  # undo the others all the same, and raise the first error
        _log.warning(
            "cannot undo the restore of %r after a later error: %s", path, describe_error(error)
        )


def _build_undo(leaf: Leaf) -> Callable[[], object]:
    """Return a function that restores the current value of an object."""
    value = leaf.value
    if has_state(leaf):
        # For a distributed iterator, this would wait for the other workers.
        return lambda: None
    if is_state_dict(leaf):
        arrays: dict[str, NDArray[Any]] = {}

        def add(array: NDArray[Any]) -> str:
            key = str(len(arrays))
            arrays[key] = np.array(array)
            return key

        try:
            state = encode_state(leaf.path, value.state_dict(), add)
        except TypeError:  # the current state has values that a checkpoint cannot save
            return functools.partial(value.load_state_dict, copy.deepcopy(value.state_dict()))
        return lambda: value.load_state_dict(decode_state(state, arrays.__getitem__))
    if isinstance(value, Variable):
        original = copy.copy(value)  # copies are never written to
        return lambda: vars(value).update(vars(original))
    if isinstance(value, ServerVariable):
        return functools.partial(value.assign, np.array(value.read()))
    if is_variable(value):
        return functools.partial(assign, value, np.array(to_array(value)))
    if isinstance(value, np.ndarray) and is_restored_in_place(value):
        return functools.partial(np.copyto, value, value.copy())
    return functools.partial(leaf.replace, value)


def prepare_restore(
    leaf: Leaf, entry: Entry, loaded: LoadedCheckpoint, local: TensorFile | None
) -> LeafRestore | None:
    """Return the change that restores an object, with its value read and checked.

    None is returned for objects that the servers restore.

    Raises:
        DataLossError: If the saved value is damaged.
        InvalidArgumentError: If it does not fit the object.
    """
    value = leaf.value
    reason = write_mismatch(value)
    if reason:
        raise InvalidArgumentError(f"{leaf.path!r} cannot be restored in place: {reason}")

    def saved_array(key: str, checksum: int | None) -> NDArray[Any]:
        assert local is not None
        array = local[key]
        local.check(key, {key: array}, checksum)
        return array

    match entry:
        case ValueEntry():
            if is_restored_in_place(value):
                return LeafRestore(
                    leaf, functools.partial(_assign_array, leaf, np.asarray(entry.value))
                )
            return LeafRestore(leaf, functools.partial(leaf.replace, entry.value))
        case StateEntry():
            return LeafRestore(leaf, functools.partial(value.set_state, entry.state))
        case StateDictEntry():
            state = decode_state(entry.state, lambda key: saved_array(key, entry.checksums[key]))
            mismatch = state_mismatch(value, state, entry.kind, entry.parameters)
            if mismatch:
                raise InvalidArgumentError(
                    f"the checkpoint {loaded.path!r} does not match this model: {leaf.path!r}: "
                    f"{mismatch}"
                )
            return LeafRestore(leaf, functools.partial(value.load_state_dict, state))
        case ArrayEntry():
            return LeafRestore(
                leaf, functools.partial(_assign_array, leaf, saved_array(entry.key, entry.checksum))
            )
        case VariableEntry() if not isinstance(value, ServerVariable):
            return LeafRestore(
                leaf, functools.partial(_assign_array, leaf, _read_variable(loaded, entry))
            )
    return None


def _assign_array(leaf: Leaf, array: NDArray[Any]) -> None:
    """Assign an array as the value of an object."""
    value = leaf.value
    if isinstance(value, ServerVariable | Variable):
        value.assign(array)
    elif is_variable(value):
        assign(value, array)
    elif isinstance(value, np.ndarray) and is_restored_in_place(value):
        value[...] = array
    elif is_array(value):
        leaf.replace(to_array_like(value, array))
    else:
        is_number = isinstance(value, int | float | complex) and not array.ndim
        leaf.replace(array.item() if is_number else np.array(array)[()])


def _read_variable(loaded: LoadedCheckpoint, entry: VariableEntry) -> NDArray[Any]:
    """Return the value of a variable that was saved from servers."""
    spec = ShardSpec(
        name=entry.name,
        variable=entry.name,
        shape=entry.shape,
        dtype=entry.dtype,
        variable_shape=entry.shape,
    )
    pieces = [
        piece for piece in loaded.pieces if (piece.kind, piece.owner) == ("shard", entry.name)
    ]

    def arrays_of(piece: ShardPiece) -> dict[str, NDArray[Any]]:
        return TensorFile(loaded.folder, piece.file).read_under(piece.key, piece.checksum)

    return assemble_shard(spec, pieces, arrays_of, {}).arrays["value"]


# --------------------------------------------------------------------------------------------------
# Optimizers of a checkpoint: slots are saved with variables, step counters with the slots

# An optimizer need not be in the `Checkpoint`: its slots are restored with the variables, and so is
# its step counter. The difference is the name: only an optimizer in the `Checkpoint` may have
# another name than when it was saved.


def find_optimizer_renames(found: Iterable[Leaf], entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the current names of optimizers, by their saved names."""
    return {
        entry.name: leaf.value.name
        for leaf in found
        if isinstance(leaf.value, Optimizer)
        and isinstance(entry := entries.get(leaf.path), OptimizerEntry)
    }


def _check_renames(
    loaded: LoadedCheckpoint,
    pieces: Iterable[ShardPiece],
    optimizer_renames: Mapping[str, str],
    restored: Mapping[str, str],
) -> None:
    """Check that the slots of two optimizers are not restored under one name.

    Args:
        loaded: The checkpoint.
        pieces: Pieces to restore now.
        optimizer_renames: Current names of optimizers, by their saved names.
        restored: The same, for slots already restored from this checkpoint.

    Raises:
        InvalidArgumentError: If they would be, or an optimizer was added after its slots were
            restored.
    """
    saved = _optimizers_with_slots(pieces)
    for old, new in optimizer_renames.items():
        if new != old and new in saved - optimizer_renames.keys():
            raise InvalidArgumentError(
                f"the checkpoint {loaded.path!r} has slots of an optimizer {new!r} that is not in "
                f"this Checkpoint, and the optimizer saved as {old!r} has that name now: add the "
                f"other optimizer to the Checkpoint, or create this one with name={old!r}"
            )
        if restored.get(old, new) != new:
            raise InvalidArgumentError(
                f"the optimizer {new!r} was saved as {old!r} in the checkpoint {loaded.path!r}, "
                "and its slots were already restored with the variables: set it in the Checkpoint "
                f"before the variables, or create it with name={old!r}"
            )


def _restore_counters(
    cluster: ServerCluster,
    loaded: LoadedCheckpoint,
    due: Iterable[Leaf],
    pieces: Iterable[ShardPiece],
    optimizer_renames: Mapping[str, str],
    restored: dict[str, str],
) -> dict[str, int]:
    """Return the values for the servers' counters, and record that optimizers were restored.

    Args:
        cluster: Cluster of the servers.
        loaded: The checkpoint.
        due: Objects to restore now.
        pieces: Pieces to restore now.
        optimizer_renames: Current names of optimizers, by their saved names.
        restored: The same, for optimizers whose counters were already restored from this
            checkpoint; those restored now are added.
    """
    saved = step_counts(loaded.manifest.counters)
    counts = {}
    for old in sorted(_optimizers_with_slots(pieces) - restored.keys()):
        if old in saved:
            counts[optimizer_renames.get(old, old)] = saved[old]
        restored[old] = optimizer_renames.get(old, old)
    for leaf in due:
        entry = loaded.manifest.entries[leaf.path]
        if isinstance(leaf.value, Optimizer) and isinstance(entry, OptimizerEntry):
            counts[leaf.value.name_in(cluster)] = entry.iterations
    for name in counts:
        cluster.optimizers.record_restored(name)
    return counter_values(counts)


def rename_counters(
    counters: Mapping[str, int], optimizer_renames: Mapping[str, str]
) -> dict[str, int]:
    """Return the counters of a checkpoint under the current names of the optimizers."""
    counts = step_counts(counters)
    unchanged = {name: count for name, count in counts.items() if name not in optimizer_renames}
    renamed = {
        optimizer_renames[name]: count
        for name, count in counts.items()
        if name in optimizer_renames
    }
    return counter_values(unchanged | renamed)


def _optimizers_with_slots(pieces: Iterable[ShardPiece]) -> set[str]:
    """Return the names of optimizers that have slots."""
    return {slot.rpartition("/")[0] for piece in pieces for slot in piece.slot_initial_values}
