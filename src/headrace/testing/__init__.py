"""For tests of your own: a clock that you turn by hand, checks of leaks and of sources."""

from headrace.testing.clock import ManualClock
from headrace.testing.conformance import check_source
from headrace.testing.leaks import Resources, assert_no_leaks

__all__ = ["ManualClock", "Resources", "assert_no_leaks", "check_source"]
