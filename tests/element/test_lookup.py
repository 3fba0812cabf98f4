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
