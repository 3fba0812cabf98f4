"""File systems of URLs: obstore for object stores if it is installed, else fsspec.

The only file that uses obstore. Its stores are used through its own fsspec interface.
"""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any

from fsspec.core import url_to_fs

from headrace.errors import HeadraceError, MissingDependencyError
from headrace.storage.options import StorageOptions
from headrace.storage.retrying import find_status, shorten_message

__all__ = ["convert_error", "find_file_system", "is_object_store"]

_HTTP_TIMEOUT_SECONDS = 30.0
"""Seconds to wait for a connection, and for the next bytes of a reply."""

_S3, _GCS, _AZURE = "s3", "gs", "az"
#: Kind of object store by scheme.
_KINDS = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS, "az": _AZURE, "abfs": _AZURE}

#: Names of options in the packages of fsspec, by kind of object store and name in obstore. A name
#: may also have the prefix `aws_`, `google_` or `azure_`.
_FSSPEC_NAMES: dict[str, dict[str, str]] = {
    _S3: {
        "access_key_id": "key",
        "secret_access_key": "secret",
        "session_token": "token",
        "endpoint": "endpoint_url",
        "skip_signature": "anon",
    },
    _GCS: {"service_account": "token", "endpoint": "endpoint_url", "skip_signature": "anon"},
    _AZURE: {"endpoint": "endpoint_url", "skip_signature": "anon"},
}
_METADATA_HOSTS = ("169.254.", "metadata.google.internal")
"""Servers of cloud providers that obstore asks for credentials if none are given."""
_PREFIXES = {_S3: "aws_", _GCS: "google_", _AZURE: "azure_"}


def find_file_system(url: str, options: StorageOptions, *, retries: bool = True) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path of the URL in it.

    Args:
        url: The URL.
        options: Options of the file system.
        retries: Whether requests to obstore may be repeated there. False is for callers that repeat
            them with `retry_read`.

    Raises:
        MissingDependencyError: If the package of its file system is not installed.
        ValueError: If there is no file system for the scheme, or it does not know an option.
    """
    try:
        return _find(url, options, retries)
    except (ValueError, ImportError) as error:
        kind = MissingDependencyError if isinstance(error, ImportError) else ValueError
        is_unknown = "not known" in str(error)
        hint = " (fsspec has no file system for this URL scheme)" if is_unknown else ""
        raise kind(f"{url!r}: {error}{hint}") from error


def _find(url: str, options: StorageOptions, retries: bool) -> tuple[Any, str]:
    scheme, _, path = url.partition("://")
    kind = _KINDS.get(scheme)
    if kind is None or "::" in url:
        return _find_fsspec_system(url, options.system)
    store = _store_class()
    if store is None:
        try:
            return _find_fsspec_system(url, _to_fsspec(kind, options.system))
        except ImportError as error:
            if _import_store_class() is None:
                raise ImportError(
                    f"{error}, or obstore: pip install 'headrace[objectstore]'"
                ) from error
            raise ImportError(
                f"{error}: obstore does not work in a forked process whose parent used it; start "
                "the process with spawn or forkserver"
            ) from error
    given = _to_obstore(kind, options.system)
    if not retries:
        timeout = datetime.timedelta(seconds=60)
        given["retry_config"] = {"max_retries": 0, "retry_timeout": timeout}
    return store(kind if scheme in ("gcs", "s3a") else scheme, **given), path


def convert_error(error: Exception) -> Exception:
    """Return an error of obstore, or of an HTTP reply, as a built-in one; others as they are."""
    # The other lines of messages of obstore repeat the first one in another form.
    message, *others = str(error).split("\n", 1)
    if type(error) is FileNotFoundError and others:
        return FileNotFoundError(message)
    if type(error).__module__.partition(".")[0] != "obstore":
        status = None if isinstance(error, HeadraceError | OSError) else find_status(error)
        return error if status is None else _convert_status(status, shorten_message(error))
    match type(error).__name__:
        case "PermissionDeniedError" | "UnauthenticatedError":
            return PermissionError(message)
        case "UnknownConfigurationKeyError":
            return ValueError(f"{message} Check `storage_options`.")
    if any(host in message for host in _METADATA_HOSTS):
        message += (
            "; this host gives no credentials: pass them in `storage_options` or in environment "
            "variables, or storage_options={'anon': True} for public files"
        )
    return OSError(message)


def _convert_status(status: int, message: str) -> OSError:
    """Return the built-in error for the HTTP status of a failed request."""
    match status:
        case 401 | 403:
            return PermissionError(message)
        case 404 | 410:
            return FileNotFoundError(message)
    return OSError(message)


def is_object_store(system: Any) -> bool:
    """Return whether a file system is one of obstore."""
    store = _import_store_class()
    return store is not None and isinstance(system, store)


def _find_fsspec_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    if url.startswith(("http://", "https://")):
        options = _add_http_timeouts(options)
    try:
        system, path = url_to_fs(url, **options)
    except TypeError as error:  # an unknown argument; the message does not contain its value
        raise ValueError(f"{error}; check `storage_options`") from None
    return system, str(path)


def _add_http_timeouts(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with limits of each wait for a server, instead of one for a whole reply.

    By default, fsspec waits five minutes for a server that has stopped to reply.
    """
    try:
        from aiohttp import ClientTimeout  # noqa: PLC0415 - optional dependency
    except ImportError:
        return options  # fsspec explains it
    seconds = _HTTP_TIMEOUT_SECONDS
    timeout = ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
    client = {"timeout": timeout} | dict(options.get("client_kwargs") or {})
    return options | {"client_kwargs": client}


def _store_class() -> Any:
    """Return obstore's class of file systems; None if it cannot be used in this process."""
    if _first_process.setdefault("id", os.getpid()) != os.getpid():
        # The threads of obstore do not exist in a forked process.
        return None
    return _import_store_class()


_first_process: dict[str, int] = {}
"""ID of the first process that used obstore, which may be a parent of this one."""


@functools.cache
def _import_store_class() -> Any:
    try:
        from obstore.fsspec import FsspecStore  # noqa: PLC0415 - optional dependency
    except ImportError:
        return None
    return FsspecStore


def _to_obstore(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options by obstore's names, from those or fsspec's."""
    obstore_names = {fsspec: obstore for obstore, fsspec in _FSSPEC_NAMES[kind].items()}
    found: dict[str, Any] = {}
    for name, value in _flatten(options).items():
        if value is None:
            continue
        if isinstance(value, int | float | bytes) and not isinstance(value, bool):
            raise ValueError(
                f"storage_options[{name!r}] must be a str, but is of type {type(value).__name__}"
            )
        plain = name.removeprefix(_PREFIXES[kind])
        name = obstore_names.get(plain, plain)
        if kind == _GCS and name == "service_account" and value == "anon":
            name, value = "skip_signature", True
        found[name] = value
    endpoint = found.get("endpoint")
    if isinstance(endpoint, str) and endpoint.startswith("http://"):
        found["client_options"] = {"allow_http": True} | dict(found.get("client_options", {}))
    return found


def _to_fsspec(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options by the names of fsspec's packages, from those or obstore's."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        plain = name.removeprefix(_PREFIXES[kind])
        if plain == "region" and kind == _S3:
            client = found.get("client_kwargs", options.get("client_kwargs", {}))
            found["client_kwargs"] = {"region_name": value} | dict(client)
        elif name == "client_kwargs":
            found[name] = dict(value) | found.get(name, {})
        elif kind == _GCS and plain in ("skip_signature", "anon"):
            if value:
                found["token"] = "anon"
        else:
            found[_FSSPEC_NAMES[kind].get(plain, name)] = value
    return found


def _flatten(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the endpoint and region of fsspec's `client_kwargs` beside the others."""
    found = dict(options)
    client = dict(found.pop("client_kwargs", None) or {})
    if "region_name" in client:
        found["region"] = client.pop("region_name")
    return found | client
