"""Sending of result batches as replies to requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from headrace.service.messages import GetElementsReply
from headrace.service.worker.batch_frames import batch_frame
from headrace.service.worker.result_batch import BatchReply, ResultBatch
from headrace.transport.channel import Buffer, Request
from headrace.transport.envelope import encode_error

__all__ = ["send_reply"]


def send_reply(
    request: Request,
    content: BatchReply,
    encode: Callable[[ResultBatch], Sequence[Buffer]] = batch_frame,
) -> None:
    """Answer a request.

    The error of an element is sent as data. As a failure of the request, it could be mistaken for a
    rejection by the worker.

    Args:
        request: The request.
        content: Contents of the reply.
        encode: Returns the frames of a batch.
    """
    if isinstance(content, Exception):
        request.fail(content)
    elif isinstance(content, GetElementsReply):
        request.reply(content)
    else:
        message = GetElementsReply(
            first_element=content.first_element,
            num_elements=content.num_elements,
            end_of_task=False,
            done_from=content.done_from,
            done_to=content.done_to,
            delivered_end=content.delivered_end,
            earlier_delivered_end=content.earlier_delivered_end,
            num_done=content.num_done,
            error=None if content.error is None else encode_error(content.error),
            mode_data=replace(content.element_ids, assigned=content.assigned)
            if content.assigned
            else content.mode_data,
        )
        request.reply(message, encode(content))
