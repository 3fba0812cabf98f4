"""Every transformation: states, threads, memory, and reading with a data service."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace as hr
from tests.conformance.checks import (
    MODES,
    assert_conforms_with_service,
    assert_elements_are_owned,
    assert_same_with_threads,
)
from tests.conformance.steps import INPUTS, STEPS, TESTED_ELSEWHERE, Setting, failing
from tests.execution.battery import assert_restores_everywhere

OPTIONS = hr.Options(seed=5)

every_input = pytest.mark.parametrize("source", INPUTS)
local_steps = pytest.mark.parametrize("name", [n for n in STEPS if n not in TESTED_ELSEWHERE])


def is_ordered(name: str) -> bool:
    return not name.endswith("unordered")


@every_input
@local_steps
def test_states_restore_with_any_number_of_threads(name: str, source: str, tmp_path: Path) -> None:
    def make(threads: int | None = None) -> hr.Dataset:
        setting = Setting(tmp_path, threads)
        dataset = STEPS[name].apply(INPUTS[source](setting), setting)
        return (dataset.prefetch(threads) if threads else dataset).with_options(OPTIONS)

    assert_same_with_threads(make, lambda: make(1), lambda: make(3), ordered=is_ordered(name))


@local_steps
def test_states_restore_if_elements_fail(name: str, tmp_path: Path) -> None:
    def make() -> hr.Dataset:
        setting = Setting(tmp_path)
        return STEPS[name].apply(INPUTS["computed"](setting).map(failing), setting)

    assert_restores_everywhere(make, ordered=is_ordered(name))


@every_input
@local_steps
def test_elements_belong_to_the_consumer(name: str, source: str, tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    assert_elements_are_owned(
        lambda: STEPS[name].apply(INPUTS[source](setting), setting).with_options(OPTIONS)
    )


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "source"),
    [(n, i) for n in STEPS for i in INPUTS if n not in TESTED_ELSEWHERE or i == "computed"],
)
def test_a_service_has_the_elements_of_one_process(
    name: str, source: str, tmp_path: Path, service: str
) -> None:
    step, setting = STEPS[name], Setting(tmp_path)
    assert_conforms_with_service(
        lambda: step.apply(INPUTS[source](setting), setting).with_options(OPTIONS),
        service,
        step.dynamic,
        {
            mode: step.refused[key]
            for mode in MODES
            for key in (mode, f"{mode}, {source}")
            if key in step.refused
        },
        is_ordered(name),
    )
