"""Deciders: jobs and their iterations begin."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import AlreadyExistsError, FailedPreconditionError
from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.dispatcher.beginnings import (
    begins_again,
    check_beginning,
    check_same_beginning,
)
from headrace.service.dispatcher.clients import addresses, leave
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.modes import name_of, policy_for, policy_of
from headrace.service.dispatcher.python_versions import check_workers_can_run
from headrace.service.dispatcher.registration import describe_difference
from headrace.service.dispatcher.state import (
    Dataset,
    DispatcherState,
    Iteration,
    Job,
    Readers,
)
from headrace.service.dispatcher.updates import Update
from headrace.service.messages import OpenIteration, Terms
from headrace.service.passes import pass_in_words

__all__ = ["check_group", "check_turn", "open_iteration", "seed_for"]


def _enabled(value: bool) -> str:
    return "enabled" if value else "disabled"


_TERMS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "processing_mode": ("processing mode", name_of),
    "target_workers": ("target workers", str),
    "num_consumers": ("num_consumers", str),
    "cross_trainer_cache": ("cross-trainer cache", _enabled),
    "visitation": ("visitation", str),
    "ordered": ("ordered", str),
    "remainder": ("remainder", str),
    "cost": ("cost_fn", lambda cost: cost or "None"),
    "half": ("half of the plan on workers", repr),
    "units": ("number of units", str),
    "group": ("group of consumers", repr),
    "group_terms": ("terms of the group", str),
}

"""What all who join a job must ask for alike: fields of `Terms`, how each is called in an error,
and how its values are shown. All but `cost_plan`: of functions that say the same, one is taken."""

_WANTED = messages.IterationOpened(iteration_id=0, tasks=(), seed=0, finished=False, wanted=True)

_DEEPEST_PASS = 32

_SILENT_INTERVALS = 3

"""Intervals between heartbeats after which a client may be dead, though it does not count so."""

_MOST_CONSUMERS = 1 << 20

_MOST_UNITS = 1 << 60

_NUMBERS = range(-(1 << 63), 1 << 63)

_PASSES = 1 << 64

"""Numbers of passes are less: the pass of a dataset that a function opened has a hash in it."""


def open_iteration(
    state: DispatcherState, request: messages.OpenIteration, moment: Moment
) -> Decision:
    """Let a client join an iteration, which is made if it does not exist.

    A client reads one iteration at a time: opening another one closes the one before.

    Raises:
        NotFoundError: The dataset is not registered.
        AlreadyExistsError: The job's name belongs to a job that differs.
        FailedPreconditionError: The dataset cannot be processed in this mode, or the workers run
            another minor version of Python than whoever registered it.
        ValueError: The request makes no sense.
    """
    _check_sense(request)
    check_group(state, request)
    dataset = state.dataset(request.dataset_id)
    policy = policy_for(request.terms)
    policy.check(state, dataset, request)
    check_beginning(request, policy.positions(dataset, request.terms.units))
    job = _find_job(state, request)
    if job is not None:
        _check_same_job(state, job, dataset, request)
    known = dataset if job is None else state.datasets[job.dataset_id]
    check_workers_can_run(state, known)
    iteration_id = None if job is None else job.iterations.get(request.pass_number)
    facts: list[Update] = []
    if iteration_id is not None and begins_again(state.iterations[iteration_id], request):
        facts.append(updates.IterationCollected(iteration_id=iteration_id))
        iteration_id = None
    if iteration_id is not None and not state.iterations[iteration_id].finished:
        _check_it_has_not_left(state.iterations[iteration_id], request.client_id)
        policy.admit(state.iterations[iteration_id], request)
    current = state.clients.get(request.client_id)
    if iteration_id is not None and current != iteration_id:
        check_same_beginning(state.iterations[iteration_id], request)
        _check_alone(state.iterations[iteration_id], request)
    if current is not None and current != iteration_id:
        facts += leave(state, request.client_id)
    if job is None:
        cost_plan = request.terms.cost_plan
        if cost_plan and cost_plan not in state.plans:
            return Decision(reply=_WANTED)
        facts.append(
            updates.JobCreated(
                job_id=state.next_job,
                name=request.job_name,
                owner=request.client_id if request.job_name is None else None,
                dataset_id=request.dataset_id,
                terms=request.terms,
            )
        )
    else:
        # The client's own job lives on when the client goes to another pass of it.
        facts = [fact for fact in facts if fact != updates.JobForgotten(job_id=job.job_id)]
        if iteration_id is None:
            _check_same_repeats(job, request)
        if iteration_id is None and job.is_over(request.pass_number):
            is_read = _is_read(state, job, request.client_id, moment)
            over = _over(job, 0, job.forgotten.get(request.pass_number), is_read)
            return Decision(updates=tuple(facts), reply=over)
    if iteration_id is None:
        iteration_id = state.next_iteration
        facts.append(
            updates.IterationCreated(
                iteration_id=iteration_id,
                job_id=state.next_job if job is None else job.job_id,
                pass_number=request.pass_number,
                seed=seed_for(state, request),
                positions=policy.positions(known, request.terms.units),
                exactly_once=policy.exactly_once,
                first_unit=request.first_unit,
                delivered=request.delivered,
                parts=request.parts,
                start=request.start,
                mode=policy.iteration_mode(request.terms),
                fixed_seeds=request.fixed_seeds,
            )
        )
    if current != iteration_id:
        facts.append(
            updates.ClientJoined(
                client_id=request.client_id,
                iteration_id=iteration_id,
                consumer_index=request.consumer_index,
            )
        )
    return Decision(
        updates=tuple(facts), compose=lambda after: _opened(after, request.client_id, moment)
    )


def _check_it_has_not_left(iteration: Iteration, client_id: str) -> None:
    """Raise where a client asks again that joined, perhaps without hearing it, and left."""
    if client_id in iteration.left:
        raise FailedPreconditionError(
            f"the dispatcher does not know this reader any more: {client_id} closed the iteration, "
            "or was silent for so long while it opened it that it counts as gone; iterate over the "
            "dataset again"
        )


def _find_job(state: DispatcherState, request: messages.OpenIteration) -> Job | None:
    """Return the job of that name, or the client's own."""
    if request.job_name is not None:
        job_id = state.names.get(request.job_name)
    else:
        job_id = state.owners.get(request.client_id)
    return None if job_id is None else state.jobs[job_id]


def _check_same_job(
    state: DispatcherState, job: Job, dataset: Dataset, request: messages.OpenIteration
) -> None:
    known, had, wanted = state.datasets[job.dataset_id], job.terms, request.terms
    differences = [
        f"Existing {said}: <{show(getattr(had, term))}>; got <{show(getattr(wanted, term))}>"
        for term, (said, show) in _TERMS.items()
        if getattr(had, term) != getattr(wanted, term)
    ]
    if known.compression != dataset.compression:
        differences.append(
            f"Existing compression: <{known.compression}>; got <{dataset.compression}>"
        )
    if known.fingerprint != dataset.fingerprint:
        differences.append(
            f"Existing dataset: <{known.dataset_id}>; got <{dataset.dataset_id}>: "
            f"{describe_difference(known.steps, dataset.steps)}"
        )
    if differences:
        name = request.job_name or f"(client {request.client_id}'s own)"
        raise AlreadyExistsError(
            f"Tried to create job with name {name}, but found an existing job with different "
            f"parameters: {'; '.join(differences)}. Choose another job_name."
        )


def _check_same_repeats(job: Job, request: messages.OpenIteration) -> None:
    """Refuse a client that repeats what others of a job do not: they would share nothing.

    An iteration is named by its number and by those of the `repeat` steps around the source.
    """
    number, *repeats = request.pass_number or (0,)
    for known in (*job.iterations, *job.forgotten):
        if known and known[0] == number and len(known) != 1 + len(repeats):
            raise FailedPreconditionError(
                f"iteration {number} of job {request.job_name!r} is read with {len(known) - 1} "
                f"`repeat` steps after `distribute`, and this client has {len(repeats)}: it would "
                "read all elements again. Repeat alike in all clients, or before `distribute`; or "
                "choose another job_name"
            )


def _check_alone(iteration: Iteration, request: messages.OpenIteration) -> None:
    """Refuse a client where another one reads what is about the whole stream."""
    check_turn(iteration, request)
    if not request.whole_stream or iteration.finished:
        return
    if iteration.clients:
        raise FailedPreconditionError(
            f"job {request.job_name!r} is read by client {min(iteration.clients)}, and "
            f"{request.whole_stream} needs the whole stream, which several clients would share. "
            "Put that step after `distribute`, or give each client a job_name of its own"
        )
    if request.terms.ordered and iteration.readers is not None:
        raise FailedPreconditionError(
            f"{pass_in_words(request.pass_number)} of job {request.job_name!r} was begun in order "
            f"by client {iteration.readers.first}, which is gone, and another one would get the "
            "rest alone. Choose another job_name"
        )


def _opened(state: DispatcherState, client_id: str, moment: Moment) -> messages.IterationOpened:
    iteration = state.client_iteration(client_id)
    job = state.jobs[iteration.job_id]
    if iteration.finished:
        is_read = _is_read(state, job, client_id, moment)
        over = _over(job, iteration.iteration_id, iteration.readers, is_read)
        if iteration.failed:
            return msgspec.structs.replace(over, finished_by="", failed=iteration.failed)
        return over
    reply = messages.IterationOpened(
        iteration_id=iteration.iteration_id,
        tasks=addresses(state.tasks_of(iteration), state.workers),
        seed=iteration.seed,
        finished=False,
        job_name=job.name or "",
        lease=moment.limits.client_timeout,
        deployment=moment.limits.deployment,
        begun_by=_readers_in_words(iteration.readers, client_id),
        is_read=_is_read(state, job, client_id, moment),
    )
    return policy_of(state, iteration).opened(reply, iteration)


def _is_read(state: DispatcherState, job: Job, client_id: str, moment: Moment) -> bool:
    """Whether other clients that are alive read the job."""
    silence = _SILENT_INTERVALS * moment.limits.client_interval(len(state.clients))
    heard = moment.presence.clients
    return any(
        moment.now - heard.get(other, -math.inf) <= silence
        for iteration in map(state.iterations.__getitem__, job.iterations.values())
        for other in iteration.clients
        if other != client_id and not iteration.finished
    )


def _readers_in_words(readers: Readers | None, client_id: str = "") -> str:
    """Return who opened an iteration; "": nobody before this client."""
    if readers is None or readers.first == client_id:
        return ""
    others = readers.clients - 1 - bool(client_id)
    if others <= 0:
        return f"client {readers.first}"
    return f"client {readers.first} and {'another' if others == 1 else f'{others} others'}"


def _over(
    job: Job, iteration_id: int, readers: Readers | None, is_read: bool
) -> messages.IterationOpened:
    return messages.IterationOpened(
        iteration_id=iteration_id,
        tasks=(),
        seed=0,
        finished=True,
        job_name=job.name or "",
        finished_by=_readers_in_words(readers) or "nobody",
        is_read=is_read,
    )


def _check_sense(request: messages.OpenIteration) -> None:
    terms = request.terms
    if terms.num_consumers is None:
        makes_sense = request.consumer_index is None
    else:
        index = -1 if request.consumer_index is None else request.consumer_index
        makes_sense = 0 <= index < terms.num_consumers <= _MOST_CONSUMERS
    if not makes_sense:
        raise ValueError(
            f"consumer_index={request.consumer_index} must be one of the num_consumers="
            f"{terms.num_consumers}"
        )
    if terms.units is not None and not -1 <= terms.units <= _MOST_UNITS:
        raise ValueError(f"units={terms.units} must be None, -1 (without end) or a number")
    most = _MOST_UNITS if terms.units in (None, -1) else terms.units
    if not 0 <= request.first_unit <= (most or 0):
        raise ValueError(f"first_unit={request.first_unit} must be a number up to units={most}")
    if not request.client_id:
        raise ValueError("a client needs an id; got client_id=''")
    if terms.cross_trainer_cache and request.job_name is None:
        raise ValueError("Cross-trainer caching requires named jobs. Got empty `job_name`.")
    if request.job_name == "":
        raise ValueError("job_name='' must be None or a name")
    if request.seed not in _NUMBERS:
        raise ValueError(f"seed={request.seed} must fit into 64 bits with a sign")
    if not all(seed in _NUMBERS for seed in request.fixed_seeds):
        raise ValueError("fixed_seeds must fit into 64 bits with a sign")
    numbers = request.pass_number
    if len(numbers) > _DEEPEST_PASS or any(not 0 <= each < _PASSES for each in numbers):
        raise ValueError(
            f"pass_number={numbers[:_DEEPEST_PASS]} must be at most {_DEEPEST_PASS} numbers of 64 "
            "bits, none of them negative"
        )


# --- groups: jobs that belong together, such as one for each consumer that reads in order ---------

# Rule 1. The iterations of a pass draw from one seed in all jobs of a group, in whatever order they
#         begin, and though some were forgotten: it follows from the group's name and the key of
#         this
#         dispatcher. Those that go on from a place have the seed of the place.
# Rule 2. They agree on their terms: a job that differs is refused while another one is known.
# Rule 3. A group's name is no other job's: whoever reads by it says which consumer it is.

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
