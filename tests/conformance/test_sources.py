"""Every source: states, threads, memory, and reading with a data service."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace as hr
from tests.conformance.checks import (
    assert_conforms_with_service,
    assert_elements_are_owned,
    assert_same_with_threads,
)
from tests.conformance.sources import SOURCES
from tests.conformance.steps import Setting

OPTIONS = hr.Options(seed=5)

every_source = pytest.mark.parametrize("name", SOURCES)


@every_source
def test_states_restore_with_any_number_of_threads(name: str, tmp_path: Path) -> None:
    def make(threads: int | None = None) -> hr.Dataset:
        dataset = SOURCES[name].read(Setting(tmp_path, threads))
        return (dataset.prefetch(threads) if threads else dataset).with_options(OPTIONS)

    SOURCES[name].write(Setting(tmp_path))
    assert_same_with_threads(make, lambda: make(1), lambda: make(3))


@every_source
def test_elements_belong_to_the_consumer(name: str, tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    SOURCES[name].write(setting)
    assert_elements_are_owned(lambda: SOURCES[name].read(setting).with_options(OPTIONS))


@pytest.mark.system
@every_source
def test_a_service_has_the_elements_of_one_process(name: str, tmp_path: Path, service: str) -> None:
    case, setting = SOURCES[name], Setting(tmp_path)
    case.write(setting)
    assert_conforms_with_service(
        lambda: case.read(setting).with_options(OPTIONS), service, case.dynamic, case.refused
    )
