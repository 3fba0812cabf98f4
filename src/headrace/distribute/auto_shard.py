"""Which part of a dataset each worker reads, as the dataset's `auto_shard_policy` says."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from headrace.distribute.input_context import InputContext
from headrace.errors import InvalidArgumentError, NotFoundError
from headrace.execution.opens_files import opens_files
from headrace.plan.node import Node
from headrace.plan.options import AutoShardPolicy
from headrace.plan.traverse import merged_options
from headrace.rewrites.read_alike import differs_by_reader, sources
from headrace.rewrites.shard import shard_files, shard_hints

__all__ = ["Share", "auto_shard", "is_read_whole"]

_log = logging.getLogger(__name__)

_SHARING = (AutoShardPolicy.AUTO, AutoShardPolicy.FILE, AutoShardPolicy.DATA)
"""Policies that share by themselves what is not shared yet."""


@dataclass(frozen=True)
class Share:
    """What one worker reads.

    Attributes:
        plan: The dataset.
        policy: By what it was shared: never AUTO.
    """

    plan: Node
    policy: AutoShardPolicy

    @property
    def is_of_each_batch(self) -> bool:
        """Whether all workers read the same batches, and each uses a part of each."""
        return self.policy is AutoShardPolicy.DATA


def auto_shard(plan: Node, context: InputContext) -> Share:
    """Return one worker's share of a dataset.

    Raises:
        InvalidArgumentError: There are fewer files than workers, or workers would read other
            batches, of which each is to use a part.
        NotFoundError: It is to be shared by files, and is not read from files.
    """
    policy = _policy(plan)
    workers, worker = context.num_input_pipelines, context.input_pipeline_id
    if workers == 1 or is_read_whole(plan):
        return Share(plan, AutoShardPolicy.OFF)
    try:
        if policy is AutoShardPolicy.HINT:
            return Share(shard_hints(plan, workers, worker), policy)
        if policy in (AutoShardPolicy.FILE, AutoShardPolicy.AUTO):
            share = shard_files(plan, workers, worker, opens_files)
            return Share(share, AutoShardPolicy.FILE)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"AutoShardPolicy.{policy.name} cannot share the dataset among {workers} workers: "
            f"{error}. With options.auto_shard_policy: AutoShardPolicy.DATA, or OFF for all of it "
            "on every worker"
        ) from error
    except NotFoundError as error:
        if policy is not AutoShardPolicy.AUTO:
            raise NotFoundError(
                f"AutoShardPolicy.FILE cannot share the dataset among {workers} workers: {error}. "
                "With options.auto_shard_policy: AutoShardPolicy.DATA, AUTO or OFF"
            ) from error
        _log.info("AutoShardPolicy.AUTO shares the dataset by DATA, not by FILE: %s", error)
        policy = AutoShardPolicy.DATA
    if policy is AutoShardPolicy.DATA:
        _check_is_read_alike(plan, workers)
    return Share(plan, policy)


def is_read_whole(plan: Node) -> bool:
    """Say whether each worker is to read all of a dataset, however many there are."""
    policy = _policy(plan)
    served = [source for source in sources(plan) if source.keeper is not None]
    is_shared = any(getattr(source, "job_name", None) is not None for source in served)
    # A service's jobs share it among their clients, or give each all of it, as the user chose.
    return (
        policy is AutoShardPolicy.OFF
        or (bool(served) and policy is AutoShardPolicy.AUTO)
        or (is_shared and policy in _SHARING)
    )


def _policy(plan: Node) -> AutoShardPolicy:
    return merged_options(plan).auto_shard_policy or AutoShardPolicy.AUTO


def _check_is_read_alike(plan: Node, workers: int) -> None:
    why = differs_by_reader(plan)
    if why:
        raise InvalidArgumentError(
            f"AutoShardPolicy.DATA cannot share the dataset among {workers} workers, each of which "
            f"reads all batches and uses its part of each: {why}. With options.auto_shard_policy: "
            "AutoShardPolicy.OFF, for all of it on every worker; or FILE, if it is read from files"
        )
