"""PyTorch layers with rows of tables on parameter servers, for ordinary loops and DDP.

    forward     pulls the rows of a batch, each id once; they are a leaf of the autograd graph
    backward    sums their gradients, which the layer stores
    step        pushes the gradients of all layers in one call, on a background thread

Tables have no PyTorch parameters: DDP averages the gradients of the dense part, and the servers add
up the gradients that ranks push.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from headrace.adapters.torch_tensors import to_tensors
from headrace.arguments import check_instance, check_int
from headrace.distribute.bag_combiner import COMBINERS, Combiner
from headrace.errors import InvalidArgumentError
from headrace.parameter_server.arrays import IndexedSlices, as_array
from headrace.parameter_server.cluster_registry import BackgroundTask
from headrace.parameter_server.optimizer import (
    InBackground,
    Optimizer,
    can_write_in_background,
    check_number,
)
from headrace.parameter_server.table import EmbeddingTable, PulledRows, pull

__all__ = ["Embedding", "EmbeddingBag", "TableOptimizer", "prefetch"]

_MAX_PREFETCHED = 8


class _Layer(nn.Module):  # type: ignore[misc]
    """Base of both layers: a table, prefetched rows, and gradients to push."""

    def __init__(self, table: EmbeddingTable, padding_idx: int | None) -> None:
        super().__init__()
        check_instance("table", table, EmbeddingTable)
        self.table = table
        if padding_idx is not None:
            check_int("padding_idx", padding_idx, minimum=-(2**63))
        self.padding_idx = padding_idx
        self._gradients: list[tuple[NDArray[np.int64], torch.Tensor]] = []
        self._prefetched: deque[tuple[NDArray[np.int64], BackgroundTask[list[PulledRows]], int]] = (
            deque(maxlen=_MAX_PREFETCHED)
        )

    @property
    def embedding_dim(self) -> int:
        """Number of elements in a row."""
        return self.table.dim

    def prefetch(self, input: Any) -> None:
        """Start pulling the rows of a later batch; see `hr.torch.prefetch`."""
        prefetch([(self, input)])

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table!r}{padding}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not share pending gradients and look-ups.
        return {**self.__dict__, "_gradients": [], "_prefetched": deque(maxlen=_MAX_PREFETCHED)}

    def _ids_to_pull(self, ids: Any) -> NDArray[np.int64]:
        """Return the ids to pull, as a 1-D array."""
        flat = self.table.check_ids(ids).reshape(-1)
        return flat if self.padding_idx is None else flat[flat != self.padding_idx]

    def _pull(self, ids: NDArray[np.int64], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the distinct ids, and for each id the index of its row."""
        pulled = self._take_prefetched(ids)
        trains = self.training and torch.is_grad_enabled()
        if pulled is None:
            pulled = pull([self.table], [ids], counts=trains)[0]
        rows = to_tensors(pulled.rows).to(device)
        if trains:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(
                functools.partial(_store_gradient, weakref.ref(self), pulled.ids)
            )
        return rows, torch.from_numpy(pulled.inverse).to(device)

    def _take_prefetched(self, ids: NDArray[np.int64]) -> PulledRows | None:
        for index, (prefetched_ids, task, number) in enumerate(self._prefetched):
            if np.array_equal(prefetched_ids, ids):
                del self._prefetched[index]
                return task.result()[number]
        return None

    def take_gradients(self) -> list[IndexedSlices]:
        """Return the gradients of rows since the last call, and clear them."""
        taken, self._gradients = self._gradients, []
        return [IndexedSlices(gradient, ids) for ids, gradient in taken]


def _store_gradient(
    layer_ref: weakref.ref[_Layer], ids: NDArray[np.int64], rows: torch.Tensor
) -> None:
    gradient, rows.grad = rows.grad, None
    layer = layer_ref()
    if layer is not None and gradient is not None:
        layer._gradients.append((ids, gradient))


class Embedding(_Layer):
    """Looks up a table row for each id, like `torch.nn.Embedding` without a fixed vocabulary.

    In training mode with gradients enabled, new ids get rows; in `eval()` or under
    `torch.no_grad()` rows are only read. `TableOptimizer` pushes gradients.

    >>> import torch
    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         words = hr.torch.Embedding(hr.EmbeddingTable(4, name="words"))
    ...     print(words(torch.tensor([7, 10**12])).shape)
    ...     strategy.close()
    torch.Size([2, 4])

    Args:
        table: An `hr.EmbeddingTable`.
        padding_idx: An id whose row is zeros, and which is never sent.
    """

    def __init__(self, table: EmbeddingTable, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx)

    def forward(self, input: Any) -> torch.Tensor:
        """Return the rows, an array of shape `(*input.shape, dim)`.

        Args:
            input: Integers of any shape; the result is on their device.
        """
        ids = self.table.check_ids(input)
        rows, inverse = self._pull(self._ids_to_pull(ids), _device_of(input))
        if inverse.numel() < ids.size:
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            whole = inverse.new_full((ids.size,), len(rows) - 1)
            is_id = torch.from_numpy(np.flatnonzero(ids.reshape(-1) != self.padding_idx))
            whole[is_id.to(whole.device)] = inverse
            inverse = whole
        return functional.embedding(inverse.reshape(ids.shape), rows)


class EmbeddingBag(_Layer):
    """Combines the table rows of each bag of ids into one row.

    >>> import torch
    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         words = hr.torch.EmbeddingBag(hr.EmbeddingTable(4, name="words"), mode="sum")
    ...     print(words(torch.tensor([[7, 8, 9], [1, 2, 3]])).shape)
    ...     strategy.close()
    torch.Size([2, 4])

    Args:
        table: An `hr.EmbeddingTable`.
        mode: "sum"; "mean"; or "sqrtn", the sum divided by the square root of the number of ids.
            With weights, "mean" divides by their sum, and "sqrtn" by the square root of the sum of
            their squares.
        padding_idx: An id that is removed from its bag, and never sent.
        include_last_offset: Whether the last of `offsets` is the number of ids.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        mode: Combiner = "mean",
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> None:
        super().__init__(table, padding_idx)
        if mode not in COMBINERS:
            raise ValueError(f"`mode` must be one of {', '.join(COMBINERS)}, but got {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, input: Any, offsets: Any = None, per_sample_weights: Any = None
    ) -> torch.Tensor:
        """Return a row for each bag; zeros for an empty bag.

        Args:
            input: Ids: 2-D with a bag in each row; 1-D with `offsets`; or a list of 1-D bags.
            offsets: Start index of each bag.
            per_sample_weights: A number for each id, in the shape of `input`.

        Raises:
            ValueError: If offsets or weights do not match the ids.
        """
        flat, bags, count = _flatten_bags(input, offsets, self.include_last_offset)
        ids = self.table.check_ids(flat)
        device = _device_of(input)
        weights = None
        if per_sample_weights is not None:
            weights = _flat_weights(per_sample_weights, device)
            if weights.numel() != ids.size:
                raise ValueError(
                    f"`per_sample_weights` must have one number for each of the {ids.size} ids, "
                    f"but has {weights.numel()}"
                )
        if self.padding_idx is not None:
            indices = np.flatnonzero(ids != self.padding_idx)
            ids, bags = ids[indices], bags[indices]
            weights = None if weights is None else weights[torch.from_numpy(indices).to(device)]
        rows, inverse = self._pull(ids, device)
        bag_indices = torch.from_numpy(bags).to(device)
        each = functional.embedding(inverse, rows)
        if weights is not None:
            weights = weights.to(rows.dtype)
            each = each * weights[:, None]
        summed = rows.new_zeros(count, rows.shape[1]).index_add(0, bag_indices, each)
        if self.mode == "sum":
            return summed
        divisors = torch.ones_like(bag_indices, dtype=rows.dtype) if weights is None else weights
        if self.mode == "sqrtn":
            divisors = divisors * divisors
        size = rows.new_zeros(count).index_add(0, bag_indices, divisors)
        if self.mode == "sqrtn":
            size = torch.where(size > 0, size, torch.ones_like(size)).sqrt()
        return summed / torch.where(size != 0, size, torch.ones_like(size))[:, None]

    def _ids_to_pull(self, ids: Any) -> NDArray[np.int64]:
        return super()._ids_to_pull(
            _flatten_bags(ids, None, False)[0] if isinstance(ids, list) else ids
        )

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


class TableOptimizer:
    """Applies an optimizer to all tables of a model in one call.

    >>> import torch
    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         words = hr.torch.Embedding(hr.EmbeddingTable(4, name="words", initializer="zeros"))
    ...     optimizer = hr.torch.TableOptimizer(hr.optimizers.SGD(0.5), words)
    ...     words(torch.tensor([7])).sum().backward()
    ...     optimizer.step()
    ...     optimizer.flush()
    ...     print(words.table.lookup([7]).tolist())
    ...     strategy.close()
    [[-0.5, -0.5, -0.5, -0.5]]

    Args:
        optimizer: One of `hr.optimizers`; it runs on the servers.
        modules: One or several modules; all `Embedding`s and `EmbeddingBag`s in them are trained.
        scale: Factor of the gradients. DDP averages gradients of the dense part over ranks, whereas
            the servers add those of tables: 1 / world_size makes both refer to the mean.
        in_flight: Maximum number of steps that run in the background; 0 waits for each step.

    Raises:
        ValueError: If the modules have no such layer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        modules: nn.Module | Iterable[nn.Module],
        *,
        scale: float = 1.0,
        in_flight: int = 2,
    ) -> None:
        check_number("scale", scale)
        check_instance("optimizer", optimizer, Optimizer)
        several = [modules] if isinstance(modules, nn.Module) else list(modules)
        found = {id(each): each for module in several for each in _table_layers(module)}
        if not found:
            raise ValueError(
                "`modules` must contain an hr.torch.Embedding or EmbeddingBag, but have none"
            )
        self._layers = list(found.values())
        self._scale = float(scale)
        self._background_optimizer = InBackground(optimizer, in_flight)

    def step(self) -> None:
        """Push the gradients of the last backward passes; without any, do nothing.

        Raises:
            Exception: The error of an earlier step, once.
        """
        by_table: dict[int, tuple[EmbeddingTable, list[IndexedSlices]]] = {}
        for layer in self._layers:
            for slices in layer.take_gradients():
                by_table.setdefault(id(layer.table), (layer.table, []))[1].append(slices)
        pairs = [(self._concatenate_slices(slices), table) for table, slices in by_table.values()]
        if pairs:
            self._background_optimizer.apply_gradients(pairs)

    def _concatenate_slices(self, slices: Sequence[IndexedSlices]) -> IndexedSlices:
        values = np.concatenate([each.values for each in slices])
        if self._scale != 1.0:
            values = values * values.dtype.type(self._scale)
        return IndexedSlices(values, np.concatenate([each.indices for each in slices]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the last backward passes."""
        for layer in self._layers:
            layer.take_gradients()

    def flush(self) -> None:
        """Wait until all steps are applied on the servers.

        Raises:
            Exception: The error of a failed step.
        """
        self._background_optimizer.flush()

    @property
    def iterations(self) -> int:
        """Number of steps taken by all ranks."""
        return self._background_optimizer.iterations


def prefetch(
    inputs: Iterable[tuple[_Layer, Any]] | Mapping[_Layer, Any],
) -> None:
    """Start pulling the rows of a later batch, for several layers in one call.

    The layer's next call with these ids uses the rows. They include the updates of all steps that
    began before this call, and not of steps that begin later.

    >>> import torch
    >>> with hr.distribute.LocalCluster(num_workers=1, num_ps=1, processes=False) as cluster:
    ...     strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
    ...     with strategy.scope():
    ...         words = hr.torch.Embedding(hr.EmbeddingTable(4, name="words"))
    ...     ids = torch.tensor([7, 9])
    ...     hr.torch.prefetch([(words, ids)])  # before the step on the batch before
    ...     print(words(ids).shape)
    ...     strategy.close()
    torch.Size([2, 4])

    Args:
        inputs: Pairs of a layer and the ids of its later call. A layer keeps prefetched rows of 8
            batches; of more, it drops the oldest.
    """
    pairs: list[tuple[_Layer, Any]] = list(
        inputs.items() if isinstance(inputs, Mapping) else inputs
    )
    for layer, _ in pairs:
        check_instance("layer", layer, _Layer)
    if not pairs or not can_write_in_background():
        return
    for trains in (True, False):
        chosen = [pair for pair in pairs if pair[0].training is trains]
        if chosen:
            ids_to_pull = [layer._ids_to_pull(ids) for layer, ids in chosen]
            tables = [layer.table for layer, _ in chosen]
            work = functools.partial(pull, tables, ids_to_pull, counts=trains)
            task = tables[0].cluster.background.submit(work)
            for number, (layer, _) in enumerate(chosen):
                layer._prefetched.append((ids_to_pull[number], task, number))


def _table_layers(module: Any) -> Iterator[_Layer]:
    check_instance("modules", module, nn.Module)
    for each in module.modules():
        if isinstance(each, _Layer):
            yield each


def _device_of(ids: Any) -> torch.device:
    return ids.device if isinstance(ids, torch.Tensor) else torch.device("cpu")


def _flat_weights(weights: Any, device: torch.device) -> torch.Tensor:
    if isinstance(weights, torch.Tensor):
        return weights.to(device).reshape(-1)
    if isinstance(weights, list):
        weights = np.concatenate([np.zeros(0, np.float32), *(as_array(part) for part in weights)])
    flat: torch.Tensor = torch.as_tensor(as_array(weights), device=device).reshape(-1)
    return flat


def _flatten_bags(
    ids: Any, offsets: Any, include_last: bool
) -> tuple[NDArray[Any], NDArray[np.int64], int]:
    """Return all ids as a 1-D array, the bag index of each, and the number of bags."""
    if isinstance(ids, list):
        if offsets is not None:
            raise ValueError("`offsets` must be None if the ids are a list of bags")
        parts = [as_array(part).reshape(-1) for part in ids]
        lengths = np.array([len(part) for part in parts], np.int64)
        filled = [part for part in parts if len(part)]
        flat = np.concatenate(filled) if filled else np.zeros(0, np.int64)
        return flat, np.repeat(np.arange(len(parts)), lengths), len(parts)
    array = as_array(ids)
    if array.ndim == 2:
        if offsets is not None:
            raise ValueError("2-D ids have one bag in each row, so `offsets` must be None")
        return array.reshape(-1), np.repeat(np.arange(len(array)), array.shape[1]), len(array)
    if array.ndim != 1 or offsets is None:
        raise ValueError(
            "ids of bags must have two axes, or one with `offsets`, or be a list of bags, but got "
            f"shape {array.shape}" + (" without `offsets`" if offsets is None else "")
        )
    starts = as_array(offsets).reshape(-1).astype(np.int64)
    ends = starts[1:] if include_last else np.append(starts[1:], len(array))
    begins = starts[:-1] if include_last else starts
    lengths = ends - begins
    if (len(starts) and starts[0] != 0) or (lengths < 0).any() or lengths.sum() != len(array):
        raise InvalidArgumentError(
            f"`offsets` must rise from 0 to at most the {len(array)} ids, but are "
            f"{starts.tolist()[:8]}"
        )
    return array, np.repeat(np.arange(len(lengths)), lengths), len(lengths)
