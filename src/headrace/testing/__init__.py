"""For tests of your own: a clock that you turn by hand, and a check that nothing is left behind."""

from headrace.testing.clock import ManualClock
from headrace.testing.leaks import Resources, assert_no_leaks

__all__ = ["ManualClock", "Resources", "assert_no_leaks"]
