"""Distributed saving: the workers of a service write a dataset, each element once."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Literal, NamedTuple

from headrace import errors, saved
from headrace.argument_names import explain_unknown_arguments
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
from headrace.service.by_value import check_modules
from headrace.service.config import parse_service
from headrace.service.dataset_registration import call_dispatcher, register_with_service
from headrace.service.messages import GetSaveStatus, SaveStatus, StartSave
from headrace.storage.files import open_folder
from headrace.storage.names import FileName
from headrace.transport.security import Security

__all__ = ["DistributedSave", "SaveProgress", "distributed_save"]

_log = logging.getLogger(__name__)

_FIRST_POLL_SECONDS = 0.01
_MAX_POLL_SECONDS = 0.5


class SaveProgress(NamedTuple):
    """Progress of a save.

    Attributes:
        is_done: Whether it has finished or failed.
        elements: Number of elements in committed files.
        files: Number of these files.
        bytes: Total size of these files.
        error: Why it failed; empty if it did not.
    """

    is_done: bool
    elements: int
    files: int
    bytes: int
    error: str


class DistributedSave:
    """Handle of a save that the workers of a service run, independently of this process.

    >>> with hr.service.LocalCluster(1, processes=False, work_dir="journal") as cluster:
    ...     save = hr.service.distributed_save(hr.Dataset.range(5), "saved", cluster.target)
    ...     isinstance(save, hr.service.DistributedSave)
    ...     save.wait(timeout=60)
    True

    Args:
        service: Address of the dispatcher.
        save: ID of the save.
        path: Directory of the saved dataset.
        security: Keys of this client.
    """

    def __init__(self, service: str, save: str, path: str, security: Security | None) -> None:
        self._service = service
        self._save = save
        self._path = path
        self._security = security

    @property
    def path(self) -> str:
        """Directory of the saved dataset, for `Dataset.load`."""
        return self._path

    def progress(self) -> SaveProgress:
        """Return the progress, as reported by the dispatcher.

        Raises:
            NotFoundError: If the dispatcher does not know the save.
            UnavailableError: If the dispatcher did not reply for a minute.
        """
        return _progress(self._get_status())

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save is finished.

        Args:
            timeout: Seconds to wait; None for no limit.

        Raises:
            HeadraceError: If the save failed; the message has the reason.
            DeadlineExceededError: If it is not finished within `timeout`.
            NotFoundError: If the dispatcher does not know the save.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        delay = _FIRST_POLL_SECONDS
        while not (status := self._get_status()).is_closed:
            pause = delay if deadline is None else min(delay, deadline - time.monotonic())
            if pause <= 0:
                raise DeadlineExceededError(
                    f"the save into {self._path!r} did not finish within {timeout:g} s; "
                    f"{status.elements} elements in {status.files} files are complete"
                )
            time.sleep(pause)
            delay = min(delay * 1.5, _MAX_POLL_SECONDS)
        _raise_failure(status, self._path)

    def wait_until_open(self) -> None:
        """Wait until the directory exists, so that it can be loaded."""
        delay = _FIRST_POLL_SECONDS
        while not ((status := self._get_status()).is_open or status.error):
            time.sleep(delay)
            delay = min(delay * 1.5, _MAX_POLL_SECONDS)
        if not status.is_open:
            _raise_failure(status, self._path)

    def _get_status(self) -> SaveStatus:
        return call_dispatcher(self._service, self._security, GetSaveStatus(save_id=self._save))

    def __repr__(self) -> str:
        return f"<DistributedSave {self._save} into {self._path!r} by {self._service}>"


@explain_unknown_arguments
def distributed_save(
    dataset: Dataset,
    path: FileName,
    service: str | tuple[str, str],
    compression: Literal["AUTO"] | None = "AUTO",
    *,
    chunk_bytes: int | None = None,
    modules: Sequence[ModuleType | str] = (),
    security: Security | None = None,
) -> DistributedSave:
    """Let the workers of a service write a dataset into a directory, each element once.

    It returns when the directory exists. The save continues independently of this process, and
    after restarts of workers and of the dispatcher. `Dataset.load(path, wait=True)` reads the
    finished part and waits for the rest; the `wait` method of the result waits for the end and
    raises the error of a failed save. Elements are ordered by the completion of their files.

    >>> with hr.service.LocalCluster(2, processes=False, work_dir="journal") as cluster:
    ...     save = hr.service.distributed_save(hr.Dataset.range(5), "saved", cluster.target)
    ...     save.wait()
    >>> sorted(int(x) for x in hr.Dataset.load("saved"))
    [0, 1, 2, 3, 4]

    Args:
        dataset: The dataset; one epoch of it is saved. Its functions are sent with it.
        path: A directory, as a path or fsspec URL, without a saved dataset. The dispatcher and all
            workers must access the same directory.
        service: The dispatcher: "tcp://host:port", "host:port" or ("tcp", "host:port"). It must run
            in fault-tolerant mode.
        compression: "AUTO", or None for uncompressed files, which can be memory-mapped.
        chunk_bytes: Size of the files; None for 64 MiB.
        modules: As in `distribute`.
        security: Keys of this client, for a service that requires them.

    Raises:
        TypeError, ValueError: If an argument is invalid.
        InvalidArgumentError: If the dataset is infinite, or the dispatcher keeps no journal.
        AlreadyExistsError: If the directory holds a dataset, or one is being saved there.
        FailedPreconditionError: If something in the dataset cannot be pickled, if the dataset
            cannot be divided into splits, or if the directory cannot be written.
        UnavailableError: If the dispatcher did not reply for a minute.
    """
    address = parse_service(service)
    if not isinstance(dataset, Dataset):
        raise TypeError(f"`dataset` must be a Dataset, but got {dataset!r}")
    if chunk_bytes is not None:
        check_int("chunk_bytes", chunk_bytes, minimum=1)
    plan = dataset.plan
    if traverse.cardinality(plan) == INFINITE:
        raise InvalidArgumentError(
            "Saving an infinite dataset is not allowed: limit it with take(n)"
        )
    folder = open_folder(path)
    saved.arrow.pyarrow()  # loading will require it
    url = os.path.abspath(folder.url) if folder.is_local else folder.url
    dataset_id = register_with_service(
        service,
        dataset,
        compression,
        None,
        security,
        modules=check_modules(modules),
        anonymous=True,
    )
    spec = traverse.element_spec(plan)
    if spec is None:
        spec = traverse.element_spec(prepare(plan).plan)
    own_seed = traverse.merged_options(plan).seed
    save_id = secrets.token_hex(8)
    request = StartSave(
        save_id=save_id,
        dataset_id=dataset_id,
        path=url,
        plan_digest=identity_digest(plan),
        spec=b"" if spec is None else json.dumps(describe_spec(spec)).encode(),
        seed=draw_seed() if own_seed is None else own_seed,
        chunk_bytes=chunk_bytes,
    )
    call_dispatcher(address, security, request)
    handle = DistributedSave(address, save_id, url, security)
    handle.wait_until_open()
    return handle


def _progress(status: SaveStatus) -> SaveProgress:
    return SaveProgress(status.is_closed, status.elements, status.files, status.bytes, status.error)


def _raise_failure(status: SaveStatus, path: str) -> None:
    if not status.error:
        return
    error_class = getattr(errors, status.error_class, FailedPreconditionError)
    if error_class is AlreadyExistsError:
        raise AlreadyExistsError(status.error)
    if not (isinstance(error_class, type) and issubclass(error_class, HeadraceError)):
        error_class = FailedPreconditionError
    raise error_class(f"the dataset could not be saved into {path!r}: {status.error}")
