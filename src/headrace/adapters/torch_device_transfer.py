"""How tensors get to a device while a training step runs there.

    send     on the thread that reads ahead: starts to copy, and does not wait for it
    receive  on the thread that trains, when the element's turn comes: whatever is computed with it
             from then on comes after its copy

A way is these two functions. What is between them is its own affair, and travels beside the
tensors. What is sent and never received (a reader that is closed) needs nobody.

Sending is a step of a plan (`TransferToDevice`), so that it can stand below a prefetch. The
elements that are on their way are buffered by the engine then, and a state is the place of what was
yielded, as it is of every dataset: chunks know their places, whatever they hold.
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
    """An element that is on its way."""

    element: Any
    event: Any
    """What `DeviceTransfer.receive` needs to know when it has arrived."""


class DeviceTransfer(Protocol):
    """A way to a device."""

    def send(self, element: Any) -> tuple[Any, Any]:
        """Start to copy an element of tensors; return it there, and a mark."""

    def receive(self, element: Any, event: Any) -> Any:
        """Return an element that may be used."""


class DirectTransfer:
    """Copies at once: to devices that have no streams of their own."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def send(self, element: Any) -> tuple[Any, Any]:
        """Return the element on the device."""
        return map_tensors(lambda tensor: tensor.to(self._device), element), None

    def receive(self, element: Any, event: Any) -> Any:
        """Return the element."""
        return element


class StreamRuntime(Protocol):
    """What `StreamTransfer` asks of a device's runtime."""

    def new_stream(self, device: Any) -> Any:
        """Return a stream of the device's."""

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Have what is started within run on a stream."""

    def pin_memory(self, tensor: Any) -> Any:
        """Return a tensor of this process's in memory that the device reads by itself."""

    def record_event(self, stream: Any) -> Any:
        """Return a mark after all that was started on a stream."""

    def wait_event(self, device: Any, event: Any) -> Any:
        """Have the device's current stream wait for a mark, and return that stream."""

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Not give out a tensor's memory before a stream has done what was started on it."""


class CudaStreamRuntime:
    """Those of CUDA, by PyTorch."""

    def new_stream(self, device: Any) -> Any:
        """Return a stream of the device's."""
        return torch.cuda.Stream(device=device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Have what is started within run on a stream."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def pin_memory(self, tensor: Any) -> Any:
        """Return the tensor in pinned memory.

        PyTorch keeps such memory to use it again, and does so only after the copies from it are
        done. So nobody holds it here.
        """
        return tensor.pin_memory()

    def record_event(self, stream: Any) -> Any:
        """Return an event after all that was started on a stream."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait_event(self, device: Any, event: Any) -> Any:
        """Have the device's current stream wait for an event, and return that stream."""
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        return stream

    def record_stream(self, tensor: Any, stream: Any) -> None:
        """Not give out a tensor's memory before a stream has done what was started on it."""
        tensor.record_stream(stream)


class StreamTransfer:
    """Copies to a device by a stream of its own, from pinned memory.

    Args:
        device: The device.
        runtime: Its runtime.
    """

    def __init__(self, device: Any, runtime: StreamRuntime) -> None:
        self._device = device
        self._runtime = runtime
        self._stream: Any = None

    def send(self, element: Any) -> tuple[Any, Any]:
        """Start to copy an element; the mark comes after its copies."""
        if self._stream is None:
            # Not before: a loader may be made where the device must not be touched yet.
            self._stream = self._runtime.new_stream(self._device)
        with self._runtime.use_stream(self._stream):
            moved = map_tensors(self._copy_tensor, element)
            return moved, self._runtime.record_event(self._stream)

    def _copy_tensor(self, tensor: Any) -> Any:
        if tensor.device.type == "cpu":
            tensor = self._runtime.pin_memory(tensor)
        return tensor.to(self._device, non_blocking=True)

    def receive(self, element: Any, event: Any) -> Any:
        """Have the stream that computes wait for the copies, without waiting here."""
        computing = self._runtime.wait_event(self._device, event)

        def kept(tensor: Any) -> Any:
            # Its memory is the side stream's, and this one uses it from now on.
            self._runtime.record_stream(tensor, computing)
            return tensor

        return map_tensors(kept, element)


def make_transfer(device: Any) -> DeviceTransfer | None:
    """Return the way to a device; None: elements stay in the memory of this process.

    Args:
        device: A torch.device or what makes one; None is the CPU.
    """
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return DirectTransfer(device)
    if device.index is None:  # as it is now, for other threads have a current device of their own
        device = torch.device("cuda", torch.cuda.current_device())
    return StreamTransfer(device, CudaStreamRuntime())


def make_sender(transfer: DeviceTransfer) -> Any:
    """Return what a `TransferToDevice` step calls for each element."""

    def send(element: Any) -> PendingTransfer:
        return PendingTransfer(*transfer.send(to_tensors(element)))

    return send


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TransferToDevice(Node):
    """`send(element)` for each element: anything at all, for the step's own iterator alone.

    It stands at the top of a plan, with nothing above it but a prefetch.
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
    """Moves one element at a time: an error is raised when its element's turn comes."""

    def __init__(self, node: TransferToDevice, context: Context) -> None:
        self._input = make_iterator(node.input, context)
        self._send = node.send

    @property
    def can_read_ahead(self) -> bool:
        return False  # each takes memory of the device: no more than was asked for

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
