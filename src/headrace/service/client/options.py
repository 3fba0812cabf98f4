"""Reading options: the validated arguments of `distribute` and `from_dataset_id`."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import InvalidArgumentError
from headrace.service.config import (
    STATIC_POLICIES,
    TARGET_WORKERS,
    TRANSFER_PROTOCOLS,
    CrossTrainerCache,
    ShardingPolicy,
    parse_processing_mode,
    parse_service,
)
from headrace.service.modes.ordered.consumer_options import make_consumer_options
from headrace.transport.security import Security, check_security

__all__ = ["ReadOptions", "make_read_options"]

_AUTOTUNE = -1
_VISITATIONS: dict[ShardingPolicy, tuple[str, ...]] = {
    ShardingPolicy.OFF: (),
    ShardingPolicy.DYNAMIC: ("exactly_once", "at_most_once"),
    **dict.fromkeys(STATIC_POLICIES, ("at_least_once",)),
}
"""Values of `visitation` that each mode supports, in addition to None, the default."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a dataset of a service is read; created by `make_read_options`."""

    processing_mode: ShardingPolicy
    """How the workers share the dataset."""
    service: str
    """Address of the dispatcher, "host:port"."""
    job_name: str | None
    """Name of the job shared with other readers; None for a private job."""
    max_outstanding_requests: int | None
    """Maximum number of requested and unconsumed elements over all workers; None for no limit."""
    data_transfer_protocol: str | None
    """"local", "shm" or "tcp"; None for the first of these that works."""
    target_workers: str
    """One of "AUTO", "ANY" and "LOCAL"."""
    visitation: str | None
    """None, "exactly_once", "at_most_once" or "at_least_once", as the mode supports."""
    num_consumers: int | None = None
    """Number of consumers that read rounds; None for FIFO delivery."""
    consumer_index: int | None = None
    """Index of this consumer."""
    readers_per_consumer: int = 1
    """Number of processes that each read all elements of the same consumer, in ordered reading."""
    reader_index: int = 0
    """Index of this process among them."""
    trainer_id: str = ""
    """If not empty, each trainer receives all elements, through a cache on the workers."""
    ordered: bool = False
    """Whether elements are delivered in the order of a single process."""
    remainder: str = "drop"
    """Handling of elements at the end that do not fill a round."""
    group: str = ""
    """If not empty, the job belongs to a group of jobs of this name, which share one seed."""
    group_options: str = ""
    """What all jobs of the group must agree on: one line in general, and one per dataset step."""
    cost_fn_id: str = ""
    cost_fn: bytes = b""
    """Identifier and pickled form of the cost function of rows; empty leaves rows unchanged."""
    wait_timeout: float
    """Seconds without a worker that could deliver, after which reading fails."""
    security: Security | None
    """Keys of this client, for a service that requires them."""
    on_data_loss: str = "error"
    """Whether missing elements at the end are an "error", or only a warning ("warn")."""

    @property
    def static_policy(self) -> str:
        """Name of a static policy whose workers the dispatcher determines; otherwise empty."""
        is_static = self.target_workers == "AUTO" and self.processing_mode in STATIC_POLICIES
        return self.processing_mode.name if is_static else ""


def make_read_options(
    *,
    processing_mode: object,
    service: object,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    readers_per_consumer: int | None = None,
    reader_index: int | None = None,
    max_outstanding_requests: object = None,
    data_transfer_protocol: object = None,
    cross_trainer_cache: object = None,
    target_workers: object = "AUTO",
    visitation: str | None = None,
    ordered: object = False,
    remainder: object = "drop",
    cost_fn: object = None,
    wait_timeout: object = 3600.0,
    security: Security | None = None,
    on_data_loss: object = "error",
) -> ReadOptions:
    """Validate the arguments of `distribute` and `from_dataset_id`, which document them.

    Raises:
        TypeError, ValueError: If a value is invalid or not supported by this version.
    """
    mode = parse_processing_mode(processing_mode)
    address = parse_service(service)
    _check_job_name(job_name)
    trainer_id = _parse_trainer(cross_trainer_cache, job_name, num_consumers)
    if trainer_id and visitation == "exactly_once":
        raise InvalidArgumentError(
            'visitation="exactly_once" is not supported with `cross_trainer_cache`, which delivers '
            "elements to each trainer at most once; leave `visitation` out"
        )
    target = _parse_target_workers(target_workers)
    consumer = make_consumer_options(
        mode=mode,
        job_name=job_name,
        consumer_index=consumer_index,
        num_consumers=num_consumers,
        readers_per_consumer=readers_per_consumer,
        reader_index=reader_index,
        remainder=remainder,
        cost_fn=cost_fn,
        target_workers=target,
        is_ordered=bool(ordered),
    )
    check_security(security)
    _check_visitation(mode, visitation)
    _check_ordered(mode, visitation, ordered)
    return ReadOptions(
        processing_mode=mode,
        service=address,
        job_name=job_name,
        max_outstanding_requests=_parse_max_outstanding(max_outstanding_requests),
        data_transfer_protocol=_parse_protocol(data_transfer_protocol),
        target_workers=target,
        visitation="exactly_once" if ordered else visitation,
        ordered=bool(ordered),
        num_consumers=consumer.num_consumers,
        consumer_index=consumer.consumer_index,
        readers_per_consumer=consumer.readers_per_consumer,
        reader_index=consumer.reader_index,
        remainder=consumer.remainder,
        cost_fn_id=consumer.cost_fn_id,
        cost_fn=consumer.cost_fn,
        wait_timeout=_parse_wait_timeout(wait_timeout),
        security=security,
        on_data_loss=_parse_on_data_loss(on_data_loss),
        trainer_id=trainer_id,
    )


def _check_job_name(job_name: object) -> None:
    if job_name is not None and not isinstance(job_name, str):
        raise ValueError(
            f"`job_name` must be a string, but `job_name` was of type {type(job_name)}. "
            f"job_name={job_name!r}"
        )
    if job_name == "":
        raise ValueError("`job_name` must not be empty")


def _parse_trainer(cache: object, job_name: object, num_consumers: object) -> str:
    """Return the trainer to read for; empty without a cross-trainer cache."""
    if cache is None:
        return ""
    if not isinstance(cache, CrossTrainerCache):
        raise TypeError(
            "`cross_trainer_cache` must be a CrossTrainerCache(trainer_id) or None, but got "
            f"{cache!r}"
        )
    if job_name is None:
        raise InvalidArgumentError(
            "Cross-trainer caching requires named jobs. Got empty `job_name`."
        )
    if num_consumers is not None:
        raise InvalidArgumentError(
            "Cross-trainer caching does not support coordinated reads. Got number of coordinated "
            f"consumers: {num_consumers!r}"
        )
    return cache.trainer_id


def _check_visitation(mode: ShardingPolicy, visitation: object) -> None:
    supported = _VISITATIONS[mode]
    if visitation is not None and visitation not in supported:
        is_known = any(visitation in names for names in _VISITATIONS.values())
        raise ValueError(
            f"visitation={visitation!r} is {'not supported' if is_known else 'unknown'} with "
            f"{mode.name}; use None{''.join(f' or {name!r}' for name in supported)}"
        )


def _check_ordered(mode: ShardingPolicy, visitation: object, ordered: object) -> None:
    if not isinstance(ordered, bool):
        raise TypeError(f"`ordered` must be True or False, but got {ordered!r}")
    if ordered and mode is not ShardingPolicy.DYNAMIC:
        raise ValueError(
            f"ordered=True requires ShardingPolicy.DYNAMIC, but got {mode.name}, with which "
            "workers read independently and elements have no common order"
        )
    if ordered and visitation not in (None, "exactly_once"):
        raise ValueError(
            f"ordered=True delivers each element exactly once, but got visitation={visitation!r}; "
            "leave `visitation` out"
        )


def _parse_max_outstanding(max_outstanding_requests: object) -> int | None:
    if max_outstanding_requests is None or max_outstanding_requests == _AUTOTUNE:
        return None
    if isinstance(max_outstanding_requests, bool) or not isinstance(max_outstanding_requests, int):
        raise TypeError(
            "`max_outstanding_requests` must be an integer or None, but got "
            f"{max_outstanding_requests!r}"
        )
    if max_outstanding_requests < 1:
        raise ValueError(
            "`max_outstanding_requests` must be at least 1, or None, but got "
            f"{max_outstanding_requests}"
        )
    return max_outstanding_requests


def _parse_protocol(protocol: object) -> str | None:
    if protocol is not None and protocol not in TRANSFER_PROTOCOLS:
        raise ValueError(
            f"`data_transfer_protocol` must be None or one of {list(TRANSFER_PROTOCOLS)}, but got "
            f"{protocol!r}"
        )
    return None if protocol is None else str(protocol)


def _parse_on_data_loss(on_data_loss: object) -> str:
    if on_data_loss not in ("error", "warn"):
        raise ValueError(f'`on_data_loss` must be "error" or "warn", but got {on_data_loss!r}')
    return str(on_data_loss)


def _parse_target_workers(target_workers: object) -> str:
    target = (target_workers.upper() or "AUTO") if isinstance(target_workers, str) else None
    if target is None or target not in TARGET_WORKERS:
        raise ValueError(
            f"Unrecognized target workers: {target_workers!r}. "
            f"Must be one of {list(TARGET_WORKERS)}."
        )
    return target


def _parse_wait_timeout(wait_timeout: object) -> float:
    if isinstance(wait_timeout, bool) or not isinstance(wait_timeout, int | float):
        raise TypeError(f"`wait_timeout` must be a number of seconds, but got {wait_timeout!r}")
    if not wait_timeout > 0:
        raise ValueError(f"`wait_timeout` must be more than 0 seconds, but got {wait_timeout}")
    return float(wait_timeout)
