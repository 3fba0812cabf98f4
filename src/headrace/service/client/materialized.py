"""What a service makes, computed once and kept: the Source.

Its reader gives the parts that are there (`parts`), goes on over the service from where the last of
them says, and writes what comes as further parts. A pass that is left off leaves what it got.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import ClassVar, cast

from headrace import saved
from headrace.element.spec import Spec
from headrace.errors import FailedPreconditionError
from headrace.plan.fingerprint import fingerprint
from headrace.plan.iteration_counter import IterationCounter
from headrace.plan.node import Node
from headrace.plan.source import INFINITE, Position, Reader, Source
from headrace.plan.traverse import merged_options
from headrace.service.client.keeping import Keeper
from headrace.service.client.materialized_reader import MaterializedReader
from headrace.service.client.options import ReadingOptions
from headrace.service.client.parts import Parts
from headrace.service.client.source import RemoteSource
from headrace.service.config import ShardingPolicy
from headrace.service.modes.ordered.consumers_source import InTurns
from headrace.storage.folder import open_folder
from headrace.storage.names import FileName

__all__ = ["MaterializedSource", "check_materialize", "materialized"]


def check_materialize(url: FileName, options: ReadingOptions) -> str:
    """Return the folder in which to keep what is read so.

    Raises:
        TypeError, ValueError: It is none, or what comes is not the same in each pass.
        FailedPreconditionError: The package pyarrow is not installed.
    """
    folder = open_folder(url)
    is_exact = options.visitation in (None, "exactly_once") and not options.trainer_id
    if options.processing_mode is not ShardingPolicy.DYNAMIC or not is_exact:
        raise ValueError(
            "`materialize` keeps a pass in which each element comes once, so it needs "
            "ShardingPolicy.DYNAMIC with exactly once, its default, and no cross-trainer cache; "
            f"got ShardingPolicy.{options.processing_mode.name}, "
            f"visitation={options.visitation!r}"
        )
    if options.num_consumers is not None and not options.ordered:
        raise ValueError(
            "`materialize` with `num_consumers` needs ordered=True: without order, which rounds "
            "there are depends on the workers"
        )
    if options.num_consumers is None and options.job_name is not None:
        raise ValueError(
            f"`materialize` keeps all that there is, and of job {options.job_name!r} each reader "
            "gets a part: leave out `job_name` (readers share what is kept), or set ordered=True, "
            "`num_consumers` and `consumer_index`"
        )
    saved.arrow.pyarrow()  # or its absence would be found after the first function was called
    return os.path.abspath(folder.url) if folder.is_local else folder.url.rstrip("/")


def materialized(
    remote: RemoteSource | InTurns, plan: Node, url: str, options: ReadingOptions, size: int
) -> MaterializedSource:
    """Return the source of what is read, kept.

    Args:
        remote: Reads it.
        plan: What is read.
        url: Under which folder to keep it: in one of its own.
        options: How it is read.
        size: How many elements there are, or INFINITE.

    Raises:
        ValueError: There is no end.
        FailedPreconditionError: In the middle of a pass nobody could go on.
    """
    if size == INFINITE:
        raise ValueError(
            "the dataset is infinite, and `materialize` keeps whole passes: choose how many "
            "elements with take(n), and write repeat() after `distribute`"
        )
    if remote.cannot_restore:
        raise FailedPreconditionError(
            f"`materialize` goes on where a pass was left off, and {remote.cannot_restore}"
        )
    words = [fingerprint(plan)]
    if options.ordered:
        words.append("ordered")
    if options.num_consumers is not None:
        words.append(f"{options.consumer_index}-of-{options.num_consumers}-{options.remainder}")
    key = "-".join(words)
    return MaterializedSource(key=key, remote=remote, url=f"{url}/{key}")


@dataclass(frozen=True, kw_only=True, eq=False)
class MaterializedSource(Source):
    """What a reading of a service gives, kept in a folder (`plan.source.Source`).

    Attributes:
        key: Tells what is kept from everything else; the folder's name.
        remote: What is read where there is nothing yet.
        url: The folder.
    """

    speed_only: ClassVar[tuple[str, ...]] = ("remote", "url")

    key: str
    remote: RemoteSource | InTurns
    url: str
    _occurrence: int = field(default=0, repr=False)
    _own_seed: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        written = self.remote.written
        if written is not None:
            object.__setattr__(self, "_own_seed", merged_options(written).seed)

    @property
    def size(self) -> int:
        return self.remote.size

    @property
    def element_spec(self) -> Spec | None:
        return self.remote.element_spec

    @property
    def elements_per_index(self) -> int | None:
        return self.remote.elements_per_index

    @property
    def element_count(self) -> int | None:
        return self.remote.element_count

    @property
    def splittable(self) -> bool:
        return False

    @property
    def cannot_restore(self) -> str:
        return self.remote.cannot_restore

    @property
    def has_order(self) -> bool:
        return self.remote.has_order

    @property
    def keeper(self) -> Keeper:
        return self.remote.keeper

    @property
    def account(self) -> str:
        kept = f"what comes is kept in {self.url!r}, and read there in later passes"
        return "\n".join(filter(None, [self.remote.account, kept]))

    def seeded(self, seed: int) -> Source:
        own = self._own_seed
        remote = self.remote.seeded(seed if own is None else own)
        return dataclasses.replace(self, remote=cast("RemoteSource | InTurns", remote))

    def apart(self) -> Source:
        return dataclasses.replace(self, remote=self.remote.apart())

    @property
    def counter(self) -> IterationCounter | None:
        return self.remote.counter

    def used_up(self, number: int) -> str:
        return self.remote.used_up(number)

    def at_occurrence(self, occurrence: int) -> Source:
        return dataclasses.replace(self, _occurrence=occurrence)

    def open(
        self,
        start: int,
        stop: int,
        position: Position = None,
        *,
        pass_number: tuple[int, ...] = (),
    ) -> Reader:
        number = tuple(pass_number) or (0,)
        return MaterializedReader(self.remote, Parts(self.url), stop, position, number)
