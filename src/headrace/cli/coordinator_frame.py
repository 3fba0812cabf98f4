"""One frame of `headrace top` for a coordinator or a parameter server, as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.cli.formatting import (
    fit_lines,
    format_bytes,
    format_duration,
    format_number,
    format_rate,
    format_table,
    format_trend,
    pluralize,
    truncate_line,
    version_mismatches,
)
from headrace.cli.status_client import ServerSnapshot, StatusSnapshot
from headrace.coordinator.status import CoordinatorStatus, TrainingWorkerStatus
from headrace.parameter_server.messages import ServerStatus

__all__ = ["ServerRates", "measure_server", "render_coordinator", "render_server"]

_MAX_LISTED = 2
_MAX_OPERATIONS = 8
_MAX_WIDTH = 52
"""Maximum characters of a running function or of a loss reason, so that later columns fit."""
_SERVER_HEAD = (
    "server", "shards", "tables", "rows", "stored", "requests", "in", "out", "busy", "waiting",
)  # fmt: skip


def render_coordinator(
    snapshot: StatusSnapshot, status: CoordinatorStatus, previous: StatusSnapshot | None, width: int
) -> str:
    """Return the status of a coordinator as lines of at most `width` characters.

    Args:
        snapshot: Snapshot to show, with its parameter servers.
        status: The coordinator's status in it.
        previous: Previous snapshot, for rates and trends; None without one.
        width: Width of the terminal.
    """
    before = None if previous is None else previous.status
    rate_before = before.finished_per_second if isinstance(before, CoordinatorStatus) else None
    versions = version_mismatches(status.versions, status.workers)
    lines = [*_head(status), *versions, "", *_closures(status, rate_before), "", *_workers(status)]
    if snapshot.servers:
        lines += ["", *_servers(snapshot, previous)]
    return fit_lines(lines, width)


def render_server(
    snapshot: StatusSnapshot, status: ServerStatus, previous: StatusSnapshot | None, width: int
) -> str:
    """Return the status of a parameter server; see `render_coordinator`."""
    before = None if previous is None else previous.status
    row = _server(f"{status.index}", status, snapshot, before, previous)
    operations = sorted(status.operations.items(), key=lambda item: -item[1])
    named = [f"{name} {format_number(count)}" for name, count in operations[:_MAX_OPERATIONS]]
    lines = [
        f"parameter server {status.index}  up {format_duration(status.uptime_seconds)}  "
        f"{pluralize(status.requests, 'request')}  {format_number(status.failed)} failed",
        f"operations  {', '.join(named) or 'none yet'}",
        "",
        *format_table([_SERVER_HEAD, row]),
    ]
    return fit_lines(lines, width)


@dataclass(frozen=True)
class ServerRates:
    """Load of a parameter server.

    Attributes:
        requests: Requests per second.
        bytes_in: Bytes of received arrays per second.
        bytes_out: Bytes of sent arrays per second.
        busy: Fraction of the time spent on operations, from 0.0 to 1.0.
    """

    requests: float
    bytes_in: float
    bytes_out: float
    busy: float


def measure_server(
    status: ServerStatus, before: ServerStatus | None, interval: float | None
) -> ServerRates:
    """Return the load since an earlier status, or else since the server's start.

    Args:
        status: Status of the server.
        before: Earlier status; None without one. It is ignored if the server has restarted.
        interval: Seconds between the two; None without an earlier one.
    """
    seconds = max(status.uptime_seconds, 1e-3)
    requests, busy = status.requests, status.busy_seconds
    bytes_in, bytes_out = status.bytes_in, status.bytes_out
    if before is not None and before.state_id == status.state_id and interval and interval > 0:
        seconds = interval
        requests, busy = requests - before.requests, busy - before.busy_seconds
        bytes_in, bytes_out = bytes_in - before.bytes_in, bytes_out - before.bytes_out
    return ServerRates(
        requests=requests / seconds,
        bytes_in=bytes_in / seconds,
        bytes_out=bytes_out / seconds,
        busy=min(1.0, busy / seconds),
    )


def _head(status: CoordinatorStatus) -> Iterator[str]:
    connected = sum(each.is_connected for each in status.workers)
    missing = len(status.workers) - connected
    parts = [pluralize(connected, "worker")]
    if missing:
        parts.append(f"{missing} missing")
    if status.servers:
        parts.append(pluralize(len(status.servers), "parameter server"))
    parts.append(f"up {format_duration(status.uptime_seconds)}")
    if status.num_workers_lost:
        parts.append(f"{pluralize(status.num_workers_lost, 'worker')} lost")
    yield "  ".join(parts)


def _closures(status: CoordinatorStatus, before: float | None) -> Iterator[str]:
    now = status.finished_per_second
    yield (
        f"functions  {format_number(status.num_waiting)} queued, "
        f"{format_number(status.num_in_flight)} in flight, "
        f"{format_number(status.num_finished)} done  {format_rate(now)}{format_trend(now, before)}"
    )
    if status.num_retried or status.num_failed:
        yield (
            f"  retries  {format_number(status.num_retried)} after the loss of a worker, "
            f"{format_number(status.num_failed)} failed"
        )
    limit = "no limit" if status.staleness is None else f"limit {status.staleness}"
    yield (
        f"  stale    oldest unfinished function {format_number(status.staleness_gap)} behind the "
        f"newest, {format_number(status.max_staleness_gap)} at most so far ({limit})"
    )
    longest = status.longest_running
    if longest is not None:
        median = (
            ""
            if longest.median_seconds is None
            else f"; median {_format_seconds(longest.median_seconds)}"
        )
        yield (
            f"  longest  {longest.name} on worker {longest.worker} for "
            f"{format_duration(longest.seconds)}{median}"
        )
    if status.failure:
        yield f"  error    raised by the next schedule, join or done: {_first_line(status.failure)}"


def _workers(status: CoordinatorStatus) -> Iterator[str]:
    if not status.workers:
        yield "no worker is registered; start one with `headrace server --coordinator HOST:PORT`"
        return
    head = ("worker", "running", "in flight", "done", "losses", "in state")
    yield from format_table([head, *map(_worker, status.workers)], left=2)


def _worker(worker: TrainingWorkerStatus) -> tuple[str, ...]:
    name = f"{worker.worker} at {worker.address}{' (draining)' if worker.is_draining else ''}"
    if worker.is_connected:
        first = worker.running[:_MAX_LISTED]
        named = [f"{function} {format_duration(seconds)}" for function, seconds in first]
        more = len(worker.running) - len(named)
        running = ", ".join(named) + (f" and {more} more" if more else "") or "nothing"
    else:
        running = f"missing: {_first_line(worker.reason) or 'not connected yet'}"
    return (
        name,
        truncate_line(running, _MAX_WIDTH),
        format_number(worker.num_in_flight),
        format_number(worker.num_finished),
        format_number(worker.num_losses),
        format_duration(worker.seconds_in_state),
    )


def _servers(snapshot: StatusSnapshot, previous: StatusSnapshot | None) -> Iterator[str]:
    before = {} if previous is None else {each.address: each.status for each in previous.servers}
    rows: list[tuple[str, ...]] = [_SERVER_HEAD]
    unreachable: list[ServerSnapshot] = []
    for each in snapshot.servers:
        if each.status is None:
            unreachable.append(each)
        else:
            name = f"{each.status.index} at {each.address}"
            rows.append(_server(name, each.status, snapshot, before.get(each.address), previous))
    if len(rows) > 1:
        yield from format_table(rows)
    for each in unreachable:
        yield f"no reply from parameter server {each.address}: {_first_line(each.problem)}"


def _server(
    name: str,
    status: ServerStatus,
    snapshot: StatusSnapshot,
    before: object,
    previous: StatusSnapshot | None,
) -> tuple[str, ...]:
    """Return a row; rates are relative to the previous status, or else to the server's start."""
    interval = None if previous is None else snapshot.taken_at - previous.taken_at
    rates = measure_server(status, before if isinstance(before, ServerStatus) else None, interval)
    return (
        name,
        format_number(status.shards),
        format_number(status.tables),
        format_number(status.rows),
        format_bytes(status.bytes_stored),
        format_rate(rates.requests),
        f"{format_bytes(rates.bytes_in)}/s",
        f"{format_bytes(rates.bytes_out)}/s",
        f"{rates.busy:.0%}",
        format_number(status.waiting_requests),
    )


def _format_seconds(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 0.1 else f"{format_number(1e3 * seconds)} ms"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
