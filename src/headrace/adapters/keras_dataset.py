"""Datasets for `fit`, `evaluate` and `predict` of Keras 3, on the back ends jax and torch.

Keras requests an iterator at the start of each epoch, and one more to build a model from its first
batch. It takes NumPy arrays without a copy; the dataset is read ahead on its own thread.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, Self

import keras

# Keras accepts subclasses of this class, which has no public name.
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from headrace.adapters.keras_batches import GlobalBatchIterator, check_batches, make_sample_weighter
from headrace.arguments import check_instance, check_int, check_state_version
from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.data.lookahead import next_epoch
from headrace.distribute.dataset import DistributedDataset, DistributedDatasetsFromFunction
from headrace.element.spec import Spec, spec_of
from headrace.element.transpose import map_leaves
from headrace.errors import FailedPreconditionError, InvalidArgumentError
from headrace.parameter_server.pickling import PerWorkerInput
from headrace.plan.buffering import Prefetch
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, UNKNOWN
from headrace.plan.traverse import element_spec

__all__ = ["KerasDataset", "adapter", "dataset"]

_log = logging.getLogger(__name__)

_VERSION = 1
_ZERO_COPY_DTYPES = {
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}


def dataset(
    dataset: Dataset | DistributedDataset | DistributedDatasetsFromFunction,
    *,
    steps: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    prefetch: int = 2,
) -> KerasDataset:
    """Return an input for `fit`, `evaluate` and `predict`: `model.fit(hr.keras.dataset(dataset))`.

    >>> import numpy as np
    >>> import headrace as hr
    >>> rows = hr.Dataset.from_tensor_slices((np.ones((10, 3), "f4"), np.ones(10, "f4")))
    >>> hr.keras.dataset(rows.batch(4)).num_batches
    3

    Args:
        dataset: A dataset of batches: `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, where each
            is an array, or a dict or tuple of arrays. Each epoch reads it once; shuffling is a step
            of the dataset. A batch of a distributed dataset contains the rows of all local
            replicas.
        steps: Batches in an epoch, if the dataset does not know their number (after a filter, or
            over a data service). Without it, Keras warns at the end of the first epoch. If the
            dataset is longer, each epoch reads its first batches, whereas `steps_per_epoch` of
            `fit` continues where the last epoch ended.
        class_weight: Weight of each class; it determines sample weights, also in `evaluate`.
            `class_weight` of `fit` applies only to that call.
        prefetch: Batches to read ahead; a distributed dataset has its own option for this.

    Raises:
        InvalidArgumentError: If elements are known not to be such batches, or there are none.
    """
    return KerasDataset(dataset, steps, class_weight, prefetch)


adapter = dataset
"""Alias of `dataset`."""


class KerasDataset(DataAdapter):  # type: ignore[misc]
    """A dataset as input of Keras; made by `dataset`.

    >>> rows = hr.Dataset.from_tensor_slices((np.ones((10, 3), "f4"), np.ones(10, "f4")))
    >>> data = hr.keras.dataset(rows.batch(4))
    >>> isinstance(data, hr.keras.KerasDataset), data.num_batches
    (True, 3)

    Args:
        dataset: A dataset of batches.
        steps: Batches in an epoch; None reads all batches of the dataset.
        class_weight: Weight of each class.
        prefetch: Batches to read ahead.
    """

    def __init__(
        self,
        dataset: Dataset | DistributedDataset | DistributedDatasetsFromFunction,
        steps: int | None = None,
        class_weight: Mapping[int, float] | None = None,
        prefetch: int = 2,
    ) -> None:
        if isinstance(dataset, PerWorkerInput):
            raise TypeError(
                "`dataset` was distributed by a ParameterServerStrategy, whose workers read it in "
                "scheduled functions, but fit reads in this process: pass the Dataset that was "
                "given to the strategy"
            )
        if not isinstance(dataset, Dataset | DistributedDataset | DistributedDatasetsFromFunction):
            raise TypeError(
                "`dataset` must be a Dataset, or one that a strategy distributed, but got "
                f"{type(dataset).__name__}: make one with Dataset.from_tensor_slices from arrays, "
                "or with Dataset.from_generator from a generator"
            )
        if steps is not None:
            check_int("steps", steps, minimum=1)
        if class_weight is not None:
            check_instance("class_weight", class_weight, Mapping)
        check_int("prefetch", prefetch, minimum=0)
        self._dataset = dataset
        self._steps = steps
        self.class_weight = class_weight
        self._add_sample_weights = (
            None if class_weight is None else make_sample_weighter(class_weight)
        )
        self._open_iterator: Callable[[int], DatasetIterator | GlobalBatchIterator]
        if isinstance(dataset, Dataset):
            self._open_iterator = partial(
                DatasetIterator, _plan_of_batches(dataset, prefetch), for_training=True
            )
        else:
            self._open_iterator = lambda epoch: GlobalBatchIterator(dataset.open_epoch(epoch))
        #: Whether epochs count from those of a state, not from other readings of the dataset.
        self._has_own_numbering = not isinstance(dataset, Dataset)
        self._is_within_epoch = False
        self._reset(0)
        if self.num_batches == 0:
            raise InvalidArgumentError(
                f"{dataset!r:.200} has no batches, but Keras needs at least one: does it have "
                "fewer rows than a batch, which `drop_remainder` drops?"
            )

    def __repr__(self) -> str:
        return f"<KerasDataset of {self._dataset!r}, steps={self._steps}>"

    def _reset(self, number: int) -> None:
        #: The iteration that is being read, or comes next; states refer to it.
        self._current = _DatasetIteration(number)
        #: The iteration that yielded the last batch.
        self._last = self._current

    @property
    def dataset(self) -> Dataset | DistributedDataset | DistributedDatasetsFromFunction:
        """The dataset that was passed in."""
        return self._dataset

    @property
    def steps(self) -> int | None:
        """The argument `steps`."""
        return self._steps

    # --- interface of Keras -----------------------------------------------------------------------

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch; None if infinite, or known only by reading them."""
        _check_arguments(self, sys._getframe(1))
        if self._steps is not None:
            return self._steps
        size = self._dataset.cardinality()
        return None if size in (INFINITE, UNKNOWN) else size

    @property
    def is_infinite(self) -> bool:
        """Whether an epoch ends only if Keras is given a number of steps."""
        return self._steps is None and self._dataset.cardinality() == INFINITE

    def __len__(self) -> int:
        return len(self._dataset) if self._steps is None else self._steps

    def __bool__(self) -> bool:
        return True

    @property
    def batch_size(self) -> int | None:
        """None, because batches may differ in size."""
        return None

    @property
    def has_partial_batch(self) -> bool | None:
        """None, because it is unknown."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """None, because it is unknown."""
        return None

    @property
    def element_spec(self) -> Spec:
        """Spec of the batches."""
        return self._dataset.element_spec

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch, from the first."""
        return self._batches()

    def get_jax_iterator(self) -> Iterator[Any]:
        """Return the same iterator: Keras puts arrays on devices itself."""
        return self._batches()

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Return an iterator over the batches as tensors on Keras' device."""
        return _to_tensors(self._batches())

    def get_tf_dataset(self) -> Any:
        """Raise an error: with the TensorFlow back end, Keras reads only tf.data.

        Raises:
            FailedPreconditionError: Always.
        """
        raise FailedPreconditionError(
            "hr.keras.dataset supports the Keras back ends jax and torch, but the back end is "
            "tensorflow: set KERAS_BACKEND before Keras is imported"
        )

    def on_epoch_begin(self) -> None:
        """Record that an epoch begins or continues."""
        self._is_within_epoch = True

    def on_epoch_end(self) -> None:
        """Record that an epoch has ended."""
        self._is_within_epoch = False

    def with_class_weight(self, class_weight: Mapping[int, float]) -> DataAdapter:
        """Return an adapter with the same batches and the sample weights of their classes.

        Raises:
            ValueError: If the dataset already has class weights.
        """
        if self.class_weight is not None:
            raise ValueError(
                f"`class_weight` of fit is {dict(class_weight)}, but hr.keras.dataset already has "
                f"class_weight={dict(self.class_weight)}: pass it once"
            )
        check_instance("class_weight", class_weight, Mapping)
        return _ClassWeightedDataset(self, make_sample_weighter(class_weight))

    # --- reading ----------------------------------------------------------------------------------

    def _batches(self) -> Iterator[Any]:
        """Yield the batches of an epoch.

        Keras builds a model from the first batch of an iterator that it then drops, in an epoch
        that ends at once. The next iterator repeats that batch, because a shared job delivers it
        only once.
        """
        own = self._begin_iteration()
        first, num_read = own.repeated_batch, 0
        if first is not None:
            own.batches_yielded, own.repeated_batch = 0, None
        elif own.start_state is not None and not own.batches_yielded:
            first = self._next_batch(own)
            if first is None:  # the state was taken at the end of an epoch, before that was known
                self._end_iteration()
                own = self._begin_iteration()
        own.is_being_read = True
        try:
            while self._steps is None or own.batches_before + own.batches_yielded < self._steps:
                batch, first = first, None
                if batch is None:
                    batch = self._next_batch(own)
                    if batch is None:
                        break
                own.batches_yielded += 1
                num_read += 1
                self._last = own
                if not self._current.is_being_read:
                    self._current = own
                yield batch
            if not num_read:
                _log.warning("an epoch of %r has no batches, but Keras needs at least one", self)
            own.close()
            if own is self._current:
                self._end_iteration()
        except GeneratorExit:
            builds_model = self._is_within_epoch and num_read == own.batches_yielded == 1
            if own is not self._current:
                own.close()
            elif builds_model and self.num_batches != 1:  # a single batch may be the whole epoch
                own.repeated_batch = batch
            raise
        finally:
            own.is_being_read = False

    def _begin_iteration(self) -> _DatasetIteration:
        """Return the iteration to read next."""
        current = self._current
        if current.is_being_read and current is self._last:
            # An epoch within one that continues: a callback evaluates on the training data.
            own = _DatasetIteration(self._next_number(current.number))
        elif (
            current.iterator is None
            or current.is_being_read
            or (current.batches_yielded and current.repeated_batch is None)
        ):
            if current.is_being_read:  # its reader was abandoned: another one was read since
                self._reset(current.number + 1)
            self._end_iteration()
            own = self._current
            own.number = self._next_number(own.number)
        else:
            own = current
        if own.iterator is None:
            own.iterator = self._open_iterator(own.number)
        return own

    def _next_batch(self, iteration: _DatasetIteration) -> Any:
        """Return the next batch of an iteration in Keras' form, or None at the end."""
        assert iteration.iterator is not None
        batch = next(iteration.iterator, None)
        return None if batch is None else self._prepare_batch(batch)

    def _prepare_batch(self, batch: Any) -> Any:
        check_batches(spec_of(batch))
        return batch if self._add_sample_weights is None else self._add_sample_weights(batch)

    def _next_number(self, minimum: int) -> int:
        if self._has_own_numbering or not isinstance(self._dataset, Dataset):
            return minimum
        return next_epoch(self._dataset, minimum)

    def _end_iteration(self) -> None:
        """End the current iteration, so that the next one follows."""
        if self._current.iterator is not None:
            self._current.close()
            self._reset(self._current.number + 1)

    @property
    def _is_complete(self) -> bool:
        """Whether all batches of the iteration were yielded."""
        current = self._current
        is_begun = current.iterator is not None and current.repeated_batch is None
        return is_begun and current.batches_before + current.batches_yielded == self.num_batches

    # --- state ------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the position of the next batch: a JSON value.

        With JAX on an accelerator, Keras reads one batch more than it has used: take states at the
        end of an epoch there.
        """
        current = self._current
        if current.iterator is None or self._is_complete:
            epoch = current.number + self._is_complete
            return {"version": _VERSION, "epoch": epoch, "iterator": None}
        is_unused = current.repeated_batch is not None  # only used to build a model
        iterator = current.start_state if is_unused else current.iterator.get_state()
        state = {"version": _VERSION, "epoch": current.number, "iterator": iterator}
        if self._steps is None or iterator is None:
            return state
        # The epoch may be shorter than the dataset, so the state counts its batches.
        num_yielded = current.batches_before + current.batches_yielded - is_unused
        return {**state, "num_yielded": num_yielded}

    def set_state(self, state: dict[str, Any]) -> None:
        """Start the next epoch where `state` was taken; it ends where that epoch does.

        Raises:
            FailedPreconditionError: If the state is of another dataset or version.
        """
        if not isinstance(state, dict) or not {"version", "epoch", "iterator"} <= state.keys():
            raise TypeError(
                "`state` must be a result of `get_state` of hr.keras.dataset, but got "
                f"{state!r:.80}"
            )
        check_state_version(state["version"], _VERSION)
        epoch = check_int("state['epoch']", state["epoch"], minimum=0)
        num_yielded = check_int("state['num_yielded']", state.get("num_yielded", 0), minimum=0)
        iterator = None
        if state["iterator"] is not None:
            iterator = self._open_iterator(epoch)
            iterator.set_state(state["iterator"])
        self.close()
        self._reset(epoch)
        self._current.iterator = iterator
        self._current.start_state = state["iterator"]
        self._current.batches_before = num_yielded
        self._has_own_numbering = True

    state_dict = get_state
    load_state_dict = set_state

    def close(self) -> None:
        """Release threads and files; the next read starts a new epoch. Idempotent."""
        self._end_iteration()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _ClassWeightedDataset(DataAdapter):  # type: ignore[misc]
    """A dataset with class weights for one call of `fit`.

    Separate from `KerasDataset`, which may also be validation data of the same call.
    """

    def __init__(self, data: KerasDataset, add_sample_weights: Callable[[Any], Any]) -> None:
        self._data = data
        self._add_sample_weights = add_sample_weights
        self.on_epoch_begin = data.on_epoch_begin
        self.on_epoch_end = data.on_epoch_end

    def get_numpy_iterator(self) -> Iterator[Any]:
        return map(self._add_sample_weights, self._data.get_numpy_iterator())

    get_jax_iterator = get_numpy_iterator

    def get_torch_dataloader(self) -> Iterator[Any]:
        return _to_tensors(self.get_numpy_iterator())

    @property
    def num_batches(self) -> int | None:
        return self._data.num_batches

    batch_size = has_partial_batch = partial_batch_size = None


def _to_tensors(batches: Iterator[Any]) -> Iterator[Any]:
    """Convert batches to PyTorch tensors on Keras' device."""
    import torch  # noqa: PLC0415 - optional dependency

    def tensor(array: Any) -> Any:
        # Keras copies arrays, but not tensors.
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        is_zero_copy = array.dtype.name in _ZERO_COPY_DTYPES
        return keras.ops.convert_to_tensor(torch.from_numpy(array) if is_zero_copy else array)

    return (map_leaves(tensor, batch) for batch in batches)


class _DatasetIteration:
    """One reading of the dataset.

    Attributes:
        number: Epoch number.
        iterator: Its iterator; None if nothing was read.
        start_state: State that it continues from; None is the start of the epoch.
        batches_before: Batches of the epoch that were yielded before that state.
        batches_yielded: Batches yielded since then.
        repeated_batch: A batch that was yielded to build a model, and is yielded again.
        is_being_read: Whether an iterator of Keras reads it now.
    """

    __slots__ = (
        "batches_before",
        "batches_yielded",
        "is_being_read",
        "iterator",
        "number",
        "repeated_batch",
        "start_state",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.iterator: DatasetIterator | GlobalBatchIterator | None = None
        self.start_state: dict[str, Any] | None = None
        self.batches_before = 0
        self.batches_yielded = 0
        self.repeated_batch: Any = None
        self.is_being_read = False

    def close(self) -> None:
        """Release the iterator."""
        if self.iterator is not None:
            self.iterator.close()


def _plan_of_batches(dataset: Dataset, prefetch: int) -> Node:
    """Return the plan of a dataset, after a check that its elements are batches if known."""
    plan: Node = dataset.plan
    spec = element_spec(plan)
    if spec is not None:
        check_batches(spec)
    is_read_ahead = isinstance(plan, Prefetch) or not prefetch
    return plan if is_read_ahead else Prefetch(input=plan, buffer_size=prefetch)


def _check_arguments(data: KerasDataset, caller: FrameType) -> None:
    """Check the arguments of Keras' own epoch iterator, if that is the caller.

    In `model.fit(hr.keras.dataset(...))`, Python looks up `fit` before the first use of `hr.keras`
    replaces it with a method that checks the arguments.
    """
    given = caller.f_locals
    if caller.f_code.co_name != "__init__" or not {"x", "steps_per_epoch"} <= given.keys():
        return
    if data.is_infinite and not given["steps_per_epoch"]:
        raise ValueError(
            "the epoch would never end: the dataset is infinite, and no number of steps is given. "
            "Pass steps_per_epoch=n, or use hr.keras.dataset(dataset, steps=n)"
        )
    for name in ("y", "sample_weight", "class_weight"):
        if given.get(name) is not None:
            raise ValueError(
                f"Keras would ignore `{name}` in this call. Create the dataset in a statement "
                "before the call: data = hr.keras.dataset(...), then "
                f"model.fit(data, ...{name}=...)"
            )
