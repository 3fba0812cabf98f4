"""Checkpoints: variables, tables, optimizers, iterators and numbers, saved together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.errors import DataLossError, InvalidArgumentError, NotFoundError
from headrace.parameter_server.checkpoint_format import Read, place_of, read_checkpoint, sweep
from headrace.parameter_server.checkpoint_objects import (
    restore_objects,
    save_objects,
    writes_here,
)
from headrace.parameter_server.checkpoint_tree import holders, is_object, leaves, refusal
from headrace.storage.names import FileName

__all__ = ["Checkpoint", "CheckpointStatus"]


class Checkpoint:
    """Objects that are saved and restored together.

    >>> import tempfile
    >>> import headrace as hr
    >>> weights = hr.Variable([1.0, 2.0])
    >>> checkpoint = hr.Checkpoint(weights=weights, step=3)
    >>> path = checkpoint.save(tempfile.mkdtemp() + "/mine")
    >>> _ = weights.assign([0.0, 0.0])
    >>> checkpoint.step = 0
    >>> checkpoint.restore(path).assert_consumed()
    >>> weights.read().tolist(), checkpoint.step
    ([1.0, 2.0], 3)

    Args:
        **objects: Variables, tables, optimizers, iterators, metrics, arrays, numbers and strings,
            objects of Keras and PyTorch, arrays of JAX, and dicts and lists of them; another
            `Checkpoint` as well. Each is an attribute under its name, and more may be set later.

    Raises:
        TypeError: An object is of a kind that is not saved, or one that cannot be changed is in a
            tuple, where it could not be restored.
        ValueError: An object of Keras is not built, or a dict has keys that are alike as strings,
            such as 1 and "1".
    """

    checkpoint_objects: dict[str, Any]

    def __init__(self, **objects: Any) -> None:
        object.__setattr__(self, "checkpoint_objects", dict(objects))
        object.__setattr__(self, "_status", None)
        leaves(self.checkpoint_objects)

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
        """Save all objects under a path or URL that all servers reach; return it.

        While others write, each shard is of one moment, and different shards of different ones.
        What was saved under the path before is replaced when all is written.

        All workers of a `MultiWorkerMirroredStrategy` call it with the same path: the first one
        writes, and the others return without waiting for that.

        Raises:
            TypeError: An object is of a kind that is not saved.
            UnavailableError: A server, or the place to save to, cannot be reached.
        """
        folder, name = place_of(path)
        try:
            save_objects(self.checkpoint_objects, folder, name)
        finally:
            # Also after one that failed, which else would take the room of the next.
            if writes_here(leaves(self.checkpoint_objects).values()):
                sweep(folder, lambda of: of == name)
        return folder.path(name)

    write = save

    def restore(self, path: FileName) -> CheckpointStatus:
        """Restore all objects that are here and were saved; others follow when they are set.

        Shards are cut and dealt as the variables here are, whatever they were when they were saved.

        Raises:
            NotFoundError: There is no such checkpoint, or it was deleted while it was read.
            InvalidArgumentError: It is of another model: an object has another kind, class, shape
                or dtype; or a tensor cannot be written. Nothing was changed.
            DataLossError: A part of it is missing or damaged. Nothing was changed.

        Where an object raises another error when it is given its value, the others get back what
        they had, except iterators that came before it.
        """
        status = CheckpointStatus(self, read_checkpoint(*place_of(path)))
        status.restore_new()
        object.__setattr__(self, "_status", status)
        return status

    read = restore

    def __repr__(self) -> str:
        return f"<Checkpoint of {', '.join(self.checkpoint_objects) or 'nothing'}>"


class CheckpointStatus:
    """What a restore has done so far.

    Args:
        checkpoint: Whose objects are restored.
        read: From what.
    """

    def __init__(self, checkpoint: Checkpoint, read: Read) -> None:
        self._checkpoint = checkpoint
        self._read = read
        self._done: dict[str, Any] = {}
        #: Names of optimizers here, by those in the checkpoint, whose slots were restored.
        self._restored_optimizers: dict[str, str] = {}

    def restore_new(self) -> None:
        """Restore what has come since the last time."""
        found = leaves(self._checkpoint.checkpoint_objects)
        entries = self._read.manifest.entries
        if found and entries and not self._done and not found.keys() & entries.keys():
            raise InvalidArgumentError(
                f"the checkpoint {self._read.path!r} is of another model: it has "
                f"{_listed(entries)}, and here is {_listed(found)}"
            )
        saved_holders = self._read.manifest.holders
        for path, holder in holders(self._checkpoint.checkpoint_objects).items():
            if saved_holders.get(path, holder) != holder:
                raise InvalidArgumentError(
                    f"the checkpoint {self._read.path!r} is of another model: {path!r} is {holder} "
                    f"here, and {saved_holders[path]} in the checkpoint"
                )
        due = [
            leaf
            for path, leaf in found.items()
            if path in entries
            # A number or an array that a program has set since is its own.
            and (path not in self._done or (is_object(leaf) and self._done[path] is not leaf.value))
        ]
        for leaf in due:
            why = refusal(leaf, entries[leaf.path])
            if why:
                raise InvalidArgumentError(
                    f"the checkpoint {self._read.path!r} is of another model: {why}"
                )
        try:
            restore_objects(self._read, found, due, self._restored_optimizers)
        except DataLossError as error:
            if self._read.exists():
                raise
            raise NotFoundError(
                f"the checkpoint {self._read.path!r} was deleted while it was read"
            ) from error
        for path, leaf in leaves(self._checkpoint.checkpoint_objects).items():
            if path in entries:
                self._done[path] = leaf.value

    def assert_existing_objects_matched(self) -> CheckpointStatus:
        """Check that each object that is here was restored.

        Raises:
            AssertionError: One was not saved.
        """
        self.restore_new()
        missing = leaves(self._checkpoint.checkpoint_objects).keys() - self._done.keys()
        if missing:
            raise AssertionError(
                f"the checkpoint {self._read.path!r} has no value for {_listed(missing)}"
            )
        return self

    def assert_consumed(self) -> CheckpointStatus:
        """Check that each object was restored, and everything that was saved was used.

        Raises:
            AssertionError: One was not saved, or is not here.
        """
        self.assert_existing_objects_matched()
        unused = self._read.manifest.entries.keys() - self._done.keys()
        if unused:
            raise AssertionError(
                f"the checkpoint {self._read.path!r} also has {_listed(unused)}, which this "
                "Checkpoint does not have"
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointStatus:
        """Check that anything was restored.

        Raises:
            AssertionError: Nothing was.
        """
        self.restore_new()
        if not self._done:
            raise AssertionError(f"nothing was restored from {self._read.path!r}")
        return self

    def expect_partial(self) -> CheckpointStatus:
        """Say that some of it will not be used, or not be found; it is not complained about."""
        return self

    def __repr__(self) -> str:
        return f"<{len(self._done)} objects restored from {self._read.path!r}>"


_NOTHING = object()


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    text = ", ".join(known[:5])
    return text if len(known) <= 5 else f"{text} and {len(known) - 5} more"
