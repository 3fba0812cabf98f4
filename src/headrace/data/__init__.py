"""Datasets: plans with methods, and their public iterator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.data.missing_names import missing_name_message

if not TYPE_CHECKING:  # else type checkers accept every name of this package

    def __getattr__(name: str) -> Any:
        # This package corresponds to `tf.data`, whose names are in `headrace`.
        raise AttributeError(missing_name_message(__name__, name, ()), name=name)
