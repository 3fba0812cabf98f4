"""Loaders: a dataset as an iterable of tensors with a state, for PyTorch training loops."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils.data import IterableDataset, get_worker_info

from headrace.adapters.torch_device_transfer import DeviceTransfer, StreamTransfer, make_transfer
from headrace.adapters.torch_iterator import LoaderIterator, OpenedEpoch, check_loader_state
from headrace.adapters.torch_loader_epochs import DatasetEpochs, DistributedDatasetEpochs
from headrace.adapters.torch_sharding import DataShard
from headrace.arguments import check_flag, check_int
from headrace.data.dataset import Dataset
from headrace.data.missing_names import explain_unknown_arguments
from headrace.distribute.dataset import ReplicaDataset
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError

__all__ = ["Loader", "loader", "to_torch"]


@explain_unknown_arguments
def loader(
    dataset: Any,
    device: Any = None,
    prefetch: int = 2,
    *,
    shard: bool | tuple[int, int] = True,
    drop_remainder: bool = True,
) -> Loader:
    """Return an iterable of a dataset's elements as tensors, for a training loop of PyTorch.

    >>> import headrace as hr
    >>> for batch in hr.torch.loader(hr.Dataset.range(5).batch(3)):
    ...     print(batch)
    tensor([0, 1, 2])
    tensor([3, 4])

    Each iteration over it reads one epoch of the dataset. Tensors are writable, in the structure of
    the elements, and share the arrays' memory; `str` and `bytes` are not converted.

    Args:
        dataset: A Dataset, of this process or over a data service; or a distributed dataset, whose
            values for several replicas are `PerReplica`s of tensors.
        device: Device of the tensors, as for `torch.device`; None leaves them in this process's
            memory. To a CUDA device they are copied from pinned memory while it computes.
        prefetch: Number of elements to prepare, and copy to the device, ahead of their use. A
            dataset that reads ahead itself is not prefetched again, unless elements are copied.
        shard: Whether each rank of torch.distributed, if it is initialized, reads a separate shard:
            every n-th element. (n, i) reads shard i of n on any rank, for instance if several
            ranks hold parts of one model and need the same data. True does not shard datasets of a
            data service, distributed datasets, those with `AutoShardPolicy.OFF`, and those with a
            step `shard(world_size, rank)`.
        drop_remainder: Whether all ranks get the same number of elements: at the end, elements
            are dropped if there is not one for every rank.
    """
    return Loader(dataset, device, prefetch, shard=shard, drop_remainder=drop_remainder)


to_torch = loader
"""Alias of `loader`."""


class Loader(IterableDataset):  # type: ignore[misc]
    """Yields the elements of a dataset as tensors; made by `loader`.

    `state_dict` and `load_state_dict` refer to the most recent iterator, so a loader is saved like
    modules and optimizers. It is also an IterableDataset: each worker process of a
    `DataLoader(loader, batch_size=None)` reads its own part.

    >>> loader = hr.torch.loader(hr.Dataset.range(4).batch(2))
    >>> [batch.tolist() for batch in loader]
    [[0, 1], [2, 3]]
    >>> isinstance(loader, hr.torch.Loader)
    True
    """

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        prefetch: int = 2,
        *,
        shard: bool | tuple[int, int] = True,
        drop_remainder: bool = True,
    ) -> None:
        check_flag("drop_remainder", drop_remainder, or_none=False)
        self._device = None if device is None else torch.device(device)
        self._prefetch = check_int("prefetch", prefetch, minimum=0)
        self._epochs = _make_epochs(dataset, self._prefetch, _check_shard(shard), drop_remainder)
        #: Number of the next epoch.
        self._next_epoch = 0
        self._iterator: LoaderIterator | None = None
        #: Whether `_iterator` was made only to get the initial state, and is not in use yet.
        self._is_unclaimed = False
        #: Start state of the next iterator.
        self._state: dict[str, Any] | None = None

    # --- reading ------------------------------------------------------------------------------

    def __iter__(self) -> LoaderIterator:
        iterator, is_unclaimed = self._iterator, self._is_unclaimed
        self._is_unclaimed = False
        # Not in a forked worker process, which reads a different part.
        if iterator is not None and is_unclaimed and get_worker_info() is None:
            return iterator
        state, self._state = self._state, None
        opened = self._open(state)
        self._next_epoch = opened.epoch + 1
        self._iterator = LoaderIterator(opened, self._make_transfer(), self._open)
        return self._iterator

    def __len__(self) -> int:
        return len(self._epochs)

    def __bool__(self) -> bool:
        return True  # so that `if loader:` does not call `__len__`

    @property
    def element_spec(self) -> Spec:
        """Spec of the dataset's elements."""
        return self._epochs.element_spec

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, by which shuffles differ between epochs.

        Epochs are counted automatically, except in worker processes of a DataLoader that end with
        each epoch: call it before each epoch there, as for a DistributedSampler. Epochs of a named
        job of a data service are counted there, too.
        """
        self._next_epoch = check_int("epoch", epoch, minimum=0)
        if self._is_unclaimed:
            self._drop_iterator()

    # --- states -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the most recent iterator: a small JSON value.

        After the last element of an epoch and StopIteration, it is the start of the next epoch.

        Raises:
            FailedPreconditionError: If the state could not be restored, for instance because the
                dataset reads from a data service.
        """
        if self._state is not None:
            return self._state
        if self._iterator is None:
            self._iterator, self._is_unclaimed = iter(self), True
        return self._iterator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iterator where `state` was taken.

        The state may be of a different number of ranks, and of any of them, if all ranks had taken
        the same number of elements, and elements are sharded individually.
        """
        check_loader_state(state)
        self._drop_iterator()
        if state["ended"]:
            self._state, self._next_epoch = None, state["epoch"] + 1
        else:
            self._state = state

    get_state = state_dict
    set_state = load_state_dict

    def close(self) -> None:
        """Release the threads and files of the most recent iterator. Idempotent.

        Its state remains available; another iteration begins the next epoch.
        """
        self._is_unclaimed = False
        if self._iterator is not None:
            self._iterator.close()

    def _drop_iterator(self) -> None:
        self.close()
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__, _iterator=None, _is_unclaimed=False)

    def __repr__(self) -> str:
        return f"<Loader of {self._epochs!r}, device={self._device}, prefetch={self._prefetch}>"

    def _open(self, state: dict[str, Any] | None) -> OpenedEpoch:
        return self._epochs.open(self._next_epoch, state, self._make_transfer())

    def _make_transfer(self) -> DeviceTransfer | None:
        transfer = make_transfer(self._device)
        if isinstance(transfer, StreamTransfer) and get_worker_info() is not None:
            raise FailedPreconditionError(
                f"a worker process of a DataLoader cannot pass tensors on {self._device} to its "
                "parent: omit `device` and use DataLoader(..., pin_memory=True), or iterate over "
                "the loader itself"
            )
        return transfer


def _make_epochs(
    dataset: Any, prefetch: int, shard: bool | DataShard, drop_remainder: bool
) -> DatasetEpochs | DistributedDatasetEpochs:
    if isinstance(dataset, Dataset):
        return DatasetEpochs(dataset, prefetch, shard, drop_remainder)
    if isinstance(dataset, ReplicaDataset):
        return DistributedDatasetEpochs(dataset)
    raise TypeError(
        "`dataset` must be a Dataset, or one that a strategy distributed, but got "
        f"{type(dataset).__name__}; convert a PyTorch dataset with hr.torch.from_torch"
    )


def _check_shard(shard: Any) -> bool | DataShard:
    if isinstance(shard, bool):
        return shard
    if isinstance(shard, tuple) and len(shard) == 2:
        count = check_int("num_shards", shard[0], minimum=1)
        return DataShard(count, check_int("index", shard[1], minimum=0, maximum=count - 1))
    raise TypeError(
        f"`shard` must be True, False or a tuple (num_shards, index), but got {shard!r:.80}"
    )
