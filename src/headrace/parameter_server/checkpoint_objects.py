"""Saving and restoring many objects: what servers do of it, and what is done here.

1. every server writes its shards; arrays of this process are written here
2. the manifest is written: now there is a checkpoint
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from headrace.distribute.current import get_strategy
from headrace.errors import DataLossError, HeadraceError, InvalidArgumentError, NotFoundError
from headrace.parameter_server.checkpoint_folder import Read
from headrace.parameter_server.checkpoint_format import (
    Answers,
    ArrayEntry,
    Manifest,
    TableEntry,
    VariableEntry,
    encode,
)
from headrace.parameter_server.checkpoint_local import changed, prepared
from headrace.parameter_server.checkpoint_optimizers import (
    check_renames,
    renames,
    restored_counters,
)
from headrace.parameter_server.checkpoint_tree import (
    Leaf,
    describe,
    describe_state_dict,
    has_state,
    holders,
    is_state_dict,
    leaves,
    local_array,
)
from headrace.parameter_server.counter import COUNTING_SERVER
from headrace.parameter_server.current import Cluster
from headrace.parameter_server.messages import Phase, RestoreShards, SaveShards, ShardsSaved
from headrace.parameter_server.operations import ShardSpec, TableSpec
from headrace.parameter_server.optimizer import Optimizer
from headrace.parameter_server.server_files import ask_for_files
from headrace.parameter_server.table import EmbeddingTable
from headrace.parameter_server.tensor_file import TensorFile, checksum_of, write_tensors
from headrace.parameter_server.variable import ServerVariable
from headrace.storage.folder import Folder

__all__ = [
    "Mark",
    "SavedNow",
    "answers_on",
    "on_servers_of",
    "restore_objects",
    "restore_on_servers",
    "save_objects",
    "writes_here",
]


class Mark(NamedTuple):
    """Up to where a server was saved: in which life, at which mark, after how many writes."""

    life: str
    mark: int
    writes: int


class SavedNow(NamedTuple):
    """What one save has done: up to where the servers were saved, and the bytes that they wrote."""

    marks: dict[int, Mark]
    bytes: int


def save_objects(
    objects: dict[str, Any],
    folder: Folder,
    name: str,
    *,
    marks: Mapping[int, Mark] | None = None,
    continues: tuple[str, ...] = (),
    forget: bool = False,
) -> SavedNow:
    """Save objects under a name, all or what changed since marks; the manifest is written last.

    Nothing is written where `writes_here` is false.
    """
    found = leaves(objects)
    stem = f"{name}.{secrets.token_hex(4)}"
    cluster, on_servers = on_servers_of(found.values())
    # Before the servers save: what others read and write meanwhile may come twice, and is not lost.
    states = {path: describe(leaf, {}) for path, leaf in found.items() if has_state(leaf)}
    arrays: dict[str, NDArray[Any]] = {}
    for path, leaf in found.items():
        if is_state_dict(leaf):
            states[path], inside = describe_state_dict(leaf)
            arrays |= inside
    answers: dict[int, ShardsSaved] = {}
    if cluster is not None:

        def ask(server: int, life: str) -> SaveShards:
            since = (marks or {}).get(server)
            return SaveShards(
                url=folder.url,
                stem=f"{stem}.{server}",
                shards=_names_on(server, on_servers, ServerVariable),
                tables=_names_on(server, on_servers, EmbeddingTable),
                since=since.mark if since and since.life == life else None,
                forget=forget,
                life=life,
            )

        answers = ask_for_files(cluster.servers, range(len(cluster.servers)), ask)
    counters: dict[str, int] = {}
    keys: Answers = {}
    for answer in answers.values():
        counters |= answer.counters
        keys |= answer.answers
    entries = {
        path: states[path] if path in states else describe(leaf, counters)
        for path, leaf in found.items()
    }
    own = {
        path: array
        for path, leaf in found.items()
        if (array := local_array(leaf.value)) is not None
    }
    for path, array in own.items():
        entry = entries[path]
        assert isinstance(entry, ArrayEntry)
        entries[path] = msgspec.structs.replace(entry, checksum=checksum_of({path: array}))
    arrays |= own
    if not writes_here(found.values()):
        return SavedNow({}, 0)
    local = f"{stem}.local.safetensors" if arrays else ""
    if arrays:
        write_tensors(folder, local, arrays)
    manifest = Manifest(
        entries=entries,
        pieces=tuple(piece for answer in answers.values() for piece in answer.pieces),
        local=local,
        continues=continues,
        counters=counters,
        incarnation=max((answer.incarnation for answer in answers.values()), default=0),
        answers=keys,
        holders=holders(objects),
    )
    _check_files(folder, manifest, answers)
    folder.write(f"{name}.json", encode(manifest))
    return SavedNow(
        {
            server: Mark(answer.life, answer.mark, answer.writes)
            for server, answer in answers.items()
        },
        sum(answer.bytes for answer in answers.values()),
    )


def writes_here(found: Iterable[Leaf]) -> bool:
    """Return whether this process writes a checkpoint: of several workers, the first one does.

    The others only read their variables, in which they take part where replicas have their own.
    """
    strategies = [
        get_strategy(),
        # Variables on parameter servers have none.
        *(getattr(leaf.value, "strategy", None) for leaf in found),
    ]
    return all(getattr(each, "first_replica", 0) == 0 for each in strategies)


def _names_on(server: int, found: Iterable[Leaf], kind: Any) -> tuple[str, ...]:
    """Return the names of the shards that a server has, each once."""
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
    """Refuse what servers have written elsewhere: to disks of their own, for one.

    Raises:
        InvalidArgumentError: A file is not there.
    """
    there = set(folder.names())
    for server, answer in answers.items():
        for piece in answer.pieces:
            if piece.file not in there:
                raise InvalidArgumentError(
                    f"parameter server {server} has written {piece.file!r}, which is not in "
                    f"{folder.url!r} as this program sees it; save to a path or URL that all reach"
                )


def on_servers_of(found: Iterable[Leaf]) -> tuple[Cluster | None, list[Leaf]]:
    """Return the variables and tables that are on servers, and their cluster.

    Optimizers have their names in that cluster from now on.
    """
    found = list(found)
    mine = [leaf for leaf in found if isinstance(leaf.value, ServerVariable | EmbeddingTable)]
    clusters = {id(leaf.value.cluster): leaf.value.cluster for leaf in mine}
    if len(clusters) > 1:
        raise ValueError("the objects of a Checkpoint must be in one cluster, and are in several")
    cluster = next(iter(clusters.values()), None)
    if cluster is not None:
        for leaf in found:
            if isinstance(leaf.value, Optimizer):
                leaf.value.name_in(cluster)
    return cluster, mine


# --- restoring -----------------------------------------------------------------------------------


def restore_objects(
    read: Read, found: Mapping[str, Leaf], due: list[Leaf], restored: dict[str, str]
) -> None:
    """Restore those of the objects that are due.

    Args:
        read: The checkpoint.
        found: All objects that are here.
        due: Those that are restored now.
        restored: Names of optimizers here, by their names in the checkpoint, whose slots were
            restored from it before.
    """
    entries = read.manifest.entries
    # What is restored here is read and checked before anything is changed.
    local = TensorFile(read.folder, read.manifest.local) if read.manifest.local else None
    ready = [
        change
        for leaf in due
        if (change := prepared(leaf, entries[leaf.path], read, local)) is not None
    ]
    cluster, on_servers = on_servers_of(found.values())
    ours = {leaf.path for leaf in due}
    if cluster is None:
        with changed(ready):
            return
    # Noted when all went well.
    now = dict(restored)
    placed = [
        (leaf, entry)
        for leaf in on_servers
        if leaf.path in ours and isinstance(entry := entries[leaf.path], VariableEntry | TableEntry)
    ]
    names = {(_kind_of(entry), entry.name) for _, entry in placed}
    pieces = [piece for piece in read.pieces if (piece.kind, piece.of) in names]
    renamed = renames(found.values(), entries)
    check_renames(read, pieces, renamed, now)
    counters = restored_counters(cluster, read, due, pieces, renamed, now)
    restore_on_servers(cluster, read, placed, renamed, counters, meanwhile=changed(ready))
    restored.update(now)


def restore_on_servers(
    cluster: Cluster,
    read: Read,
    placed: Iterable[tuple[Leaf, VariableEntry | TableEntry]],
    renamed: dict[str, str],
    counters: dict[str, int],
    *,
    only: int | None = None,
    answers: Answers | None = None,
    meanwhile: AbstractContextManager[None] | None = None,
) -> None:
    """Have the servers read what they are to hold.

    Args:
        cluster: Whose servers.
        read: What from.
        placed: Variables and tables, and what they were saved as.
        renamed: New names of optimizers.
        counters: What server 0 is to count on from.
        only: Ask this server alone, which has nothing yet; and see to no other life of it.
        answers: Keys of writes that were carried out.
        meanwhile: What is changed here between reading and committing, and taken back if the
            servers fail to commit.

    Raises:
        DataLossError: A part is missing or damaged. Nothing was changed on any server.
    """
    token = secrets.token_hex(8)
    shards: dict[int, list[tuple[ShardSpec, str]]] = {}
    tables: dict[int, list[tuple[TableSpec, str]]] = {}
    for leaf, entry in placed:
        # A handle's record says where its shards are.
        for part in leaf.value.placed:
            where: Any = shards if isinstance(entry, VariableEntry) else tables
            where.setdefault(part.server, []).append((part.spec, entry.name))
    which = {*shards, *tables, *({COUNTING_SERVER} if counters else ())}
    if only is not None:
        which = {only}  # also one that gets nothing: it is to know that there was nothing

    def ask(phase: Phase, server: int, life: str) -> RestoreShards:
        mine, theirs = tuple(shards.get(server, ())), tuple(tables.get(server, ()))
        needed = {("shard", name) for _, name in mine} | {("table", name) for _, name in theirs}
        return RestoreShards(
            url=read.folder.url,
            shards=mine,
            tables=theirs,
            pieces=tuple(piece for piece in read.pieces if (piece.kind, piece.of) in needed),
            renamed=renamed,
            counters=counters if server == COUNTING_SERVER else {},
            incarnation=read.manifest.incarnation,
            answers=answers or {},
            life=life,
            recovers=only is not None,
            phase=phase,
            token=token,
        )

    def ask_all(phase: Phase) -> None:
        ask_for_files(
            cluster.servers, sorted(which), functools.partial(ask, phase), meets=only is None
        )

    if only is None and which:
        try:
            ask_all("prepare")
        except (DataLossError, NotFoundError):
            with contextlib.suppress(HeadraceError):
                ask_all("discard")  # others keep what they have read
            raise
    with contextlib.ExitStack() as stack:
        if meanwhile is not None:
            try:
                stack.enter_context(meanwhile)
            except Exception:
                if which:
                    with contextlib.suppress(HeadraceError):
                        ask_all("discard")
                raise
        ask_all("commit")


def _kind_of(entry: VariableEntry | TableEntry) -> str:
    """Return what pieces of it are called."""
    return "shard" if isinstance(entry, VariableEntry) else "table"


def answers_on(server: int, placed: Iterable[Any], answers: Answers) -> Answers:
    """Return the keys of writes to the shards of a server, and to its counters."""
    own = {
        f"{_kind_of(entry)} {part.spec.name}"
        for leaf, entry in placed
        for part in leaf.value.placed
        if part.server == server
    }
    return {
        target: found
        for target, found in answers.items()
        if target in own or (server == COUNTING_SERVER and target.startswith("counter "))
    }
