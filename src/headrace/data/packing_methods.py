"""Methods of `Dataset` that pack sequences into rows or balance the cost of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from headrace.data.missing_names import MissingNamesMeta
from headrace.plan.node import Node
from headrace.plan.packing import BatchByCost, ConcatThenSplit, PackSequences

if TYPE_CHECKING:
    from headrace.data.dataset import Dataset

__all__ = ["PackingMethods"]

DEFAULT_NUM_BINS = 32


class PackingMethods(metaclass=MissingNamesMeta):
    """Methods for sequences of different lengths."""

    if TYPE_CHECKING:

        def _append_step(self, step: Callable[..., Node], **arguments: Any) -> Dataset[Any]: ...

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
