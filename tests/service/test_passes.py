"""How a pass is called, and what a client hears that comes too late for one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.service import LocalCluster, distribute
from headrace.service.passes import pass_in_words


@pytest.mark.parametrize(
    ("number", "words"), [((), "pass 0"), ((3,), "pass 3"), ((0, 2), "pass 0.2")]
)
def test_a_pass_is_called_by_its_numbers(number: tuple[int, ...], words: str) -> None:
    assert pass_in_words(number) == words


@pytest.mark.catalogue("LW17")
@pytest.mark.system
def test_who_comes_too_late_for_a_pass_hears_which_and_who_read_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        data = hr.Dataset.range(3)
        for expected in ([0, 1, 2], []):
            share = distribute("distributed_epoch", cluster.target, job_name="a")
            assert sorted(int(each) for each in data.apply(share)) == expected
    (said,) = [each for each in caplog.records if "no elements" in each.getMessage()]
    words = said.getMessage()
    assert "job 'a' has no elements left for epoch 0: it was read by client " in words
    assert "Use another job_name to read the data again" in words
    assert said.levelno == logging.ERROR


USES: dict[str, Callable[[hr.Dataset], Any]] = {
    "loader": hr.torch.loader,
    "distributed dataset": hr.distribute.get_strategy().distribute_dataset,
}


@pytest.mark.system
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("use", USES)
def test_training_on_a_job_that_is_used_up_is_an_error(use: str, ordered: bool) -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        share = distribute("distributed_epoch", cluster.target, job_name="a", ordered=ordered)
        data = hr.Dataset.range(3)
        assert len(list(data.apply(share))) == 3
        training = USES[use](data.apply(share))
        with pytest.raises(FailedPreconditionError, match=r"job 'a' .* epoch 0: .*job_name"):
            list(training)


@pytest.mark.system
def test_a_reader_that_comes_too_late_for_an_epoch_that_others_read_has_an_empty_one() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        share = distribute("distributed_epoch", cluster.target, job_name="a")
        one, other, third = (hr.Dataset.range(3).apply(share) for _ in range(3))
        had_elements = hr.torch.loader(one)
        assert len(list(had_elements)) == 3
        assert [len(list(other)) for _ in range(2)] == [0, 3]
        assert list(had_elements) == []
        with iter(other) as reading:
            next(reading)
            assert list(hr.torch.loader(third)) == []
