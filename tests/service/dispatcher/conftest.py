"""A scenario whose facts and state are checked when the test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.dispatcher.scenario import Scenario


@pytest.fixture
def scene() -> Iterator[Scenario]:
    scene = Scenario()
    yield scene
    scene.check()
