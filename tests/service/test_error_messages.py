"""Error messages for unsupported requests: the value found and the fix."""

from __future__ import annotations

import pytest

import headrace as hr
from headrace.errors import FailedPreconditionError
from headrace.service import LocalCluster, distribute, from_dataset_id, register_dataset

DYNAMIC = hr.service.ShardingPolicy.DYNAMIC


def test_an_unknown_policy_lists_the_known_ones() -> None:
    words = (
        r"has no member 'DYNAMC'; its members are OFF, DYNAMIC, FILE, .* Did you mean 'DYNAMIC'\?"
    )
    with pytest.raises(AttributeError, match=words):
        print(hr.service.ShardingPolicy.DYNAMC)  # type: ignore[attr-defined]
    assert not hasattr(hr.service.ShardingPolicy, "_repr_html_")


@pytest.mark.parametrize("ordered", [False, True])
def test_a_dataset_is_distributed_once(service: str, ordered: bool) -> None:
    share = distribute(DYNAMIC, service, ordered=ordered)
    with pytest.raises(FailedPreconditionError, match=r"already reads from a data service.* once"):
        hr.Dataset.range(4).apply(share).apply(share)


def test_explain_of_a_distributed_dataset_omits_the_split_count(service: str) -> None:
    dataset = hr.Dataset.range(4)
    assert "number of splits: 4" in dataset.explain()
    for ordered in (False, True):
        text = dataset.apply(distribute(DYNAMIC, service, ordered=ordered)).explain()
        assert "with the data service" in text
        assert "number of splits" not in text


@pytest.mark.parametrize("spec", ["x", 3, (hr.ArraySpec((), "int64"), "x")])
def test_an_invalid_element_spec_is_rejected(service: str, spec: object) -> None:
    dataset_id = register_dataset(service, hr.Dataset.range(4).map(lambda x: x + 1))
    with pytest.raises(TypeError, match="`element_spec` must be an ArraySpec"):
        from_dataset_id(DYNAMIC, service, dataset_id, element_spec=spec)  # type: ignore[arg-type]


def test_get_state_of_a_dataset_by_id_names_the_alternatives(service: str) -> None:
    dataset_id = register_dataset(service, hr.Dataset.range(40))
    with iter(from_dataset_id(DYNAMIC, service, dataset_id)) as iterator:
        next(iterator)
        with pytest.raises(FailedPreconditionError, match=r"from_dataset_id.*ordered=True"):
            iterator.get_state()
    with iter(from_dataset_id(DYNAMIC, service, dataset_id, ordered=True)) as iterator:
        next(iterator)
        assert iterator.get_state()


def test_a_rejected_start_position_names_the_epoch() -> None:
    with LocalCluster(num_workers=1, processes=False) as cluster:
        datasets = [
            hr.Dataset.range(400).apply(distribute(DYNAMIC, cluster.target, job_name="a"))
            for _ in range(2)
        ]
        first, second = map(iter, datasets)
        next(first)
        second.set_state(first.get_state())
        with pytest.raises(FailedPreconditionError, match=r"^epoch 0 of job 'a' is read from the"):
            next(second)
