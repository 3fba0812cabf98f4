from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import errors
from headrace.transport.envelope import (
    MAX_FRAME_BYTES,
    ErrorText,
    RequestHeader,
    decode_error,
    decode_request_header,
    encode,
    encode_error,
    flat_views,
    join_frames,
    split_frames,
)
from tests.transport.messages import Echo


@given(st.integers(0, 2**63), st.integers())
def test_header_keeps_its_message_encoded(ticket, number):
    number %= 2**63
    header = RequestHeader(ticket, 0, msgspec.Raw(encode(Echo(number=number))))
    again = decode_request_header(encode(header))
    assert again.request_id == ticket
    assert msgspec.msgpack.decode(again.body, type=Echo) == Echo(number=number)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_header_or_a_decode_error(data):
    with contextlib.suppress(msgspec.DecodeError, ValueError):
        assert isinstance(decode_request_header(data), RequestHeader)


@given(
    st.text(st.characters(codec=None)),
    st.sampled_from(sorted(set(errors.__all__) - {"describe_error"})),
)
def test_headrace_errors_carry_any_text(text, name):
    kind = getattr(errors, name)
    again = decode_error(encode_error(kind(text)))
    assert type(again) is kind
    assert str(again) == text.encode("utf-8", "backslashreplace").decode()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("a"), ValueError, "a"),
        (KeyError("a"), KeyError, "'a'"),
        (OSError(2, "No such file", "x"), OSError, "[Errno 2] No such file: 'x'"),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"), errors.HeadraceError, None),
        (ValueError(), ValueError, ""),
    ],
)
def test_builtin_errors_cross_if_made_from_text(error, kind, text):
    again = decode_error(encode_error(error))
    if type(error) is FileNotFoundError:
        kind = FileNotFoundError
    assert type(again) is kind
    if text is not None:
        assert str(again) == text


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "eval", "Exploit", ""])
def test_unknown_error_name_becomes_a_headrace_error(name):
    again = decode_error(encode(ErrorText(name, "text")))
    assert type(again) is errors.HeadraceError
    assert str(again) == f"{name}: text"


def test_flat_views_take_any_contiguous_memory():
    array = np.arange(12, dtype=np.float64).reshape(3, 4)
    views = flat_views([b"abc", bytearray(b"de"), array.data, np.zeros((0, 5)).data])
    assert [view.tobytes() for view in views] == [b"abc", b"de", array.tobytes(), b""]
    assert all(view.format == "B" and view.ndim == 1 for view in views)


def test_flat_views_refuse_other_objects():
    with pytest.raises(TypeError):
        flat_views(["text"])


def test_buffers_of_usual_size_are_not_split():
    views = flat_views([b"a", b"", bytes(MAX_FRAME_BYTES)])
    assert split_frames(views) == (views, (1, 1, 1))
    assert join_frames(views, (1, 1, 1)) == views


def test_huge_buffer_is_sent_in_pieces():
    sizes = [0, 5, 2 * MAX_FRAME_BYTES + 1]
    views = flat_views([bytes([size % 251]) * size for size in sizes])
    frames, pieces = split_frames(views)
    assert pieces == (1, 1, 3)
    assert max(frame.nbytes for frame in frames) == MAX_FRAME_BYTES
    assert join_frames(frames, pieces) == views


@pytest.mark.parametrize("pieces", [(), (1,), (3,), (1, 1, 1), (2, 0), (-1, 3)])
def test_unannounced_frames_are_refused(pieces):
    with pytest.raises(ValueError, match="received 2 frames"):
        join_frames([memoryview(b"a"), memoryview(b"b")], pieces)
