"""Who reads which rows: what a process makes of a dataset that several share.

The dataset is alike in all processes, and its batches are those of all of them. How many pipelines
read it, and which of them this process belongs to, follows from the sharding; what each pipeline
reads follows from the dataset's `auto_shard_policy`, as for strategies. Processes leave words for
each other in the store of `jax.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# Whoever coordinates processes of JAX uses this; it has no public name.
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
    """What a process reads of a dataset.

    Attributes:
        steps: Its rows.
        rows_per_shard: Rows that each share of a full batch has; None: that is not known.
        agreement: How it agrees with others on each step; None: it need not.
        device_prefetch: How many steps may be on their devices before they are asked for.
        open_resharded: Returns what reads the same rows after others, as many as a state says.
    """

    steps: DatasetInputSteps
    rows_per_shard: int | None
    agreement: InputStepAgreement | None
    device_prefetch: int
    open_resharded: Callable[[], InputSteps]


def open_process_input(
    dataset: Dataset, layout: BatchLayout, process: int, prefetch: int, pad: bool
) -> ProcessInput:
    """Return what this process reads.

    Args:
        dataset: The same in all processes.
        layout: Who needs which rows.
        process: This one.
        prefetch: Batches to have under way.
        pad: Whether batches are filled up, so that elements need rows.

    Raises:
        InvalidArgumentError: Its elements are no batches; or there are fewer files than pipelines;
            or processes that need the same rows would read others.
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
            "the sharding gives some processes more of a batch than others "
            f"({[len(each.shards) for each in layout.pipelines]} shares): use a mesh that gives "
            "all as much"
        )
    part = auto_shard(plan, context)
    shares_batches = len(layout.pipelines) == 1 or part.splits_each_batch
    if shares_batches or len(layout.local_pipeline.processes) > 1:
        alike = layout.processes if shares_batches else layout.local_pipeline.processes
        _check_same_elements(plan, alike)
    size = global_batch_size(plan)
    # What a data service gave is known at the place where it is used, and at no other.
    depth = (
        1 if prefetch > 1 and all(each.replay_buffers is None for each in find_sources(plan)) else 0
    )
    read = part.plan
    if prefetch > depth and not isinstance(read, Prefetch):
        read = Prefetch(input=read, buffer_size=prefetch - depth)
    passes_on = layout.num_shards == 1 and not pad

    def reshared() -> InputSteps:
        distributed = DistributedDataset(Dataset(plan), context)
        mine = layout.pipeline_positions
        return DistributedInputSteps(iter(distributed), layout, passes_on, mine)

    return ProcessInput(
        DatasetInputSteps(open_lookahead(dataset, read), layout, shares_batches, passes_on),
        None if size is None else -(-size // layout.num_shards),
        None if shares_batches else agreement,
        depth,
        reshared,
    )


def make_agreement(layout: BatchLayout, process: int) -> InputStepAgreement | None:
    """Return how the processes of a layout agree; None: there is one."""
    processes = layout.processes
    if len(processes) == 1:
        return None
    return InputStepAgreement(jax_store(), unique_iterator_name(processes), processes, process)


def _check_same_elements(plan: Node, processes: tuple[int, ...]) -> None:
    """Raise unless these processes get the same elements in the same order."""
    if len(processes) == 1:
        return
    why = explain_reader_differences(plan)
    if why:
        raise InvalidArgumentError(
            f"processes {_format_processes(processes)} must read the same rows, as the sharding "
            "says, but "
            f"{why}; or use a sharding in which no two processes need the same rows"
        )


def _format_processes(processes: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, processes[:8]))
    return shown if len(processes) <= 8 else f"{shown}, ..."


_GET_TIMEOUT_MILLISECONDS = 1000


class _JaxStore:
    """The store of `jax.distributed`."""

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
        except RuntimeError as error:  # XlaRuntimeError, JaxRuntimeError: the name changes
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError from None
            raise UnavailableError(
                f"the coordinator of jax.distributed cannot be asked: {error}"
            ) from error


def jax_store() -> AgreementStore:
    """Return the store of `jax.distributed`.

    Raises:
        FailedPreconditionError: There is none.
    """
    client = distributed.global_state.client
    if client is None:
        raise FailedPreconditionError(
            "the sharding has devices of several processes, and they have nothing to agree by: "
            "call jax.distributed.initialize() first, in each of them"
        )
    return _JaxStore(client)
