"""Validated options that identify one of several consumers, in coordinated or ordered reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.element.spec import ArraySpec, Spec
from headrace.element.transpose import map_leaves
from headrace.plan.elements import FromSource
from headrace.plan.elementwise import Map
from headrace.plan.fingerprint import fingerprint
from headrace.plan.serialize import dump_plan
from headrace.service.config import REMAINDERS, STATIC_POLICIES, ShardingPolicy
from headrace.sources.memory import RangeSource

__all__ = ["ConsumerOptions", "consumer_spec", "make_consumer_options"]

_MAX_COST_FN_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ConsumerOptions:
    """Which consumer reads, of how many, and how the remainder of a round is handled."""

    num_consumers: int | None = None
    consumer_index: int | None = None
    readers_per_consumer: int = 1
    reader_index: int = 0
    remainder: str = "drop"
    cost_fn_id: str = ""
    """Identifies the cost function; empty if there is none."""
    cost_fn: bytes = b""


def make_consumer_options(
    *,
    mode: ShardingPolicy,
    job_name: str | None,
    consumer_index: object,
    num_consumers: object,
    readers_per_consumer: object,
    reader_index: object,
    remainder: object,
    cost_fn: object,
    target_workers: str,
    is_ordered: bool,
) -> ConsumerOptions:
    """Validate the arguments of `distribute` that concern consumers.

    Raises:
        TypeError, ValueError: If a value is invalid or contradicts another.
        FailedPreconditionError: If the cost function cannot be sent to workers.
    """
    if remainder not in REMAINDERS:
        raise ValueError(f"`remainder` must be one of {list(REMAINDERS)}, but got {remainder!r}")
    if (consumer_index is None) != (num_consumers is None):
        raise ValueError(
            "`consumer_index` and `num_consumers` must be set together, but got "
            f"consumer_index={consumer_index!r} and num_consumers={num_consumers!r}"
        )
    if num_consumers is None:
        for name, value, default in (
            ("readers_per_consumer", readers_per_consumer, None),
            ("reader_index", reader_index, None),
            ("remainder", remainder, "drop"),
            ("cost_fn", cost_fn, None),
        ):
            if value != default:
                raise ValueError(
                    f"`{name}` requires `num_consumers` and `consumer_index`, but got "
                    f"{name}={value!r} without them"
                )
        return ConsumerOptions()
    if job_name is None:
        raise ValueError(
            "`job_name` must be set when setting `num_consumers`. num_consumers was set to "
            f"{num_consumers!r}."
        )
    number = _check_int("num_consumers", num_consumers)
    index = _check_int("consumer_index", consumer_index)
    if not 0 <= index < number:
        raise ValueError(
            f"`consumer_index` must be at least 0 and less than `num_consumers`, but got "
            f"consumer_index={index} and num_consumers={number}"
        )
    readers, reader = _check_readers(readers_per_consumer, reader_index, is_ordered=is_ordered)
    if mode in STATIC_POLICIES:
        raise ValueError(
            f"coordinated reads (num_consumers={number}) require ShardingPolicy.OFF or DYNAMIC, "
            f"but got {mode.name}: each round comes from one worker, and the workers take turns"
        )
    if target_workers == "LOCAL":
        raise ValueError(
            'Coordinated reads require non-local workers, but `target_workers` is "LOCAL".'
        )
    cost_fn_id, pickled = _pickle_cost_fn(cost_fn)
    return ConsumerOptions(
        num_consumers=number,
        consumer_index=index,
        readers_per_consumer=readers,
        reader_index=reader,
        remainder=str(remainder),
        cost_fn_id=cost_fn_id,
        cost_fn=pickled,
    )


def _check_readers(readers: object, index: object, *, is_ordered: bool) -> tuple[int, int]:
    """Return the number of processes that read the same consumer's elements, and which this is."""
    if (readers is None) != (index is None):
        raise ValueError(
            "`readers_per_consumer` and `reader_index` must be set together, but got "
            f"readers_per_consumer={readers!r} and reader_index={index!r}"
        )
    if readers is None:
        return 1, 0
    count = _check_int("readers_per_consumer", readers)
    reader = _check_int("reader_index", index)
    if not 0 <= reader < count:
        raise ValueError(
            "`reader_index` must be at least 0 and less than `readers_per_consumer`, but got "
            f"reader_index={reader} and readers_per_consumer={count}"
        )
    if not is_ordered:
        raise ValueError(
            f"readers_per_consumer={count} requires `ordered=True`: otherwise each element is "
            "delivered to one client, and several readers would receive different elements"
        )
    return count, reader


def _check_int(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer or None, but got {value!r}")
    return value


def _pickle_cost_fn(cost_fn: object) -> tuple[str, bytes]:
    """Return an identifier of a cost function, and its pickled form for workers."""
    if cost_fn is None:
        return "", b""
    if not callable(cost_fn):
        raise TypeError(f"`cost_fn` must be a function of a row, or None, but got {cost_fn!r}")
    fn: Callable[..., Any] = cost_fn
    # It is pickled, named in errors and compared like the function of a dataset step.
    step = Map(input=FromSource(source=RangeSource(0, 1, 1)), fn=fn)
    pickled = dump_plan(step)
    if len(pickled) > _MAX_COST_FN_BYTES:
        raise ValueError(
            f"`cost_fn` must be at most {_MAX_COST_FN_BYTES:,} bytes long when pickled, but got "
            f"{len(pickled):,} bytes, because of the data that it refers to: read such data from a "
            "file inside the function"
        )
    return fingerprint(step), pickled


def consumer_spec(spec: Spec | None, remainder: str) -> Spec | None:
    """Return the spec of a consumer's batches, given that of the plan's; the last may be short."""
    if spec is None or remainder == "drop":
        return spec
    return map_leaves(_with_any_rows, spec)


def _with_any_rows(leaf: Any) -> Any:
    if isinstance(leaf, ArraySpec) and leaf.shape:
        return ArraySpec((None, *leaf.shape[1:]), leaf.dtype, leaf.name)
    return leaf
