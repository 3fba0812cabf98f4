"""Which workers a client reads: by where they are, by their tags, by their process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import headrace as hr
from headrace.errors import AlreadyExistsError, FailedPreconditionError
from headrace.service import LocalCluster, ShardingPolicy, distribute
from tests.service.mixed_workers import Site
from tests.service.reading import numbers, wait_until

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
def test_tagged_workers_of_other_processes_are_skipped(site: Site, tags: tuple[str, ...]) -> None:
    site.add(1, *tags)
    site.add(2, *tags, remote=True)
    assert site.read() == list(range(100))
    assert sorted(site.read(target="ANY")) == sorted(3 * list(range(100)))


@pytest.mark.catalogue("WT2", "WT4")
def test_an_untagged_remote_worker_is_read_too(site: Site) -> None:
    site.add(1, "COLOCATED")
    site.add(2, "COLOCATED", remote=True)
    site.add(1, remote=True)
    assert sorted(site.read()) == sorted(2 * list(range(100)))
    assert sorted(site.read(DYNAMIC)) == list(range(100))


@pytest.mark.catalogue("WT3")
def test_a_local_worker_needs_no_tag(site: Site) -> None:
    site.add(2, "COLOCATED", remote=True)
    site.add(1)
    assert site.read() == list(range(100))


@pytest.mark.catalogue("WT9")
def test_other_tags_change_nothing(site: Site) -> None:
    site.add(2, "Unused tag 1", "Unused tag 2", remote=True)
    assert sorted(site.read(size=10)) == sorted(2 * list(range(10)))


@pytest.mark.catalogue("WT7")
def test_new_workers_are_read_or_skipped_by_their_tags(site: Site) -> None:
    site.add(1, "COLOCATED")
    site.add(1, "COLOCATED", remote=True)
    share = distribute(OFF, site.dispatcher.target)
    dataset = hr.Dataset.range(10**7).apply(share)
    with iter(dataset) as iterator:
        next(iterator)
        site.add(2, remote=True)
        site.add(2, "COLOCATED", remote=True)
        wait_until(lambda: bool(next(iterator)) and len(hr.service.delivery_report(dataset)) == 3)


def test_a_client_with_only_skipped_workers_waits_for_another(
    site: Site,
) -> None:
    site.add(1, "COLOCATED", remote=True)
    share = distribute(OFF, site.dispatcher.target)
    with iter(hr.Dataset.range(3).apply(share)) as iterator:
        site.add(1)
        assert [int(x) for x in iterator] == [0, 1, 2]


# --- readers of local workers, with workers of other processes present ----------------------------


TEN = list(range(10))
#: Workers of this process, and of others.
GRID = [(1, 0), (1, 2), (3, 0), (3, 2)]


@pytest.mark.catalogue("LW2-6", "LW8")
@pytest.mark.parametrize(("local", "remote"), GRID)
def test_each_local_worker_delivers_a_copy_and_no_other_does(
    site: Site, local: int, remote: int
) -> None:
    site.add(local)
    site.add(remote, remote=True)
    ten = hr.Dataset.range(10)
    copies = sorted(local * TEN)
    assert sorted(numbers(site.over(ten, "LOCAL").repeat(5))) == sorted(5 * copies)
    assert sorted(numbers(site.over(ten, "LOCAL").prefetch(10))) == copies
    assert numbers(site.over(hr.Dataset.range(0), "LOCAL")) == []
    dataset = site.over(ten, "LOCAL")
    for _ in range(3):
        assert sorted(numbers(dataset)) == copies
    assert sorted(
        numbers(site.over(hr.Dataset.range(100), "LOCAL", mode=ShardingPolicy.DYNAMIC))
    ) == (list(range(100)))


@pytest.mark.catalogue("LW9")
@pytest.mark.parametrize(("local", "remote"), [(0, 1), (0, 3), (3, 1)])
def test_without_tags_auto_reads_all_workers(site: Site, local: int, remote: int) -> None:
    site.add(local)
    site.add(remote, remote=True)
    assert sorted(site.read(size=10)) == sorted((local + remote) * TEN)


@pytest.mark.catalogue("LW7")
def test_clients_of_one_job_share_the_copies_of_all_workers(site: Site) -> None:
    site.add(1)
    site.add(3, remote=True)
    size = 60
    readers = [iter(site.over(hr.Dataset.range(size), job_name="shared_job")) for _ in range(8)]
    with contextlib.ExitStack() as stack:
        for reader in readers:
            stack.callback(reader.close)
        # First come, first served: some may have had the last ones before others ask again.
        taken = [next(reader, None) for _ in range(5) for reader in readers]
        got = [int(element) for element in taken if element is not None]
        for reader in readers:
            got += [int(element) for element in reader]
    assert sorted(got) == sorted(4 * list(range(size)))


@pytest.mark.catalogue("LW10")
def test_a_missing_local_worker_is_an_error(site: Site) -> None:
    site.add(1, remote=True)
    with pytest.raises(FailedPreconditionError, match="Local reads require local workers"):
        numbers(site.over(hr.Dataset.range(10), "LOCAL"))


@pytest.mark.catalogue("LW11")
def test_readers_of_a_job_read_the_same_workers(site: Site) -> None:
    site.add(1)
    ten = hr.Dataset.range(10)
    with iter(site.over(ten, "AUTO", job_name="job")) as first:
        next(first)
        for target in ("ANY", "LOCAL"):
            with pytest.raises(AlreadyExistsError, match="Existing target workers: <AUTO>"):
                numbers(site.over(ten, target, job_name="job"))


@pytest.mark.catalogue("LW13")
def test_rounds_are_not_read_from_local_workers_alone(site: Site) -> None:
    site.add(1)
    with pytest.raises(ValueError, match=r"target_workers|local"):
        numbers(
            site.over(
                hr.Dataset.range(10), "LOCAL", job_name="job", num_consumers=3, consumer_index=0
            )
        )


@pytest.mark.catalogue("LW14-16")
@pytest.mark.parametrize("remote", [0, 2])
@pytest.mark.parametrize("job_name", [None, "job"])
def test_each_epoch_of_an_endless_dataset_begins_again(
    site: Site, remote: int, job_name: str | None
) -> None:
    site.add(1)
    site.add(remote, remote=True)
    dataset = site.over(hr.Dataset.counter(), "LOCAL", job_name=job_name)
    for _ in range(3):
        with iter(dataset) as iterator:
            assert [int(next(iterator)) for _ in range(5)] == list(range(5))
    ten = site.over(hr.Dataset.range(10), "LOCAL", job_name=None if job_name is None else "ten")
    assert numbers(ten.repeat(3)) == 3 * TEN


@pytest.mark.catalogue("LW19")
def test_an_epoch_after_the_local_worker_was_replaced_is_whole() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        dataset = hr.Dataset.range(10).apply(
            distribute(ShardingPolicy.OFF, cluster.target, target_workers="LOCAL")
        )
        assert numbers(dataset) == TEN
        cluster.stop_worker(0)
        cluster.add_worker()
        assert numbers(dataset) == TEN
