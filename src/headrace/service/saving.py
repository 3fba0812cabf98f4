"""Save a dataset with a service: the workers write it, each element once."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from headrace import errors, saved
from headrace.arguments import check_int
from headrace.data.dataset import Dataset
from headrace.element.spec import describe_spec
from headrace.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    HeadraceError,
    InvalidArgumentError,
)
from headrace.execution.build import draw_seed
from headrace.plan import traverse
from headrace.plan.identity import identity_digest
from headrace.plan.source import INFINITE
from headrace.rewrites.optimize import prepare
from headrace.service.by_value import checked_modules
from headrace.service.config import parse_service
from headrace.service.messages import GetSaveStatus, SaveStatus, StartSave
from headrace.service.registering import ask, registered
from headrace.storage.files import open_folder
from headrace.storage.names import FileName
from headrace.transport.security import Security

__all__ = ["DistributedSave", "SaveProgress", "distributed_save"]

_log = logging.getLogger(__name__)

_FIRST_LOOK = 0.01
_LAST_LOOK = 0.5


class SaveProgress(NamedTuple):
    """How far a save is.

    Attributes:
        is_done: Whether it is finished, or failed.
        elements: How many elements are in files that count.
        files: How many files that is.
        bytes: How large they are together.
        error: Why it failed; empty: it did not.
    """

    is_done: bool
    elements: int
    files: int
    bytes: int
    error: str


class DistributedSave:
    """A save that the workers of a service carry out, whatever becomes of this process.

    >>> with hr.service.LocalCluster(1, processes=False, work_dir="journal") as cluster:
    ...     save = hr.service.distributed_save(hr.Dataset.range(5), "saved", cluster.target)
    ...     isinstance(save, hr.service.DistributedSave)
    ...     save.wait(timeout=60)
    True

    Args:
        service: The dispatcher.
        save: Id of the save.
        path: The directory.
        security: Keys of this client.
    """

    def __init__(self, service: str, save: str, path: str, security: Security | None) -> None:
        self._service = service
        self._save = save
        self._path = path
        self._security = security

    @property
    def path(self) -> str:
        """The directory, for `Dataset.load`."""
        return self._path

    def progress(self) -> SaveProgress:
        """Return how far it is, as the dispatcher says.

        Raises:
            NotFoundError: The dispatcher does not remember it.
            UnavailableError: The dispatcher did not answer for a minute.
        """
        return _progress(self._ask())

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is finished.

        Args:
            timeout: Seconds to wait; None: as long as it takes.

        Raises:
            HeadraceError: It failed; the message says why.
            DeadlineExceededError: It is not finished yet.
            NotFoundError: The dispatcher does not remember it.
        """
        until = None if timeout is None else time.monotonic() + timeout
        delay = _FIRST_LOOK
        while not (update := self._ask()).is_closed:
            left = delay if until is None else min(delay, until - time.monotonic())
            if left <= 0:
                raise DeadlineExceededError(
                    f"the save into {self._path!r} is not finished after {timeout:g} s: "
                    f"{update.elements} elements are in {update.files} files"
                )
            time.sleep(left)
            delay = min(delay * 1.5, _LAST_LOOK)
        _raise_failure(update, self._path)

    def wait_until_open(self) -> None:
        """Wait until the directory was begun, so that whoever loads it finds it."""
        delay = _FIRST_LOOK
        while not ((update := self._ask()).is_open or update.error):
            time.sleep(delay)
            delay = min(delay * 1.5, _LAST_LOOK)
        if not update.is_open:
            _raise_failure(update, self._path)

    def _ask(self) -> SaveStatus:
        return ask(self._service, self._security, GetSaveStatus(save_id=self._save))

    def __repr__(self) -> str:
        return f"<DistributedSave {self._save} into {self._path!r} by {self._service}>"


def distributed_save(
    dataset: Dataset,
    path: FileName,
    service: str | tuple[str, str],
    compression: str | None = "AUTO",
    *,
    chunk_bytes: int | None = None,
    modules: Sequence[ModuleType | str] = (),
    security: Security | None = None,
) -> DistributedSave:
    """Let the workers of a service write a dataset into a directory, each element once.

    It returns when the directory was begun; the workers go on whatever becomes of this process, and
    through restarts of theirs and of the dispatcher's. `Dataset.load(path, wait=True)` reads what
    is there already and waits for the rest; `wait` of what is returned waits for all, and raises
    what went wrong. The order of the elements is that in which files became whole.

    >>> with hr.service.LocalCluster(2, processes=False, work_dir="journal") as cluster:
    ...     save = hr.service.distributed_save(hr.Dataset.range(5), "saved", cluster.target)
    ...     save.wait()
    >>> sorted(int(x) for x in hr.Dataset.load("saved"))
    [0, 1, 2, 3, 4]

    Args:
        dataset: What to save: one pass over it. Its functions travel with it.
        path: A directory, by path or fsspec URL, that holds no saved dataset. It is the same for
            the dispatcher and all workers.
        service: The dispatcher: "tcp://host:port", "host:port" or ("tcp", "host:port"). It must run
            in the fault tolerant mode.
        compression: "AUTO" or None: files are not compressed, so that they can be mapped.
        chunk_bytes: How large files are to be; None: 64 MiB.
        modules: As in `distribute`.
        security: Keys of this client, for a service that asks for them.

    Raises:
        TypeError, ValueError: An argument is wrong.
        InvalidArgumentError: The dataset is infinite, or the dispatcher keeps no journal.
        AlreadyExistsError: The directory holds a dataset, or one is being saved there.
        FailedPreconditionError: Something in the dataset cannot be pickled, or it cannot be dealt
            to workers; or the directory cannot be written.
        UnavailableError: The dispatcher did not answer for a minute.
    """
    address = parse_service(service)
    if not isinstance(dataset, Dataset):
        raise TypeError(f"`dataset` must be a Dataset, but got {dataset!r}")
    if chunk_bytes is not None:
        check_int("chunk_bytes", chunk_bytes, minimum=1)
    plan = dataset.plan
    if traverse.cardinality(plan) == INFINITE:
        raise InvalidArgumentError(
            "Saving an infinite dataset is not allowed: choose how many elements with take(n)"
        )
    folder = open_folder(path)
    saved.arrow.pyarrow()  # whoever saves wants to load
    where = os.path.abspath(folder.url) if folder.is_local else folder.url
    dataset_id = registered(
        service,
        dataset,
        compression,
        None,
        security,
        modules=checked_modules(modules),
        anonymous=True,
    )
    spec = traverse.element_spec(plan)
    if spec is None:
        spec = traverse.element_spec(prepare(plan).plan)
    own_seed = traverse.merged_options(plan).seed
    save = secrets.token_hex(8)
    begin = StartSave(
        save_id=save,
        dataset_id=dataset_id,
        path=where,
        plan_digest=identity_digest(plan),
        spec=b"" if spec is None else json.dumps(describe_spec(spec)).encode(),
        seed=draw_seed() if own_seed is None else own_seed,
        chunk_bytes=chunk_bytes,
    )
    ask(address, security, begin)
    handle = DistributedSave(address, save, where, security)
    handle.wait_until_open()
    return handle


def _progress(update: SaveStatus) -> SaveProgress:
    return SaveProgress(update.is_closed, update.elements, update.files, update.bytes, update.error)


def _raise_failure(update: SaveStatus, path: str) -> None:
    if not update.error:
        return
    kind = getattr(errors, update.error_class, FailedPreconditionError)
    if kind is AlreadyExistsError:
        raise AlreadyExistsError(update.error)
    if not (isinstance(kind, type) and issubclass(kind, HeadraceError)):
        kind = FailedPreconditionError
    raise kind(f"the dataset could not be saved into {path!r}: {update.error}")
