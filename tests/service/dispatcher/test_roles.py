"""Which requests may be sent with whose keys."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
import pytest

from headrace.errors import UnauthenticatedError
from headrace.service import messages
from headrace.service.dispatcher.roles import let_in
from headrace.transport.channel import Request


class Sent(Request):
    """A request without a wire."""

    def __init__(self, message: msgspec.Struct, role: Literal["worker", "client"] | None) -> None:
        self.message, self.role = message, role
        self.error: Exception | None = None

    def reply(self, message: msgspec.Struct, buffers: Any = ()) -> None:
        raise AssertionError("answered")

    def fail(self, error: Exception) -> None:
        self.error = error


def example(kind: type[msgspec.Struct]) -> msgspec.Struct:
    values: dict[Any, Any] = {int: 1, bool: False, bytes: b"", str: ""}
    fields = {
        field.name: values.get(field.type, ())
        for field in msgspec.structs.fields(kind)
        if field.required
    }
    return kind(**fields)


CLIENTS = {
    "Ping",
    "RegisterDataset",
    "PutPlan",
    "GetDataset",
    "GetPlan",
    "OpenIteration",
    "ClientHeartbeat",
    "SettleTask",
    "CloseIteration",
    "ReportUnreachable",
    "GatherPlace",
    "GetStatus",
    "BeginSave",
    "GetSave",
}


@pytest.mark.parametrize("kind", get_args(messages.DispatcherRequest), ids=lambda k: k.__name__)
def test_the_keys_of_a_client_do_what_clients_do(kind: type[msgspec.Struct]) -> None:
    request = Sent(example(kind), "client")
    allowed = let_in([request]) == [request]
    assert allowed == (kind.__name__ in CLIENTS)
    assert allowed == (request.error is None)
    if not allowed:
        assert isinstance(request.error, UnauthenticatedError)
    for role in ("worker", None):
        other = Sent(example(kind), role)  # type: ignore[arg-type]
        assert let_in([other]) == [other]


def test_refused_requests_do_not_keep_others_out() -> None:
    register = messages.RegisterWorker(worker_id="w", address="a:1")
    requests = [Sent(register, "client"), Sent(messages.Ping(), "client"), Sent(register, "worker")]
    assert let_in(requests) == requests[1:]
