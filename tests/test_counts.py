from __future__ import annotations

import pytest

from headrace import counts


def value(name, **labels):
    return counts.REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("count", "name", "labels", "amount"),
    [
        (lambda: counts.count_delivered(32), "headrace_elements_delivered_total", {}, 32),
        (counts.count_split_granted, "headrace_splits_granted_total", {}, 1),
        (counts.count_user_function_error, "headrace_user_function_errors_total", {}, 1),
        (counts.count_request_too_large, "headrace_requests_too_large_total", {}, 1),
        (counts.count_answer_withheld, "headrace_answers_withheld_total", {}, 1),
        (counts.count_connection_cut, "headrace_connections_cut_total", {}, 1),
        (counts.count_memory_refused, "headrace_memory_refused_total", {}, 1),
        (
            lambda: counts.count_handshake_refused("keys"),
            "headrace_handshakes_refused_total",
            {"reason": "keys"},
            1,
        ),
    ],
)
def test_a_count_moves_its_own_counter(count, name, labels, amount):
    before = value(name, **labels)
    count()
    assert value(name, **labels) - before == amount
