"""What a parameter server keeps, and what it says of itself to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.parameter_server.messages import ServerStatus
from headrace.parameter_server.store import Store

__all__ = ["Kept", "kept_in", "metrics_of"]


class Kept(NamedTuple):
    """What a store keeps.

    Attributes:
        shards: Of variables.
        tables: Shards of tables.
        rows: Of tables.
        nbytes: Of arrays, in all.
    """

    shards: int = 0
    tables: int = 0
    rows: int = 0
    nbytes: int = 0


def kept_in(store: Store) -> Kept:
    """Return what a store keeps; to be called between two operations."""
    tables = store.tables.values()
    return Kept(
        shards=len(store.shards),
        tables=len(tables),
        rows=sum(len(table.rows) for table in tables),
        nbytes=sum(shard.nbytes for shard in store.shards.values())
        + sum(table.nbytes for table in tables),
    )


def metrics_of(status: ServerStatus) -> Iterator[Metric]:
    """Return the metrics of a parameter server."""
    name = "headrace_parameter_server_"
    operations = CounterMetricFamily(
        f"{name}operations", "Operations that were carried out.", labels=["operation"]
    )
    for operation, count in status.operations.items():
        operations.add_metric([operation], count)
    yield operations
    for counter, words, value in (
        ("requests", "Requests that were carried out.", status.requests),
        ("failures", "Requests that ended with an error.", status.failed),
        ("received_bytes", "Bytes of arrays that came.", status.bytes_in),
        ("sent_bytes", "Bytes of arrays that went.", status.bytes_out),
        ("busy_seconds", "Seconds spent on operations.", status.busy_seconds),
    ):
        yield CounterMetricFamily(f"{name}{counter}", words, value=value)
    seats = GaugeMetricFamily(
        f"{name}seats",
        "Stores that are on two servers, and what this one does.",
        labels=["store", "does"],
    )
    for store, does in status.seats.items():
        seats.add_metric([str(store), does], 1)
    yield seats
    for gauge, words, value in (
        ("waiting", "Requests that wait.", status.waiting),
        ("shards", "Shards of variables that are kept.", status.shards),
        ("tables", "Shards of tables that are kept.", status.tables),
        ("rows", "Rows of tables that are kept.", status.rows),
        ("kept_bytes", "Bytes of values, slots and tables that are kept.", status.bytes_kept),
        ("uptime_seconds", "Seconds since the server started.", status.seconds),
    ):
        yield GaugeMetricFamily(f"{name}{gauge}", words, value=value)
