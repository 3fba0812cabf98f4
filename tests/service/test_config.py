"""Configurations, modes and addresses are checked where they are written."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.service.config import (
    DispatcherConfig,
    ShardingPolicy,
    WorkerConfig,
    check_reachable,
    parse_processing_mode,
    parse_service,
)


def test_policies_keep_their_numbers() -> None:
    assert {policy.name: int(policy) for policy in ShardingPolicy} == {
        "OFF": 0,
        "DYNAMIC": 1,
        "FILE": 2,
        "DATA": 3,
        "FILE_OR_DATA": 4,
        "HINT": 5,
    }


@pytest.mark.parametrize("policy", list(ShardingPolicy))
def test_a_policy_is_a_mode(policy: ShardingPolicy) -> None:
    assert parse_processing_mode(policy) is policy


def test_two_names_are_modes() -> None:
    assert parse_processing_mode("parallel_epochs") is ShardingPolicy.OFF
    assert parse_processing_mode("distributed_epoch") is ShardingPolicy.DYNAMIC


@pytest.mark.catalogue("OP41")
@pytest.mark.parametrize("value", [0, 1, 5, "invalid", "DYNAMIC", "off", None, [], 1.0, True])
def test_nothing_else_is_a_mode(value: Any) -> None:
    with pytest.raises(ValueError, match="processing_mode") as caught:
        parse_processing_mode(value)
    for said in ("ShardingPolicy", '"parallel_epochs"', '"distributed_epoch"', f"Got {value!r}."):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    "service", ["tcp://127.0.0.1:5050", "127.0.0.1:5050", ("tcp", "127.0.0.1:5050")]
)
def test_a_service_is_written_in_three_ways(service: Any) -> None:
    assert parse_service(service) == "127.0.0.1:5050"


def test_grpc_is_read_as_tcp_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    for service in ("grpc://127.0.0.1:5050", ("grpc", "127.0.0.1:5050")):
        assert parse_service(service) == "127.0.0.1:5050"
    (record,) = caplog.records
    assert "does not support gRPC" in record.getMessage()


def test_a_host_may_be_a_name_or_in_brackets() -> None:
    assert parse_service("tcp://dispatcher.local:1") == "dispatcher.local:1"
    assert parse_service("tcp://[::1]:5050") == "[::1]:5050"


@pytest.mark.parametrize(
    ("service", "said"),
    [
        (1, "`service` must be a string, but `service` was of type <class 'int'>. service=1"),
        (None, "`service` must be a string"),
        ("", "`service` must not be empty"),
        ("tcp://", "`service` must not be empty"),
        ((), "must be (protocol, address)"),
        (("tcp", ""), "`service` must not be empty"),
        (("tcp", "a:1", "b"), "must be (protocol, address)"),
        (("tcp", 5050), "must be (protocol, address)"),
        ("a://b://c", "Malformed `service` string has multiple '://': a://b://c"),
        ("grp://a:1", "must have the protocol 'tcp'"),
        ("localhost", "host:port"),
        ("localhost:", "is not a port"),
        ("localhost:http", "'http' is not a port"),
        ("localhost:99999", "'99999' is not a port"),
        (":5050", "host:port"),
    ],
)
def test_other_services_are_refused(service: Any, said: str) -> None:
    with pytest.raises(ValueError, match="service") as caught:
        parse_service(service)
    assert said in str(caught.value)


def test_fields_come_in_the_documented_order() -> None:
    def names(kind: Any) -> list[str]:
        return [field.name for field in dataclasses.fields(kind)]

    assert names(DispatcherConfig)[:10] == [
        "port",
        "host",
        "work_dir",
        "fault_tolerant_mode",
        "worker_addresses",
        "job_gc_check_interval_ms",
        "job_gc_timeout_ms",
        "worker_timeout_ms",
        "worker_max_concurrent_snapshots",
        "security",
    ]
    assert names(WorkerConfig)[:11] == [
        "dispatcher_address",
        "worker_address",
        "port",
        "host",
        "heartbeat_interval_ms",
        "dispatcher_timeout_ms",
        "data_transfer_protocol",
        "worker_tags",
        "cross_trainer_cache_size_bytes",
        "preload",
        "security",
    ]


def test_good_values_are_kept(tmp_path: Path) -> None:
    config = DispatcherConfig(0, "127.0.0.1", tmp_path, True, job_gc_timeout_ms=-1)
    assert config.work_dir == tmp_path
    assert WorkerConfig("tcp://a:1", worker_tags=["x"]).worker_tags == ("x",)
    assert WorkerConfig("tcp://a:1").dispatcher_address == "a:1"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


@pytest.mark.catalogue("SL5")
@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"port": "5050"}, TypeError, "`port` must be an integer, but got '5050' of type str"),
        ({"port": True}, TypeError, "`port` must be an integer, but got True"),
        ({"port": -1}, ValueError, "`port` must be at least 0, but got -1"),
        ({"port": 99999999}, ValueError, "`port` must be at most 65535, but got 99999999"),
        ({"port": None}, TypeError, "`port` must be an integer, but got None"),
        ({"host": ""}, ValueError, "`host` must not be empty"),
        ({"host": 1}, TypeError, "`host` must be a string, but got 1 of type int"),
        ({"work_dir": 1}, TypeError, "`work_dir` must be a path, but got 1 of type int"),
        ({"work_dir": ""}, ValueError, "`work_dir` must not be empty"),
        (
            {"fault_tolerant_mode": 1, "work_dir": "x"},
            TypeError,
            "`fault_tolerant_mode` must be a bool, but got 1",
        ),
        (
            {"fault_tolerant_mode": True},
            ValueError,
            "Cannot enable fault tolerant mode without configuring a work dir",
        ),
        ({"worker_addresses": "a:1"}, TypeError, "`worker_addresses` must be a list of strings"),
        ({"worker_addresses": ["a:1", 2]}, TypeError, "`worker_addresses[1]` must be a string"),
        (
            {"job_gc_check_interval_ms": -1},
            ValueError,
            "`job_gc_check_interval_ms` must be at least 0, but got -1",
        ),
        (
            {"job_gc_timeout_ms": -2},
            ValueError,
            "`job_gc_timeout_ms` must be at least -1, but got -2",
        ),
        (
            {"worker_timeout_ms": 0.5},
            TypeError,
            "`worker_timeout_ms` must be an integer, but got 0.5",
        ),
        ({"client_timeout_ms": -1}, ValueError, "`client_timeout_ms` must be at least 0"),
        ({"deployment_mode": "HYBRID"}, ValueError, "must be None or one of COLOCATED, REMOTE"),
        ({"worker_max_concurrent_snapshots": -1}, ValueError, "snapshots` must be at least 0"),
        (
            {"gc_dynamic_sharding_jobs": None},
            TypeError,
            "`gc_dynamic_sharding_jobs` must be a bool",
        ),
        (
            {"security": "keys"},
            TypeError,
            "`security` must be a Security, but got 'keys' of type str; use Security.load(",
        ),
    ],
)
def test_a_dispatchers_bad_values_are_named(
    fields: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        DispatcherConfig(**fields)
    assert said in str(caught.value)


@pytest.mark.catalogue("WT10")
@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"dispatcher_address": None}, ValueError, "Must specify a `dispatcher_address`"),
        ({"dispatcher_address": ""}, ValueError, "Must specify a `dispatcher_address`"),
        ({"dispatcher_address": 5}, TypeError, "`dispatcher_address` must be a string, but got 5"),
        (
            {"dispatcher_address": "nowhere"},
            ValueError,
            '`dispatcher_address` must be "host:port", as in',
        ),
        ({"worker_address": ""}, ValueError, "`worker_address` must not be empty"),
        ({"port": 70000}, ValueError, "`port` must be at most 65535"),
        ({"heartbeat_interval_ms": -5}, ValueError, "`heartbeat_interval_ms` must be at least 0"),
        ({"dispatcher_timeout_ms": "1"}, TypeError, "`dispatcher_timeout_ms` must be an integer"),
        ({"data_transfer_protocol": "grpc"}, ValueError, "data_transfer_protocol='grpc'"),
        ({"worker_tags": ["x", ""]}, ValueError, "`worker_tags[1]` must not be empty"),
        ({"worker_tags": "COLOCATED"}, TypeError, "`worker_tags` must be a list of strings"),
        (
            {"cross_trainer_cache_size_bytes": 0},
            ValueError,
            "cache_size_bytes` must be at least 1, but got 0",
        ),
        ({"preload": [1]}, TypeError, "`preload[0]` must be a string"),
        ({"security": 1}, TypeError, "`security` must be a Security"),
    ],
)
def test_a_workers_bad_values_are_named(
    fields: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        WorkerConfig(**{"dispatcher_address": "127.0.0.1:5050", **fields})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (WorkerConfig, {"dispatcher_address": "a:1", "data_transfer_protocol": "tcp"}),
    ],
)
def test_settings_without_effect_are_rejected(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not supported by this version; use"):
        kind(**fields)


@pytest.mark.catalogue("SL8")
@pytest.mark.parametrize("address", ["host:1", "10.0.0.7:5050", "[fe80::1]:80", "localhost:9"])
def test_an_address_that_clients_can_find_is_accepted(address: str) -> None:
    check_reachable(address)


@pytest.mark.parametrize("address", ["0.0.0.0:5050", "[::]:5050", "*:1", "[::0]:1"])
def test_a_wildcard_worker_address_is_rejected(address: str) -> None:
    with pytest.raises(ValueError, match=r"wildcard address.*worker_address"):
        check_reachable(address)


@pytest.mark.parametrize(
    "address", ["nonsense", "", ":1", "a b:1", "a\n:1", "host:0", "host:99999"]
)
def test_a_malformed_address_is_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="address="):
        check_reachable(address)
