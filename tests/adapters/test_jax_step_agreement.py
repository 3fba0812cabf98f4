"""Agreement on steps: all processes apply the same decision, or all raise an error."""

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

SIGNATURES = [[3, "float32"]]
END: dict[str, Any] = {"end": True}


def rows(**counts: int) -> dict[str, Any]:
    return {"rows": {name[1:]: count for name, count in counts.items()}, "signatures": SIGNATURES}


@pytest.mark.parametrize("remainder", ["error", "pad", "drop"])
def test_equal_row_counts_are_used_and_all_processes_end_together(remainder):
    messages = {0: rows(s0=2, s1=2), 1: rows(s2=2)}
    assert decide_step(messages, remainder) == {"rows_per_shard": 2, "signatures": SIGNATURES}
    assert decide_step({0: END, 1: END}, remainder) == {"end": True}


def test_if_some_have_ended_all_raise_or_end_or_are_padded():
    messages = {0: rows(s0=2), 3: END, 5: END}
    assert "processes [3, 5] have no rows left" in decide_step(messages, "error")["error"]
    assert decide_step(messages, "drop") == {"end": True}
    assert decide_step(messages, "pad") == {"rows_per_shard": 2, "signatures": SIGNATURES}
    assert decide_step(messages, "pad", 4) == {"rows_per_shard": 4, "signatures": SIGNATURES}


def test_unequal_row_counts_raise_or_are_padded_or_dropped():
    messages = {0: rows(s0=2, s1=2), 1: rows(s2=2, s3=1)}
    assert "2, 2, 2 and 1 rows" in decide_step(messages, "error")["error"]
    assert decide_step(messages, "pad") == {"rows_per_shard": 2, "signatures": SIGNATURES}
    assert decide_step(messages, "drop") == {"drop": True}


def test_processes_that_read_the_same_rows_count_once():
    messages = {0: rows(s0=2), 1: rows(s0=2), 2: rows(s1=2)}
    assert decide_step(messages, "error") == {"rows_per_shard": 2, "signatures": SIGNATURES}
    messages[1] = rows(s0=1)
    assert "the same rows" in decide_step(messages, "pad")["error"]


def test_failed_and_closed_processes_and_different_shapes_are_named():
    messages = {0: rows(s0=2), 1: {"error": "ValueError: no"}}
    assert (
        "process 1 failed, so all processes stop: ValueError: no"
        in decide_step(messages, "pad")["aborted"]
    )
    messages[1] = {"closed": True}
    assert "process 1 closed" in decide_step(messages, "pad")["aborted"]
    other = {"rows": {"1": 2}, "signatures": [[4, "float32"]]}
    assert "padded_batch" in decide_step({0: rows(s0=2), 1: other}, "pad")["error"]


class MemoryStore:
    """An agreement store in the memory of this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.tick = 0.0

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> str | None:
        with self.changed:
            if key not in self.values and not self.changed.wait_for(
                lambda: key in self.values, 0.2
            ):
                self.tick += 1
            return self.values.get(key)

    def delete(self, key: str) -> None:
        with self.changed:
            self.values.pop(key, None)


def run_processes(
    store: MemoryStore, messages: list[list[dict[str, Any]]], remainder: str = "error"
) -> list[Any]:
    """Return the decisions that each process got, or the types of its errors, step by step."""
    decisions: list[Any] = [[] for _ in messages]

    def run(process: int) -> None:
        agreement = InputStepAgreement(store, "it", range(len(messages)), process)
        decisions[process].append(agreement.broadcast_first(process * 10))
        for message in messages[process]:
            try:
                decisions[process].append(agreement.agree(message, remainder))
            except Exception as error:
                decisions[process].append(type(error))
        agreement.close()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(messages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return decisions


def test_all_processes_get_the_same_decisions_and_messages_are_deleted():
    store = MemoryStore()
    steps = [[rows(s0=2)] * 50 + [END], [rows(s1=2)] * 50 + [END], [rows(s2=2)] * 50 + [END]]
    decisions = run_processes(store, steps)
    assert decisions[0] == decisions[1] == decisions[2]
    assert decisions[0][0] == 0
    assert decisions[0][1:] == [{"rows_per_shard": 2, "signatures": SIGNATURES}] * 50 + [
        {"end": True}
    ]
    assert len(store.values) <= 3


def test_a_process_that_closes_early_does_not_block_the_other():
    for closed in (0, 1):
        steps = [[rows(s0=2)] * 3, [rows(s1=2)] * 3]
        steps[closed] = steps[closed][:1]
        decisions = run_processes(MemoryStore(), steps)
        assert decisions[1 - closed][2] is AbortedError


def test_a_failed_process_ends_all():
    decisions = run_processes(
        MemoryStore(), [[rows(s0=2), {"error": "no"}], [rows(s1=2), rows(s1=2)]]
    )
    assert decisions[0][2] is decisions[1][2] is AbortedError


def test_unequal_row_counts_raise_the_same_error_on_all():
    decisions = run_processes(MemoryStore(), [[rows(s0=2)], [rows(s1=1)]])
    assert decisions[0][1] is decisions[1][1] is InvalidArgumentError


def test_a_missing_process_is_named_after_the_timeout():
    store = MemoryStore()
    agreement = InputStepAgreement(store, "it", [0, 7], 0, timeout=2.5, clock=lambda: store.tick)
    with pytest.raises(DeadlineExceededError, match="process 7 has not reached step 0"):
        agreement.agree(rows(s0=1), "error")


def test_iterator_names_are_new_and_equal_for_the_same_processes():
    first, second, other = (
        unique_iterator_name([0, 1]),
        unique_iterator_name([0, 1]),
        unique_iterator_name([0, 2]),
    )
    assert first != second
    assert first.rpartition("/")[0] == second.rpartition("/")[0] != other.rpartition("/")[0]
