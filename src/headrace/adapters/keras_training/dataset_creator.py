"""`hr.keras.DatasetCreator`: a function that makes the dataset of an input pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

# Keras takes whatever derives from this; it has no public name.
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from headrace.adapters.keras_dataset import KerasDataset
from headrace.arguments import check_callable, check_instance
from headrace.data.dataset import Dataset
from headrace.distribute.input_context import InputContext, InputOptions

__all__ = ["DatasetCreator"]


class DatasetCreator(DataAdapter):  # type: ignore[misc]
    """Training data by the function that makes it: `model.fit(creator, steps_per_epoch=...)`.

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
        input_options: How a strategy distributes it.

    Raises:
        TypeError: `dataset_fn` is no function, or `input_options` are no `InputOptions`.
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
            TypeError: The function returned something else.
        """
        check_instance("context", context, InputContext)
        made = self.dataset_fn(context)
        if not isinstance(made, Dataset):
            raise TypeError(
                "`dataset_fn` of hr.keras.DatasetCreator must return a Dataset, but returned "
                f"{made!r:.80} of type {type(made).__name__}"
            )
        return made

    def open_data(self) -> KerasDataset:
        """Return the dataset of a program without a strategy, as Keras reads it."""
        return KerasDataset(self(InputContext(1, 0, 1)))

    def __repr__(self) -> str:
        return f"DatasetCreator({self.dataset_fn!r})"

    # --- a `fit` that was looked up before Headrace replaced it -----------------------------------

    def close(self) -> None:
        """Release threads and files of such a `fit`; others do it themselves. Idempotent."""
        if "_data" in vars(self):
            self._data.close()
            del self._data

    @cached_property
    def _data(self) -> KerasDataset:
        return self.open_data()

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Return an iterator over the batches of a pass."""
        return self._data.get_numpy_iterator()

    def get_jax_iterator(self) -> Iterator[Any]:
        """Return the same."""
        return self._data.get_jax_iterator()

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Return the same as tensors."""
        return self._data.get_torch_dataloader()

    def on_epoch_begin(self) -> None:
        """Record that a pass begins, or continues."""
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Record that an epoch is over."""
        self._data.on_epoch_end()

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch; None: unknown, or infinite."""
        return self._data.num_batches

    batch_size = has_partial_batch = partial_batch_size = None
