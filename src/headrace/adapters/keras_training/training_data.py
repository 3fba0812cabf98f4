"""Batches that `fit`, `evaluate` and `predict` read; `hr.keras.DatasetCreator`.

A `Dataset` and an `hr.keras.dataset` are read as they are. Arrays become a shuffled `Dataset`.
Anything else that Keras reads (a generator, a PyDataset, a DataLoader of PyTorch) comes
through Keras' own adapter.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import keras
import numpy as np

# Keras takes whatever derives from this; it has no public name.
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from headrace.adapters.keras_dataset import KerasDataset
from headrace.adapters.keras_training.keras_internals import data_adapter, draw_keras_seed
from headrace.arguments import check_callable, check_instance
from headrace.data.dataset import Dataset
from headrace.data.iterator import DatasetIterator
from headrace.distribute.dataset import DistributedDataset, DistributedDatasetsFromFunction
from headrace.distribute.input_context import InputContext, InputOptions
from headrace.distribute.iterator import DistributedIterator
from headrace.element.structure import flatten, unflatten
from headrace.parameter_server.pickling import PerWorkerInput

__all__ = [
    "DatasetCreator",
    "TrainingData",
    "are_arrays",
    "dataset_of_arrays",
    "split_for_validation",
]


class DatasetCreator(DataAdapter):  # type: ignore[misc]
    """Function that creates training data: `model.fit(creator, steps_per_epoch=...)`.

    Without a strategy `fit`, `evaluate` and `predict` call the function once, with
    `InputContext(1, 0, 1)`, and read its dataset as `hr.keras.dataset` does.

    >>> import headrace as hr
    >>> creator = hr.keras.DatasetCreator(
    ...     lambda context: hr.Dataset.range(8).shard(
    ...         context.num_input_pipelines, context.input_pipeline_id
    ...     ).batch(context.get_per_replica_batch_size(4))
    ... )
    >>> creator(hr.distribute.InputContext(2, 1, 2)).element_spec.dtype
    dtype('int64')

    Args:
        dataset_fn: A function of an `hr.distribute.InputContext` that returns a Dataset of batches.
        input_options: Options for the strategy that distributes the dataset.

    Raises:
        TypeError: If `dataset_fn` is not callable, or `input_options` is not an `InputOptions`.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        input_options: InputOptions | None = None,
    ) -> None:
        check_callable("dataset_fn", dataset_fn)
        if input_options is not None:
            check_instance("input_options", input_options, InputOptions)
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    def __call__(self, context: InputContext) -> Dataset:
        """Return the dataset of an input pipeline.

        Raises:
            TypeError: If the function returned anything but a Dataset.
        """
        check_instance("context", context, InputContext)
        dataset = self.dataset_fn(context)
        if not isinstance(dataset, Dataset):
            raise TypeError(
                "`dataset_fn` of hr.keras.DatasetCreator must return a Dataset, but returned "
                f"{dataset!r:.80} of type {type(dataset).__name__}"
            )
        return dataset

    def open_data(self) -> KerasDataset:
        """Return the dataset for use without a strategy, as a data adapter of Keras."""
        return KerasDataset(self(InputContext(1, 0, 1)))

    def __repr__(self) -> str:
        return f"DatasetCreator({self.dataset_fn!r})"

    # --- Keras' data adapter interface, for a `fit` that was looked up before Headrace patched it -

    def close(self) -> None:
        """Release the threads and files of such a `fit`. Idempotent."""
        if "_data" in vars(self):
            self._data.close()
            del self._data

    @cached_property
    def _data(self) -> KerasDataset:
        return self.open_data()

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch, as NumPy arrays."""
        return self._data.get_numpy_iterator()

    def get_jax_iterator(self) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch, as arrays that JAX accepts."""
        return self._data.get_jax_iterator()

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch, as PyTorch tensors."""
        return self._data.get_torch_dataloader()

    def on_epoch_begin(self) -> None:
        """Record that an epoch begins, or continues."""
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Record that an epoch has ended."""
        self._data.on_epoch_end()

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch; None if unknown or infinite."""
        return self._data.num_batches

    batch_size = has_partial_batch = partial_batch_size = None


_log = logging.getLogger(__name__)

_UNSUPPORTED_INPUTS = (
    DistributedDataset,
    DistributedDatasetsFromFunction,
    DatasetIterator,
    DistributedIterator,
    PerWorkerInput,
)


class TrainingData:
    """The batches of one call of `fit`, `evaluate` or `predict`.

    Args:
        method: Name of the method, for errors.
        x: Inputs that Keras accepts, or a Dataset of batches.
        y: Labels, if `x` is an array.
        sample_weight: Weights, if `x` is an array.
        batch_size: Batch size of arrays; None: 32.
        steps: Number of batches in an epoch; None reads all data.
        steps_argument: Name of `steps` among the method's arguments, for errors.
        shuffle: Whether arrays are shuffled before each epoch.
        class_weight: Weight of each class, by class index.
        restarts: Whether each epoch begins at the start of the data, even if the previous epoch
            ended before their end.
    """

    def __init__(
        self,
        method: str,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        steps_argument: str = "steps",
        shuffle: bool = False,
        class_weight: Mapping[int, float] | None = None,
        restarts: bool = False,
    ) -> None:
        if isinstance(x, _UNSUPPORTED_INPUTS):
            raise TypeError(
                f"{method} got a {type(x).__name__}, which is read by workers: pass the Dataset "
                "that was given to the strategy; each batch is sent to one worker"
            )
        #: Dataset that this object created and must close; None if the caller created it.
        self._own_dataset: KerasDataset | None = None
        self._class_weight = class_weight
        #: Seed for shuffling arrays; None without shuffling.
        self._seed: int | None = None
        self._arrays: Callable[[int | None], Dataset] | None = None
        if are_arrays(x):
            self._arrays = functools.partial(
                dataset_of_arrays, method, x, y, sample_weight, batch_size or 32, shuffle
            )
            self._seed = draw_keras_seed() if shuffle else None
            x = self._arrays(self._seed)
        if isinstance(x, Dataset):
            x = self._own_dataset = KerasDataset(x, None, class_weight)
        elif isinstance(x, DatasetCreator):
            x = self._own_dataset = x.open_data()
        elif isinstance(x, KerasDataset):
            x = x if class_weight is None else x.with_class_weight(class_weight)
        else:
            x = data_adapter(
                x=x,
                y=y,
                sample_weight=sample_weight,
                batch_size=batch_size,
                steps_per_epoch=steps,
                shuffle=shuffle,
                class_weight=class_weight,
            )
        self._adapter = x
        self._steps = steps
        self._restarts = restarts
        if steps is None and getattr(x, "is_infinite", False):
            raise ValueError(
                f"{method} would never end: the dataset is infinite, and `{steps_argument}` is not "
                f"given. Pass {steps_argument}=n"
            )
        self._iterator: Iterator[Any] | None = None
        self._peeked: list[Any] = []

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch; None if it is unknown before the data are read."""
        return self._steps or self._adapter.num_batches

    def peek(self) -> Any:
        """Return the first batch of the next epoch without consuming it.

        Raises:
            ValueError: If there is none.
        """
        if not self._peeked:
            batch = next(self._open_iterator(), None)
            if batch is None:
                raise ValueError("the dataset has no batches, but Keras needs at least one")
            self._peeked.append(batch)
        return self._peeked[0]

    def epoch(self, done: int = 0) -> Iterator[Any]:
        """Yield the remaining batches of an epoch.

        With `steps`, the next epoch continues where this one ends, unless `restarts` is set. If the
        data end earlier, the epoch ends with a warning.

        Args:
            done: Number of batches of the epoch before a restored state.
        """
        self._adapter.on_epoch_begin()
        count = done
        while self._steps is None or count < self._steps:
            batch = self._peeked.pop() if self._peeked else next(self._open_iterator(), None)
            if batch is None:
                self._iterator = None
                if self._steps is not None:
                    _log.warning(
                        "the data ended after %d of the %d steps of an epoch; to read them several "
                        "times, repeat() the dataset",
                        count,
                        self._steps,
                    )
                break
            count += 1
            yield batch
        if self._restarts or self._steps is None or self._steps == self._adapter.num_batches:
            self._end_iteration()
        self._adapter.on_epoch_end()

    def _open_iterator(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._adapter.get_numpy_iterator())
        return self._iterator

    def get_state(self) -> dict[str, Any]:
        """Return the position of the next batch: a JSON value."""
        position = None
        if isinstance(self._adapter, KerasDataset):
            position = self._adapter.get_state()
        return {"seed": self._seed, "position": position}

    def set_state(self, state: dict[str, Any], batch: int) -> None:
        """Continue at a state.

        Args:
            state: Result of `get_state` for the same data, possibly in an earlier process.
            batch: Number of batches of the epoch before the state; if the data cannot restore
                states, this many batches are read and dropped.
        """
        self._end_iteration()
        if self._arrays is not None and state["seed"] != self._seed:
            self.close()
            self._seed = state["seed"]
            dataset = self._arrays(self._seed)
            self._adapter = self._own_dataset = KerasDataset(dataset, None, self._class_weight)
        if state["position"] is not None and isinstance(self._adapter, KerasDataset):
            self._adapter.set_state(state["position"])
            return
        for _ in range(batch):
            next(self._open_iterator(), None)

    def close(self) -> None:
        """Release threads and files. Idempotent."""
        self._end_iteration()
        if self._own_dataset is not None:
            self._own_dataset.close()

    def _end_iteration(self) -> None:
        """Close the iterator over the data; the next epoch opens another one."""
        iterator, self._iterator = self._iterator, None
        self._peeked.clear()
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def split_for_validation(
    x: Any, y: Any, sample_weight: Any, fraction: float
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Split arrays into rows for training and the last rows, for validation.

    Raises:
        ValueError: If the inputs are not arrays, or one part would be empty.
    """
    if not are_arrays(x):
        raise ValueError(
            "`validation_split` is for arrays; of a dataset take validation_data with take() and "
            "skip()"
        )
    leaves, _ = flatten(x)
    rows = len(leaves[0])
    split_row = math.floor(rows * (1.0 - fraction))
    if split_row in (0, rows):
        raise ValueError(
            f"`validation_split` is {fraction}, which leaves no rows of {rows} on one side"
        )
    before = tuple(_rows(each, slice(None, split_row)) for each in (x, y, sample_weight))
    after = tuple(_rows(each, slice(split_row, None)) for each in (x, y, sample_weight))
    return (before[0], before[1], before[2]), (after[0], after[1], after[2])


def _rows(value: Any, which: slice) -> Any:
    if value is None:
        return None
    leaves, structure = flatten(value)
    return unflatten(structure, [np.asarray(each)[which] for each in leaves])


def are_arrays(x: Any) -> bool:
    """Return whether a value is an array, or arrays in a tuple, list or dict."""
    if isinstance(x, list):
        x = tuple(x)
    try:
        leaves, _ = flatten(x)
    except Exception:  # not a structure of arrays
        return False
    return bool(leaves) and all(_is_array(each) for each in leaves)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (
        hasattr(value, "__array__") and bool(getattr(value, "shape", ()))
    )


def dataset_of_arrays(
    method: str,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int,
    shuffle: bool,
    seed: int | None,
) -> Dataset:
    """Return a dataset of batches of arrays.

    Args:
        method: Name of the method that got the arguments, for errors.
        x: Arrays of inputs.
        y: Labels, or None.
        sample_weight: Weights, or None.
        batch_size: Number of rows in a batch.
        shuffle: Whether rows are shuffled before each epoch.
        seed: Seed for shuffling; None draws one.

    Raises:
        ValueError: If the arrays' numbers of rows differ, or there are weights without labels.
    """
    if sample_weight is not None and y is None:
        raise ValueError(f"`sample_weight` of {method} is given without `y`")
    parts = [each for each in (x, y, sample_weight) if each is not None]
    leaves, structure = flatten(
        tuple(tuple(each) if isinstance(each, list) else each for each in parts)
    )
    arrays = [_to_floatx(np.asarray(keras.ops.convert_to_numpy(each))) for each in leaves]
    sizes = {len(each) for each in arrays}
    if len(sizes) > 1:
        raise ValueError(
            f"arrays given to {method} have different numbers of rows: {sorted(sizes)}"
        )
    dataset = Dataset.from_tensor_slices(unflatten(structure, arrays))
    if shuffle:
        dataset = dataset.shuffle(max(sizes), seed=seed)
    return dataset.batch(batch_size)


def _to_floatx(array: Any) -> Any:
    return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array
