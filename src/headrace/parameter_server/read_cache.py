"""A scope in which each variable on parameter servers is read once and then cached.

Variables named for prefetching are read together with the first other read, in the same requests: a
step that reads rows of a large variable and all of some small ones waits for its servers once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.parameter_server.server_requests import (
    OperationReply,
    OperationRequest,
    ParameterServerClient,
)

if TYPE_CHECKING:  # they import this module
    from headrace.parameter_server.table import TablePull
    from headrace.parameter_server.variable_shards import VariableShards

__all__ = [
    "ReadCache",
    "cache_variable_reads",
    "current_read_cache",
    "execute_with_prefetch",
    "read_together",
    "read_with_rows",
]


class ReadCache:
    """Values read in a scope, by variable, and the variables to prefetch with the next read.

    Args:
        prefetched: Distinct variables to read completely.
    """

    def __init__(self, prefetched: Sequence[VariableShards] = ()) -> None:
        self._values: dict[VariableShards, NDArray[Any]] = {}
        self._prefetched = frozenset(prefetched)
        #: Variables to read together with the next read.
        self._pending = tuple(dict.fromkeys(prefetched))

    def has(self, variable: VariableShards) -> bool:
        """Return whether all of a variable was read, or will be."""
        return variable in self._values or variable in self._prefetched

    def read(self, variable: VariableShards) -> NDArray[Any]:
        """Return the value of a variable, which must not be changed."""
        if variable not in self._values:
            self._pending = tuple(each for each in self._pending if each is not variable)
            answers = execute_with_prefetch(variable.servers, variable.read_requests())
            self.store(variable, answers)
        return self._values[variable]

    def store(self, variable: VariableShards, answers: Sequence[OperationReply]) -> None:
        """Cache a value; if two threads read at the same time, the first one is kept."""
        self._values.setdefault(variable, variable.join_value(answers))

    def take_pending(self, servers: ParameterServerClient) -> list[VariableShards]:
        """Return the pending variables on these servers, and mark them as read."""
        found = [each for each in self._pending if each.servers is servers]
        if found:
            self._pending = tuple(each for each in self._pending if each.servers is not servers)
        return found


_read_cache: ContextVar[ReadCache | None] = ContextVar("headrace_reads", default=None)


@contextmanager
def cache_variable_reads(*variables: Any) -> Iterator[None]:
    """Read each variable on parameter servers once; later reads in the scope return that value.

    >>> import headrace as hr
    >>> with hr.distribute.cache_variable_reads():
    ...     pass  # v.read() returns the same value, even after a v.assign

    A variable is read when it is first used, all of it. Rows are taken from the cached value, if
    there is one. The scope applies to this thread, and to replicas that `run` starts in it.

    Args:
        variables: Variables to read completely with the first read in the scope, in the same
            requests: one round trip instead of one for each.

    Raises:
        TypeError: If a value is not a variable on parameter servers.
        ValueError: If scopes are nested.
    """
    prefetched = []
    for each in variables:
        sharded = getattr(each, "sharded", None)
        if sharded is None:
            raise TypeError(
                "cache_variable_reads takes variables on parameter servers as separate arguments, "
                f"but got a value of type {type(each).__name__}"
            )
        prefetched.append(sharded)
    if _read_cache.get() is not None:
        raise ValueError("cache_variable_reads scope cannot be nested")
    token = _read_cache.set(ReadCache(prefetched))
    try:
        yield
    finally:
        _read_cache.reset(token)


def current_read_cache() -> ReadCache | None:
    """Return the cache of the current scope, or None outside of one."""
    return _read_cache.get()


def execute_with_prefetch(
    servers: ParameterServerClient, requests: Sequence[OperationRequest]
) -> list[OperationReply]:
    """Execute requests, and prefetch pending variables of the scope in the same requests.

    Raises:
        HeadraceError: As for `ParameterServerClient.execute_all`.
    """
    cache = _read_cache.get()
    prefetched = [] if cache is None else cache.take_pending(servers)
    if cache is None or not prefetched:
        return servers.execute_all(requests)
    parts = [each.read_requests() for each in prefetched]
    answers = servers.execute_all([*requests, *(request for part in parts for request in part)])
    start = len(requests)
    for each, part in zip(prefetched, parts, strict=True):
        cache.store(each, answers[start : start + len(part)])
        start += len(part)
    return answers[: len(requests)]


def read_together(variables: Sequence[Any]) -> list[NDArray[Any]]:
    """Return the values of several variables, with one request to each server.

    Args:
        variables: Variables on parameter servers of one cluster.

    Returns:
        Arrays owned by the caller, in the order of the variables.

    Raises:
        HeadraceError: As for `ParameterServerClient.execute_all`.
    """
    return read_with_rows(variables, [])[0]


def read_with_rows(
    variables: Sequence[Any],
    rows: Sequence[tuple[Any, NDArray[np.int64]]],
    pulls: Sequence[TablePull] = (),
) -> tuple[list[NDArray[Any]], list[NDArray[Any]], list[NDArray[Any]]]:
    """Return values of variables and rows of variables and tables; each server is asked once.

    Args:
        variables: Variables on parameter servers of one cluster.
        rows: Pairs of a variable there and distinct row indices in ascending order.
        pulls: Requests for rows of tables there (`table.TablePull`).

    Returns:
        Values in the order of the variables, rows in the order of the pairs, and rows in the order
        of the pulls. The caller owns all arrays.

    Raises:
        HeadraceError: As for `ParameterServerClient.execute_all`.
    """
    whole_variables: list[VariableShards] = [each.sharded for each in variables]
    row_variables: list[VariableShards] = [each.sharded for each, _ in rows]
    parts = [each.read_requests() for each in whole_variables]
    parts += [each.row_requests(ids) for each, (_, ids) in zip(row_variables, rows, strict=True)]
    parts += [each.requests for each in pulls]
    requests = [request for part in parts for request in part]
    servers = [each.servers for each in (*whole_variables, *row_variables)] + [
        each.servers for each in pulls
    ]
    replies = iter(servers[0].execute_all(requests) if requests else ())
    answers = iter([[next(replies) for _ in part] for part in parts])
    return (
        [each.join_value(next(answers)) for each in whole_variables],
        [each.join_rows(next(answers)) for each in row_variables],
        [each.rows(next(answers)) for each in pulls],
    )
