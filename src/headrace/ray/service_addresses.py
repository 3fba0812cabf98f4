"""Addresses of services by name: a host such as "input.headrace-ray" means its current dispatcher.

Clients and workers look a host up whenever they connect, so they follow a dispatcher that Ray
restarts on another node. After the first time, a lookup returns the last known address at once and
asks for the current one in the background: it must not delay a thread that receives elements.
"""

from __future__ import annotations

import logging
import os
import threading

from headrace.errors import HeadraceError, UnavailableError
from headrace.ray.nodes import call_actor, find_actor, import_ray
from headrace.service.config import parse_service
from headrace.transport import address as addresses

__all__ = ["CONTROLLER_PREFIX", "service_address"]

_log = logging.getLogger(__name__)

CONTROLLER_PREFIX = "headrace-data/"
"""Prefix of the names of controllers."""
_SUFFIX = ".headrace-ray"
_CALL_SECONDS = 10.0

_lock = threading.Lock()
_known: dict[str, str] = {}
_refreshing: set[str] = set()
_process = os.getpid()


def service_address(actor: str, port: int) -> str:
    """Return an address of the dispatcher that stays the same when it moves.

    Args:
        actor: Name of the controller's actor.
        port: Any port, since the lookup finds the current one.
    """
    return addresses.join(actor.removeprefix(CONTROLLER_PREFIX) + _SUFFIX, port)


def _look_up(host: str) -> str:
    """Return the current address, "host:port", of the dispatcher of a host with the suffix."""
    with _lock:
        known = _known.get(host, "")
        # Ray cannot be used in a forked child.
        if known and (host in _refreshing or os.getpid() != _process):
            return known
        if known:
            _refreshing.add(host)
    if not known:
        return _query(host)
    threading.Thread(target=_refresh, args=(host,), name="headrace-ray-lookup", daemon=True).start()
    return known


def _refresh(host: str) -> None:
    try:
        _query(host)
    except HeadraceError as error:
        _log.debug("lookup of %s: %s", host, error)
    except Exception as error:
        _log.warning("lookup of %s failed: %s: %s", host, type(error).__name__, error)
    finally:
        with _lock:
            _refreshing.discard(host)


def _query(host: str) -> str:
    """Ask the controller for its address, and remember it.

    Raises:
        UnavailableError: If there is no such controller, or it does not answer.
    """
    name = host.removesuffix(_SUFFIX)
    if not import_ray().is_initialized():
        raise UnavailableError(f"data service {name!r} cannot be found: Ray was shut down")
    controller = find_actor(CONTROLLER_PREFIX + name)
    if controller is None:
        with _lock:
            was_known = _known.pop(host, None) is not None
        if was_known:
            _log.warning("data service %r was stopped; its readers fail after `wait_timeout`", name)
        raise UnavailableError(f"no data service {name!r} runs on this Ray cluster any more")
    what = f"data service {name!r}"
    found = parse_service(call_actor(controller, "target", what=what, timeout=_CALL_SECONDS))
    with _lock:
        before, _known[host] = _known.get(host), found
    if before not in (None, found):
        _log.warning("the dispatcher of %s moved from %s to %s", what, before, found)
    return found


addresses.register_lookup(_SUFFIX, _look_up)
