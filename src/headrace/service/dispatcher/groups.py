"""Groups: jobs that belong together, such as one for each consumer that reads in order.

Rule 1. The iterations of a pass draw from one seed in all jobs of a group, in whatever order they
        begin, and though some were forgotten: it follows from the group's name and the key of this
        dispatcher. Those that go on from a place have the seed of the place.
Rule 2. They agree on their terms: a job that differs is refused while another one is known.
Rule 3. A group's name is no other job's: whoever reads by it says which consumer it is.
"""

from __future__ import annotations

import hashlib
import json

from headrace.errors import AlreadyExistsError, FailedPreconditionError
from headrace.service.dispatcher.registration import describe_difference
from headrace.service.dispatcher.state import DispatcherState, Iteration
from headrace.service.messages import OpenIteration, Terms
from headrace.service.passes import pass_in_words

__all__ = ["check_group", "check_turn", "seed_for"]

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
    wanted, name = request.terms, request.job_name
    if not wanted.group:
        is_new = name is not None and name not in state.names
        if is_new and any(job.terms.group == name for job in state.jobs.values()):
            raise AlreadyExistsError(
                f"job {name!r} is read in order by several consumers, and this client does not say "
                "which of them it is: set `num_consumers` and `consumer_index`, or choose another "
                "job_name"
            )
        return
    if wanted.group in state.names:
        raise AlreadyExistsError(
            f"job {wanted.group!r} is read without `num_consumers`, and this client is one of "
            "several consumers in order. Choose another job_name"
        )
    for job in state.jobs.values():
        if job.terms.group == wanted.group and job.terms.group_terms != wanted.group_terms:
            raise AlreadyExistsError(
                f"job {wanted.group!r} is read by consumers with other terms: "
                f"{_difference(job.terms, wanted)}. Choose another job_name"
            )


def _difference(had: Terms, wanted: Terms) -> str:
    """Say how two terms differ: a line of words each, and one for each step of the dataset."""
    (was, *known), (is_, *given) = (
        terms.group_terms.splitlines() or [""] for terms in (had, wanted)
    )
    found = f"existing <{was}>; got <{is_}>"
    if known == given:
        return found
    return f"{found}: of the dataset, {describe_difference(_named(known), _named(given))}"


def _named(steps: list[str]) -> list[tuple[str, str]]:
    """Return the names of steps, each with its fingerprint."""
    split = (step.rpartition(" ") for step in steps)
    return [(name, digits) for name, _, digits in split]


def check_turn(iteration: Iteration, request: OpenIteration) -> None:
    """Refuse a consumer whose elements another client reads, or read without an end.

    Raises:
        FailedPreconditionError: It says what would do.
    """
    if not request.terms.group or iteration.finished:
        return
    if iteration.clients:
        raise FailedPreconditionError(
            f"job {request.job_name!r} is read by client {min(iteration.clients)}: there is one "
            "client for each `consumer_index`. Set another one; a consumer that was started again "
            "is let in once the client before it is silent for `client_timeout_ms`"
        )
    if iteration.readers is not None:
        raise FailedPreconditionError(
            f"{pass_in_words(request.pass_number)} of job {request.job_name!r} was begun by client "
            f"{iteration.readers.first}, which is gone: go on from a state of that one "
            "(`set_state`), or choose another job_name for all consumers"
        )
