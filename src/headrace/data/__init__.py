"""Datasets: a plan with methods, and the iterator that its user sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.data.absent import no_such_name

if not TYPE_CHECKING:  # or every name would pass for one of this package

    def __getattr__(name: str) -> Any:
        # It stands where `tf.data` would: names of that are those of `headrace`.
        raise AttributeError(no_such_name(__name__, name, ()), name=name)
