"""Given what each process has for a step, when they agree, then all do the same, or all fail."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.adapters.jax_step_agreement import (
    InputStepAgreement,
    decide_step,
    unique_iterator_name,
)
from headrace.errors import AbortedError, DeadlineExceededError, InvalidArgumentError

FORMS = [[3, "float32"]]
END: dict[str, Any] = {"end": True}


def rows(**shares: int) -> dict[str, Any]:
    return {"rows": {name[1:]: count for name, count in shares.items()}, "forms": FORMS}


@pytest.mark.parametrize("remainder", ["error", "pad", "drop"])
def test_equal_shares_are_used_and_all_end_when_all_have_ended(remainder):
    words = {0: rows(s0=2, s1=2), 1: rows(s2=2)}
    assert decide_step(words, remainder) == {"use": 2, "forms": FORMS}
    assert decide_step({0: END, 1: END}, remainder) == {"end": True}


def test_where_some_have_ended_all_fail_or_all_end_or_those_are_padded():
    words = {0: rows(s0=2), 3: END, 5: END}
    assert "processes [3, 5] have no rows left" in decide_step(words, "error")["error"]
    assert decide_step(words, "drop") == {"end": True}
    assert decide_step(words, "pad") == {"use": 2, "forms": FORMS}
    assert decide_step(words, "pad", 4) == {"use": 4, "forms": FORMS}


def test_shares_that_differ_are_an_error_or_padded_or_left_out():
    words = {0: rows(s0=2, s1=2), 1: rows(s2=2, s3=1)}
    assert "2, 2, 2 and 1 rows" in decide_step(words, "error")["error"]
    assert decide_step(words, "pad") == {"use": 2, "forms": FORMS}
    assert decide_step(words, "drop") == {"drop": True}


def test_processes_that_read_the_same_rows_count_once():
    words = {0: rows(s0=2), 1: rows(s0=2), 2: rows(s1=2)}
    assert decide_step(words, "error") == {"use": 2, "forms": FORMS}
    words[1] = rows(s0=1)
    assert "the same rows" in decide_step(words, "pad")["error"]


def test_one_that_failed_or_left_and_shapes_that_differ_are_named():
    words = {0: rows(s0=2), 1: {"error": "ValueError: no"}}
    assert (
        "process 1 failed, so that all end here: ValueError: no"
        in decide_step(words, "pad")["aborted"]
    )
    words[1] = {"closed": True}
    assert "process 1 closed" in decide_step(words, "pad")["aborted"]
    other = {"rows": {"1": 2}, "forms": [[4, "float32"]]}
    assert "padded_batch" in decide_step({0: rows(s0=2), 1: other}, "pad")["error"]


class Words:
    """A store in this process."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self.changed = threading.Condition()
        self.tick = 0.0

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.words[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> str | None:
        with self.changed:
            if key not in self.words and not self.changed.wait_for(lambda: key in self.words, 0.2):
                self.tick += 1
            return self.words.get(key)

    def delete(self, key: str) -> None:
        with self.changed:
            self.words.pop(key, None)


def together(
    store: Words, words: list[list[dict[str, Any]]], remainder: str = "error"
) -> list[Any]:
    """Return what each process was told, or the error that it met, at each of its steps."""
    told: list[Any] = [[] for _ in words]

    def run(process: int) -> None:
        agreement = InputStepAgreement(store, "it", range(len(words)), process)
        told[process].append(agreement.broadcast_first(process * 10))
        for word in words[process]:
            try:
                told[process].append(agreement.agree(word, remainder))
            except Exception as error:
                told[process].append(type(error))
        agreement.close()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(words))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return told


def test_all_are_told_the_same_and_words_do_not_pile_up():
    store = Words()
    steps = [[rows(s0=2)] * 50 + [END], [rows(s1=2)] * 50 + [END], [rows(s2=2)] * 50 + [END]]
    told = together(store, steps)
    assert told[0] == told[1] == told[2]
    assert told[0][0] == 0
    assert told[0][1:] == [{"use": 2, "forms": FORMS}] * 50 + [{"end": True}]
    assert len(store.words) <= 3


def test_one_that_leaves_early_keeps_nobody_waiting():
    for leaver in (0, 1):
        steps = [[rows(s0=2)] * 3, [rows(s1=2)] * 3]
        steps[leaver] = steps[leaver][:1]
        told = together(Words(), steps)
        assert told[1 - leaver][2] is AbortedError


def test_one_that_fails_ends_all():
    told = together(Words(), [[rows(s0=2), {"error": "no"}], [rows(s1=2), rows(s1=2)]])
    assert told[0][2] is told[1][2] is AbortedError


def test_shares_that_differ_are_the_same_error_for_all():
    told = together(Words(), [[rows(s0=2)], [rows(s1=1)]])
    assert told[0][1] is told[1][1] is InvalidArgumentError


def test_one_that_never_comes_is_named_when_patience_ends():
    store = Words()
    agreement = InputStepAgreement(store, "it", [0, 7], 0, timeout=2.5, clock=lambda: store.tick)
    with pytest.raises(DeadlineExceededError, match="process 7 has not come to step 0"):
        agreement.agree(rows(s0=1), "error")


def test_names_are_alike_for_the_same_processes_and_new_each_time():
    first, second, other = (
        unique_iterator_name([0, 1]),
        unique_iterator_name([0, 1]),
        unique_iterator_name([0, 2]),
    )
    assert first != second
    assert first.rpartition("/")[0] == second.rpartition("/")[0] != other.rpartition("/")[0]
