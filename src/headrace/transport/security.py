"""Authentication and encryption: CURVE keys, and the lists of authorized clients."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq

from headrace.arguments import check_instance

__all__ = ["Security", "check_security", "new_keys"]

_SERVER_PUBLIC = "server.key"
_SERVER_SECRET = "server.key_secret"
_CLIENT_PUBLIC = "client.key"
_CLIENT_SECRET = "client.key_secret"
_CLIENTS = "authorized_clients"
_WORKERS = "authorized_workers"


@dataclass(frozen=True, kw_only=True)
class Security:
    """The keys of one role.

    >>> from headrace.transport.security import new_keys
    >>> _ = new_keys("keys")  # as `headrace keys new keys` does
    >>> config = hr.service.DispatcherConfig(security=hr.service.Security.load("keys", "server"))
    >>> with hr.service.DispatchServer(config) as dispatcher:
    ...     client = hr.service.Security.load("keys", "client")
    ...     hr.service.register_dataset(
    ...         dispatcher.target, hr.Dataset.range(3), dataset_id="numbers", security=client
    ...     )
    'numbers'

    Attributes:
        role: "server" or "client"; a process that is both has two records.
        public_key: Own public key, 40 characters (Z85).
        secret_key: Own secret key, 40 characters (Z85).
        server_key: For a client: the public key of the servers it trusts.
        authorized_clients: For a server: public keys that are accepted as clients, or a directory
            whose files ending in `.key` contain one each; changes take effect at once.
        authorized_workers: For a server: public keys that are accepted as workers, in the same
            form. Servers that share this server's key pair are workers without being listed.
    """

    role: Literal["server", "client"]
    public_key: str
    secret_key: str = field(repr=False)
    server_key: str = ""
    authorized_clients: frozenset[str] | Path = frozenset()
    authorized_workers: frozenset[str] | Path = frozenset()
    directory: Path | None = field(default=None, repr=False, compare=False)
    """Directory that `load` read."""

    def __reduce__(self) -> tuple[Callable[..., Security], tuple[str, str]]:
        # A pickled dataset is kept by the dispatcher and sent to every worker, so a secret key in
        # it would not stay secret. Only its directory is pickled.
        if self.directory is None:
            raise TypeError(
                "secret keys are not pickled: load them with Security.load(directory, "
                f"{self.role!r}) on each machine, which needs the same directory"
            )
        return Security.load, (str(self.directory), self.role)

    def __post_init__(self) -> None:
        if self.role not in ("server", "client"):
            raise ValueError(f'role={self.role!r} must be "server" or "client"')
        for name, key in (("public_key", self.public_key), ("secret_key", self.secret_key)):
            if len(key) != 40:
                raise ValueError(f"{name} must have 40 characters, but has {len(key)}")
        if self.role == "client" and len(self.server_key) != 40:
            raise ValueError("a client requires server_key, the public key of its servers")

    @classmethod
    def load(cls, directory: str | os.PathLike[str], role: Literal["server", "client"]) -> Security:
        """Read the keys of a role from a directory created by `new_keys`.

        Args:
            directory: Directory made by `headrace keys new`, or one with the files of the role.
            role: "server" for a dispatcher, worker or other server; "client" for those who connect.

        Raises:
            ValueError: If a file is missing, or does not contain a key.
        """
        folder = Path(directory)
        if role == "server":
            return cls(
                role=role,
                public_key=_read_key(folder / _SERVER_PUBLIC),
                secret_key=_read_key(folder / _SERVER_SECRET),
                authorized_clients=folder / _CLIENTS,
                authorized_workers=folder / _WORKERS,
                directory=folder.absolute(),
            )
        return cls(
            role=role,
            public_key=_read_key(folder / _CLIENT_PUBLIC),
            secret_key=_read_key(folder / _CLIENT_SECRET),
            server_key=_read_key(folder / _SERVER_PUBLIC),
            directory=folder.absolute(),
        )

    def as_client(self) -> Security:
        """Return the keys for connections of a server to another server of the same service.

        Servers that share a key pair trust each other: each accepts its own key.
        """
        if self.role == "client":
            return self
        return Security(
            role="client",
            public_key=self.public_key,
            secret_key=self.secret_key,
            server_key=self.public_key,
        )

    def apply(self, socket: zmq.Socket[bytes], role: Literal["server", "client"]) -> None:
        """Configure encryption and authentication of a socket that is not yet bound or connected.

        Raises:
            ValueError: If these are the keys of the other role.
        """
        self.check_role(role)
        socket.curve_publickey = self.public_key.encode()
        socket.curve_secretkey = self.secret_key.encode()
        if role == "server":
            socket.curve_server = True
            socket.zap_domain = b"headrace"
        else:
            socket.curve_serverkey = self.server_key.encode()

    def check_role(self, role: Literal["server", "client"]) -> None:
        """Check that these are the keys of a role.

        Raises:
            ValueError: If these are the keys of the other role.
        """
        if self.role != role:
            raise ValueError(
                f"security= has the keys of a {self.role}, but a {role} needs them: use "
                f'Security.load(directory, "{role}")'
            )


def check_security(value: object) -> None:
    """Check that an argument is None or a `Security`.

    Raises:
        TypeError: If it is anything else, such as the name of a directory.
    """
    if value is not None:
        check_instance("security", value, Security, fix="use Security.load(directory, role)")


class AllowList:
    """Decides which peers a server accepts, and in which role.

    These are the listed keys, and as workers the peers with the server's own key.

    Its `callback` is called by pyzmq's authenticator.
    """

    def __init__(
        self,
        clients: frozenset[str] | Path,
        own_key: str = "",
        workers: frozenset[str] | Path = frozenset(),
    ) -> None:
        self._clients = clients
        self._workers = workers
        self._own_key = own_key

    @classmethod
    def of(cls, security: Security) -> AllowList:
        """Return the allow list of a server's keys."""
        return cls(security.authorized_clients, security.public_key, security.authorized_workers)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the peer with this public key (Z85) is accepted."""
        return self.role_of(key.decode("ascii", "replace")) is not None

    def role_of(self, name: str) -> Literal["worker", "client"] | None:
        """Return the role of the peer with this public key; None if it is rejected."""
        if not name:
            return None
        if name == self._own_key or name in _listed(self._workers):
            return "worker"
        return "client" if name in _listed(self._clients) else None


def _listed(keys: frozenset[str] | Path) -> frozenset[str]:
    if isinstance(keys, frozenset):
        return keys
    # Handshakes are rare and the directory is small: it is read each time, so that a removed or
    # replaced key takes effect at once.
    found = set()
    for file in sorted(keys.glob("*.key")):
        with contextlib.suppress(OSError, ValueError):
            found.add(_read_key(file))
    return frozenset(found)


def new_keys(directory: str | os.PathLike[str]) -> Path:
    """Create the keys of a server and of a first client, which is authorized.

    Writes `server.key`, `server.key_secret`, `client.key`, `client.key_secret`, the directory
    `authorized_clients` with a copy of `client.key`, and an empty directory `authorized_workers`.
    Secret keys are readable by their owner only.

    Returns:
        The directory.

    Raises:
        FileExistsError: If keys exist already; they are not changed.
    """
    folder = Path(directory)
    for name in (_SERVER_PUBLIC, _SERVER_SECRET, _CLIENT_PUBLIC, _CLIENT_SECRET):
        if (folder / name).exists():
            raise FileExistsError(
                f"{folder / name} already exists; choose another directory or remove the "
                "old keys first"
            )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (_CLIENTS, _WORKERS):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    for public, secret in ((_SERVER_PUBLIC, _SERVER_SECRET), (_CLIENT_PUBLIC, _CLIENT_SECRET)):
        public_key, secret_key = zmq.curve_keypair()
        _write_new(folder / public, public_key, 0o644)
        _write_new(folder / secret, secret_key, 0o600)
        if public == _CLIENT_PUBLIC:
            _write_new(folder / _CLIENTS / public, public_key, 0o644)
    return folder


def _write_new(path: Path, key: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cannot read a key from {path}: {error}; copy the keys of this role from where they "
            "were made, or make new ones for all machines with `headrace keys new DIR`"
        ) from error
    if len(key) != 40:
        raise ValueError(f"{path} must contain a key of 40 characters, but has {len(key)}")
    return key
