"""Transfer of tensors to a device while a training step runs there.

    send     on the thread that reads ahead: starts the copy without waiting for it
    receive  on the training thread, when the element is returned: operations that follow on the
             device wait for the copy

A transfer consists of these two functions and the event that `send` passes to `receive` along with
the tensors. An element that is sent but never received, because its reader is closed, needs no
cleanup.

Sending is a step of a plan (`TransferToDevice`), so that it can be placed below a prefetch. The
engine then buffers the elements in transfer, and a state refers to the elements that were yielded,
as for every dataset: chunks carry their positions, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from headrace.adapters.torch_tensors import map_tensors, to_tensors
from headrace.element.chunk import Chunk
from headrace.execution.context import Context
from headrace.execution.iterator import ElementIterator, State, make_iterator
from headrace.plan.node import Node

__all__ = [
    "CudaStreamRuntime",
    "DeviceTransfer",
    "DirectTransfer",
    "PendingTransfer",
    "StreamRuntime",
    "StreamTransfer",
    "TransferToDevice",
    "make_sender",
    "make_transfer",
]


class PendingTransfer(NamedTuple):
    """An element whose transfer was started."""

    element: Any
    event: Any
    """Argument of `DeviceTransfer.receive` that identifies the end of the transfer."""


class DeviceTransfer(Protocol):
    """Transfer of elements to a device."""

    def send(self, element: Any) -> tuple[Any, Any]:
        """Start copying an element of tensors; return the copy and an event."""

    def receive(self, element: Any, event: Any) -> Any:
        """Return an element that is safe to use."""


class DirectTransfer:
    """Copies synchronously, for devices without streams."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def send(self, element: Any) -> tuple[Any, Any]:
        """Return the element on the device."""
        return map_tensors(lambda tensor: tensor.to(self._device), element), None

    def receive(self, element: Any, event: Any) -> Any:
        """Return the element."""
        return element


class StreamRuntime(Protocol):
    """The functions of a device runtime that `StreamTransfer` needs."""

    def new_stream(self, device: Any) -> Any:
        """Return a new stream of the device."""

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Run operations that are started in this context on a stream."""

    def pin_memory(self, tensor: Any) -> Any:
        """Return a copy of a CPU tensor in page-locked memory."""

    def record_event(self, stream: Any) -> Any:
        """Return an event after all operations started on a stream so far."""

    def wait_event(self, device: Any, event: Any) -> Any:
        """Make the device's current stream wait for an event, and return that stream."""

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Keep a tensor's memory until the operations started on a stream have finished."""


class CudaStreamRuntime:
    """The CUDA runtime, through PyTorch."""

    def new_stream(self, device: Any) -> Any:
        """Return a new stream of the device."""
        return torch.cuda.Stream(device=device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Run operations that are started in this context on a stream."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def pin_memory(self, tensor: Any) -> Any:
        """Return the tensor in page-locked memory.

        PyTorch reuses such memory only after the copies from it have finished, so no reference to
        it is kept here.
        """
        return tensor.pin_memory()

    def record_event(self, stream: Any) -> Any:
        """Return an event after all operations started on a stream so far."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait_event(self, device: Any, event: Any) -> Any:
        """Make the device's current stream wait for an event, and return that stream."""
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        return stream

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Keep a tensor's memory until the operations started on a stream have finished."""
        tensor.record_stream(stream)


class StreamTransfer:
    """Copies to a device on a separate stream, from page-locked memory.

    Args:
        device: Target device.
        runtime: Runtime of the device.
    """

    def __init__(self, device: Any, runtime: StreamRuntime) -> None:
        self._device = device
        self._runtime = runtime
        self._stream: Any = None

    def send(self, element: Any) -> tuple[Any, Any]:
        """Start copying an element; the event follows its copies."""
        if self._stream is None:
            # Created late: when a loader is made, the device may not be initialized yet.
            self._stream = self._runtime.new_stream(self._device)
        with self._runtime.use_stream(self._stream):
            moved = map_tensors(self._copy_tensor, element)
            return moved, self._runtime.record_event(self._stream)

    def _copy_tensor(self, tensor: Any) -> Any:
        if tensor.device.type == "cpu":
            tensor = self._runtime.pin_memory(tensor)
        return tensor.to(self._device, non_blocking=True)

    def receive(self, element: Any, event: Any) -> Any:
        """Make the computing stream wait for the copies, without blocking this thread."""
        stream = self._runtime.wait_event(self._device, event)

        def record_use(tensor: Any) -> Any:
            # The memory belongs to the copying stream, but this stream uses it from now on.
            self._runtime.record_stream(tensor, stream)
            return tensor

        return map_tensors(record_use, element)


def make_transfer(device: Any) -> DeviceTransfer | None:
    """Return the transfer to a device; None leaves elements in the memory of this process.

    Args:
        device: A torch.device, or an argument for it; None is the CPU.
    """
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return DirectTransfer(device)
    if device.index is None:  # resolved here, because the current device differs by thread
        device = torch.device("cuda", torch.cuda.current_device())
    return StreamTransfer(device, CudaStreamRuntime())


def make_sender(transfer: DeviceTransfer) -> Any:
    """Return the function that a `TransferToDevice` step calls for each element."""

    def send(element: Any) -> PendingTransfer:
        return PendingTransfer(*transfer.send(to_tensors(element)))

    return send


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TransferToDevice(Node):
    """Calls `send(element)` for each element; the results are for the step's own iterator only.

    It is the last step of a plan, except for a prefetch above it.
    """

    kind: ClassVar[str] = "transfer_to_device"
    is_split_local: ClassVar[bool] = True
    propagates_ids: ClassVar[bool] = True
    is_read_only: ClassVar[bool] = True
    is_transparent: ClassVar[bool] = True
    one_to_one: ClassVar[bool] = True
    preserves_count: ClassVar[bool] = True
    performance_fields: ClassVar[tuple[str, ...]] = ("send",)

    input: Node
    send: Callable[[Any], Any]


@make_iterator.register(TransferToDevice)
class _TransferIterator(ElementIterator):
    """Sends one element at a time, so that an error is raised in the position of its element."""

    def __init__(self, node: TransferToDevice, context: Context) -> None:
        self._input = make_iterator(node.input, context)
        self._send = node.send

    @property
    def can_read_ahead(self) -> bool:
        return False  # each element takes device memory: not more than the buffer's size

    def next_chunk(self, limit: int) -> Chunk | None:
        chunk = self._input.next_chunk(1)
        if chunk is None:
            return None
        return Chunk.of_rows(
            [self._send(row) for row in chunk.rows()], chunk.states, chunk.metadata
        )

    def get_state(self) -> State:
        return self._input.get_state()

    def set_state(self, state: State) -> None:
        self._input.set_state(state)

    def skip(self, count: int) -> int:
        return self._input.skip(count)

    def close(self) -> None:
        self._input.close()
