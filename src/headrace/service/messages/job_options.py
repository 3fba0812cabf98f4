"""Terms: what all who read a job ask for alike."""

from __future__ import annotations

import msgspec

__all__ = ["JobOptions"]


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a job is read, as its first reader asks for it; whoever joins it asks for the same.

    It is in the request that opens an iteration, in the fact that the job began, and in the
    dispatcher's state. A field that is added has a default that means what was the case before.
    """

    processing_mode: int
    target_workers: str = "AUTO"
    num_consumers: int | None = None
    """Rounds of so many elements are read together, one by each consumer; None: whoever asks first
    is served first."""
    cross_trainer_cache: bool = False
    """Each trainer gets all elements, which are computed once."""
    visitation: str | None = None
    """How often elements come where something is lost; None: the default of the mode."""
    ordered: bool = False
    """Elements come in the order in which one process would yield them."""
    remainder: str = "drop"
    """What becomes of elements at the end that do not fill a round."""
    cost_fn_id: str = ""
    """Tells one cost function from others; empty: there is none."""
    cost_fn_digest: bytes = b""
    """Digest of the cost function, a plan of one `map` that is put as plans are (`PutPlan`). Two
    that say the same may be different bytes: the first reader's are used."""
    partition_mode: str = ""
    """How the plan is cut in two (`rewrites.cut`): workers run the lower half, and the client the
    upper one. Empty: workers run all of it."""
    num_splits: int | None = None
    """Units that the lower half is dealt in, or INFINITE (-1); None: as the dataset says."""
    group: str = ""
    """Not empty: one of several jobs, whose iterations of a pass draw from one seed."""
    group_options: str = ""
    """What the jobs of a group must agree on, in words."""
