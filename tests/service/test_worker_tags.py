"""Which workers a client reads: by where they are, and by their tags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import headrace as hr
from headrace.service import ShardingPolicy, distribute
from tests.service.reading import wait_until
from tests.service.site import Site

pytestmark = pytest.mark.system

OFF, DYNAMIC = ShardingPolicy.OFF, ShardingPolicy.DYNAMIC


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(monkeypatch, stack)


@pytest.mark.catalogue("MP1", "LW12")
def test_without_tags_auto_and_any_read_all_workers_and_local_its_own(site: Site) -> None:
    site.add(1)
    site.add(2, remote=True)
    assert sorted(site.read(size=10)) == sorted(3 * list(range(10)))
    assert sorted(site.read(size=10, target="any")) == sorted(3 * list(range(10)))
    assert site.read(size=10, target="LOCAL") == list(range(10))


@pytest.mark.catalogue("WT1", "WT8")
@pytest.mark.parametrize("tags", [("COLOCATED",), ("colocated", "COLOCATED_2", "other")])
def test_tagged_workers_of_other_processes_are_left_to_those(
    site: Site, tags: tuple[str, ...]
) -> None:
    site.add(1, *tags)
    site.add(2, *tags, remote=True)
    assert site.read() == list(range(100))
    assert sorted(site.read(target="ANY")) == sorted(3 * list(range(100)))


@pytest.mark.catalogue("WT2", "WT4")
def test_an_untagged_worker_elsewhere_is_read_as_well(site: Site) -> None:
    site.add(1, "COLOCATED")
    site.add(2, "COLOCATED", remote=True)
    site.add(1, remote=True)
    assert sorted(site.read()) == sorted(2 * list(range(100)))
    assert sorted(site.read(DYNAMIC)) == list(range(100))


@pytest.mark.catalogue("WT3")
def test_the_own_worker_needs_no_tag(site: Site) -> None:
    site.add(2, "COLOCATED", remote=True)
    site.add(1)
    assert site.read() == list(range(100))


@pytest.mark.catalogue("WT9")
def test_other_tags_change_nothing(site: Site) -> None:
    site.add(2, "Unused tag 1", "Unused tag 2", remote=True)
    assert sorted(site.read(size=10)) == sorted(2 * list(range(10)))


@pytest.mark.catalogue("WT7")
def test_workers_that_join_are_read_or_left_alone_by_their_tags(site: Site) -> None:
    site.add(1, "COLOCATED")
    site.add(1, "COLOCATED", remote=True)
    share = distribute(OFF, site.dispatcher.target)
    dataset = hr.Dataset.range(10**7).apply(share)
    with iter(dataset) as iterator:
        next(iterator)
        site.add(2, remote=True)
        site.add(2, "COLOCATED", remote=True)
        wait_until(lambda: bool(next(iterator)) and len(hr.service.delivery_report(dataset)) == 3)


def test_a_client_that_has_only_workers_to_pass_over_waits_and_reads_one_that_comes(
    site: Site,
) -> None:
    site.add(1, "COLOCATED", remote=True)
    share = distribute(OFF, site.dispatcher.target)
    with iter(hr.Dataset.range(3).apply(share)) as iterator:
        site.add(1)
        assert [int(x) for x in iterator] == [0, 1, 2]
