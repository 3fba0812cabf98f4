"""States that earlier releases have written are restored by this one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.service import DispatchServer, WorkerConfig, WorkerServer
from tests.data.golden_states import CASES, ON_A_SERVICE, as_json, directory_of_files, load

GOLDEN = load()
IDS = [f"{release}: {name}" for release, name, _ in GOLDEN]


@pytest.fixture(scope="module", autouse=True)
def files() -> Iterator[None]:
    with directory_of_files():
        yield


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """Address of a data service."""
    with DispatchServer() as server:
        config = WorkerConfig(dispatcher_address=server.target.split("://")[1])
        with WorkerServer(config):
            yield server.target


def check_restored(make: Callable[[], hr.Dataset[Any]], case: dict[str, Any]) -> None:
    """Check that each state continues with the elements that the release had not yet returned."""
    elements = case["elements"]
    for position, state in case["states"].items():
        with iter(make()) as iterator:
            iterator.set_state(state)
            remaining = [as_json(element) for element in iterator]
        assert len(remaining) == len(elements) - int(position)
        assert sorted(remaining + elements[: int(position)], key=str) == sorted(elements, key=str)
        if "positions" not in state["position"]:  # which have no order
            assert remaining == elements[int(position) :]


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for _, name, case in GOLDEN if name in CASES],
    ids=[each for each, (_, name, _) in zip(IDS, GOLDEN, strict=True) if name in CASES],
)
def test_a_state_of_an_earlier_release_is_restored(name: str, case: dict[str, Any]) -> None:
    check_restored(CASES[name], case)


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for _, name, case in GOLDEN if name in ON_A_SERVICE],
    ids=[each for each, (_, name, _) in zip(IDS, GOLDEN, strict=True) if name in ON_A_SERVICE],
)
def test_a_state_of_an_earlier_release_is_restored_on_a_service(
    name: str, case: dict[str, Any], target: str
) -> None:
    check_restored(lambda: ON_A_SERVICE[name](target), case)


def test_the_cases_of_a_release_are_all_restored() -> None:
    assert {name for _, name, _ in GOLDEN} == {*CASES, *ON_A_SERVICE}


def test_a_state_of_a_later_format_is_refused_with_both_versions() -> None:
    _, name, case = GOLDEN[0]
    state = copy.deepcopy(case["states"]["0"])
    state["version"] += 1
    with iter(CASES[name]()) as iterator, pytest.raises(FailedPreconditionError) as raised:
        iterator.set_state(state)
    assert f"version {state['version']}" in str(raised.value)
    assert f"reads version {state['version'] - 1}" in str(raised.value)
