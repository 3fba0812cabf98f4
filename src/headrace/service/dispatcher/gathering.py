"""Decider: the clients of an iteration find the place at which all of them stand together."""

from __future__ import annotations

from headrace.errors import FailedPreconditionError
from headrace.service import messages
from headrace.service.dispatcher.beginnings import check_place
from headrace.service.dispatcher.decision import Decision, Moment
from headrace.service.dispatcher.gathered import Answered, Place, Said, joined
from headrace.service.dispatcher.state import DispatcherState
from headrace.service.passes import pass_in_words

__all__ = ["gather_place"]


def gather_place(state: DispatcherState, request: messages.GatherPlace, moment: Moment) -> Decision:
    """Say where all clients of an iteration stand, when each of them has said where it does.

    Raises:
        NotFoundError: The client reads no iteration.
        ValueError: What it says makes no sense.
        FailedPreconditionError: Somebody who read it is gone: what that used is not known.
    """
    gathered = moment.presence.gathered
    known = gathered.answer(request.token)
    if known is not None:
        return Decision(reply=_reply(known))
    iteration = state.client_iteration(request.client_id)
    check_place(request.delivered, request.parts, iteration.splits.positions)
    readers = iteration.readers
    if readers is not None and readers.clients > len(iteration.clients):
        raise FailedPreconditionError(
            f"{readers.clients - len(iteration.clients)} of {readers.clients} clients that read "
            f"{pass_in_words(iteration.pass_number)} have left, and what they used is not "
            "known, so that the place of all has no state. Take states while all clients read"
        )
    said = Said(
        iteration.iteration_id,
        request.client_id,
        request.token,
        Place(request.delivered, request.parts),
    )
    waiting = gathered.waiting(iteration.iteration_id, moment.now)
    waiting[request.client_id] = said
    missing = iteration.clients - waiting.keys()
    if missing:
        reply = messages.PlaceGathered(missing=tuple(sorted(missing)))
        return Decision(reply=reply, notes=(said,))
    together = [waiting[each] for each in sorted(iteration.clients)]
    place = joined([each.place for each in together])
    tokens = tuple(each.token for each in together)
    answered = Answered(iteration.iteration_id, tokens, place)
    return Decision(reply=_reply(place), notes=(answered,))


def _reply(place: Place) -> messages.PlaceGathered:
    return messages.PlaceGathered(delivered=place.units, parts=place.parts)
