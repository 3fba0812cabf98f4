"""Rules for every test: it leaks no resources, and a failure can be reproduced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings

from headrace.service.messages import Done, Ping
from headrace.testing import ManualClock, assert_no_leaks
from headrace.transport import zeromq
from headrace.transport.channel import Request

# Not derandomised: each run tries other examples, and prints a blob to reproduce a failure. The
# deadline is off because the speed of a shared machine is not a property of the code.
settings.register_profile(
    "headrace",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "quick", settings.get_profile("headrace"), max_examples=15, phases=set(Phase) - {Phase.explain}
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "headrace"))


# A shell that starts the tests in the background makes them and their children ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_REAL_PROCESSES_SECONDS = 500
"""After which a test of real processes is taken for stuck. On a machine that is busy with twenty
others, three interpreters need half a minute to start; its own deadlines are what such a test is
about."""

# Resources that libraries keep until the process exits, by part of the description, and why.
KEPT_BY_LIBRARIES = (
    "/.hypothesis/",  # the example database
    "/dev/null",  # opened once by subprocess
    "asyncio_",  # the event loop's default executor
    "execnet",  # pytest-xdist talks to its parent
    "/dev/urandom",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Extend the timeout of tests that start processes and set none.

    Tests of Keras on JAX are slow: on PyTorch they are part of `make test`.
    """
    for item in items:
        if getattr(getattr(item, "callspec", None), "params", {}).get("back_end") == "jax":
            item.add_marker(pytest.mark.slow)
        starts_processes = item.get_closest_marker("system") or item.get_closest_marker("heavy")
        if starts_processes and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_REAL_PROCESSES_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def _process_wide_sockets() -> None:
    """Open the resources that all sockets of a process share, before leaks are checked.

    These are ZeroMQ's context (I/O threads, eventfds) and pyzmq's collector of buffers that were
    sent without a copy.
    """

    def answer(requests: Sequence[Request]) -> None:
        for request in requests:
            request.reply(Done(), [bytes(1 << 20)])

    server = zeromq.serve(answer, request_type=Ping)
    try:
        channel = zeromq.connect(server.address, reply_type=Done, shared_memory=False)
        try:
            channel.call(Ping(), [bytes(1 << 20)], timeout=30.0)
        finally:
            channel.close()
    finally:
        server.close()


@pytest.fixture(autouse=True)
def _check_for_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks a thread, process, descriptor or shared memory."""
    grace = 10.0 if request.node.get_closest_marker("system") else 3.0
    with assert_no_leaks(grace=grace, allowed=KEPT_BY_LIBRARIES):
        yield


@pytest.fixture
def clock() -> ManualClock:
    """A clock at 1000 s that only the test moves."""
    return ManualClock(1000.0)
