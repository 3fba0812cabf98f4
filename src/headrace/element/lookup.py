"""Lookup of words in a vocabulary: maps words to integers, with indices for unknown words."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from itertools import repeat
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import check_int
from headrace.errors import InvalidArgumentError

__all__ = ["Lookup"]

_MAX_SHOWN = 3


class Lookup:
    """A mapping from the words of a vocabulary to integers.

    >>> import headrace as hr
    >>> lookup = hr.Lookup.from_vocabulary(["red", "green"])
    >>> lookup(["green", b"red", "blue"])
    array([2, 1, 0])
    >>> len(lookup)
    3

    Numbers below `num_oov` are for words outside the vocabulary ("out of vocabulary"); the
    vocabulary's words follow in order. A `str` and its UTF-8 `bytes` are the same word. Words may
    also be integers. A function that captures the lookup is sent to each worker with it, once.

    Args:
        words: The words, without duplicates.
        num_oov: Number of indices that unknown words share by hash; 0 makes unknown words an error.

    Raises:
        TypeError: If a word is neither text nor an integer, or if both kinds occur.
        ValueError: If a word occurs twice.
    """

    def __init__(self, words: Iterable[Any], num_oov: int = 1) -> None:
        self.num_oov: int = check_int("num_oov", num_oov, minimum=0)
        if isinstance(words, str | bytes):
            raise TypeError(
                f"`words` must be an iterable of words, but got the single word {words!r}"
            )
        # `tolist` converts NumPy scalars to Python objects.
        plain = words.tolist() if isinstance(words, np.ndarray) else list(words)
        self._words = tuple(map(_to_python_word, plain))
        kinds = {isinstance(word, int) for word in self._words}
        if len(kinds) > 1:
            raise TypeError("`words` must be all text or all integers, but contains both")
        self._is_of_integers = kinds == {True}
        numbers = dict(
            zip(map(_key, self._words), range(num_oov, num_oov + len(plain)), strict=True)
        )
        if len(numbers) < len(self._words):
            keys = [_key(word) for word in self._words]
            twice = next(word for word, key in enumerate(keys) if key in keys[:word])
            raise ValueError(
                f"`words` must not contain duplicates, but contains {self._words[twice]!r} twice"
            )
        self._numbers = numbers
        #: The same numbers by `str`, to avoid encoding text in each call.
        self._by_text = {} if self._is_of_integers else _by_text(numbers)

    @classmethod
    def from_vocabulary(cls, words: Iterable[Any], num_oov: int = 1) -> Self:
        """Create a lookup from words, in their order.

        Args:
            words: Distinct words.
            num_oov: Number of indices that unknown words share by hash; 0 makes unknown words an
                error.
        """
        return cls(words, num_oov)

    @classmethod
    def from_dataset(
        cls,
        dataset: Iterable[Any],
        num_oov: int = 1,
        max_size: int | None = None,
        min_count: int = 1,
    ) -> Self:
        """Create a lookup from the words of one epoch of a dataset, the most frequent first.

        Words that are equally frequent come in the order of their first appearance. A data service
        with DYNAMIC sharding reads in no fixed order, so that it makes no difference only with
        `ordered=True`. The counts of all distinct words are held in memory.

        >>> import headrace as hr
        >>> sentences = hr.Dataset.from_random_access(["to be or", "not to be"])
        >>> hr.Lookup.from_dataset(sentences.map(lambda s: s.split()), max_size=3).words
        ('to', 'be', 'or')

        Args:
            dataset: A Dataset whose elements are words or arrays of words.
            num_oov: Number of indices that unknown words share by hash; 0 makes unknown words an
                error.
            max_size: Maximum number of words; None keeps all.
            min_count: Minimum number of occurrences of a word.

        Raises:
            TypeError: If an element is neither a word nor an array of words.
        """
        check_int("num_oov", num_oov, minimum=0)
        check_int("min_count", min_count, minimum=1)
        if max_size is not None:
            check_int("max_size", max_size, minimum=1)
        if not hasattr(dataset, "as_numpy_iterator"):
            raise TypeError(
                f"`dataset` must be a Dataset, but got {type(dataset).__name__}; for words in "
                "memory use from_vocabulary"
            )
        counts: Counter[Any] = Counter()
        for element in dataset:
            if isinstance(element, np.ndarray):
                counts.update(element.ravel().tolist())
            elif isinstance(element, str | bytes | np.generic):
                counts[element] += 1
            else:
                raise TypeError(
                    f"an element must be a word or an array of words, but is {element!r:.80}; "
                    "select the words with map()"
                )
        merged: dict[Any, list[Any]] = {}  # the first form of each word, and its count
        for word, count in counts.items():
            plain = _to_python_word(word)
            merged.setdefault(_key(plain), [plain, 0])[1] += count
        # The sort is stable, so that equally frequent words stay in order.
        frequent = sorted(
            [entry for entry in merged.values() if entry[1] >= min_count],
            key=lambda entry: -entry[1],
        )
        return cls([word for word, _ in frequent[:max_size]], num_oov)

    @property
    def words(self) -> tuple[Any, ...]:
        """The words, in the order of their numbers."""
        return self._words

    @property
    def size(self) -> int:
        """Number of indices, which is the number of rows of an embedding of them."""
        return self.num_oov + len(self._words)

    def __len__(self) -> int:
        return self.size

    def __call__(self, words: Any) -> Any:
        """Return the numbers of words, as an int64 array of the same shape.

        Args:
            words: An array of any shape, a list, or a single word.

        Raises:
            InvalidArgumentError: If a word is not in the vocabulary, and `num_oov` is 0.
            TypeError: If text is looked up in a vocabulary of integers, or the other way around.
        """
        array = words if isinstance(words, np.ndarray) else np.asarray(words, object)
        flat = array.reshape(-1).tolist()
        found = list(map(self._by_text.get, flat, repeat(-1)))
        if self._is_of_integers or -1 in found:
            missing = [index for index, number in enumerate(found) if number == -1]
            others: list[Any] = []
            for index in missing:
                key = _key(_to_python_word(flat[index]))
                if isinstance(key, int) is not self._is_of_integers and self._words:
                    kind = "integers" if self._is_of_integers else "text"
                    raise TypeError(f"this Lookup contains {kind}, but got {flat[index]!r}")
                number = self._numbers.get(key, -1)
                if number < 0:
                    others.append(flat[index])
                    number = zlib.crc32(str(key).encode()) % self.num_oov if self.num_oov else -1
                found[index] = number
            if others and not self.num_oov:
                raise self._unknown_words_error(others)
        numbers = np.array(found, np.int64).reshape(array.shape)
        return numbers[()] if numbers.ndim == 0 else numbers

    def _unknown_words_error(self, others: list[Any]) -> InvalidArgumentError:
        shown = ", ".join(map(repr, dict.fromkeys(others[:_MAX_SHOWN])))
        known = ", ".join(map(repr, self._words[:_MAX_SHOWN]))
        more = ", ..." if len(self._words) > _MAX_SHOWN else ""
        return InvalidArgumentError(
            f"{shown} is not among the {len(self._words)} words of this Lookup ({known}{more}), "
            f"and num_oov=0 assigns no number to unknown words ({len(others)} in this call); add "
            "the word, or use num_oov=1"
        )

    def inverse(self, numbers: Any, unknown: Any = None) -> NDArray[Any]:
        """Return the words of numbers as an object array; numbers below `num_oov` become `unknown`.

        Args:
            numbers: Integers of any shape, in [0, size).
            unknown: Result for numbers that stand for no word.

        Raises:
            InvalidArgumentError: If a number is out of range.
        """
        array = np.asarray(numbers)
        if array.size and not (array.min() >= 0 and array.max() < self.size):
            raise InvalidArgumentError(f"numbers of this Lookup must be in [0, {self.size})")
        table = np.empty(self.size, object)
        table[: self.num_oov] = unknown
        table[self.num_oov :] = self._words
        return table[array.astype(np.int64)]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._words, self.num_oov)

    def __repr__(self) -> str:
        return f"<Lookup of {len(self._words)} words, num_oov={self.num_oov}>"


def _to_python_word(word: Any) -> Any:
    if isinstance(word, np.generic):
        word = word.item()
    if isinstance(word, bool) or not isinstance(word, str | bytes | int):
        raise TypeError(f"a word must be str, bytes or an integer, but got {word!r}")
    return word


def _key(word: Any) -> Any:
    return word.encode("utf-8", "surrogatepass") if isinstance(word, str) else word


def _by_text(numbers: dict[Any, int]) -> dict[Any, int]:
    """Return the numbers by bytes, and by str for bytes that are valid UTF-8."""
    found = dict(numbers)
    for word, number in numbers.items():
        try:
            found[word.decode("utf-8", "surrogatepass")] = number
        except UnicodeDecodeError:
            continue
    return found
