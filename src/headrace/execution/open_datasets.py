"""Open datasets of an interleave: its outer input, and a dataset in each slot."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from headrace.element.chunk import States
from headrace.element.metadata import element_numbers
from headrace.errors import DataLossError, UserFunctionError
from headrace.execution.context import Context, reads_coordinated_job
from headrace.execution.element_numbers import IdColumn
from headrace.execution.input_buffer import ChunkSizer, InputBuffer
from headrace.execution.interleave_order import CLOSED_SLOT, InterleavePosition, OuterPosition
from headrace.execution.iterator import State, make_iterator
from headrace.execution.nested_dataset import DatasetReadAhead, NestedDataset, OpenResult
from headrace.execution.thread_tuning import MAX_THREADS, MIN_THREADS, ThreadTuner
from headrace.plan.combining import Interleave
from headrace.plan.node import AUTOTUNE, Node
from headrace.plan.partition_nodes import ReadSplits
from headrace.plan.user_function import UserFunction

__all__ = [
    "DatasetOpener",
    "OpenDatasets",
    "OuterInput",
]

# --- The outer input: reads outer elements one by one and opens their datasets --------------------

_MAX_SLOT_BYTES = 1 << 18
_MAX_TOTAL_BYTES = 16 << 20
"""Approximate maximum bytes read ahead for all open datasets; `_MAX_SLOT_BYTES` for each."""


class DatasetOpener(Protocol):
    """Opens the datasets of an interleave, one by one."""

    reads_coordinated_job: bool
    """Whether an open dataset reads a coordinated job, whose elements wait for other datasets."""

    def open_next(self) -> OpenResult:
        """Open the next dataset."""

    def open_at(self, outer_state: State, number: int) -> NestedDataset:
        """Reopen dataset number `number`, which was opened at `outer_state`."""

    def position(self) -> tuple[States, int]:
        """Return the states from the next dataset on, and its number."""

    def set_state(self, state: State, number: int) -> None:
        """Restore the state before dataset `number`."""

    def close(self) -> None:
        """Close the input."""


class OuterInput:
    """Opens the datasets of an interleave from its input's elements.

    Args:
        node: The step.
        context: Context of the step.
        step: Name of the step, for errors.
    """

    def __init__(self, node: Interleave, context: Context, step: str) -> None:
        self._node = node
        self._context = context
        self._step = step
        self._function = UserFunction(node.fn, step, context.contain_exits)
        self._input_buffer = InputBuffer(
            make_iterator(node.input, context.with_element_numbers(True))
        )
        #: States after the last opened element; None asks the input.
        self._next_states: States | None = None
        self._count = 0  # number of datasets opened so far
        self.reads_coordinated_job: bool = False

    def open_next(self) -> OpenResult:
        """Open the dataset of the next element."""
        input_buffer = self._input_buffer
        outer_states, number = self.position()
        try:
            chunk = input_buffer.peek_ahead(1)
        except Exception as error:
            self._next_states = _constant_states(input_buffer.get_state())
            return OpenResult(outer_states, number, error=error)
        if chunk is None:
            self._next_states = _constant_states(input_buffer.get_state())
            return OpenResult(outer_states, number, is_end=True)
        states, index = chunk.states, input_buffer.offset
        row, outer_id = chunk.rows()[index], chunk.take_metadata(slice(index, index + 1))
        input_buffer.consume(1)
        self._count = number + 1
        self._next_states = lambda after: states(index + 1 + after)
        element_states = states if not index else lambda after: states(index + after)
        try:
            return OpenResult(
                element_states, number, dataset=self._open(row, outer_id, element_states, number)
            )
        except Exception as error:
            return OpenResult(element_states, number, error=error)

    def open_at(self, outer_state: State, number: int) -> NestedDataset:
        """Open the dataset of element `number`, which is at `outer_state`."""
        self._input_buffer.set_state(outer_state)
        chunk = self._input_buffer.take(1)
        if chunk is None:
            raise DataLossError(
                f"the input of {self._step} has fewer elements than when the state was saved; "
                "restore the state with the same data"
            )
        return self._open(chunk.rows()[0], chunk.metadata, _constant_states(outer_state), number)

    def _open(
        self, row: Any, outer_id: IdColumn | None, outer_states: States, number: int
    ) -> NestedDataset:
        assert outer_id is not None
        function = self._function
        try:
            dataset = function(row)
        except BaseException as error:
            raise function.wrap_error(error, number, row) from error
        plan = getattr(dataset, "plan", None)
        if not isinstance(plan, Node):
            raise UserFunctionError(
                f"the function of {self._step} must return a Dataset, but returned "
                f"{type(dataset).__name__} for element {number}",
                position=number,
                original_type="TypeError",
            )
        if self._node.cycle_length > 1 and not self.reads_coordinated_job:
            self.reads_coordinated_job = reads_coordinated_job(plan)
        numbers = element_numbers(outer_id)
        assert numbers is not None
        nested = self._context.nested(self._node.number or 0, int(numbers[0]))
        iterator = self._context.build(plan, nested)
        # The total size of all slots' buffers is bounded.
        max_bytes = min(_MAX_SLOT_BYTES, _MAX_TOTAL_BYTES // self._node.cycle_length)
        chunk_sizer = ChunkSizer(min_elements=self._node.block_length, max_bytes=max_bytes)
        return NestedDataset(outer_states, number, iterator, chunk_sizer, outer_id)

    def position(self) -> tuple[States, int]:
        """Return the states from the next element on, and its number."""
        return self._next_states or _constant_states(self._input_buffer.get_state()), self._count

    def set_state(self, state: State, number: int) -> None:
        """Restore the state before element `number`."""
        self._input_buffer.set_state(state)
        self._next_states = None
        self._count = number

    def close(self) -> None:
        """Close the input."""
        self._input_buffer.close()


def _constant_states(state: State) -> States:
    return lambda index: state


# --- The open datasets: one per slot, and those opened ahead --------------------------------------


class OpenDatasets:
    """Opens datasets, reads them ahead if there are threads, and closes them.

    Args:
        node: The step.
        context: Context of the step.
        step: Name of the step, for errors.
        opener: Opens the next dataset; None uses the step's function.
    """

    def __init__(
        self,
        node: Interleave | ReadSplits,
        context: Context,
        step: str,
        opener: DatasetOpener | None = None,
    ) -> None:
        if opener is None:
            assert isinstance(node, Interleave)
            opener = OuterInput(node, context, step)
        self._opener: DatasetOpener = opener
        self._step = step
        self._cycle_length = node.cycle_length
        calls = node.num_parallel_calls if isinstance(node, Interleave) else None
        #: Chooses the number of threads for AUTOTUNE.
        self.tuner = (
            ThreadTuner(
                step,
                context.parallelism,
                # A dataset that waits, such as for a slow peer, should not block all others.
                min_threads=max(MIN_THREADS, context.parallelism),
                max_threads=min(MAX_THREADS, node.cycle_length + 1),
            )
            if calls == AUTOTUNE
            else None
        )
        self.threads: int = (
            0 if calls is None else calls if self.tuner is None else self.tuner.threads
        )
        self._read_ahead: DatasetReadAhead | None = None
        self.slots: list[NestedDataset | None] = []
        #: Opened datasets without a slot, next one first.
        self._opened_ahead: deque[OpenResult] = deque()
        self.reset()

    def reset(self) -> None:
        """Close all datasets and empty all slots."""
        self._close_all()
        self._could_read_ahead = False  # whether the last closed dataset could read ahead
        self.slots = [None] * self._cycle_length
        self.num_buffered = [0] * self._cycle_length
        """Number of buffered elements of each slot, or CLOSED_SLOT."""
        self.has_ended = False
        """Whether the end of the outer input was reached in a turn."""

    @property
    def reads_ahead_freely(self) -> bool:
        """Whether reading ahead is free in all open datasets."""
        has_dataset = False
        for slot in self.slots:
            if slot is not None:
                if not slot.iterator.can_read_ahead:
                    return False
                has_dataset = True
        # Assume that the next datasets are like the last.
        return has_dataset or self._could_read_ahead

    @property
    def num_open(self) -> int:
        """Number of slots with a dataset."""
        return self._cycle_length - self.slots.count(None)

    # --- opening --------------------------------------------------------------------------------

    @property
    def has_opened_ahead(self) -> bool:
        """Whether the next dataset, or the end, is already known."""
        return len(self._opened_ahead) > 0

    @property
    def can_open_immediately(self) -> bool:
        """Whether a slot can be filled without a call, a wait or an error."""
        return self.has_opened_ahead and self._opened_ahead[0].error is None

    def open(self, slot: int) -> bool:
        """Open the next dataset in an empty slot; return False at the end."""
        opened = self._opened_ahead.popleft() if self._opened_ahead else self._open_next()
        if opened.is_end:
            self.has_ended = True
            self._update_num_buffered()
            return False
        if opened.error is not None:
            raise opened.error
        assert opened.dataset is not None
        self.slots[slot] = opened.dataset
        if self.threads:
            self.open_ahead()
        return True

    def open_one_ahead(self) -> None:
        """Open the next dataset without a slot, unless there is one."""
        if not self._opened_ahead:
            self._opened_ahead.append(self._open_next())

    def _open_next(self) -> OpenResult:
        opened = self._opener.open_next()
        self._start_coordinated_threads()
        return opened

    def _start_coordinated_threads(self) -> None:
        """Use threads for datasets that wait for each other; sequential reads would deadlock."""
        if not self._opener.reads_coordinated_job:
            return
        if not self.threads:
            self.threads = self._cycle_length
        elif self.tuner is not None:
            self.tuner, self.threads = None, self._cycle_length
            if self._read_ahead is not None:
                self._read_ahead.stop_tuning(self.threads)

    def open_ahead(self) -> None:
        """Open datasets for the empty slots and one more, and start reading them."""
        read_ahead = self._read_ahead
        if read_ahead is None:
            read_ahead = self._read_ahead = self._make_read_ahead()
        max_open = 1 + self._cycle_length - self.num_open
        while len(self._opened_ahead) < max_open and not self.has_ended:
            if self._opened_ahead and self._opened_ahead[-1].is_end:
                break
            self._opened_ahead.append(self._open_next())
            dataset = self._opened_ahead[-1].dataset
            if dataset is not None:
                read_ahead.read(dataset)

    def _make_read_ahead(self) -> DatasetReadAhead:
        threads = self.threads if self.tuner is None else self.tuner.threads
        return DatasetReadAhead(threads, self.tuner)

    def close_slot(self, slot: int) -> None:
        """Close the dataset in a slot, which has ended."""
        dataset = self.slots[slot]
        assert dataset is not None
        self._could_read_ahead = dataset.iterator.can_read_ahead
        dataset.close()
        self.slots[slot] = None
        self.num_buffered[slot] = CLOSED_SLOT if self.has_ended else 0

    def _update_num_buffered(self) -> None:
        """Update the numbers of buffered elements after all slots changed."""
        empty = CLOSED_SLOT if self.has_ended else 0
        self.num_buffered = [empty if slot is None else slot.num_buffered for slot in self.slots]

    # --- with threads ---------------------------------------------------------------------------

    def receive(self, dataset: NestedDataset) -> bool:
        """Buffer a thread's result and start the next read; return False at the end."""
        assert self._read_ahead is not None
        self._read_ahead.wait_for(dataset, self._step)
        has_more = dataset.receive()
        if has_more:
            self._read_ahead.read(dataset)
        return has_more

    def wait_for_any(self) -> None:
        """Wait until one of the slots' datasets has a result."""
        assert self._read_ahead is not None
        datasets = [slot for slot in self.slots if slot is not None]
        self._read_ahead.wait_for_any(datasets, self._step)

    # --- state ----------------------------------------------------------------------------------

    def outer_position(self) -> OuterPosition:
        """Return the position of the outer input, without datasets opened ahead."""
        if self._opened_ahead:
            first = self._opened_ahead[0]
            return first.outer_states, first.number, self.has_ended
        return (*self._opener.position(), self.has_ended)

    def position(self) -> InterleavePosition:
        """Return the position of all slots and of the outer input."""
        slots = [None if slot is None else (slot, slot.states, slot.index) for slot in self.slots]
        return slots, self.outer_position()

    def set_state(self, state: State) -> None:
        """Reopen the datasets of a state, each at its position."""
        self.reset()
        for slot, saved in enumerate(state["slots"]):
            if saved is None:
                continue
            dataset = self._opener.open_at(saved["outer"], saved["number"])
            dataset.set_state(saved["dataset"])
            self.slots[slot] = dataset
        self._start_coordinated_threads()
        self._opener.set_state(state["input"], state["next_number"])
        self.has_ended = state["ended"]
        self._update_num_buffered()
        if self.threads:
            self._read_ahead = self._make_read_ahead()
            for dataset in filter(None, self.slots):
                self._read_ahead.read(dataset)

    def _close_all(self) -> None:
        """Close all open datasets."""
        datasets = [slot for slot in self.slots if slot is not None]
        datasets += [opened.dataset for opened in self._opened_ahead if opened.dataset is not None]
        if self._read_ahead is not None:
            self._read_ahead.close(datasets, self._step)
        else:
            for dataset in datasets:
                dataset.close()
        # Last: after an interruption before this line, they are closed again.
        self._read_ahead, self.slots, self._opened_ahead = None, [], deque()

    def close(self) -> None:
        """Close the datasets and the input; the iterator has ended."""
        self.reset()
        self.has_ended = True
        self._update_num_buffered()
        self._opener.close()
