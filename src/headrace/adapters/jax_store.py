"""Where the processes of a JAX program leave words for each other: the store of jax.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Whoever coordinates processes of JAX uses this; it has no public name.
from jax._src import distributed

from headrace.adapters.jax_agreement import Store
from headrace.errors import FailedPreconditionError, UnavailableError

__all__ = ["jax_store"]

_LOOK_MILLISECONDS = 1000


class _JaxStore:
    """The store of `jax.distributed`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._call(self._client.key_value_set, key, value, True)

    def get(self, key: str) -> str | None:
        try:
            found: str = self._call(self._client.blocking_key_value_get, key, _LOOK_MILLISECONDS)
        except TimeoutError:
            return None
        return found

    def delete(self, key: str) -> None:
        self._call(self._client.key_value_delete, key)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # XlaRuntimeError, JaxRuntimeError: the name changes
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError from None
            raise UnavailableError(
                f"the coordinator of jax.distributed cannot be asked: {error}"
            ) from error


def jax_store() -> Store:
    """Return the store of `jax.distributed`.

    Raises:
        FailedPreconditionError: There is none.
    """
    client = distributed.global_state.client
    if client is None:
        raise FailedPreconditionError(
            "the sharding has devices of several processes, and they have nothing to agree by: "
            "call jax.distributed.initialize() first, in each of them"
        )
    return _JaxStore(client)
