"""Wrong arguments fail where they are written, before anything is connected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.service import (
    ShardingPolicy,
    WorkerConfig,
    WorkerServer,
    distribute,
    distributed_save,
    from_dataset_id,
    register_dataset,
)
from headrace.service.client.options import make_read_options

NOWHERE = "127.0.0.1:1"
CONSUMER = {"consumer_index": 0, "num_consumers": 2, "job_name": "j"}


@pytest.mark.catalogue("CT13", "CT17", "OP2", "OP15-18", "OP38-40")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processing_mode": "invalid"}, r"ShardingPolicy.*distributed_epoch.*Got 'invalid'\."),
        ({"processing_mode": 0}, "Got 0"),
        ({"processing_mode": "dynamic"}, r"Did you mean ShardingPolicy\.DYNAMIC\?"),
        ({"processing_mode": None}, "Got None"),
        ({"service": ""}, "^`service` must not be empty$"),
        ({"service": 1}, "`service` must be a string"),
        ({"service": "a://b://c"}, "multiple '://'"),
        ({"service": "grp://127.0.0.1:1"}, "grp"),
        ({"job_name": ""}, "`job_name` must not be empty"),
        ({"job_name": 5}, "`job_name` must be a string"),
        ({"consumer_index": 0}, "must be set together"),
        ({"num_consumers": 2}, "must be set together"),
        ({"consumer_index": 0, "num_consumers": 2}, "`job_name` must be set"),
        ({**CONSUMER, "consumer_index": 2}, "less than `num_consumers`.*consumer_index=2"),
        ({**CONSUMER, "consumer_index": -3}, "less than `num_consumers`.*consumer_index=-3"),
        ({**CONSUMER, "num_consumers": 0}, "num_consumers=0"),
        ({**CONSUMER, "target_workers": "local"}, "require non-local workers"),
        ({**CONSUMER, "processing_mode": ShardingPolicy.DATA}, "require .*OFF or DYNAMIC.*DATA"),
        ({**CONSUMER, "remainder": "keep"}, "one of .*'end_together'.*'keep'"),
        ({"remainder": "pad"}, "requires `num_consumers` .* got remainder='pad'"),
        ({"cost_fn": len}, "requires `num_consumers` .* got cost_fn="),
        ({"max_outstanding_requests": 0}, "must be at least 1"),
        ({"max_outstanding_requests": -5}, "must be at least 1"),
        ({"data_transfer_protocol": "grpc"}, "`data_transfer_protocol` must be None or one of"),
        ({"compression": "foo"}, "Invalid `compression` argument: foo"),
        (
            {"cross_trainer_cache": hr.service.CrossTrainerCache("t")},
            r"Cross-trainer caching requires named jobs\. Got empty `job_name`\.",
        ),
        (
            {
                "processing_mode": ShardingPolicy.DYNAMIC,
                "cross_trainer_cache": hr.service.CrossTrainerCache("t"),
                "job_name": "j",
                "visitation": "exactly_once",
            },
            "to each trainer at most once",
        ),
        (
            {
                "cross_trainer_cache": hr.service.CrossTrainerCache("t"),
                "job_name": "j",
                "consumer_index": 0,
                "num_consumers": 1,
            },
            "Cross-trainer caching does not support coordinated reads. Got number of coordinated "
            "consumers: 1",
        ),
        ({"target_workers": "foo"}, "Unrecognized target workers: 'foo'"),
        ({"wait_timeout": 0}, "`wait_timeout` must be more than 0 seconds"),
        ({"visitation": "exactly_once"}, "visitation='exactly_once' is not supported with OFF"),
    ],
)
def test_distribute_refuses(changes: dict[str, Any], message: str) -> None:
    arguments = {"processing_mode": ShardingPolicy.OFF, "service": NOWHERE, **changes}
    with pytest.raises(ValueError, match=message):
        distribute(**arguments)
    arguments.pop("compression", None)
    if "visitation" not in arguments and "compression" not in changes:
        with pytest.raises(ValueError, match=message):
            from_dataset_id(dataset_id="1000", **arguments)


def test_an_argument_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match=r"distribute\(\) has no argument 'materialize'; it has"):
        distribute(ShardingPolicy.DYNAMIC, NOWHERE, materialize="folder")  # type: ignore[call-arg]


def test_a_dataset_given_to_distribute_is_refused_with_apply() -> None:
    with pytest.raises(TypeError, match=r"dataset\.apply\(hr\.service\.distribute"):
        distribute(hr.Dataset.range(3), NOWHERE)  # type: ignore[arg-type]


def test_dynamic_accepts_the_name_of_its_own_visitation() -> None:
    options = make_read_options(
        processing_mode=ShardingPolicy.DYNAMIC, service=NOWHERE, visitation="at_most_once"
    )
    assert options.visitation == "at_most_once"


@pytest.mark.parametrize("credit", ["3", 2.5, True])
def test_a_non_integer_max_outstanding_requests_is_rejected(credit: Any) -> None:
    with pytest.raises(TypeError, match="`max_outstanding_requests` must be an integer"):
        distribute(ShardingPolicy.OFF, NOWHERE, max_outstanding_requests=credit)


def test_a_directory_name_is_rejected_as_security(tmp_path: Path) -> None:
    keys: Any = "keys"
    data, mode = hr.Dataset.range(1), ShardingPolicy.DYNAMIC
    for refused in (
        lambda: distribute(mode, NOWHERE, security=keys),
        lambda: from_dataset_id(mode, NOWHERE, "1000", security=keys),
        lambda: register_dataset(NOWHERE, data, security=keys),
        lambda: distributed_save(data, tmp_path, NOWHERE, security=keys),
    ):
        with pytest.raises(
            TypeError, match=r"`security` must .*'keys'.*Security\.load\(directory, role\)"
        ):
            refused()


def test_an_id_or_dataset_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="`dataset_id` must be a string"):
        register_dataset(NOWHERE, hr.Dataset.range(1), dataset_id=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`dataset` must be a Dataset"):
        register_dataset(NOWHERE, [1, 2])  # type: ignore[arg-type]


def test_an_unpicklable_object_is_named_at_registration() -> None:
    handle = (value for value in range(3))
    dataset = hr.Dataset.range(3).map(lambda x: x + next(handle))
    with pytest.raises(hr.errors.FailedPreconditionError, match="`handle`, a generator"):
        dataset.apply(distribute(ShardingPolicy.OFF, NOWHERE))


def test_a_worker_needs_a_dispatcher() -> None:
    with pytest.raises(ValueError, match="Must specify a `dispatcher_address`"):
        WorkerServer(WorkerConfig(dispatcher_address=""))


def test_a_worker_reports_an_unresponsive_dispatcher() -> None:
    config = WorkerConfig(dispatcher_address=NOWHERE, dispatcher_timeout_ms=100)
    with pytest.raises(
        hr.errors.UnavailableError,
        match=r"did not reply to RegisterWorker of worker \S+ for 0\.1 s",
    ):
        WorkerServer(config)


@pytest.mark.catalogue("SL13")
def test_a_worker_that_was_stopped_cannot_be_started() -> None:
    worker = WorkerServer(WorkerConfig(dispatcher_address=NOWHERE), start=False)
    worker.stop()
    worker.stop()
    worker.join()
    with pytest.raises(RuntimeError, match="cannot be started after it has been stopped"):
        worker.start()
