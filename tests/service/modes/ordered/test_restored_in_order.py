"""In order, what a state has read already is not made again for whoever goes on from it."""

from __future__ import annotations

import functools
import json
import uuid
from pathlib import Path

import pytest

import headrace as hr
from headrace.service import LocalCluster, ShardingPolicy, distribute

pytestmark = pytest.mark.system


def opened(folder: str, number: int) -> hr.Dataset:
    (Path(folder) / f"{number}-{uuid.uuid4().hex}").touch()
    return hr.Dataset.range(1000 * number, 1000 * number + (200 if number == 3 else 4))


def test_datasets_that_were_read_beside_a_long_one_are_not_opened_again(tmp_path: Path) -> None:
    def over(cluster: LocalCluster, folder: Path) -> hr.Dataset:
        opens = functools.partial(opened, str(folder))
        dataset = hr.Dataset.range(60).interleave(opens, cycle_length=2)
        return dataset.apply(distribute(ShardingPolicy.DYNAMIC, cluster.target, ordered=True))

    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    with LocalCluster(num_workers=1, processes=False) as cluster:
        everything = [int(each) for each in over(cluster, before)]
        with iter(over(cluster, before)) as iterator:
            first = [int(next(iterator)) for _ in range(300)]
            state = json.dumps(iterator.get_state())
    read = {number // 1000 for number in first} - {3, first[-1] // 1000, first[-2] // 1000}
    assert len(read) > 20, "they were read beside number 3"
    with LocalCluster(num_workers=2, processes=False) as cluster:
        iterator = iter(over(cluster, after))
        iterator.set_state(json.loads(state))
        assert first + [int(each) for each in iterator] == everything
    again = {int(path.name.partition("-")[0]) for path in after.iterdir()}
    assert 3 in again
    assert not again & read
