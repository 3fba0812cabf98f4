"""A server of the test messages; as a program it serves until its standard input ends.

python -m tests.transport.peer PORT [KEYS]
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from typing import Any

from headrace import errors
from headrace.transport import zeromq
from headrace.transport.channel import Request
from headrace.transport.security import Security
from tests.transport.messages import (
    Count,
    Echo,
    Echoed,
    Explode,
    Fail,
    Hold,
    Make,
    Release,
    TestRequest,
)


class TestHandler:
    """Answers at once, except for held requests."""

    __test__ = False

    def __init__(self) -> None:
        self.held: list[Request] = []
        self.server: Any = None

    def __call__(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._answer(request)

    def _answer(self, request: Request) -> None:
        match request.message:
            case Echo(number=number):
                request.reply(Echoed(number=number), request.buffers)
            case Make(number=number, size=size):
                request.reply(Echoed(number=number), [bytes([number % 256]) * size])
            case Fail(name="UserFunctionError"):
                request.fail(
                    errors.UserFunctionError(
                        "it raised",
                        position=7,
                        original_type="ZeroDivisionError",
                        original_traceback="Traceback ...",
                    )
                )
            case Fail(name="OwnSubclass"):
                request.fail(type("OwnSubclass", (errors.NotFoundError,), {})("made up"))
            case Fail(name="Strange"):
                request.fail(type("Strange", (Exception,), {})("made up"))
            case Fail(name=name):
                kind = getattr(errors, name, None) or getattr(builtins, name)
                request.fail(kind("made up"))
            case Hold():
                self.held.append(request)
            case Release():
                while self.held:
                    held = self.held.pop()
                    held.reply(Echoed(number=held.message.number), held.buffers)
                request.reply(Echoed())
            case Explode():
                raise errors.NotFoundError("the handler raised")
            case Count():
                request.reply(Echoed(number=len(self.server.arenas)))


def main() -> None:
    port = int(sys.argv[1])
    security = Security.load(sys.argv[2], "server") if len(sys.argv) > 2 else None
    handler = TestHandler()
    handler.server = zeromq.serve(handler, request_type=TestRequest, port=port, security=security)
    print(handler.server.address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
