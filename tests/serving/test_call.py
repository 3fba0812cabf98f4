"""A request names the type of its reply, and gets that or an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import pytest

from headrace.errors import NotFoundError
from headrace.service import messages
from headrace.serving.call import Done, Message, Ping, Question, Stub, reply_type
from headrace.transport import inprocess
from headrace.transport.channel import Request


class Sum(Message, frozen=True):
    total: int


class Add(Question[Sum], frozen=True):
    numbers: tuple[int, ...]


class AddTwice(Add, frozen=True):
    """Answered as `Add` is."""


Requests: TypeAlias = Ping | Add | AddTwice
Replies: TypeAlias = Done | Sum


def answer(requests: Sequence[Request]) -> None:
    for request in requests:
        match request.message:
            case Ping():
                request.reply(Sum(total=0))
            case Add(numbers=()):
                request.fail(NotFoundError("no numbers"))
            case Add(numbers=numbers):
                request.reply(Sum(total=sum(numbers)))


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = inprocess.serve(answer, request_type=Requests, host="127.0.0.1", port=1)
    try:
        with Stub(inprocess.connect(server.address), "adder") as stub:
            yield stub
    finally:
        server.close()


def test_the_reply_is_of_the_type_that_the_question_names(stub: Stub) -> None:
    assert stub.call(Add(numbers=(1, 2, 3))).total == 6
    assert stub.call(AddTwice(numbers=(4,)), timeout=20.0).total == 4


def test_an_error_is_raised_as_it_is(stub: Stub) -> None:
    with pytest.raises(NotFoundError, match="no numbers"):
        stub.call(Add(numbers=()))


def test_a_reply_of_another_type_is_an_error_that_says_so(stub: Stub) -> None:
    with pytest.raises(TypeError) as caught:
        stub.call(Ping())
    assert str(caught.value) == (
        "the adder at 127.0.0.1:1 answered Ping with Sum where Done is due; is it of another "
        "version of Headrace?"
    )


def test_a_channel_that_was_released_is_not_closed_with_its_stub(stub: Stub) -> None:
    channel = stub.release()
    stub.close()
    assert channel.call(Add(numbers=(1, 2)), timeout=10)[0] == Sum(total=3)
    channel.close()


def test_a_question_that_names_no_reply_is_refused() -> None:
    with pytest.raises(TypeError, match="Question names no reply"):
        reply_type(Question)


def test_what_a_question_expects_does_not_travel() -> None:
    sent = msgspec.msgpack.encode(Add(numbers=(1, 2)))
    assert msgspec.msgpack.decode(sent) == {"type": "Add", "numbers": [1, 2]}
    assert msgspec.msgpack.Decoder(Requests).decode(sent) == Add(numbers=(1, 2))


def test_every_request_of_the_data_service_names_a_reply_that_its_channel_understands() -> None:
    for requests, replies in (
        (messages.DispatcherRequest, messages.DispatcherReply),
        (messages.WorkerRequest, messages.WorkerReply),
    ):
        expected = {reply_type(request) for request in requests.__args__}
        assert expected == set(replies.__args__)
