"""How what a task hands out is put into the answer to a request."""

from __future__ import annotations

from headrace.service.messages import Elements
from headrace.service.worker.portion import Answer
from headrace.transport.channel import Request
from headrace.transport.envelope import encode_error

__all__ = ["answer"]


def answer(request: Request, content: Answer) -> None:
    """Answer a request.

    The error of an element goes as data: as a failure of the request, one of the classes by which a
    worker refuses requests would be taken for a refusal.
    """
    if isinstance(content, Exception):
        request.fail(content)
    elif isinstance(content, Elements):
        request.reply(content)
    else:
        message = Elements(
            first=content.first,
            count=content.count,
            end=False,
            done_from=content.done_from,
            done_to=content.done_to,
            touched=content.touched,
            begun=content.begun,
            error=None if content.error is None else encode_error(content.error),
            origins=content.origins,
            done=content.done,
        )
        request.reply(message, content.buffers)
