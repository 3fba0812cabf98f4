"""Checkpoints: objects saved and restored together (`Checkpoint`), and a series of them.

`CheckpointManager` numbers the checkpoints of a program while it trains, keeps the latest, and
restores servers from them:

    save()        ckpt-1, ckpt-2 ...: everything
    increments    ckpt-2+1, ckpt-2+2 ...: changes since then, at a fixed interval
    a server restarts empty       it reads its shards from the newest of both

Guarantee after the loss of a server: each of its shards is as it was in the newest checkpoint or
increment, bit for bit. Later writes to it are lost, and counted; waiting writes are executed after
the restore. Shards of other servers lose nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from headrace.argument_names import explain_unknown_arguments
from headrace.arguments import check_flag, check_instance, check_int, check_seconds, check_string
from headrace.errors import (
    CancelledError,
    DataLossError,
    HeadraceError,
    InvalidArgumentError,
    NotFoundError,
    describe_error,
)
from headrace.parameter_server.checkpoint_format import (
    LoadedCheckpoint,
    TableEntry,
    VariableEntry,
    delete_checkpoint,
    delete_unfinished,
    is_numbered,
    list_checkpoints,
    list_increments,
    list_up_to,
    list_without_manifest,
    read_checkpoint,
    split_path,
)
from headrace.parameter_server.checkpoint_objects import (
    SavedUpTo,
    SaveResult,
    answers_for_server,
    find_optimizer_renames,
    find_server_objects,
    is_checkpoint_writer,
    rename_counters,
    restore_objects,
    restore_on_servers,
    save_objects,
)
from headrace.parameter_server.checkpoint_tree import (
    describe_holders,
    is_object,
    list_leaves,
    mismatch_reason,
)
from headrace.parameter_server.cluster_registry import ServerCluster
from headrace.storage.names import FileName

__all__ = ["Checkpoint", "CheckpointManager", "CheckpointStatus", "checkpoints_iterator"]

_log = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0
_FIRST_WARNING_SECONDS, _REPEAT_WARNING_SECONDS = 10.0, 60.0


class Checkpoint:
    """Objects that are saved and restored together.

    >>> import tempfile
    >>> import headrace as hr
    >>> weights = hr.Variable([1.0, 2.0])
    >>> checkpoint = hr.Checkpoint(weights=weights, step=3)
    >>> path = checkpoint.save(tempfile.mkdtemp() + "/mine")
    >>> _ = weights.assign([0.0, 0.0])
    >>> checkpoint.step = 0
    >>> _ = checkpoint.restore(path).assert_consumed()
    >>> weights.read().tolist(), checkpoint.step
    ([1.0, 2.0], 3)

    Args:
        **objects: Variables, tables, optimizers, iterators, metrics, arrays, numbers and strings,
            objects of Keras and PyTorch, arrays of JAX, dicts and lists of them, and other
            `Checkpoint` objects. Each becomes an attribute; more may be set later.

    Raises:
        TypeError: If an object cannot be saved, or an immutable one is in a tuple, where it could
            not be restored.
        ValueError: If a Keras object is not built, or a dict has keys that are equal as strings,
            such as 1 and "1".
    """

    checkpoint_objects: dict[str, Any]

    def __init__(self, **objects: Any) -> None:
        object.__setattr__(self, "checkpoint_objects", dict(objects))
        object.__setattr__(self, "_status", None)
        list_leaves(self.checkpoint_objects)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["checkpoint_objects"][name]
        except KeyError:
            raise AttributeError(f"this Checkpoint has no object {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(f"{name!r} is a method of Checkpoint; use another name")
        self.checkpoint_objects[name] = value
        status: CheckpointStatus | None = self.__dict__["_status"]
        if status is not None:
            status.restore_new()

    def save(self, path: FileName) -> str:
        """Save all objects under a path or URL that all servers can reach; return the path.

        Each shard is saved as of one moment; while others write, that moment differs between
        shards. An earlier checkpoint of the same path is replaced after all has been written.

        All workers of a `MultiWorkerMirroredStrategy` call this with the same path: the first one
        writes, and the others return without waiting for it.

        Raises:
            TypeError: If an object cannot be saved.
            UnavailableError: If a server or the storage is unreachable.
        """
        folder, name = split_path(path)
        try:
            save_objects(self.checkpoint_objects, folder, name)
        finally:
            # Also after a failure, whose files would use up the space of the next save.
            if is_checkpoint_writer(list_leaves(self.checkpoint_objects).values()):
                delete_unfinished(folder, lambda checkpoint_name: checkpoint_name == name)
        return folder.path(name)

    write = save

    def restore(self, path: FileName) -> CheckpointStatus:
        """Restore all objects that were saved; objects set later are restored then.

        The shards may be partitioned differently from when they were saved.

        Raises:
            NotFoundError: If the checkpoint does not exist, or was deleted while it was read.
            InvalidArgumentError: If it is of another model: an object has another kind, class,
                shape or dtype, or a tensor cannot be written. Nothing was changed.
            DataLossError: If a part of it is missing or damaged. Nothing was changed.

        If an object raises another error when it gets its value, the others get their previous
        values back, except iterators restored before it.
        """
        status = CheckpointStatus(self, read_checkpoint(*split_path(path)))
        status.restore_new()
        object.__setattr__(self, "_status", status)
        return status

    read = restore

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self.checkpoint_objects) or 'nothing'}>"


class CheckpointStatus:
    """Progress of a restore, and checks of what was matched.

    Args:
        checkpoint: Checkpoint whose objects are restored.
        loaded: Checkpoint that was read.
    """

    def __init__(self, checkpoint: Checkpoint, loaded: LoadedCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._loaded = loaded
        self._restored_paths: dict[str, Any] = {}
        #: Current names of optimizers whose slots were restored, by their saved names.
        self._restored_optimizers: dict[str, str] = {}

    def restore_new(self) -> None:
        """Restore objects added since the last call."""
        found = list_leaves(self._checkpoint.checkpoint_objects)
        entries = self._loaded.manifest.entries
        if found and entries and not self._restored_paths and not found.keys() & entries.keys():
            raise InvalidArgumentError(
                f"the checkpoint {self._loaded.path!r} does not match this model: it has "
                f"{_format_names(entries)}, but this Checkpoint has {_format_names(found)}"
            )
        saved_holders = self._loaded.manifest.holders
        for path, holder in describe_holders(self._checkpoint.checkpoint_objects).items():
            if saved_holders.get(path, holder) != holder:
                raise InvalidArgumentError(
                    f"the checkpoint {self._loaded.path!r} does not match this model: {path!r} is "
                    f"{holder}, but {saved_holders[path]} in the checkpoint"
                )
        due = [
            leaf
            for path, leaf in found.items()
            if path in entries
            # A number or array that the program has set since then is kept.
            and (
                path not in self._restored_paths
                or (is_object(leaf) and self._restored_paths[path] is not leaf.value)
            )
        ]
        for leaf in due:
            mismatch = mismatch_reason(leaf, entries[leaf.path])
            if mismatch:
                raise InvalidArgumentError(
                    f"the checkpoint {self._loaded.path!r} does not match this model: {mismatch}"
                )
        try:
            restore_objects(self._loaded, found, due, self._restored_optimizers)
        except DataLossError as error:
            if self._loaded.exists():
                raise
            raise NotFoundError(
                f"the checkpoint {self._loaded.path!r} was deleted while it was read"
            ) from error
        for path, leaf in list_leaves(self._checkpoint.checkpoint_objects).items():
            if path in entries:
                self._restored_paths[path] = leaf.value

    def assert_existing_objects_matched(self) -> CheckpointStatus:
        """Check that each object of the `Checkpoint` was restored.

        Raises:
            AssertionError: If an object was not saved.
        """
        self.restore_new()
        missing = (
            list_leaves(self._checkpoint.checkpoint_objects).keys() - self._restored_paths.keys()
        )
        if missing:
            raise AssertionError(
                f"the checkpoint {self._loaded.path!r} has no value for {_format_names(missing)}"
            )
        return self

    def assert_consumed(self) -> CheckpointStatus:
        """Check that each object was restored, and that all saved values were used.

        Raises:
            AssertionError: If an object was not saved, or a saved value has no object.
        """
        self.assert_existing_objects_matched()
        unused = self._loaded.manifest.entries.keys() - self._restored_paths.keys()
        if unused:
            raise AssertionError(
                f"the checkpoint {self._loaded.path!r} also has {_format_names(unused)}, which "
                "this Checkpoint does not have"
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointStatus:
        """Check that at least one object was restored.

        Raises:
            AssertionError: If no object was restored.
        """
        self.restore_new()
        if not self._restored_paths:
            raise AssertionError(f"nothing was restored from {self._loaded.path!r}")
        return self

    def expect_partial(self) -> CheckpointStatus:
        """Accept that some objects or saved values are not matched."""
        return self

    def __repr__(self) -> str:
        return f"<{len(self._restored_paths)} objects restored from {self._loaded.path!r}>"


def _format_names(names: Iterable[str]) -> str:
    known = sorted(names)
    text = ", ".join(known[:5])
    return text if len(known) <= 5 else f"{text} and {len(known) - 5} more"


@explain_unknown_arguments
class CheckpointManager:
    """Saves numbered checkpoints, and restores lost servers from them.

    Created in the program that has the strategy, it watches the strategy's servers: a server
    restarted at its address gets its shards back before this program sends it any other request.

    >>> import tempfile
    >>> import headrace as hr
    >>> checkpoint = hr.Checkpoint(step=1)
    >>> with hr.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=2) as manager:
    ...     path = manager.save()
    >>> path.rpartition("/")[2], manager.latest_checkpoint == path
    ('ckpt-1', True)

    Args:
        checkpoint: Objects to save.
        directory: Path or URL of a directory used by this manager only.
        max_to_keep: Number of checkpoints to keep; older ones are deleted. None keeps all.
        checkpoint_name: Prefix of the checkpoint names.
        incremental_seconds: Interval in seconds for saving changes; everything is saved first if no
            checkpoint exists. None disables increments.
        save_on_sigterm: Whether to save once when this process receives SIGTERM, before it ends.
            The manager must then be created on the main thread.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: FileName,
        max_to_keep: int | None = 5,
        checkpoint_name: str = "ckpt",
        *,
        incremental_seconds: float | None = None,
        save_on_sigterm: bool = False,
    ) -> None:
        check_instance("checkpoint", checkpoint, Checkpoint)
        if max_to_keep is not None:
            check_int("max_to_keep", max_to_keep, minimum=1)
        check_string("checkpoint_name", checkpoint_name, empty=False)
        if incremental_seconds is not None:
            check_seconds("incremental_seconds", incremental_seconds)
        check_flag("save_on_sigterm", save_on_sigterm, or_none=False)
        self.checkpoint = checkpoint
        self._folder, _ = split_path(f"{os.fspath(directory)!s}/{checkpoint_name}")
        self._prefix = checkpoint_name
        self._max_to_keep = max_to_keep
        self._incremental_seconds = incremental_seconds
        #: Held while files are written or deleted.
        self._lock = threading.RLock()
        #: Name of the checkpoint used to restore lost servers; "" before the first one.
        self._newest = ""
        self._full = ""
        self._full_bytes = 0
        self._increments: list[str] = []
        self._increment_bytes = 0
        self._marks: dict[int, SavedUpTo] = {}
        #: Writes of each server contained in the newest checkpoint.
        self._saved_writes: dict[int, int] = {}
        self._unrestored_servers: set[int] = set()
        #: Writes of each server contained in each checkpoint that this program saved or was
        #: restored from. The newest is the last.
        self._writes_in: dict[str, dict[int, int]] = {}
        #: Whether the newest was found damaged, so that no increment may continue it.
        self._is_damaged = False
        self.lost_updates: int = 0
        """Number of server writes known to be lost with their servers."""
        self._closed = threading.Event()
        self._cluster: ServerCluster | None = None
        self._thread: threading.Thread | None = None
        self._before_sigterm: Any = None
        self._watch_servers()
        if save_on_sigterm:
            self._before_sigterm = signal.signal(signal.SIGTERM, self._on_sigterm)

    # --- saving -------------------------------------------------------------------------------

    @property
    def directory(self) -> str:
        """Directory of the checkpoints."""
        return self._folder.url

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the existing full checkpoints, oldest first."""
        return [self._folder.path(name) for name in list_checkpoints(self._folder, self._prefix)]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest full checkpoint, or None."""
        names = list_checkpoints(self._folder, self._prefix)
        return self._folder.path(names[-1]) if names else None

    @property
    def latest_increment(self) -> str | None:
        """Path of the newest increment of the newest checkpoint, or None; it can be restored."""
        names = list_checkpoints(self._folder, self._prefix)
        increments = list_increments(self._folder, names[-1]) if names else []
        return self._folder.path(increments[-1]) if increments else None

    def save(self, checkpoint_number: int | None = None) -> str:
        """Save everything under the next number or a given one; return the path.

        All workers of a `MultiWorkerMirroredStrategy` call this; the first one chooses the number
        and writes. The others return a path without waiting; pass `checkpoint_number` to make them
        agree on it.

        Raises:
            UnavailableError: If a server or the storage is unreachable.
        """
        if checkpoint_number is not None:
            check_int("checkpoint_number", checkpoint_number, minimum=0)
        self._watch_servers()
        with self._lock:
            names = list_checkpoints(self._folder, self._prefix)
            number = checkpoint_number
            if number is None:
                number = 1 + (int(names[-1].rpartition("-")[2]) if names else 0)
            name = f"{self._prefix}-{number}"
            # Servers forget earlier removals from tables, so no increment may continue an earlier
            # checkpoint, even if this save fails.
            self._marks = {}
            is_writer = is_checkpoint_writer(
                list_leaves(self.checkpoint.checkpoint_objects).values()
            )
            for old in list_increments(self._folder, name) if is_writer else []:
                self._folder.remove(f"{old}.json")
            saved = self._save_as(name)
            self._record_saved(name, saved)
            self._is_damaged = False
            self._full = self._newest = name
            self._full_bytes, self._increment_bytes, self._increments = saved.bytes, 0, []
            # All servers had their contents, whichever program restored them, so later writes must
            # not be replaced.
            self._unrestored_servers.clear()
            if is_writer:
                self._prune()
        return self._folder.path(name)

    def save_increment(self) -> str:
        """Save the changes since the last save, or everything if nothing was saved yet.

        Returns:
            Path of the increment, such as "ckpt-2+1" after "ckpt-2", or of a full checkpoint.
        """
        with self._lock:
            if not self._marks or self._is_damaged or self._increment_bytes > self._full_bytes:
                return self.save()
            name = f"{self._full}+{len(self._increments) + 1}"
            before = (self._full, *self._increments)
            saved = self._save_as(name, marks=self._marks, continues=before)
            self._record_saved(name, saved)
            self._increments.append(name)
            self._increment_bytes += saved.bytes
            self._newest = name
        return self._folder.path(name)

    def _save_as(self, name: str, **since: Any) -> SaveResult:
        objects = self.checkpoint.checkpoint_objects
        try:
            return save_objects(objects, self._folder, name, forget_earlier_marks=True, **since)
        except Exception:
            with contextlib.suppress(Exception):
                if is_checkpoint_writer(list_leaves(objects).values()):
                    delete_unfinished(
                        self._folder, lambda checkpoint_name: checkpoint_name == name
                    )  # frees the space for the next save
            raise

    def _record_saved(self, name: str, saved: SaveResult) -> None:
        self._marks = saved.marks
        self._writes_in.pop(name, None)
        self._writes_in[name] = {server: mark.writes for server, mark in saved.marks.items()}
        self._saved_writes = {server: mark.writes for server, mark in saved.marks.items()}

    def _prune(self) -> None:
        names = list_checkpoints(self._folder, self._prefix)
        if self._max_to_keep is not None:
            for name in [name for name in names if name != self._full][
                : -self._max_to_keep + 1 or None
            ]:
                delete_checkpoint(self._folder, name)
        existing = list_up_to(self._folder, self._prefix, self._full)
        self._writes_in = {
            name: writes for name, writes in self._writes_in.items() if name in existing
        }
        delete_unfinished(self._folder, lambda name: is_numbered(name, self._prefix))

    # --- restoring ----------------------------------------------------------------------------

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint with its increments; return its path.

        A damaged one is skipped: the one before it is restored, and the error is logged.

        Returns:
            The path, or None if there is no checkpoint; all objects then keep their initial values.

        Raises:
            DataLossError: If all checkpoints are damaged.
        """
        self._watch_servers()
        path = self.latest_increment or self.latest_checkpoint
        if path is None:
            self._warn_of_missing_manifests()
            return None
        names = list_up_to(self._folder, self._prefix, path.rpartition("/")[2])
        name = self._restore_newest_intact(
            names, lambda name: self.checkpoint.restore(self._folder.path(name))
        )
        self._unrestored_servers.clear()
        self._newest = name
        self._writes_in = {each: {} for each in names[: names.index(name) + 1]}
        return self._folder.path(name)

    def _restore_newest_intact(self, names: Sequence[str], restore: Callable[[str], object]) -> str:
        """Restore the last checkpoint that is not damaged; return its name.

        Raises:
            DataLossError: If all are damaged.
            NotFoundError: If the last one does not exist, and no other can be restored.
        """
        first: HeadraceError | None = None
        directory = self._folder.url
        for name in reversed(names):
            try:
                restore(name)
            except (DataLossError, NotFoundError) as error:
                first = first or error
                _log.error(
                    "cannot restore checkpoint %s, %s: %s",
                    self._folder.path(name),
                    f"and there is no earlier one in {directory}"
                    if name == names[0]
                    else "trying the previous one",
                    describe_error(error),
                )
            else:
                return name
        assert first is not None
        raise type(first)(
            f"{first}; no other checkpoint in {directory} can be restored: copy the file from a "
            "backup, or remove the checkpoints to start from initial values"
        ) from first

    def _warn_of_missing_manifests(self) -> None:
        """Log files of checkpoints that cannot be restored, because the manifest is missing."""
        files = list_without_manifest(self._folder, self._prefix)
        if files:
            _log.warning(
                "no checkpoint is restored, although %s has files of checkpoints (%s%s): each "
                "needs a manifest, such as %s-1.json, which is written last. If a save was "
                "interrupted, nothing is wrong; otherwise restore the manifest before the next "
                "save, which removes these files",
                self._folder.url,
                ", ".join(files[:5]),
                f" and {len(files) - 5} more" if len(files) > 5 else "",
                self._prefix,
            )

    def _recover_server(self, server: int, writes: int) -> None:
        """Restore the contents of a restarted server."""
        self._unrestored_servers.add(server)
        saved = self._saved_writes.get(server, 0)
        lost = max(0, writes - saved)
        self._saved_writes[server] = 0  # its count starts again from 0
        self.lost_updates += lost
        name = self._restore_server(server)
        if name != self._newest:
            unsaved = max(0, saved - self._writes_in.get(name, {}).get(server, 0))
            lost += unsaved
            self.lost_updates += unsaved
        for each in self._writes_in.values():
            each.pop(server, None)
        _log.warning(
            "parameter server %d restored from %s; at least %d later updates are lost",
            server,
            self._folder.path(name),
            lost,
        )

    def _restore_server(self, server: int) -> str:
        """Restore a server from the newest intact checkpoint; return its name."""
        if not self._newest:
            raise NotFoundError(
                "this CheckpointManager has no checkpoint yet: call save() after creating the "
                "variables, or set incremental_seconds"
            )
        name = self._restore_newest_intact(
            list(self._writes_in), functools.partial(self._restore_server_from, server)
        )
        self._is_damaged = self._is_damaged or name != self._newest
        self._unrestored_servers.discard(server)
        return name

    def _restore_server_from(self, server: int, name: str) -> None:
        cluster = self._cluster
        assert cluster is not None
        loaded = read_checkpoint(self._folder, name)
        entries = loaded.manifest.entries
        found = list_leaves(self.checkpoint.checkpoint_objects)
        placed = [
            (leaf, entry)
            for leaf in find_server_objects(found.values())[1]
            if isinstance(entry := entries.get(leaf.path), VariableEntry | TableEntry)
        ]
        renamed = find_optimizer_renames(found.values(), entries)
        restore_on_servers(
            cluster,
            loaded,
            placed,
            renamed,
            rename_counters(loaded.manifest.counters, renamed),
            only=server,
            answers=answers_for_server(server, placed, loaded.manifest.answers),
        )

    # --- during training --------------------------------------------------------------------------

    def _watch_servers(self) -> None:
        """Register for recovery of the servers of the checkpoint's variables, once it has any."""
        if self._cluster is not None or self._closed.is_set():
            return
        found = list_leaves(self.checkpoint.checkpoint_objects)
        self._cluster, _ = find_server_objects(found.values())
        if self._cluster is None and self._incremental_seconds is None:
            return
        if self._cluster is not None:
            self._cluster.servers.states.set_recovery(self._recover_server)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="headrace-checkpoints", daemon=True
            )
            self._thread.start()

    def _watch(self) -> None:
        """Detect restarted servers, and save increments."""
        next_save, next_warning = time.monotonic(), 0.0
        #: Error type of the last save. Errors of one type are logged once a minute: their texts
        #: differ in file names only.
        last_error: type[Exception] | None = None
        pause = (
            _CHECK_SECONDS
            if self._incremental_seconds is None
            else min(_CHECK_SECONDS, self._incremental_seconds)
        )
        while not self._closed.wait(pause):
            try:
                self._watch_servers()
                if self._cluster is not None:
                    self._cluster.servers.wait_until_reachable()
                    with self._lock:
                        for server in list(self._unrestored_servers):
                            self._restore_server(server)
                if self._incremental_seconds is not None and time.monotonic() >= next_save:
                    # Set before the save, so that a failure, such as a full disk, is not retried at
                    # once.
                    next_save = time.monotonic() + self._incremental_seconds
                    self.save_increment()
                    last_error = None
                elif self._incremental_seconds is None:
                    last_error = None
            except CancelledError:
                return
            except Exception as error:
                if self._closed.is_set():
                    return
                level = logging.DEBUG
                if type(error) is not last_error or time.monotonic() >= next_warning:
                    last_error, next_warning = (
                        type(error),
                        time.monotonic() + _REPEAT_WARNING_SECONDS,
                    )
                    level = logging.WARNING
                description = describe_error(error)
                _log.log(
                    level,
                    "cannot save or restore checkpoints in %s, retrying: %s",
                    self._folder.url,
                    description,
                )

    def _on_sigterm(self, number: int, frame: Any) -> None:
        # A second signal ends the process at once.
        signal.signal(signal.SIGTERM, self._before_sigterm)
        threading.Thread(target=self._save_and_end, name="headrace-last-checkpoint").start()

    def _save_and_end(self) -> None:
        try:
            path = self.save()
            _log.warning("received SIGTERM: saved %s", path)
        except (HeadraceError, OSError) as error:
            _log.error("received SIGTERM, and could not save: %s", describe_error(error))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Stop saving and watching servers. Idempotent."""
        self._closed.set()
        if self._cluster is not None:
            self._cluster.servers.states.clear_recovery(self._recover_server)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CheckpointManager of {self._folder.url!r}>"


def checkpoints_iterator(
    directory: FileName,
    timeout: float | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[str]:
    """Yield the newest checkpoint of a directory whenever there is a new one.

    Superseded checkpoints are skipped. A checkpoint may be deleted while it is read:
    restoring it raises NotFoundError, and the next one can be used instead.

    >>> import tempfile
    >>> import headrace as hr
    >>> directory = tempfile.mkdtemp()
    >>> _ = hr.Checkpoint(step=1).save(f"{directory}/ckpt-1")
    >>> [path.rpartition("/")[2] for path in hr.checkpoints_iterator(directory, timeout=0.1)]
    ['ckpt-1']

    Args:
        directory: Path or URL, which need not exist yet.
        timeout: Seconds without a new checkpoint after which the iterator ends; None waits forever,
            with a warning after 10 s.
        clock: Returns the time in seconds.
    """
    if timeout is not None:
        check_seconds("timeout", timeout)
    folder, _ = split_path(f"{os.fspath(directory)!s}/any")
    seen = ""
    since = clock()
    is_quiet = False
    while True:
        names = list_checkpoints(folder)
        if names and names[-1] != seen:
            seen = names[-1]
            yield folder.path(seen)
            since, is_quiet = clock(), False
            continue
        waited = clock() - since
        if timeout is not None and waited >= timeout:
            return
        if waited >= _FIRST_WARNING_SECONDS and not is_quiet:
            is_quiet = True
            _log.warning(
                "no new checkpoint in %s for %.0f s; the last one was %s",
                folder.url,
                waited,
                seen or "none",
            )
        remaining = _CHECK_SECONDS if timeout is None else max(0.0, timeout - waited)
        time.sleep(min(remaining, 0.02 + waited / 10, _CHECK_SECONDS))
