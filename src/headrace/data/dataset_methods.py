"""Methods of `Dataset` that select between datasets or make padded batches, windows and buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.data.missing_names import MissingNamesMeta
from headrace.plan.batching import PaddedBatch
from headrace.plan.combining import Choose, Sample
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Map
from headrace.plan.node import Node, call_site
from headrace.plan.windows import BucketBySequenceLength, GroupByWindow
from headrace.sources.memory import RangeSource

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["SelectionMethods", "WindowMethods"]


class SelectionMethods(metaclass=MissingNamesMeta):
    """Constructors of datasets that take each element from one of several datasets."""

    if TYPE_CHECKING:

        @property
        def plan(self) -> Node: ...  # noqa: D102

        @classmethod
        def _from_plan(cls, plan: Node) -> Dataset[Any]: ...

    @classmethod
    def sample_from_datasets(
        cls,
        datasets: Sequence[Any],
        weights: Any = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset[Any]:
        """Take each element from a randomly drawn dataset.

        >>> import headrace as hr
        >>> ones, twos = (hr.Dataset.from_tensors(n).repeat() for n in (1, 2))
        >>> mixed = hr.Dataset.sample_from_datasets([ones, twos], weights=[0.9, 0.1], seed=7)
        >>> sum(int(x) for x in mixed.take(1000)) < 1200
        True
        >>> stages = [(0, [1, 0]), (3, [0.5, 0.5]), (1000, [0, 1])]
        >>> mixed = hr.Dataset.sample_from_datasets([ones, twos], weights=stages, seed=7)
        >>> [int(x) for x in mixed.take(3)], [int(x) for x in mixed.skip(1000).take(3)]
        ([1, 1, 1], [2, 2, 2])

        Args:
            datasets: The datasets; their elements have the same structure.
            weights: Probability weights of the datasets; None draws all with equal probability. For
                weights that change, pass pairs `(step, weights)` in ascending order from step 0 on,
                a function that returns the weights of a step, or a Dataset of weights, one row for
                each step. A step is the number of an element of the mixture, from 0 on in each
                epoch. Steps that only have weights for exhausted datasets are skipped.
            seed: Seed of the choices; None draws new ones in each run.
            stop_on_empty_dataset: Whether to end when an exhausted dataset is drawn, instead of
                drawing again among the others.
            rerandomize_each_iteration: Whether each epoch has new choices; None means only if no
                seed is given.
        """
        weight_inputs: tuple[Node, ...] = ()
        if isinstance(weights, SelectionMethods):
            weight_inputs, weights = (weights.plan,), None
        elif callable(weights):
            steps = FromSource(source=RangeSource(0, None, 1), location=call_site())
            weight_inputs = (Map(input=steps, fn=weights, location=call_site()),)
            weights = None
        return cls._from_plan(
            Sample(
                datasets=cls._check_datasets("datasets", datasets),
                weight_inputs=weight_inputs,
                weights=weights,
                seed=seed,
                stop_on_empty_dataset=stop_on_empty_dataset,
                rerandomize_each_iteration=rerandomize_each_iteration,
                location=call_site(),
            )
        )

    @classmethod
    def choose_from_datasets(
        cls, datasets: Sequence[Any], choice_dataset: Any, stop_on_empty_dataset: bool = True
    ) -> Dataset[Any]:
        """Take each element from the dataset whose index `choice_dataset` yields.

        >>> import headrace as hr
        >>> letters = [hr.Dataset.from_tensors(letter).repeat() for letter in "abc"]
        >>> choices = hr.Dataset.range(3).repeat(2)
        >>> "".join(hr.Dataset.choose_from_datasets(letters, choices))
        'abcabc'

        Args:
            datasets: The datasets; their elements have the same structure.
            choice_dataset: Dataset of integers from 0 to the number of datasets - 1.
            stop_on_empty_dataset: Whether to end when an exhausted dataset is chosen, instead of
                continuing with the next choice.
        """
        (choices,) = cls._check_datasets("choice_dataset", [choice_dataset])
        return cls._from_plan(
            Choose(
                datasets=cls._check_datasets("datasets", datasets),
                choices=choices,
                stop_on_empty_dataset=stop_on_empty_dataset,
                location=call_site(),
            )
        )

    @classmethod
    def _check_datasets(cls, name: str, datasets: Sequence[Any]) -> tuple[Node, ...]:
        if not isinstance(datasets, list | tuple):
            raise TypeError(f"`{name}` must be a list of Datasets, but got {datasets!r:.80}")
        for dataset in datasets:
            if not isinstance(dataset, SelectionMethods):
                raise TypeError(
                    f"`{name}` must contain Datasets, but has a {type(dataset).__name__}; "
                    "create one from arrays with Dataset.from_tensor_slices"
                )
        return tuple([dataset.plan for dataset in datasets])


class WindowMethods(metaclass=MissingNamesMeta):
    """Methods that batch elements of different shapes, or group elements."""

    if TYPE_CHECKING:

        def _append_step(
            self, step: Callable[..., Node], *, name: str | None = None, **arguments: Any
        ) -> Dataset[Any]: ...

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Stack `batch_size` consecutive elements, padding each component to a common shape.

        >>> import headrace as hr
        >>> rows = hr.Dataset.range(1, 4).map(lambda n: [n] * int(n))
        >>> next(iter(rows.padded_batch(3))).tolist()
        [[1, 0, 0], [2, 2, 0], [3, 3, 3]]

        Args:
            batch_size: Number of elements per batch.
            padded_shapes: A shape for each component, nested like the elements. None or -1 as a
                length, or None as a shape, uses the longest element of the batch.
            padding_values: A number, bytes or str for all components, or values nested like the
                elements; None is zero or empty.
            drop_remainder: Whether to drop a last batch that is smaller.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(
            PaddedBatch,
            size=batch_size,
            padded_shapes=padded_shapes,
            padding_values=padding_values,
            drop_remainder=drop_remainder,
            name=name,
        )

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[..., Any],
        window_size: int | None = None,
        window_size_func: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Group elements by key; apply `reduce_func` to full windows and yield the elements.

        At the end of the data, incomplete windows follow in the order of their oldest elements.

        >>> import headrace as hr
        >>> by_parity = hr.Dataset.range(7).group_by_window(
        ...     key_func=lambda x: x % 2, reduce_func=lambda key, window: window.batch(3),
        ...     window_size=3,
        ... )
        >>> [batch.tolist() for batch in by_parity]
        [[0, 2, 4], [1, 3, 5], [6]]

        Args:
            key_func: Function that returns the key of an element, an integer.
            reduce_func: Function of a key and a Dataset of the elements of a window; returns a
                Dataset.
            window_size: Number of elements per window.
            window_size_func: Function that returns the window size for a key, instead of
                `window_size`.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(
            GroupByWindow,
            key_func=key_func,
            reduce_func=reduce_func,
            window_size=window_size,
            window_size_func=window_size_func,
            make_dataset=type(self),
            name=name,
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
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Group elements of similar length into buckets; yield each full one as a padded batch.

        >>> import headrace as hr
        >>> rows = hr.Dataset.range(1, 7).map(lambda n: [n] * int(n))
        >>> buckets = rows.bucket_by_sequence_length(len, [3], [2, 4])
        >>> [batch.shape for batch in buckets]
        [(2, 2), (4, 6)]

        Args:
            element_length_func: Function that returns the length of an element.
            bucket_boundaries: Bucket i has the elements with boundary i - 1 <= length < boundary i.
            bucket_batch_sizes: Number of elements per batch for each bucket; one more than there
                are boundaries.
            padded_shapes: As for `padded_batch`.
            padding_values: As for `padded_batch`.
            pad_to_bucket_boundary: Whether to pad axes of unknown length to the bucket's boundary
                minus 1, instead of to the longest element of the batch. An element beyond the last
                boundary raises an error. An axis is unknown if its length is None in
                `padded_shapes` or, without shapes, in the elements' spec; without a spec it is
                the first axis.
            no_padding: Whether all elements of a batch already have the same shape.
            drop_remainder: Whether to drop incomplete batches at the end.
            name: Name of the step in errors and in `explain`.
        """
        return self._append_step(
            BucketBySequenceLength,
            element_length_func=element_length_func,
            bucket_boundaries=bucket_boundaries,
            bucket_batch_sizes=bucket_batch_sizes,
            padded_shapes=padded_shapes,
            padding_values=padding_values,
            pad_to_bucket_boundary=pad_to_bucket_boundary,
            no_padding=no_padding,
            drop_remainder=drop_remainder,
            name=name,
        )
