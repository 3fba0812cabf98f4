"""For tests of your own.

clock         a clock that stands still until it is moved
leaks         whether a piece of code gave back what it took
conformance   what every Source must keep
"""

from headrace.testing.clock import ManualClock
from headrace.testing.conformance import check_source
from headrace.testing.leaks import Resources, assert_no_leaks

__all__ = ["ManualClock", "Resources", "assert_no_leaks", "check_source"]


def __dir__() -> list[str]:
    return list(__all__)
