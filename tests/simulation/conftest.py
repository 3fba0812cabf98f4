"""Fixtures of the simulation's tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Disable logging: the trace contains what the dispatcher logs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
