"""Selection of the rows that a process reads from a dataset that all processes share.

The dataset is the same in all processes, and its batches contain the rows of all of them. The
sharding determines the number of pipelines that read it, and which of them this process belongs to;
the dataset's `auto_shard_policy` determines what each pipeline reads, as for strategies. Processes
communicate through the key-value store of `jax.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# Needed to communicate with other processes of the JAX program; it has no public name.
from jax._src import distributed

from headrace.adapters.jax_input_steps import DatasetInputSteps, DistributedInputSteps, InputSteps
from headrace.adapters.jax_step_agreement import (
    AgreementStore,
    InputStepAgreement,
    unique_iterator_name,
)
from headrace.data.dataset import Dataset
from headrace.data.lookahead import open_lookahead
from headrace.distribute.batch_inputs import check_is_batched, global_batch_size
from headrace.distribute.dataset import DistributedDataset
from headrace.distribute.input_context import InputContext
from headrace.distribute.input_streams import auto_shard
from headrace.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from headrace.execution.build import draw_seed
from headrace.frameworks.jax_global_arrays import BatchLayout
from headrace.plan.buffering import Prefetch
from headrace.plan.node import Node
from headrace.plan.options import Options, WithOptions
from headrace.plan.traverse import merged_options
from headrace.rewrites.reader_agreement import explain_reader_differences, find_sources

__all__ = [
    "ProcessInput",
    "jax_store",
    "make_agreement",
    "open_process_input",
]


class ProcessInput(NamedTuple):
    """Input of one process.

    Attributes:
        steps: Source of its rows.
        rows_per_shard: Rows in each shard of a full batch; None if unknown.
        agreement: Agreement with the other processes on each step; None if not needed.
        device_prefetch: Number of steps that may be on devices before they are requested.
        open_resharded: Returns steps for the same rows that can restore a state of a different
            number of pipelines.
    """

    steps: DatasetInputSteps
    rows_per_shard: int | None
    agreement: InputStepAgreement | None
    device_prefetch: int
    open_resharded: Callable[[], InputSteps]


def open_process_input(
    dataset: Dataset, layout: BatchLayout, process: int, prefetch: int, pad: bool
) -> ProcessInput:
    """Open the input of this process.

    Args:
        dataset: The dataset, the same in all processes.
        layout: Assignment of rows to processes.
        process: Index of this process.
        prefetch: Number of batches to prepare ahead.
        pad: Whether batches are padded, so that elements must have rows.

    Raises:
        InvalidArgumentError: If elements are not batches, there are fewer files than pipelines, or
            processes that need the same rows would read different ones.
    """
    plan = dataset.plan
    if layout.num_shards > 1 or pad:
        check_is_batched(plan)
    agreement = make_agreement(layout, process)
    if agreement is not None and merged_options(plan).seed is None:
        seed = agreement.broadcast_first(draw_seed())
        plan = WithOptions(input=plan, options=Options(seed=seed))
    context = InputContext(len(layout.pipelines), layout.pipeline_index, layout.num_shards)
    if any(len(each.shards) != context.num_replicas_per_pipeline for each in layout.pipelines):
        raise InvalidArgumentError(
            "the sharding gives processes different numbers of shards of a batch "
            f"({[len(each.shards) for each in layout.pipelines]}): use a mesh that gives each the "
            "same number"
        )
    part = auto_shard(plan, context)
    same_batches = len(layout.pipelines) == 1 or part.splits_each_batch
    if same_batches or len(layout.local_pipeline.processes) > 1:
        group = layout.processes if same_batches else layout.local_pipeline.processes
        _check_same_elements(plan, group)
    size = global_batch_size(plan)
    # A data service can report only the position of the element in use, so nothing is prefetched.
    depth = (
        1 if prefetch > 1 and all(each.replay_buffers is None for each in find_sources(plan)) else 0
    )
    read_plan = part.plan
    if prefetch > depth and not isinstance(read_plan, Prefetch):
        read_plan = Prefetch(input=read_plan, buffer_size=prefetch - depth)
    keep_whole = layout.num_shards == 1 and not pad

    def open_resharded() -> InputSteps:
        distributed = DistributedDataset(Dataset(plan), context)
        indices = layout.pipeline_positions
        return DistributedInputSteps(iter(distributed), layout, keep_whole, indices)

    elements = open_lookahead(dataset, read_plan)
    return ProcessInput(
        DatasetInputSteps(elements, layout, same_batches, keep_whole),
        None if size is None else -(-size // layout.num_shards),
        None if same_batches else agreement,
        depth,
        open_resharded,
    )


def make_agreement(layout: BatchLayout, process: int) -> InputStepAgreement | None:
    """Return the agreement between the processes of a layout, or None for a single process."""
    processes = layout.processes
    if len(processes) == 1:
        return None
    return InputStepAgreement(jax_store(), unique_iterator_name(processes), processes, process)


def _check_same_elements(plan: Node, processes: tuple[int, ...]) -> None:
    """Raise an error unless these processes read the same elements in the same order."""
    if len(processes) == 1:
        return
    difference = explain_reader_differences(plan)
    if difference:
        raise InvalidArgumentError(
            f"the sharding requires processes {_format_processes(processes)} to read the same "
            f"rows, but {difference}; or use a sharding in which no two processes need the same "
            "rows"
        )


def _format_processes(processes: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, processes[:8]))
    return shown if len(processes) <= 8 else f"{shown}, ..."


_GET_TIMEOUT_MILLISECONDS = 1000


class _JaxStore:
    """Key-value store of `jax.distributed`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._call(self._client.key_value_set, key, value, True)

    def get(self, key: str) -> str | None:
        try:
            found: str = self._call(
                self._client.blocking_key_value_get, key, _GET_TIMEOUT_MILLISECONDS
            )
        except TimeoutError:
            return None
        return found

    def delete(self, key: str) -> None:
        self._call(self._client.key_value_delete, key)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # XlaRuntimeError or JaxRuntimeError, by version of JAX
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError from None
            raise UnavailableError(
                f"the coordination service of jax.distributed does not respond: {error}"
            ) from error


def jax_store() -> AgreementStore:
    """Return the key-value store of `jax.distributed`.

    Raises:
        FailedPreconditionError: If `jax.distributed` is not initialized.
    """
    client = distributed.global_state.client
    if client is None:
        raise FailedPreconditionError(
            "the sharding has devices of several processes, but jax.distributed is not "
            "initialized, which they need to agree on steps: call jax.distributed.initialize() "
            "first in each process"
        )
    return _JaxStore(client)
