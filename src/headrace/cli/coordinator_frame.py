"""One frame of `headrace top` on a coordinator, or on a parameter server, as text."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.cli.asking import Look, SeenServer
from headrace.cli.tables import (
    bytes_of,
    cut,
    duration,
    fitted,
    number,
    other_versions,
    plural,
    rate,
    table,
    trend,
)
from headrace.coordinator.status import CoordinatorStatus, WorkerStatus
from headrace.parameter_server.messages import ServerStatus

__all__ = ["render_coordinator", "render_server"]

_MOST_NAMED = 2
_MOST_OPERATIONS = 8
_WIDEST = 52
"""Letters of what a worker runs, or of why it is not there: what comes after that counts, too."""
_SERVER_HEAD = (
    "server", "shards", "tables", "rows", "kept", "requests", "came", "went", "busy", "waiting",
)  # fmt: skip


def render_coordinator(
    look: Look, status: CoordinatorStatus, previous: Look | None, width: int
) -> str:
    """Return how a coordinator is as lines of at most `width` letters.

    Args:
        look: What is shown, with its parameter servers.
        status: The coordinator in it.
        previous: The look before it, for rates and what rises and falls; None: there is none.
        width: Of the terminal.
    """
    before = None if previous is None else previous.status
    then = before.finished_per_second if isinstance(before, CoordinatorStatus) else None
    versions = other_versions(status.versions, status.workers)
    lines = [*_head(status), *versions, "", *_closures(status, then), "", *_workers(status)]
    if look.servers:
        lines += ["", *_servers(look, previous)]
    return fitted(lines, width)


def render_server(look: Look, status: ServerStatus, previous: Look | None, width: int) -> str:
    """Return how a parameter server is; see `render_coordinator`."""
    before = None if previous is None else previous.status
    row = _server(f"{status.index}", status, look, before, previous)
    done = sorted(status.operations.items(), key=lambda item: -item[1])
    named = [f"{name} {number(count)}" for name, count in done[:_MOST_OPERATIONS]]
    lines = [
        f"parameter server {status.index}  up {duration(status.uptime_seconds)}  "
        f"{plural(status.requests, 'request')}  {number(status.failed)} failed",
        f"operations  {', '.join(named) or 'none so far'}",
        "",
        *table([_SERVER_HEAD, row]),
    ]
    return fitted(lines, width)


def _head(status: CoordinatorStatus) -> Iterator[str]:
    there = sum(each.is_there for each in status.workers)
    missing = len(status.workers) - there
    parts = [plural(there, "worker")]
    if missing:
        parts.append(f"{missing} missing")
    if status.servers:
        parts.append(plural(len(status.servers), "parameter server"))
    parts.append(f"up {duration(status.seconds_up)}")
    if status.workers_lost:
        parts.append(f"{plural(status.workers_lost, 'worker')} lost so far")
    yield "  ".join(parts)


def _closures(status: CoordinatorStatus, before: float | None) -> Iterator[str]:
    now = status.finished_per_second
    yield (
        f"functions  {number(status.waiting)} queued, {number(status.in_flight)} in flight, "
        f"{number(status.finished)} done  {rate(now)}{trend(now, before)}"
    )
    if status.retried or status.failed:
        yield (
            f"  again    {number(status.retried)} taken back from lost workers, "
            f"{number(status.failed)} failed"
        )
    bound = "no bound" if status.staleness is None else f"bound {status.staleness}"
    yield (
        f"  stale    {number(status.gap)} behind the newest one sent, "
        f"{number(status.largest_gap)} at most so far ({bound})"
    )
    longest = status.longest
    if longest is not None:
        usual = "" if longest.usual is None else f"; {_brief(longest.usual)} in the median"
        yield (
            f"  longest  {longest.name} on worker {longest.worker} for "
            f"{duration(longest.seconds)}{usual}"
        )
    if status.failure:
        yield f"  error    to be raised by schedule, join or done: {_first_line(status.failure)}"


def _workers(status: CoordinatorStatus) -> Iterator[str]:
    if not status.workers:
        yield "there is no worker; start one with `headrace server --coordinator HOST:PORT`"
        return
    head = ("worker", "runs", "has", "done", "lost", "since")
    yield from table([head, *map(_worker, status.workers)], left=2)


def _worker(worker: WorkerStatus) -> tuple[str, ...]:
    name = f"{worker.worker} at {worker.address}{' (leaving)' if worker.is_leaving else ''}"
    if worker.is_there:
        first = worker.running[:_MOST_NAMED]
        named = [f"{function} {duration(seconds)}" for function, seconds in first]
        more = len(worker.running) - len(named)
        runs = ", ".join(named) + (f" and {more} more" if more else "") or "nothing"
    else:
        runs = f"not there: {_first_line(worker.reason) or 'it was not reached yet'}"
    return (
        name,
        cut(runs, _WIDEST),
        number(worker.in_flight),
        number(worker.finished),
        number(worker.losses),
        duration(worker.seconds),
    )


def _servers(look: Look, previous: Look | None) -> Iterator[str]:
    then = {} if previous is None else {each.address: each.status for each in previous.servers}
    rows: list[tuple[str, ...]] = [_SERVER_HEAD]
    silent: list[SeenServer] = []
    for each in look.servers:
        if each.status is None:
            silent.append(each)
        else:
            name = f"{each.status.index} at {each.address}"
            rows.append(_server(name, each.status, look, then.get(each.address), previous))
    if len(rows) > 1:
        yield from table(rows)
    for each in silent:
        yield f"the parameter server at {each.address} does not answer: {_first_line(each.problem)}"


def _server(
    name: str, status: ServerStatus, look: Look, before: object, previous: Look | None
) -> tuple[str, ...]:
    """Return a row; rates are those since the look before, or else since the server started."""
    seconds = max(status.uptime_seconds, 1e-3)
    requests, busy = status.requests, status.busy_seconds
    came, went = status.bytes_in, status.bytes_out
    if (
        isinstance(before, ServerStatus)
        and before.state_id == status.state_id
        and previous is not None
        and look.at > previous.at
    ):
        seconds = look.at - previous.at
        requests, busy = requests - before.requests, busy - before.busy_seconds
        came, went = came - before.bytes_in, went - before.bytes_out
    return (
        name,
        number(status.shards),
        number(status.tables),
        number(status.rows),
        bytes_of(status.bytes_stored),
        rate(requests / seconds),
        f"{bytes_of(came / seconds)}/s",
        f"{bytes_of(went / seconds)}/s",
        f"{min(1.0, busy / seconds):.0%}",
        number(status.waiting_requests),
    )


def _brief(seconds: float) -> str:
    return duration(seconds) if seconds >= 0.1 else f"{number(1e3 * seconds)} ms"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
