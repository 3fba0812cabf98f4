"""How a pass is called, and what a client hears that comes too late for one."""

from __future__ import annotations

import logging

import pytest

import headrace as hr
from headrace.service import LocalCluster, distribute
from headrace.service.passes import pass_in_words


@pytest.mark.parametrize(
    ("number", "words"), [((), "pass 0"), ((3,), "pass 3"), ((0, 2), "pass 0.2")]
)
def test_a_pass_is_called_by_its_numbers(number: tuple[int, ...], words: str) -> None:
    assert pass_in_words(number) == words


@pytest.mark.system
def test_who_comes_too_late_for_a_pass_hears_which_and_who_read_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        data = hr.Dataset.range(3)
        for expected in ([0, 1, 2], []):
            share = distribute("distributed_epoch", cluster.target, job_name="a")
            assert sorted(int(each) for each in data.apply(share)) == expected
    (said,) = [each.getMessage() for each in caplog.records if "no elements" in each.getMessage()]
    assert "job 'a' has no elements left for pass 0: it was read by client " in said
    assert caplog.records[0].levelno >= logging.WARNING
