"""Requests, iterators and definitions for the tests of the worker's rooms."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from headrace.element import wire
from headrace.element.chunk import Chunk
from headrace.execution.iterator import ElementIterator
from headrace.service.config import ShardingPolicy
from headrace.service.messages import Elements, GetElements, TaskDefinition
from headrace.transport.channel import Buffer, Request
from headrace.transport.envelope import decode_error

SECONDS = 10.0
TICKET = "ticket"


class Asked(Request):
    """A request whose answer can be waited for."""

    def __init__(
        self, client: str, number: int, acknowledged: int = 0, ticket: str = TICKET
    ) -> None:
        self.message = GetElements(
            task_id=1, ticket=ticket, client_id=client, number=number, acknowledged=acknowledged
        )
        self.buffers = ()
        self.peer = client
        self._answers: SimpleQueue[tuple[Any, Sequence[Buffer]]] = SimpleQueue()

    def reply(self, message: Any, buffers: Sequence[Buffer] = ()) -> None:
        self._answers.put((message, buffers))

    def fail(self, error: Exception) -> None:
        self._answers.put((error, ()))

    @property
    def is_answered(self) -> bool:
        return not self._answers.empty()

    def answer(self) -> tuple[Elements, Sequence[Buffer]]:
        """Return the answer that came; raise the error that came."""
        message, buffers = self._answers.get(timeout=SECONDS)
        if isinstance(message, Exception):
            raise message
        assert isinstance(message, Elements)
        if message.error is not None:
            raise decode_error(message.error)
        return message, buffers

    def elements(self) -> list[int]:
        """Return the elements that came."""
        _, buffers = self.answer()
        return [int(row) for row in wire.decode(buffers).rows()]

    def nothing(self) -> bool:
        """Whether the answer is that nothing is left: True at the end, False "come again"."""
        message, _ = self.answer()
        assert message.count == 0
        return message.end


class Listed(ElementIterator):
    """Yields chunks, raises errors, as listed; its state is one unit for each element."""

    def __init__(self, steps: list[list[int] | BaseException]) -> None:
        self._steps = steps
        self._yielded = 0
        self.closed = False

    def next_chunk(self, limit: int) -> Chunk | None:
        if not self._steps:
            return None
        step = self._steps[0]
        if isinstance(step, BaseException):
            self._steps.pop(0)
            raise step
        values, rest = step[:limit], step[limit:]
        self._steps[:1] = [rest] if rest else []
        self._yielded += len(values)
        chunk = Chunk.of_columns(np.array(values), len(values))
        before = self._yielded - len(values)
        return chunk.with_states(lambda index: {"dealt": before + index})

    def get_state(self) -> Any:
        return {"dealt": self._yielded}

    def set_state(self, state: Any) -> None:
        raise AssertionError("a task does not go back")

    def close(self) -> None:
        self.closed = True


def definition(
    *, mode: ShardingPolicy = ShardingPolicy.OFF, digest: bytes = b"", ticket: str = TICKET
) -> TaskDefinition:
    return TaskDefinition(
        task_id=1,
        iteration_id=1,
        dataset_id="1",
        digest=digest,
        processing_mode=int(mode),
        pass_number=(0,),
        seed=1,
        ticket=ticket,
    )
