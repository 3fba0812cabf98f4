"""Words as numbers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InvalidArgumentError

WORDS = ["red", "green", "blue"]


@pytest.mark.parametrize(
    "given", [WORDS, np.array(WORDS), [w.encode() for w in WORDS], tuple(WORDS)]
)
@pytest.mark.parametrize("num_oov", [0, 1, 4])
def test_words_are_numbered_in_order_after_the_oov_numbers(given, num_oov):
    lookup = hr.Lookup.from_vocabulary(given, num_oov=num_oov)
    assert len(lookup) == lookup.size == 3 + num_oov
    for asked in (
        ["green", "red"],
        [b"green", b"red"],
        np.array(["green", "red"]),
        np.array([b"green", b"red"]),
        np.array(["green", b"red"], object),
    ):
        found = lookup(asked)
        assert found.dtype == np.int64
        assert found.tolist() == [num_oov + 1, num_oov]
    assert lookup("blue") == num_oov + 2
    assert lookup(np.array([["red"], ["red"]])).shape == (2, 1)
    assert lookup([]).shape == (0,)
    assert lookup.inverse(lookup(["blue", "red"])).tolist() == [lookup.words[2], lookup.words[0]]


def test_unknown_words_share_oov_numbers_by_a_stable_hash():
    lookup = hr.Lookup.from_vocabulary(WORDS, num_oov=3)
    others = [f"word {number}" for number in range(100)]
    found = lookup(others)
    assert set(found.tolist()) == {0, 1, 2}
    assert np.array_equal(pickle.loads(pickle.dumps(lookup))(others), found)
    assert np.array_equal(lookup([word.encode() for word in others]), found)
    assert lookup.inverse([0, 3], "?").tolist() == ["?", "red"]
    assert hr.Lookup.from_vocabulary(WORDS)(["x", "red"]).tolist() == [0, 1]


def test_an_unknown_word_without_a_number_for_it_is_named():
    lookup = hr.Lookup.from_vocabulary(WORDS, num_oov=0)
    with pytest.raises(InvalidArgumentError, match=r"'violet'.*'red', 'green', 'blue'.*num_oov=1"):
        lookup(["red", "violet"])


def test_integers_are_words_of_a_vocabulary_of_integers():
    lookup = hr.Lookup.from_vocabulary(np.array([70, -2, 5]))
    assert lookup([5, 70, 6]).tolist() == [3, 1, 0]
    with pytest.raises(TypeError, match="integers"):
        lookup(["5"])
    with pytest.raises(TypeError, match="text"):
        hr.Lookup.from_vocabulary(WORDS)([1])


def test_wrong_vocabularies_are_rejected():
    with pytest.raises(ValueError, match="'red'"):
        hr.Lookup.from_vocabulary(["red", "blue", b"red", "red"])
    for words in ("red", [1.5], [True], [None], ["a", 1]):
        with pytest.raises(TypeError):
            hr.Lookup.from_vocabulary(words)
    with pytest.raises(ValueError, match="num_oov"):
        hr.Lookup.from_vocabulary(WORDS, num_oov=-1)
    with pytest.raises(InvalidArgumentError):
        hr.Lookup.from_vocabulary(WORDS).inverse([4])


def test_it_maps_elements_of_a_dataset():
    lookup = hr.Lookup.from_vocabulary(WORDS)
    dataset = hr.Dataset.from_tensor_slices(np.array(["blue", "pink", "red"])).batch(3).map(lookup)
    assert next(iter(dataset)).tolist() == [3, 0, 1]


# --- vocabularies of datasets ---------------------------------------------------------------------


def test_lookup_from_dataset_orders_words_by_frequency_then_first_appearance():
    sentences = ["b a c a", "c d", "", "d b e"]
    arrays = hr.Dataset.from_random_access(sentences).map(
        lambda text: np.array(text.split(), object).reshape(1, -1)
    )
    words = hr.Dataset.from_random_access(" ".join(sentences).split())
    for dataset in (arrays, words):
        lookup = hr.Lookup.from_dataset(dataset)
        assert lookup.words == ("b", "a", "c", "d", "e")
        assert lookup.num_oov == 1
        assert hr.Lookup.from_dataset(dataset, min_count=2).words == ("b", "a", "c", "d")
        assert hr.Lookup.from_dataset(dataset, 3, max_size=2).words == ("b", "a")
        assert hr.Lookup.from_dataset(dataset, 3, max_size=2).size == 5
    assert hr.Lookup.from_dataset(words.take(0)).words == ()


def test_lookup_from_dataset_counts_text_and_its_bytes_as_one_word():
    words = hr.Dataset.from_random_access(["x", b"y", "é", "é".encode(), b"x", b"x"])
    assert hr.Lookup.from_dataset(words).words == ("x", "é", b"y")
    numbers = hr.Dataset.from_tensor_slices([7, 5, 5])
    assert hr.Lookup.from_dataset(numbers).words == (5, 7)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: hr.Lookup.from_dataset(["a"]), TypeError, "from_vocabulary"),
        (
            lambda: hr.Lookup.from_dataset(hr.Dataset.from_tensors({"a": "b"})),
            TypeError,
            r"a word or an array of words, but is .*; select the words with map\(\)",
        ),
        (
            lambda: hr.Lookup.from_dataset(hr.Dataset.from_tensors(1.5)),
            TypeError,
            "a word must be str, bytes or an integer, but got 1.5",
        ),
        (
            lambda: hr.Lookup.from_dataset(hr.Dataset.range(3), max_size=0),
            ValueError,
            "`max_size` must be at least 1",
        ),
        (
            lambda: hr.Lookup.from_dataset(hr.Dataset.range(3), min_count=0),
            ValueError,
            "`min_count` must be at least 1",
        ),
    ],
)
def test_lookup_from_dataset_explains_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
