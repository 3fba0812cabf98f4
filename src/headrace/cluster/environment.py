"""Cluster described by `TF_CONFIG`.

`read_variable` and `read_number` read environment variables of any launcher.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

from headrace.cluster.resolver import ClusterResolver
from headrace.cluster.spec import ClusterSpec
from headrace.errors import FailedPreconditionError, InvalidArgumentError

__all__ = ["TFConfigClusterResolver", "read_number", "read_variable"]


def read_variable(*names: str, launcher: str) -> str:
    """Return the first of several environment variables that is set.

    Args:
        *names: Names of the variables.
        launcher: Name of the launcher that sets them.

    Raises:
        FailedPreconditionError: If none is set.
    """
    for name in names:
        if name in os.environ:
            return os.environ[name]
    raise FailedPreconditionError(
        f"the environment variable {names[0]} is not set: was this process started "
        f"by {launcher}? Otherwise use TFConfigClusterResolver or "
        "SimpleClusterResolver"
    )


def read_number(*names: str, launcher: str) -> int:
    """Return the first of several environment variables that is set, as an integer >= 0.

    Raises:
        FailedPreconditionError: If none is set.
        InvalidArgumentError: If it is not such an integer.
    """
    text = read_variable(*names, launcher=launcher)
    if not text.isascii() or not text.strip().isdigit():
        raise InvalidArgumentError(f"{names[0]} must be an integer, but got {text!r}")
    return int(text)


_VARIABLE = "TF_CONFIG"
_KEYS = ("cluster", "task", "rpc_layer", "session_master", "environment")


class TFConfigClusterResolver(ClusterResolver):
    """Reads the environment variable `TF_CONFIG` on each use.

        TF_CONFIG='{"cluster": {"worker": ["host1:2222", "host2:2222"]},
                    "task": {"type": "worker", "index": 0}}'

    Without the variable the cluster has no tasks. An evaluator needs no entry in `cluster`. If the
    variable has a `session_master`, `master()` returns it; a cluster of no task, or of one, has no
    master.

    >>> import json, os
    >>> os.environ["TF_CONFIG"] = json.dumps(
    ...     {"cluster": {"worker": ["host1:2222"]}, "task": {"type": "worker", "index": 0}}
    ... )
    >>> resolver = hr.distribute.TFConfigClusterResolver()
    >>> resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id
    ({'worker': ['host1:2222']}, 'worker', 0)
    >>> del os.environ["TF_CONFIG"]

    Args:
        task_type: Replaces that of the variable.
        task_id: Replaces that of the variable.
        rpc_layer: Replaces that of the variable.
        environment: Replaces that of the variable.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks that the variable describes.

        Raises:
            InvalidArgumentError: If the variable is not a valid description.
        """
        cluster = _read_object(_config(), "cluster")
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"'cluster' in {_VARIABLE}: {error}") from None

    @property
    def task_type(self) -> str | None:
        """Type of this process's task; None if unknown."""
        if self._task_type is not None:
            return self._task_type
        configured = _read_object(_config(), "task").get("type")
        return None if configured is None else str(configured)

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._task_type = None if value is None else str(value)

    @property
    def task_id(self) -> int | None:
        """Number of this process's task; None if unknown."""
        if self._task_id is not None:
            return self._task_id
        configured = _read_object(_config(), "task").get("index")
        return None if configured is None else _parse_number(configured, f"'index' in {_VARIABLE}")

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = None if value is None else _parse_number(value, "`task_id`")

    @property
    def rpc_layer(self) -> str | None:
        """Prefix of addresses; None if unknown."""
        configured = _config().get("rpc_layer")
        return configured if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = value

    def __repr__(self) -> str:
        # The variable may be invalid: show it unparsed.
        return f"{type(self).__name__}({_VARIABLE}={os.environ.get(_VARIABLE)!r})"

    @property
    def environment(self) -> str:
        """Name of the environment in which the cluster runs."""
        return self._environment or _config().get("environment") or ""

    def _find_master(self, task_type: str | None, task_id: int | None) -> str:
        configured = _config().get("session_master")
        if configured is not None:
            return str(configured)
        spec = self.cluster_spec()
        if sum(map(spec.num_tasks, spec.jobs)) <= 1:
            return ""
        try:
            return super()._find_master(task_type, task_id)
        except ValueError as error:
            raise type(error)(f"{error}, according to {_VARIABLE}") from None


def _config() -> dict[str, Any]:
    """Return the contents of the variable; {} if it is not set."""
    text = os.environ.get(_VARIABLE, "")
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(
            f"{_VARIABLE} is no JSON: {error}; it should read like "
            '{"cluster": {"worker": ["host1:2222"]}, "task": {"type": "worker", "index": 0}}, '
            f"but is {text!r}"
        ) from None
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"{_VARIABLE} must be a JSON object, but got {text!r}")
    for key in sorted(set(found) - set(_KEYS)):
        for suggestion in difflib.get_close_matches(key, _KEYS, 1, 0.8):
            # Launchers add other keys; but a misspelled key would result in an empty cluster.
            raise InvalidArgumentError(
                f"{_VARIABLE} has the unknown key {key!r}; did you mean {suggestion!r}?"
            )
    return found


def _read_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object in the variable, with the keys of JSON converted to integers."""
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise InvalidArgumentError(
            f"{name!r} in {_VARIABLE} must be a JSON object, but got {found!r}"
        )
    if name != "cluster":
        return found
    return {
        key: _parse_indices(tasks) if isinstance(tasks, dict) else tasks
        for key, tasks in found.items()
    }


def _parse_indices(tasks: Mapping[str, Any]) -> dict[int, Any]:
    description = f"a task index in {_VARIABLE}"
    return {_parse_number(index, description): address for index, address in tasks.items()}


def _parse_number(value: object, description: str) -> int:
    """Return a number that may be written as a string; errors call it `description`."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole and not (isinstance(value, str) and value.strip().isdecimal()):
        raise InvalidArgumentError(f"{description} must be an integer, but got {value!r}")
    number = int(value)  # type: ignore[call-overload]
    if number < 0:
        raise InvalidArgumentError(f"{description} must be at least 0, but got {value!r}")
    return int(number)
