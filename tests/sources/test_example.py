from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataLossError, InvalidElementError
from headrace.io import FixedLenFeature, VarLenFeature, encode_example, parse_example
from headrace.sources.protobuf import (
    WireFormatError,
    decode_varints,
    encode_field,
    encode_varint,
    encode_varints,
)

#: What TensorFlow wrote, deterministically, for the two sets of features below.
GOLDEN = [
    bytes.fromhex(
        "0a5a0a0c0a0369647312051a030a01010a140a05696d616765120b0a090a0589504e47000a000a170a056c61"
        "62656c120e1a0c0a0afbffffffffffffffff010a1b0a07776569676874731210120e0a0c0000003f00000000"
        "0000a0bf"
    ),
    bytes.fromhex(
        "0a6f0a210a03696473121a1a180a1601800180808080808080808001ffffffffffffffff7f0a140a05696d61"
        "6765120b0a090a0589504e47000a000a170a056c6162656c120e1a0c0a0afeffffffffffffffff010a1b0a07"
        "776569676874731210120e0a0c0000003f000040400000a0bf"
    ),
]
IDS = [1, 128, -(1 << 63), (1 << 63) - 1]
FEATURES: list[dict[str, Any]] = [
    {
        "label": -5 + index,
        "image": [b"\x89PNG\x00", b""],
        "weights": [0.5, float(index), -1.25],
        "ids": IDS[: index + 1],
    }
    for index in (0, 3)
]
WANTED = {
    "image": FixedLenFeature((2,), bytes),
    "label": FixedLenFeature((), np.int64),
    "weights": FixedLenFeature((3,), np.float32),
    "ids": VarLenFeature(np.int64),
}


@pytest.mark.parametrize("index", [0, 1])
def test_encoded_examples_equal_those_of_tensorflow(index: int) -> None:
    assert encode_example(FEATURES[index]) == GOLDEN[index]


def test_one_example_is_parsed() -> None:
    parsed = parse_example(GOLDEN[1], WANTED)

    assert list(parsed) == ["image", "label", "weights", "ids"]
    assert parsed["image"].tolist() == [b"\x89PNG\x00", b""]
    assert parsed["label"] == -2
    assert isinstance(parsed["label"], np.int64)
    assert parsed["weights"].tolist() == [0.5, 3.0, -1.25]
    assert parsed["weights"].dtype == np.float32
    assert parsed["weights"].flags.writeable
    assert parsed["ids"].tolist() == IDS


@pytest.mark.parametrize("make", [list, tuple, lambda rows: np.array(rows, object)])
def test_a_batch_gives_stacked_columns(make: Any) -> None:
    parsed = parse_example(make(GOLDEN), WANTED)

    assert parsed["image"].tolist() == [[b"\x89PNG\x00", b""]] * 2
    assert parsed["label"].tolist() == [-5, -2]
    assert parsed["weights"].tolist() == [[0.5, 0.0, -1.25], [0.5, 3.0, -1.25]]
    assert parsed["ids"]["values"].tolist() == [1, *IDS]
    assert parsed["ids"]["lengths"].tolist() == [1, 4]


def test_an_empty_batch_has_columns_of_no_rows() -> None:
    parsed = parse_example([], WANTED)

    assert parsed["image"].shape == (0, 2)
    assert parsed["weights"].shape == (0, 3)
    assert parsed["weights"].dtype == np.float32
    assert parsed["ids"]["lengths"].shape == (0,)


def test_shapes_and_dtypes_are_as_requested() -> None:
    data = encode_example({"a": np.arange(6).reshape(2, 3), "b": 0.5, "c": "hé", "d": True})

    parsed = parse_example(
        data,
        {
            "a": FixedLenFeature((2, 3), np.uint8),
            "b": FixedLenFeature((), np.float64),
            "c": FixedLenFeature((), str),
            "d": FixedLenFeature((), np.bool_),
        },
    )

    assert parsed["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert parsed["a"].dtype == np.uint8
    assert isinstance(parsed["b"], np.float64)
    assert parsed["c"] == "hé"
    assert parsed["d"] is np.True_


def test_missing_features_get_default_values() -> None:
    wanted = {
        "i": FixedLenFeature((2,), np.int32, -1),
        "f": FixedLenFeature((), np.float32, 3),
        "s": FixedLenFeature((), bytes, "none"),
        "v": VarLenFeature(bytes),
        "e": FixedLenFeature((2,), np.float32, [1.0, 2.0]),
    }
    empty, full = encode_example({"e": []}), encode_example({"i": [5, 6], "s": b"some", "v": "x"})

    one = parse_example(empty, wanted)
    batch = parse_example([empty, full], wanted)

    assert one["i"].tolist() == [-1, -1]
    assert (one["f"], one["s"], one["v"].tolist()) == (3.0, b"none", [])
    assert batch["i"].tolist() == [[-1, -1], [5, 6]]
    assert batch["f"].tolist() == [3.0, 3.0]
    assert batch["s"].tolist() == [b"none", b"some"]
    assert batch["v"]["values"].tolist() == [b"x"]
    assert batch["v"]["lengths"].tolist() == [0, 1]
    assert batch["e"].tolist() == [[1.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (FixedLenFeature((), np.int64), "has no feature 'z'"),
        (FixedLenFeature((), np.float32), "has no feature 'z'"),
    ],
)
def test_a_missing_feature_is_named(wanted: FixedLenFeature, message: str) -> None:
    good = encode_example({"z": 1 if wanted.kind == 3 else 1.0})

    with pytest.raises(InvalidElementError, match="the example " + message):
        parse_example(GOLDEN[0], {"z": wanted})
    with pytest.raises(InvalidElementError, match="example 1 of the batch " + message):
        parse_example([good, GOLDEN[0]], {"z": wanted})


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("label", FixedLenFeature((), np.float32), "is a list of int64, but dtype float32"),
        ("weights", VarLenFeature(bytes), "is a list of float"),
        ("weights", FixedLenFeature((2,), np.float32), r"has 3 values, but its shape \(2,\)"),
        ("image", FixedLenFeature((), bytes), "has 2 values"),
        ("ids", FixedLenFeature((3,), np.int64), "has . values"),
        ("label", FixedLenFeature((), np.uint8), "holds -., which uint8 cannot hold"),
        ("label", FixedLenFeature((), np.uint64), "holds -., which uint64 cannot hold"),
    ],
)
def test_a_mismatching_feature_is_named(name: str, wanted: Any, message: str) -> None:
    for serialized in (GOLDEN[0], GOLDEN, GOLDEN[:1] * 3):
        with pytest.raises(InvalidElementError, match=f"feature '{name}'.*{message}"):
            parse_example(serialized, {name: wanted})


def test_the_position_in_the_batch_is_named() -> None:
    rows = [encode_example({"a": [1.0] * n}) for n in (2, 2, 3)]

    with pytest.raises(InvalidElementError, match="'a' of example 2 of the batch has 3 values"):
        parse_example(rows, {"a": FixedLenFeature((2,), np.float32)})


def entry(name: bytes, feature: bytes) -> bytes:
    return encode_field(1, encode_field(1, name) + encode_field(2, feature))


UNPACKED = encode_field(
    1,
    entry(b"i", encode_field(3, b"\x08\x05\x08\xac\x02" + encode_field(1, b"\x07")))
    + entry(b"f", encode_field(2, b"\x0d\x00\x00\x80\x3f" + encode_field(1, b"\x00\x00\x00\x40")))
    + entry(b"\x66" * 200, encode_field(1, encode_field(1, b"x" * 300))),
)


def test_unpacked_numbers_are_read() -> None:
    wanted = {"i": VarLenFeature(np.int64), "f": FixedLenFeature((2,), np.float32)}

    one = parse_example(UNPACKED, wanted)
    batch = parse_example([UNPACKED] * 3, wanted)

    assert one["i"].tolist() == [5, 300, 7]
    assert one["f"].tolist() == [1.0, 2.0]
    assert batch["i"]["values"].tolist() == [5, 300, 7] * 3
    assert batch["f"].tolist() == [[1.0, 2.0]] * 3


def test_unknown_fields_are_skipped_and_the_last_duplicate_is_used() -> None:
    unknown = b"\x18\x96\x01" + b"\x21" + bytes(8) + b"\x2d" + bytes(4) + b"\x32\x02hi"
    number = entry(b"a", unknown + encode_field(3, encode_field(1, b"\x01")))
    again = entry(b"a", encode_field(3, unknown + encode_field(1, b"\x02")))
    swapped = encode_field(
        1, encode_field(2, encode_field(3, encode_field(1, b"\x09"))) + encode_field(1, b"b")
    )
    data = unknown + encode_field(1, number + unknown) + encode_field(1, again + swapped)

    parsed = parse_example(
        data, {"a": FixedLenFeature((), np.int64), "b": FixedLenFeature((), np.int64)}
    )

    assert parsed == {"a": 2, "b": 9}


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x05",
        b"\x0a\x80",
        b"no example",
        b"\x0b\x00",
        b"\x00\x00",
        b"\x0a" + b"\xff" * 11,
        GOLDEN[0][:-1],
        GOLDEN[0] + b"\x0a",
        encode_field(1, entry(b"ids", encode_field(3, b"\x0a\x05\x01"))),
        encode_field(1, entry(b"ids", encode_field(3, encode_field(1, b"\x80")))),
        encode_field(1, entry(b"ids", encode_field(3, encode_field(1, b"\x80" * 30)))),
        encode_field(1, entry(b"weights", encode_field(2, encode_field(1, b"\x80" * 5)))),
        encode_field(1, encode_field(1, b"\x0a\x7fids")),
    ],
)
def test_damaged_examples_raise_data_loss(data: bytes) -> None:
    wanted = {"ids": VarLenFeature(np.int64), "weights": VarLenFeature(np.float32)}

    with pytest.raises(DataLossError, match=r"example"):
        parse_example(data, wanted)
    with pytest.raises(DataLossError, match="example 1 of the batch"):
        parse_example([GOLDEN[0], data], wanted)


def test_invalid_text_raises_data_loss() -> None:
    with pytest.raises(DataLossError, match="feature 's' of the example is damaged"):
        parse_example(encode_example({"s": b"\xff"}), {"s": FixedLenFeature((), str)})


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40))
def test_varints_round_trip(values: list[int]) -> None:
    array = np.array(values, np.int64)
    data = encode_varints(array)

    assert data == b"".join([encode_varint(value % (1 << 64)) for value in values])
    assert decode_varints(data).tolist() == values


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_varints_or_rejected(data: bytes) -> None:
    try:
        values = decode_varints(data)
    except WireFormatError:
        return
    assert len(values) == sum([octet < 0x80 for octet in data])


values = st.one_of(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=30),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30),
    st.lists(st.binary(max_size=200), min_size=1, max_size=4),
)


@given(st.lists(st.dictionaries(st.sampled_from("abcdefé"), values), min_size=1, max_size=5))
def test_encoded_examples_are_parsed_alone_and_in_batches(rows: list[dict[str, list[Any]]]) -> None:
    data = [encode_example(row) for row in rows]
    kinds: dict[str, Any] = {}
    for row in rows:
        for name, items in row.items():
            kinds.setdefault(name, type(items[0]))
    for name, kind in kinds.items():
        wanted = {name: VarLenFeature({int: np.int64, float: np.float32}.get(kind, bytes))}
        expected = [row.get(name, []) for row in rows]
        if any(items and type(items[0]) is not kind for items in expected):
            with pytest.raises(InvalidElementError, match="is a list of"):
                parse_example(data, wanted)
            continue
        assert [parse_example(row, wanted)[name].tolist() for row in data] == expected
        batch = parse_example(data, wanted)[name]
        assert batch["values"].tolist() == [item for items in expected for item in items]
        assert batch["lengths"].tolist() == list(map(len, expected))


@given(st.lists(st.tuples(st.integers(-9, 300), st.floats(width=32)), min_size=2, max_size=9))
def test_examples_of_one_or_several_layouts_parse_the_same(rows: list[tuple[Any, Any]]) -> None:
    data = [encode_example({"i": [i, 3], "f": f, "s": b"%04d" % i}) for i, f in rows]
    wanted = {
        "i": FixedLenFeature((2,), np.int64),
        "f": FixedLenFeature((), np.float32),
        "s": FixedLenFeature((), bytes),
    }

    batch = parse_example(data, wanted)

    singles = [parse_example(row, wanted) for row in data]
    for name in wanted:
        np.testing.assert_array_equal(batch[name], np.array([row[name] for row in singles]))


@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 16_383, 16_384, 1 << 21])
@pytest.mark.parametrize("number", [0, 127, 128, 20_000, (1 << 63) - 1, -1, -(1 << 63)])
def test_one_value_of_any_size_is_returned_unchanged(size: int, number: int) -> None:
    wanted = {"image": FixedLenFeature((), bytes), "label": FixedLenFeature((), np.int64)}

    parsed = parse_example(encode_example({"image": b"x" * size, "label": number}), wanted)

    assert parsed == {"image": b"x" * size, "label": number}
    assert type(parsed["label"]) is np.int64


@pytest.mark.parametrize("size", [0, 1, 130, 20_000])
def test_entries_in_unusual_forms_are_read(size: int) -> None:
    item = b"x" * size
    name, values = (
        encode_field(1, b"image"),
        encode_field(2, encode_field(1, encode_field(1, item))),
    )
    parts = encode_field(2, encode_field(1, encode_field(1, b"a"))) + encode_field(
        2, encode_field(1, encode_field(1, item))
    )
    forms = {
        "value first": (values + name, [item]),
        "value in parts": (name + parts, [b"a", item]),
        "value around the name": (values + name + values, [item, item]),
        "two items": (
            name + encode_field(2, encode_field(1, encode_field(1, item) * 2)),
            [item, item],
        ),
        "two lists": (
            name + encode_field(2, encode_field(2, b"") + encode_field(1, encode_field(1, item))),
            [item],
        ),
        "no item": (name + encode_field(2, encode_field(1, b"")), []),
        "no list": (name + encode_field(2, b""), []),
        "a field more": (name + values + encode_field(7, item), [item]),
    }
    for what, (entry, expected) in forms.items():
        example = encode_field(1, encode_field(1, entry))
        parsed = parse_example(example, {"image": VarLenFeature(bytes)})
        assert parsed["image"].tolist() == expected, what


def test_features_may_change_between_calls() -> None:
    data = encode_example({"a": 1, "b": 300})
    features: dict[str, Any] = {"a": FixedLenFeature((), np.int64)}

    assert parse_example(data, features) == {"a": 1}
    features["b"] = FixedLenFeature((), np.int32)
    assert list(parse_example(data, features)) == ["a", "b"]
    features["a"] = features.pop("a")  # the last one now
    assert list(parse_example(data, features)) == ["b", "a"]
    features["b"] = FixedLenFeature((1,), np.int64)
    assert parse_example(data, features)["b"].tolist() == [300]
    features["b"] = [3]
    with pytest.raises(TypeError, match=r"got \[3\] for 'b'"):
        parse_example(data, features)


def test_unhashable_features_are_read() -> None:
    class Unhashable(FixedLenFeature):
        __hash__ = None  # type: ignore[assignment]

    data = encode_example({"a": 1})

    assert parse_example(data, {"a": Unhashable((), np.int64)}) == {"a": 1}


@given(st.binary(max_size=30), st.integers(0, len(GOLDEN[1])), st.integers(0, 30))
def test_damage_raises_only_data_loss(noise: bytes, at: int, cut: int) -> None:
    data = GOLDEN[1][:at] + noise + GOLDEN[1][at + cut :]
    for serialized in (data, [GOLDEN[1], data]):
        found: Any = None
        try:
            found = parse_example(serialized, WANTED)
        except (DataLossError, InvalidElementError) as error:
            found = error
        assert isinstance(found, DataLossError | InvalidElementError) or set(found) == set(WANTED)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (object(), TypeError, "feature 'x' must hold bytes or str"),
        (None, TypeError, "feature 'x' must hold bytes or str"),
        (1j, TypeError, "feature 'x' must be bytes, str, int, float"),
        ([b"a", 3], TypeError, "feature 'x' must hold bytes or str"),
        ([[1], [1, 2]], TypeError, "feature 'x' cannot be converted to an array"),
        (1 << 64, ValueError, "feature 'x' holds 18446744073709551616"),
        (1 << 63, ValueError, "feature 'x' holds 9223372036854775808"),
        (1e300, ValueError, "does not fit into float32"),
        ([1.0, 1e300], ValueError, "feature 'x' holds a number that does not fit into float32"),
    ],
)
def test_an_unencodable_value_is_named(value: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        encode_example({"x": value})


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="features must be a mapping"):
        encode_example([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="names of str, got 3"):
        encode_example({3: 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="names a feature"):
        parse_example(b"", {})
    with pytest.raises(TypeError, match="must hold FixedLenFeature or VarLenFeature"):
        parse_example(b"", {"x": np.int64})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="serialized must be bytes"):
        parse_example("text", WANTED)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="of something else"):
        parse_example([b"", 3], WANTED)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"of shape \[n\]"):
        parse_example(np.array([GOLDEN], object), WANTED)
    with pytest.raises(ValueError, match="dtype must be"):
        VarLenFeature(np.complex64)
    with pytest.raises(ValueError, match="shape must hold lengths"):
        FixedLenFeature((None,), np.int64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="default_value must be one or 2"):
        FixedLenFeature((2,), np.int64, [1, 2, 3])
    with pytest.raises(ValueError, match="default_value must be one or 1"):
        FixedLenFeature((), np.int64, 1.5)
