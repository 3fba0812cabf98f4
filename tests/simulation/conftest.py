"""What all tests of the simulation have in common."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Keep what the dispatcher logs of each loss out of the report: the trace has it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
