"""Rows of tables on parameter servers as layers of PyTorch, for ordinary loops and ranks of DDP.

    forward     pulls the rows of a batch, each id once; they are a leaf of the graph
    backward    adds up their gradients, which the layer keeps
    step        pushes those of all layers at once, on a thread beside the loop

Nothing of a table is a parameter: DDP averages the dense part, and the servers add up what the
ranks push.
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
    """What both layers share: a table, rows pulled ahead, gradients that were not pushed."""

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
        """Elements in a row."""
        return self.table.dim

    def prefetch(self, input: Any) -> None:
        """Begin to pull the rows of a batch that is to come; see `hr.torch.prefetch`."""
        prefetch([(self, input)])

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table!r}{padding}"

    def __getstate__(self) -> dict[str, Any]:
        # Of a copy: what is under way belongs to this one.
        return {**self.__dict__, "_gradients": [], "_ahead": deque(maxlen=_MAX_PREFETCHED)}

    def _ids_to_pull(self, ids: Any) -> NDArray[np.int64]:
        """Return the ids to pull, in one row."""
        wanted = self.table.check_ids(ids).reshape(-1)
        return wanted if self.padding_idx is None else wanted[wanted != self.padding_idx]

    def _pull(self, wanted: NDArray[np.int64], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of ids, each once, and where each id is among them."""
        pulled = self._take_prefetched(wanted)
        trains = self.training and torch.is_grad_enabled()
        if pulled is None:
            pulled = pull([self.table], [wanted], counts=trains)[0]
        rows = to_tensors(pulled.rows).to(device)
        if trains:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(
                functools.partial(_store_gradient, weakref.ref(self), pulled.ids)
            )
        return rows, torch.from_numpy(pulled.inverse).to(device)

    def _take_prefetched(self, wanted: NDArray[np.int64]) -> PulledRows | None:
        for place, (ids, work, number) in enumerate(self._prefetched):
            if np.array_equal(ids, wanted):
                del self._prefetched[place]
                return work.result()[number]
        return None

    def take_gradients(self) -> list[IndexedSlices]:
        """Return the gradients of rows since the last call, and forget them."""
        taken, self._gradients = self._gradients, []
        return [IndexedSlices(gradient, ids) for ids, gradient in taken]


def _store_gradient(of: weakref.ref[_Layer], ids: NDArray[np.int64], rows: torch.Tensor) -> None:
    gradient, rows.grad = rows.grad, None
    layer = of()
    if layer is not None and gradient is not None:
        layer._gradients.append((ids, gradient))


class Embedding(_Layer):
    """A row of a table for each id; `torch.nn.Embedding` without a vocabulary or a bound.

    Rows are made for new ids in training mode with gradients; in `eval()` or under
    `torch.no_grad()` they are read, and nothing is changed. `TableOptimizer` pushes gradients.

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
        padding_idx: An id that reads zeros, and is never sent.
    """

    def __init__(self, table: EmbeddingTable, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx)

    def forward(self, input: Any) -> torch.Tensor:
        """Return an array of the shape of `input` and `dim`.

        Args:
            input: Integers of any shape; the answer is on their device.
        """
        ids = self.table.check_ids(input)
        rows, inverse = self._pull(self._ids_to_pull(ids), _device_of(input))
        if inverse.numel() < ids.size:
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            whole = inverse.new_full((ids.size,), len(rows) - 1)
            there = torch.from_numpy(np.flatnonzero(ids.reshape(-1) != self.padding_idx))
            whole[there.to(whole.device)] = inverse
            inverse = whole
        return functional.embedding(inverse.reshape(ids.shape), rows)


class EmbeddingBag(_Layer):
    """The pooled rows of each bag of ids.

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
        mode: "sum", "mean", or "sqrtn": the sum by the square root of how many there are. With
            weights: by the sum of weights, and by the square root of the sum of their squares.
        padding_idx: An id that is left out of its bag, and never sent.
        include_last_offset: Whether `offsets` ends with the number of ids.
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
        """Return a row for each bag; zeros for one without ids.

        Args:
            input: Ids: 2-D, a bag in each row; 1-D with `offsets`; or a list of bags, each 1-D and
                as long as it is.
            offsets: Where each bag begins.
            per_sample_weights: A number for each id, of the shape of `input`.

        Raises:
            ValueError: Offsets or weights do not fit.
        """
        flat, bags, count = _flatten_bags(input, offsets, self.include_last_offset)
        ids = self.table.check_ids(flat)
        device = _device_of(input)
        weights = None
        if per_sample_weights is not None:
            weights = _flat_weights(per_sample_weights, device)
            if weights.numel() != ids.size:
                raise ValueError(
                    f"`per_sample_weights` must have a number for each of {ids.size} ids, but has "
                    f"{weights.numel()}"
                )
        if self.padding_idx is not None:
            kept = np.flatnonzero(ids != self.padding_idx)
            ids, bags = ids[kept], bags[kept]
            weights = None if weights is None else weights[torch.from_numpy(kept).to(device)]
        rows, inverse = self._pull(ids, device)
        bag_of = torch.from_numpy(bags).to(device)
        each = functional.embedding(inverse, rows)
        if weights is not None:
            weights = weights.to(rows.dtype)
            each = each * weights[:, None]
        summed = rows.new_zeros(count, rows.shape[1]).index_add(0, bag_of, each)
        if self.mode == "sum":
            return summed
        powers = torch.ones_like(bag_of, dtype=rows.dtype) if weights is None else weights
        if self.mode == "sqrtn":
            powers = powers * powers
        size = rows.new_zeros(count).index_add(0, bag_of, powers)
        if self.mode == "sqrtn":
            size = torch.where(size > 0, size, torch.ones_like(size)).sqrt()
        return summed / torch.where(size != 0, size, torch.ones_like(size))[:, None]

    def _ids_to_pull(self, ids: Any) -> NDArray[np.int64]:
        return super()._ids_to_pull(
            _flatten_bags(ids, None, False)[0] if isinstance(ids, list) else ids
        )

    def extra_repr(self) -> str:
        """Return what `repr` shows."""
        return f"{super().extra_repr()}, mode={self.mode!r}"


class TableOptimizer:
    """Takes steps of an optimizer on the tables of a model, for all of them in one call.

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
        modules: A model, or several; all `Embedding`s and `EmbeddingBag`s in them are trained.
        scale: Multiplies gradients. DDP averages those of the dense part over its ranks, and the
            servers add up those of tables: with 1 / world_size both are of the mean.
        in_flight: At most so many steps are under way while the loop goes on; 0: none.

    Raises:
        ValueError: There is no such layer in the modules.
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
                "`modules` have no hr.torch.Embedding or EmbeddingBag, and so no table to train"
            )
        self._layers = list(found.values())
        self._scale = float(scale)
        self._background_optimizer = InBackground(optimizer, in_flight)

    def step(self) -> None:
        """Push what backward left; without any, do nothing.

        Raises:
            Exception: What an earlier step failed with, once.
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
        """Forget what backward left."""
        for layer in self._layers:
            layer.take_gradients()

    def flush(self) -> None:
        """Wait until all steps are on the servers.

        Raises:
            Exception: What one failed with.
        """
        self._background_optimizer.flush()

    @property
    def iterations(self) -> int:
        """Steps that were taken, by all ranks."""
        return self._background_optimizer.iterations


def prefetch(
    inputs: Iterable[tuple[_Layer, Any]] | Mapping[_Layer, Any],
) -> None:
    """Begin to pull the rows of a batch that is to come, for many layers in one call.

    The layer's next call with these ids takes what came. The rows are those after all steps that
    began before this call, and without those that begin after it.

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
        inputs: Pairs of a layer and the ids that it will be called with. A layer keeps what it was
            given ahead for 8 batches; of more, it forgets the oldest.
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
            wanted = [layer._ids_to_pull(ids) for layer, ids in chosen]
            tables = [layer.table for layer, _ in chosen]
            work = functools.partial(pull, tables, wanted, counts=trains)
            begun = tables[0].cluster.background.submit(work)
            for number, (layer, _) in enumerate(chosen):
                layer._prefetched.append((wanted[number], begun, number))


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
    """Return all ids in a row, the bag of each, and how many bags there are."""
    if isinstance(ids, list):
        if offsets is not None:
            raise ValueError("a list of bags needs no `offsets`")
        parts = [as_array(part).reshape(-1) for part in ids]
        lengths = np.array([len(part) for part in parts], np.int64)
        filled = [part for part in parts if len(part)]
        flat = np.concatenate(filled) if filled else np.zeros(0, np.int64)
        return flat, np.repeat(np.arange(len(parts)), lengths), len(parts)
    array = as_array(ids)
    if array.ndim == 2:
        if offsets is not None:
            raise ValueError("ids in two axes are one bag a row, and take no `offsets`")
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
