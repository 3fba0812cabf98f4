"""Groups: jobs that belong together, such as one for each consumer that reads in order.

Rule 1. The iterations of a pass draw from one seed in all jobs of a group, in whatever order they
        begin, and though some were forgotten: it follows from the group's name and the key of this
        dispatcher. Those that go on from a place have the seed of the place.
Rule 2. They agree on their terms: a job that differs is refused while another one is known.
"""

from __future__ import annotations

import hashlib
import json

from headrace.errors import AlreadyExistsError
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.messages import OpenIteration

__all__ = ["check_group", "seed_for"]

_SEED_BITS = 52


def seed_for(state: DispatcherState, request: OpenIteration) -> int:
    """Return the seed of an iteration that a client is the first to open."""
    if not request.terms.group or request.start:
        return request.seed
    words = json.dumps([request.terms.group, request.pass_number])
    drawn = hashlib.blake2b(words.encode(), key=state.secret, digest_size=8)
    return int.from_bytes(drawn.digest(), "little") >> (64 - _SEED_BITS)


def check_group(state: DispatcherState, request: OpenIteration) -> None:
    """Refuse a client whose job differs from others of its group.

    Raises:
        AlreadyExistsError: It says how.
    """
    wanted = request.terms
    if not wanted.group:
        return
    for job in state.jobs.values():
        had = job.terms
        if had.group == wanted.group and had.group_terms != wanted.group_terms:
            raise AlreadyExistsError(
                f"job {wanted.group!r} is read by consumers with other terms: existing "
                f"<{had.group_terms}>; got <{wanted.group_terms}>. Choose another job_name"
            )
