"""Tests of the HTTP endpoint for metrics and health."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket

import pytest
from prometheus_client.metrics_core import GaugeMetricFamily

from headrace.serving import endpoint as endpoints
from headrace.serving.endpoint import Endpoint


def no_metrics():
    return []


@contextlib.contextmanager
def serving(metrics=no_metrics, why_not_ready=str, host="127.0.0.1", port=0):
    endpoint = Endpoint(host, port, metrics=metrics, not_ready_reason=why_not_ready)
    try:
        yield endpoint
    finally:
        endpoint.close()


def ask(endpoint, path, method="GET"):
    connection = http.client.HTTPConnection(endpoint.address, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_metrics_include_those_of_the_process_and_the_server():
    with serving(lambda: [GaugeMetricFamily("headrace_here", "Something.", value=7)]) as endpoint:
        status, text = ask(endpoint, "/metrics")
    assert status == 200
    assert "# HELP headrace_here Something.\n" in text
    assert "headrace_here 7.0\n" in text
    assert "headrace_splits_assigned_total" in text


def test_endpoint_is_healthy_before_ready_and_gives_the_reason():
    reasons = ["the journal is being read", ""]
    with serving(why_not_ready=lambda: reasons.pop(0)) as endpoint:
        assert ask(endpoint, "/healthz") == (200, "ok\n")
        assert ask(endpoint, "/readyz") == (503, "not ready: the journal is being read\n")
        assert ask(endpoint, "/readyz") == (200, "ready\n")


def test_unknown_page_lists_the_existing_ones():
    with serving() as endpoint:
        status, text = ask(endpoint, "/")
    assert status == 404
    assert "/metrics, /healthz, /readyz" in text


def test_endpoint_supports_reads_only():
    with serving() as endpoint:
        assert ask(endpoint, "/metrics", "POST")[0] == 501
        assert ask(endpoint, "/metrics", "HEAD") == (200, "")


def test_failing_metrics_are_503_with_the_reason():
    def fail():
        raise OSError("the journal cannot be used")

    with serving(fail) as endpoint:
        assert ask(endpoint, "/metrics") == (503, "OSError: the journal cannot be used\n")
        assert ask(endpoint, "/healthz")[0] == 200


def test_port_in_use_is_an_error_with_a_remedy():
    with serving() as first:
        port = int(first.address.rpartition(":")[2])
        with (
            pytest.raises(OSError, match=f"cannot serve metrics at port {port} .*another port"),
            serving(port=port),
        ):
            pass


def test_a_host_of_another_machine_is_refused():
    with pytest.raises(OSError, match=r"192\.0\.2\.1"), serving(host="192.0.2.1"):
        pass


def test_silent_connection_does_not_block_others(monkeypatch):
    monkeypatch.setattr("headrace.serving.endpoint._Handler.timeout", 0.5)
    with serving() as endpoint:
        host, _, port = endpoint.address.rpartition(":")
        with socket.create_connection((host, int(port))):
            assert ask(endpoint, "/healthz")[0] == 200


def test_a_forked_child_does_not_keep_the_port():
    with serving() as endpoint:
        child = os.fork()
        if child == 0:
            os._exit(0 if endpoint._server.socket.fileno() == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ask(endpoint, "/healthz")[0] == 200


def test_close_is_idempotent():
    with serving() as endpoint:
        endpoint.close()


def test_excess_and_slow_connections_are_closed(monkeypatch):
    monkeypatch.setattr(endpoints, "_TIMEOUT_SECONDS", 0.3)
    with serving() as endpoint, contextlib.ExitStack() as stack:
        host, _, port = endpoint.address.rpartition(":")
        slow = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            for _ in range(endpoints._MAX_CONNECTIONS + 8)
        ]
        for each in slow:
            with contextlib.suppress(OSError):
                each.sendall(b"G")
        for each in slow:
            with contextlib.suppress(OSError):  # reset, since the sent data was not read
                assert each.recv(1) == b"", "it was ended without an answer"
        assert ask(endpoint, "/healthz") == (200, "ok\n")
