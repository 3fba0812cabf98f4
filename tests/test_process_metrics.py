from __future__ import annotations

import pytest

from headrace import process_metrics


def value(name, **labels):
    return process_metrics.REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("count", "name", "labels", "amount"),
    [
        (lambda: process_metrics.count_delivered(32), "headrace_elements_delivered_total", {}, 32),
        (process_metrics.count_split_assigned, "headrace_splits_assigned_total", {}, 1),
        (process_metrics.count_user_function_error, "headrace_user_function_errors_total", {}, 1),
        (process_metrics.count_request_too_large, "headrace_requests_too_large_total", {}, 1),
        (process_metrics.count_reply_dropped, "headrace_replies_dropped_total", {}, 1),
        (
            process_metrics.count_slow_connection_closed,
            "headrace_slow_connections_closed_total",
            {},
            1,
        ),
        (
            process_metrics.count_shared_memory_refused,
            "headrace_shared_memory_refused_total",
            {},
            1,
        ),
        (
            lambda: process_metrics.count_handshake_refused("keys"),
            "headrace_handshakes_refused_total",
            {"reason": "keys"},
            1,
        ),
    ],
)
def test_each_count_function_increments_its_counter(count, name, labels, amount):
    before = value(name, **labels)
    count()
    assert value(name, **labels) - before == amount
