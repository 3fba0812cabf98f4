"""Parts of `Dataset`: choosing between datasets; padded batches, windows and buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from headrace.data.absent import AbsentNames
from headrace.plan.batching import PaddedBatch
from headrace.plan.combining import Choose, Sample
from headrace.plan.node import Node, call_site
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow

__all__ = ["Choosing", "Windows"]


class Choosing(metaclass=AbsentNames):
    """Makes a dataset of several, whose elements come one by one from any of them."""

    if TYPE_CHECKING:

        @property
        def plan(self) -> Node: ...  # noqa: D102

        def __init__(self, plan: Node) -> None: ...

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Any],
        weights: Any = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Self:
        """Take each element from one of the datasets at random.

        >>> import headrace as hr
        >>> ones, twos = (hr.Dataset.from_tensors(n).repeat() for n in (1, 2))
        >>> mixed = hr.Dataset.sample_from_datasets([ones, twos], weights=[0.9, 0.1], seed=7)
        >>> sum(int(x) for x in mixed.take(1000)) < 1200
        True

        Args:
            datasets: The datasets; their elements are alike.
            weights: How likely each is, or a Dataset of such lists, one for each element; None:
                all alike.
            seed: Seed of the choices; None: others in each run.
            stop_on_empty_dataset: Whether to end when a dataset is drawn that has ended, instead
                of drawing again among the others.
            rerandomize_each_iteration: Whether each pass has choices of its own; None: only
                without a seed.
        """
        drawn = isinstance(weights, Choosing)
        return cls(
            Sample(
                datasets=cls._plans("datasets", datasets),
                drawn_weights=(weights.plan,) if isinstance(weights, Choosing) else (),
                weights=None if drawn else weights,
                seed=seed,
                stop_on_empty_dataset=stop_on_empty_dataset,
                rerandomize_each_iteration=rerandomize_each_iteration,
                location=call_site(),
            )
        )

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[Any], choice_dataset: Any, stop_on_empty_dataset: bool = True
    ) -> Self:
        """Take each element from the dataset whose number `choice_dataset` yields.

        >>> import headrace as hr
        >>> letters = [hr.Dataset.from_tensors(letter).repeat() for letter in "abc"]
        >>> choices = hr.Dataset.range(3).repeat(2)
        >>> "".join(hr.Dataset.choose_from_datasets(letters, choices))
        'abcabc'

        Args:
            datasets: The datasets; their elements are alike.
            choice_dataset: Integers from 0 to the number of datasets - 1.
            stop_on_empty_dataset: Whether to end when a dataset is chosen that has ended, instead
                of going on with the next choice.
        """
        (choices,) = cls._plans("choice_dataset", [choice_dataset])
        return cls(
            Choose(
                datasets=cls._plans("datasets", datasets),
                choices=choices,
                stop_on_empty_dataset=stop_on_empty_dataset,
                location=call_site(),
            )
        )

    @classmethod
    def _plans(cls, name: str, datasets: Sequence[Any]) -> tuple[Node, ...]:
        if not isinstance(datasets, list | tuple):
            raise TypeError(f"`{name}` must be a list of Datasets, but got {datasets!r:.80}")
        for dataset in datasets:
            if not isinstance(dataset, Choosing):
                raise TypeError(
                    f"`{name}` must be of Datasets, but got a {type(dataset).__name__}; "
                    "Dataset.from_tensor_slices makes one of rows in memory"
                )
        return tuple([dataset.plan for dataset in datasets])


class Windows(metaclass=AbsentNames):
    """Makes batches and windows of elements that are not alike, or belong together."""

    if TYPE_CHECKING:

        def _then(self, step: Callable[..., Node], **arguments: Any) -> Self: ...

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Self:
        """Stack `batch_size` consecutive elements into one, each component padded to one shape.

        >>> import headrace as hr
        >>> rows = hr.Dataset.range(1, 4).map(lambda n: [n] * int(n))
        >>> next(iter(rows.padded_batch(3))).tolist()
        [[1, 0, 0], [2, 2, 0], [3, 3, 3]]

        Args:
            batch_size: Elements to a batch.
            padded_shapes: A shape for each component, nested as the elements are; None or -1 in a
                shape, or None in place of one: as long as the longest element of the batch.
            padding_values: A number, bytes or str for all components, or nested as they are; None:
                zero, or empty.
            drop_remainder: Whether to leave out a last batch that is smaller.
        """
        return self._then(
            PaddedBatch,
            size=batch_size,
            padded_shapes=padded_shapes,
            padding_values=padding_values,
            drop_remainder=drop_remainder,
        )

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[..., Any],
        window_size: int | None = None,
        window_size_func: Callable[..., Any] | None = None,
    ) -> Self:
        """Gather elements of one key; yield the elements of the datasets made of full windows.

        Windows that are not full at the end of the data come then, that of the oldest element
        first.

        >>> import headrace as hr
        >>> by_parity = hr.Dataset.range(7).group_by_window(
        ...     key_func=lambda x: x % 2, reduce_func=lambda key, window: window.batch(3),
        ...     window_size=3,
        ... )
        >>> [batch.tolist() for batch in by_parity]
        [[0, 2, 4], [1, 3, 5], [6]]

        Args:
            key_func: Returns the key of an element, an integer.
            reduce_func: Called with a key and a Dataset of the elements of a window; returns a
                Dataset.
            window_size: Elements to a window.
            window_size_func: In place of `window_size`: returns it for a key.
        """
        return self._then(
            GroupByWindow,
            key_func=key_func,
            reduce_func=reduce_func,
            window_size=window_size,
            window_size_func=window_size_func,
            make_dataset=type(self),
        )

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
    ) -> Self:
        """Gather elements of like length into buckets; yield each full one as a padded batch.

        >>> import headrace as hr
        >>> rows = hr.Dataset.range(1, 7).map(lambda n: [n] * int(n))
        >>> buckets = rows.bucket_by_sequence_length(len, [3], [2, 4])
        >>> [batch.shape for batch in buckets]
        [(2, 2), (4, 6)]

        Args:
            element_length_func: Returns the length of an element.
            bucket_boundaries: Bucket i has the elements whose length is at least boundary i - 1
                and less than boundary i.
            bucket_batch_sizes: Elements to a batch, for each bucket: one more than boundaries.
            padded_shapes: As for `padded_batch`.
            padding_values: As for `padded_batch`.
            pad_to_bucket_boundary: Whether axes of unknown length are padded to the boundary of
                the bucket minus 1, instead of to the longest of the batch. An element that is
                longer than all boundaries fails. Unknown are axes whose length is None in
                `padded_shapes`, or else in the spec of the elements; without either the first.
            no_padding: Whether all elements of a batch have one shape already.
            drop_remainder: Whether to leave out batches that are not full at the end.
        """
        return self._then(
            BucketBySequenceLength,
            element_length_func=element_length_func,
            bucket_boundaries=bucket_boundaries,
            bucket_batch_sizes=bucket_batch_sizes,
            padded_shapes=padded_shapes,
            padding_values=padding_values,
            pad_to_bucket_boundary=pad_to_bucket_boundary,
            no_padding=no_padding,
            drop_remainder=drop_remainder,
        )
