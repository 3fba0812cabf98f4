"""Tools for tests of user code.

clock         a clock that advances only on request
leaks         detection of threads, processes and files that a piece of code left open
conformance   checks of the contract of Source
"""

from headrace.testing.clock import ManualClock
from headrace.testing.conformance import check_source
from headrace.testing.leaks import HeldResources, assert_no_leaks

__all__ = ["HeldResources", "ManualClock", "assert_no_leaks", "check_source"]


def __dir__() -> list[str]:
    return list(__all__)
