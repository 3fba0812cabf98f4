"""A cluster as `TF_CONFIG` describes it.

`read` and `read_whole` read what any launcher says in the environment.
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

__all__ = ["TFConfigClusterResolver", "read", "read_whole"]


def read(*names: str, launcher: str) -> str:
    """Return the first of some variables that is there.

    Args:
        *names: Of the variables.
        launcher: Who sets them, in words.

    Raises:
        FailedPreconditionError: None is there.
    """
    for name in names:
        if name in os.environ:
            return os.environ[name]
    raise FailedPreconditionError(
        f"{names[0]} is not in the environment: was this process started by {launcher}? Elsewhere "
        "use TFConfigClusterResolver or SimpleClusterResolver"
    )


def read_whole(*names: str, launcher: str) -> int:
    """Return the first of some variables that is there, as a number of 0 or more.

    Raises:
        FailedPreconditionError: None is there.
        InvalidArgumentError: It is no such number.
    """
    text = read(*names, launcher=launcher)
    if not text.isascii() or not text.strip().isdigit():
        raise InvalidArgumentError(f"{names[0]} must be an integer, but is {text!r}")
    return int(text)


_VARIABLE = "TF_CONFIG"
_KEYS = ("cluster", "task", "rpc_layer", "session_master", "environment")


class TFConfigClusterResolver(ClusterResolver):
    """Reads the environment variable `TF_CONFIG`, each time that it is asked.

        TF_CONFIG='{"cluster": {"worker": ["host1:2222", "host2:2222"]},
                    "task": {"type": "worker", "index": 0}}'

    Without the variable the cluster has no tasks. An evaluator needs no entry in `cluster`.
    `session_master` in it is what `master()` returns; a cluster of no task, or of one, has no
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
        task_type: In place of the variable's.
        task_id: In place of the variable's.
        rpc_layer: In place of the variable's.
        environment: In place of the variable's.
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
        """Return the tasks that the variable names.

        Raises:
            InvalidArgumentError: The variable is no such description.
        """
        cluster = _part(_config(), "cluster")
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"'cluster' in {_VARIABLE}: {error}") from None

    @property
    def task_type(self) -> str | None:
        """The type of this process's task, None if nobody says."""
        if self._task_type is not None:
            return self._task_type
        said = _part(_config(), "task").get("type")
        return None if said is None else str(said)

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._task_type = None if value is None else str(value)

    @property
    def task_id(self) -> int | None:
        """The number of this process's task, None if nobody says."""
        if self._task_id is not None:
            return self._task_id
        said = _part(_config(), "task").get("index")
        return None if said is None else _number(said, f"'index' in {_VARIABLE}")

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = None if value is None else _number(value, "`task_id`")

    @property
    def rpc_layer(self) -> str | None:
        """The prefix of addresses, None if nobody says."""
        said = _config().get("rpc_layer")
        return said if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = value

    def __repr__(self) -> str:
        # What stands in the variable may be no description: this says it all the same.
        return f"{type(self).__name__}({_VARIABLE}={os.environ.get(_VARIABLE)!r})"

    @property
    def environment(self) -> str:
        """A word for where the cluster runs."""
        return self._environment or _config().get("environment") or ""

    def _find_master(self, task_type: str | None, task_id: int | None) -> str:
        said = _config().get("session_master")
        if said is not None:
            return str(said)
        spec = self.cluster_spec()
        if sum(map(spec.num_tasks, spec.jobs)) <= 1:
            return ""
        try:
            return super()._find_master(task_type, task_id)
        except ValueError as error:
            raise type(error)(f"{error}, as {_VARIABLE} says") from None


def _config() -> dict[str, Any]:
    """Return what the variable says; {} if it is not there."""
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
        raise InvalidArgumentError(f"{_VARIABLE} must be a JSON object, but is {text!r}")
    for key in sorted(set(found) - set(_KEYS)):
        for meant in difflib.get_close_matches(key, _KEYS, 1, 0.8):
            # Launchers add keys of their own; a misspelt one would make a cluster of no tasks.
            raise InvalidArgumentError(f"{_VARIABLE} has {key!r}; did you mean {meant!r}?")
    return found


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object within the variable; JSON's names of numbers become numbers."""
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise InvalidArgumentError(
            f"{name!r} in {_VARIABLE} must be a JSON object, but is {found!r}"
        )
    if name != "cluster":
        return found
    return {
        key: _numbered(tasks) if isinstance(tasks, dict) else tasks for key, tasks in found.items()
    }


def _numbered(tasks: Mapping[str, Any]) -> dict[int, Any]:
    words = f"the number of a task in {_VARIABLE}"
    return {_number(index, words): address for index, address in tasks.items()}


def _number(value: object, words: str) -> int:
    """Return a number that may be written as a string; the words say of what."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole and not (isinstance(value, str) and value.strip().isdecimal()):
        raise InvalidArgumentError(f"{words} must be an integer, but is {value!r}")
    number = int(value)  # type: ignore[call-overload]
    if number < 0:
        raise InvalidArgumentError(f"{words} must be at least 0, but is {value!r}")
    return int(number)
