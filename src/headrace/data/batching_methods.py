"""Methods of `Dataset` that make batches of elements of different shapes, costs or lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from headrace.data.step_methods import StepMethods
from headrace.element.ragged import find_fixed_lengths
from headrace.plan.batching import PaddedBatch, RaggedBatch
from headrace.plan.packing import BatchByCost, ConcatThenSplit, PackSequences
from headrace.plan.traverse import element_spec
from headrace.plan.windows import BucketBySequenceLength
from headrace.rewrites.optimize import prepare

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["BatchingMethods"]

DEFAULT_NUM_BINS = 32


class BatchingMethods(StepMethods):
    """Methods that batch elements; `batch` and `unbatch` are methods of `Dataset` itself."""

    if TYPE_CHECKING:

        def unbatch(self, *, name: str | None = None) -> Dataset[Any]: ...  # noqa: D102

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

    def ragged_batch(
        self, batch_size: int, drop_remainder: bool = False, *, name: str | None = None
    ) -> Dataset[Any]:
        """Join `batch_size` consecutive elements, without padding, into one of `hr.RaggedArray`.

        An array becomes a `RaggedArray` unless the plan tells the length of its first axis;
        arrays that a function makes count as unknown. Other components are stacked as by `batch`.

        >>> import headrace as hr
        >>> rows = hr.Dataset.range(1, 4).map(lambda n: {"x": [n] * int(n), "label": n})
        >>> batch = next(iter(rows.ragged_batch(3)))
        >>> batch["x"].to_list(), batch["label"].tolist()
        ([[1], [2, 2], [3, 3, 3]], [1, 2, 3])
        >>> batch["x"].values.tolist(), batch["x"].row_splits.tolist()
        ([1, 2, 2, 3, 3, 3], [0, 1, 3, 6])

        Args:
            batch_size: Number of elements per batch.
            drop_remainder: Whether to drop a last batch that is smaller.
            name: Name of the step in errors and in `explain`.
        """
        spec = element_spec(prepare(self.plan).plan)
        return self._append_step(
            RaggedBatch,
            size=batch_size,
            drop_remainder=drop_remainder,
            fixed_lengths=find_fixed_lengths(spec),
            name=name,
        )

    def rebatch(
        self, batch_size: int, drop_remainder: bool = False, *, name: str | None = None
    ) -> Dataset[Any]:
        """Change the number of rows per batch: the same as `unbatch().batch(batch_size)`.

        Batches are sliced and concatenated; no row is handled on its own.

        >>> import headrace as hr
        >>> batches = hr.Dataset.range(7).batch(3)
        >>> [batch.tolist() for batch in batches.rebatch(2)]
        [[0, 1], [2, 3], [4, 5], [6]]

        Args:
            batch_size: Number of rows per batch.
            drop_remainder: Whether to drop a last batch that is smaller.
            name: Name of the steps in errors and in `explain`.
        """
        return self.unbatch(name=name).batch(batch_size, drop_remainder, name=name)

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

    def batch_by_cost(
        self,
        max_cost: float,
        cost_fn: Callable[..., float],
        drop_remainder: bool = False,
        padded_shapes: Any = None,
        padding_values: Any = None,
        count_padding: bool = False,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Stack consecutive elements into batches whose cost is at most `max_cost`.

        The cost of a batch is the sum of the costs of its elements, such as their numbers of
        tokens. A batch ends before an element that would raise it above `max_cost`. Components
        of different shapes are padded as by `padded_batch`.

        >>> import headrace as hr
        >>> rows = hr.Dataset.range(1, 7).map(lambda n: [n] * int(n))
        >>> [batch.shape for batch in rows.batch_by_cost(6, len)]
        [(3, 3), (1, 4), (1, 5), (1, 6)]

        Args:
            max_cost: Maximum cost of a batch.
            cost_fn: Function of an element that returns its cost, a number of at least 0; a tuple
                is passed as several arguments.
            drop_remainder: Whether to drop the last batch unless it reaches `max_cost`.
            padded_shapes: As for `padded_batch`.
            padding_values: As for `padded_batch`.
            count_padding: Whether the cost of a batch is its largest cost times its number of
                elements. With lengths as costs, this limits the size of the padded batch.
            name: Name of the step in errors and in `explain`.

        Raises:
            InvalidElementError: For an element whose cost alone exceeds `max_cost`, when it is
                read; reading continues after it.
        """
        return self._append_step(
            BatchByCost,
            max_cost=max_cost,
            cost_fn=cost_fn,
            drop_remainder=drop_remainder,
            padded_shapes=padded_shapes,
            padding_values=padding_values,
            count_padding=count_padding,
            name=name,
        )

    def pack_sequences(
        self,
        length: int | Mapping[str, int],
        strategy: Literal["first_fit", "best_fit", "concat_then_split"] = "first_fit",
        num_bins: int | None = None,
        *,
        name: str | None = None,
    ) -> Dataset[Any]:
        """Pack sequences of different lengths into rows of one length.

        Elements are dicts of one-dimensional arrays of numbers; an array alone counts as
        `{"tokens": array}`. A row has three arrays for each component `name`, each `length` long:

        * `name`: the tokens of several sequences, followed by zeros.
        * `name_segment_ids`: int32, 1 for the tokens of the first sequence, 2 for the second, and
          so on; 0 is padding. A sequence has the same id in all components.
        * `name_positions`: int32, the position of each token within its sequence, from 0.

        >>> import headrace as hr
        >>> rows = hr.Dataset.range(1, 5).map(lambda n: [10 * n] * int(n)).pack_sequences(5)
        >>> for row in rows:
        ...     print(row["tokens"], row["tokens_segment_ids"], row["tokens_positions"])
        [10 20 20  0  0] [1 2 2 0 0] [0 0 1 0 0]
        [30 30 30  0  0] [1 1 1 0 0] [0 1 2 0 0]
        [40 40 40 40  0] [1 1 1 1 0] [0 1 2 3 0]

        Sequences without tokens are dropped. Rows come as they are finished, and at the end of the
        data incomplete rows in the order in which they were begun. Like elements of a shuffle
        buffer, the sequences of open rows are not saved in states but read again.

        Args:
            length: Number of tokens in a row; a dict has a length for each component.
            strategy: Where a sequence goes. "first_fit": to the oldest open row in which it fits.
                "best_fit": to the row in which it leaves least free. If it fits in none, it begins
                a row; if `num_bins` rows are open, the fullest of them is finished before.
                "concat_then_split": rows are filled completely, and a sequence that does not fit is
                continued in the next row, as a new segment with positions from 0. All components
                must then have the same length.
            num_bins: Maximum number of open rows, 32 by default. More bins leave less padding, and
                hold more sequences in memory. Not used by "concat_then_split".
            name: Name of the step in errors and in `explain`.

        Raises:
            InvalidElementError: For a sequence longer than `length`, which "concat_then_split"
                would split, when it is read; reading continues after it.
        """
        if strategy == "concat_then_split":
            if num_bins is not None:
                raise ValueError(
                    f"`num_bins` applies to first_fit and best_fit, but got {num_bins} with "
                    "strategy='concat_then_split', which has one open row; leave it out"
                )
            return self._append_step(ConcatThenSplit, length=length, name=name)
        if strategy not in ("first_fit", "best_fit"):
            raise ValueError(
                "`strategy` must be 'first_fit', 'best_fit' or 'concat_then_split', but got "
                f"{strategy!r}"
            )
        return self._append_step(
            PackSequences,
            length=length,
            best_fit=strategy == "best_fit",
            num_bins=DEFAULT_NUM_BINS if num_bins is None else num_bins,
            name=name,
        )
