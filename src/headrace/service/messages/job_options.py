"""Options that all clients of a job share."""

from __future__ import annotations

import msgspec

__all__ = ["JobOptions"]


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a job is read, as requested by its first client; clients that join must request the same.

    The record is in the request that opens an iteration, in the event that creates the job, and in
    the dispatcher's state. The default of a new field must preserve the earlier behaviour.
    """

    processing_mode: int
    target_workers: str = "AUTO"
    num_consumers: int | None = None
    """Number of consumers that read rounds together, one element each; None delivers elements in
    the order of requests."""
    cross_trainer_cache: bool = False
    """Whether each trainer receives all elements, which are computed once."""
    visitation: str | None = None
    """How often elements are delivered after losses; None uses the default of the mode."""
    ordered: bool = False
    """Whether elements are delivered in the order in which one process would yield them."""
    remainder: str = "drop"
    """What happens to elements at the end that do not fill a round."""
    cost_fn_id: str = ""
    """Identifies the cost function; empty if there is none."""
    cost_fn_digest: bytes = b""
    """Digest of the cost function, a plan of one `map` that is stored like other plans (`PutPlan`).
    Equal functions may be pickled to different bytes: those of the first client are used."""
    partition_mode: str = ""
    """How the plan is partitioned (`rewrites.partition`): workers run the worker stage, the client
    runs the client stage. Empty if workers run the whole plan."""
    num_splits: int | None = None
    """Number of splits of the worker stage, or INFINITE (-1); None uses that of the dataset."""
    group: str = ""
    """Name of the group if the job is one of several whose iterations of an epoch share a seed."""
    group_options: str = ""
    """Description of the options that all jobs of a group must share."""
