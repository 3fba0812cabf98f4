"""What the actors of `headrace.ray` need of Ray: its import, node addresses, names and keys.

Keys are created once, by the owner of a cluster, and travel in calls of Ray actors only. Processes
that connect later ask a named actor for the client's keys. A pickled dataset contains the name of
that actor, not the keys.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import zmq

from headrace.cluster.resolver import import_package
from headrace.errors import FailedPreconditionError, UnavailableError
from headrace.transport.security import Security

__all__ = [
    "NAMESPACE",
    "ActorSecurity",
    "ClusterKeys",
    "StoredNumber",
    "call_actor",
    "connect_ray",
    "fetch_security",
    "find_actor",
    "import_ray",
    "init_ray",
    "node_address",
]

_log = logging.getLogger(__name__)

NAMESPACE = "headrace"
"""Ray namespace of all named actors, so that any driver finds them."""
_MINIMUM_VERSION = (2, 10)
_CALL_SECONDS = 30.0


def import_ray() -> Any:
    """Import and return the package `ray`.

    Raises:
        FailedPreconditionError: If it is not installed, or too old.
    """
    ray = import_package("ray", needed_by="headrace.ray")
    check_version(str(ray.__version__))
    return ray


@functools.lru_cache
def check_version(version: str) -> None:
    """Check that this version of Ray is supported.

    Raises:
        FailedPreconditionError: If it is too old.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < _MINIMUM_VERSION:
        required = ".".join(map(str, _MINIMUM_VERSION))
        raise FailedPreconditionError(
            f"headrace.ray requires ray>={required}, but version {version} is installed; pip "
            "install --upgrade 'headrace[ray]'"
        )


def init_ray() -> Any:
    """Return the package `ray`, initialized.

    Like Ray's own functions, this calls `ray.init()` if the program has not: that connects to the
    cluster of RAY_ADDRESS or to one that runs on this machine, and otherwise starts one.
    """
    ray = import_ray()
    if not ray.is_initialized():
        ray.init()
    return ray


def connect_ray() -> Any:
    """Return the package `ray`, connected to a running cluster. Starts none.

    Raises:
        UnavailableError: If `ray.init` was not called, and no cluster is found.
    """
    ray = import_ray()
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError as error:
            raise UnavailableError(
                "no running Ray cluster was found: call ray.init(address=...) first, or set "
                f"RAY_ADDRESS ({str(error).partition(chr(10))[0]})"
            ) from error
    return ray


def node_address() -> str:
    """Return the address of this process's Ray node, which other nodes can reach."""
    return str(import_ray().util.get_node_ip_address())


def find_actor(name: str) -> Any | None:
    """Return the handle of a named actor in `NAMESPACE`; None if there is none, or no more."""
    try:
        return import_ray().get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def call_actor(
    actor: Any, method: str, *arguments: Any, what: str, timeout: float = _CALL_SECONDS
) -> Any:
    """Call a method of an actor; return its result.

    Args:
        actor: Handle of the actor.
        method: Name of the method.
        *arguments: Arguments of the method.
        what: Description of the actor, for errors.
        timeout: Seconds to wait for the reply.

    Raises:
        UnavailableError: If the actor is dead, did not reply in time, or Ray was shut down.
        Exception: Any error that the method raised.
    """
    ray = import_ray()
    if not ray.is_initialized():  # the call would start another Ray cluster
        raise UnavailableError(f"no reply from {what}: Ray was shut down in this process")
    reply = getattr(actor, method).remote(*arguments)
    try:
        return ray.get(reply, timeout=timeout)
    except ray.exceptions.RayTaskError as error:
        # Errors of Headrace are raised as such, without the class that Ray derives from them.
        raise getattr(error, "cause", error) from error
    except ray.exceptions.RayError as error:
        raise UnavailableError(
            f"no reply from {what}: {str(error).partition(chr(10))[0]}"
        ) from error


class StoredNumber:
    """A number in Ray's control store, for the actors that Ray restarts.

    Args:
        key: Its key. It must be unique for all time, since a killed actor does not delete it.
    """

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._store = importlib.import_module("ray.experimental.internal_kv")

    def load(self, default: int) -> int:
        """Return the number; `default` if none was stored."""
        value = self._store._internal_kv_get(self._key, namespace=NAMESPACE)
        return default if value is None else int(value)

    def store(self, number: int) -> None:
        """Store a number."""
        self._store._internal_kv_put(self._key, str(number), namespace=NAMESPACE)

    def delete(self) -> None:
        """Delete the number, if there is one."""
        self._store._internal_kv_del(self._key, namespace=NAMESPACE)


@dataclass(frozen=True, kw_only=True)
class ClusterKeys:
    """Keys of the servers and of the clients of one cluster.

    Pickling one copies its secrets, so it is passed to actors only.
    """

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def create(cls) -> ClusterKeys:
        """Create keys."""
        server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
        client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
        )

    def server(self) -> Security:
        """Return the keys of servers. They accept each other, and the clients."""
        return Security(
            role="server",
            public_key=self.server_public,
            secret_key=self.server_secret,
            authorized_clients=frozenset({self.client_public}),
        )

    def client(self, actor: str = "") -> Security:
        """Return the keys of clients.

        Args:
            actor: Name of the actor whose method `client_keys` returns `client_part`, for
                processes to which a dataset is pickled. "": it cannot be pickled.
        """
        return _client_security(self.client_part(), actor)

    def client_part(self) -> tuple[str, str, str]:
        """Return what a client may know: its public and secret key, and the servers' public key."""
        return self.client_public, self.client_secret, self.server_public


@dataclass(frozen=True, kw_only=True)
class ActorSecurity(Security):
    """Keys of a client, which are pickled as the name of the actor that knows them.

    Attributes:
        actor: Name of the actor, in `NAMESPACE`.
    """

    actor: str

    def __reduce__(self) -> tuple[Callable[..., Security], Any]:
        return fetch_security, (self.actor,)


def fetch_security(actor: str) -> Security:
    """Return the keys of clients, from the named actor that knows them.

    Raises:
        UnavailableError: If there is no such actor, or no Ray cluster.
    """
    # The addresses of a pickled dataset need its lookup, too.
    importlib.import_module("headrace.ray.service_addresses")
    connect_ray()
    handle = find_actor(actor)
    if handle is None:
        raise UnavailableError(
            f"no Ray actor {actor!r} in namespace {NAMESPACE!r}, which has the keys of its cluster:"
            " has the cluster been closed?"
        )
    part = call_actor(handle, "client_keys", what=f"Ray actor {actor!r}")
    return _client_security(part, actor)


def _client_security(part: tuple[str, str, str], actor: str) -> Security:
    role: Literal["client"] = "client"
    public, secret, server = part
    if not actor:
        return Security(role=role, public_key=public, secret_key=secret, server_key=server)
    return ActorSecurity(
        role=role, public_key=public, secret_key=secret, server_key=server, actor=actor
    )
