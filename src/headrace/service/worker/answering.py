"""How what a task hands out is put into the answer to a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from headrace.service.messages import GetElementsReply
from headrace.service.worker.portion import Answer, Portion
from headrace.service.worker.sending import frame_of
from headrace.transport.channel import Buffer, Request
from headrace.transport.envelope import encode_error

__all__ = ["answer"]


def answer(
    request: Request,
    content: Answer,
    frame_of: Callable[[Portion], Sequence[Buffer]] = frame_of,
) -> None:
    """Answer a request.

    The error of an element goes as data: as a failure of the request, one of the classes by which a
    worker refuses requests would be taken for a refusal.

    Args:
        request: Whose.
        content: What there is to say.
        frame_of: Returns what is sent of a portion.
    """
    if isinstance(content, Exception):
        request.fail(content)
    elif isinstance(content, GetElementsReply):
        request.reply(content)
    else:
        message = GetElementsReply(
            first_element=content.first,
            num_elements=content.count,
            end_of_task=False,
            done_from=content.done_from,
            done_to=content.done_to,
            delivered_end=content.touched,
            earlier_delivered_end=content.begun,
            num_done=content.done,
            error=None if content.error is None else encode_error(content.error),
            mode_data=replace(content.origins, assigned=content.dealt)
            if content.dealt
            else content.mode,
        )
        request.reply(message, frame_of(content))
