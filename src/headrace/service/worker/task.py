"""A task: who gets what of it, the units that it was dealt, its end. No thread, lock or clock.

Each method takes what happened and adds what is to be done to `actions`.

Rule 1. A producer makes one portion, and the next when there is room for it.
Rule 2. A task that is cut takes no more units; one that reads a plan whole ends where it is.
Rule 3. The dispatcher hears that a task is over before its clients do: it then knows that the
        iteration is over when they ask. If it does not answer, the clients need not wait.
"""

from __future__ import annotations

import hmac
import math
from typing import Generic, TypeVar

from headrace.errors import CancelledError
from headrace.service.messages import (
    CommitFiles,
    FailTask,
    FinishTask,
    GetElements,
    GetSplit,
    GetSplitReply,
    ReportDepartedClient,
    ReturnSplits,
    TaskDefinition,
)
from headrace.service.ranges import Ranges, first, first_missing, subtracted
from headrace.service.worker.agenda import Actions, Grant
from headrace.service.worker.hand_out import HandOut, Left, Ready
from headrace.service.worker.portion import Answer, Portion
from headrace.service.worker.unit_asking import UnitAsking

__all__ = ["Task", "is_ticket", "was_deleted", "wrong_ticket"]

R = TypeVar("R")


class Task(Generic[R]):
    """One task, from its start to its end.

    Args:
        definition: What the dispatcher says of it.
        worker_id: Whose it is.
        producer: Number of its producer.
        hand_out: Decides which client gets which portion.
    """

    def __init__(
        self,
        definition: TaskDefinition,
        worker_id: str,
        producer: int,
        hand_out: HandOut[R],
    ) -> None:
        self.task_id = definition.task_id
        self.ticket = definition.task_token
        self.producer = producer
        self.is_finished = False
        """Whether the clients may hear that it is over."""
        self.finish_at = math.inf
        """When it is finished although the dispatcher did not answer."""
        self._worker_id = worker_id
        self._units = UnitAsking() if definition.assigns_splits else None
        #: How many grants there were when it was last told to pause: then nothing is held.
        self._paused_after = 0
        self._hand_out = hand_out
        #: The producer has made a portion, and was not let make another.
        self._waits_for_room = False
        self._has_ended = False
        self._is_cut = False
        self._failure: str | None = None
        #: What was left when it was called off.
        self.left: Left | None = None

    @property
    def is_dealt(self) -> bool:
        """Whether it reads units, not the plan as a whole."""
        return self._units is not None

    @property
    def is_over(self) -> bool:
        """Whether it is finished and everything acknowledged."""
        return self.is_finished and self._hand_out.is_settled

    @property
    def received(self) -> Ranges:
        """Units that clients have whole, as far as that is counted unit by unit."""
        return self._hand_out.acknowledged[0]

    @property
    def is_deserted(self) -> bool:
        """Whether all clients that asked are gone, and what is left can be handed back."""
        return self.is_dealt and self._hand_out.is_deserted

    @property
    def ready(self) -> Ready:
        """What is made and waits for clients."""
        return self._hand_out.ready

    # --- clients --------------------------------------------------------------------------------

    def requested(self, request: R, message: GetElements, now: float, actions: Actions[R]) -> None:
        """Answer a request now or later."""
        if not is_ticket(message.ticket, self.ticket):
            actions.answers.append((request, wrong_ticket(self.task_id)))
            return
        self._answer(self._hand_out.ask(request, message, now), actions)

    def depart(self, client_id: str, actions: Actions[R]) -> ReportDepartedClient:
        """Give a client that is gone nothing more; return what to say of it."""
        answers, departure = self._hand_out.depart(client_id)
        self._answer(answers, actions)
        received, touched = self._hand_out.acknowledged
        return ReportDepartedClient(
            worker_id=self._worker_id,
            task_id=self.task_id,
            task_token=self.ticket,
            client_id=client_id,
            unacknowledged=departure.units,
            possibly_lost=departure.lost,
            partially_unacknowledged=departure.parts,
            partially_acknowledged=departure.used,
            delivered=received,
            partially_delivered=touched,
        )

    def forget(self, client_id: str, actions: Actions[R]) -> None:
        """Forget what a client that is gone had not acknowledged: the dispatcher has heard it."""
        self._answer(self._hand_out.forget(client_id), actions)

    def forget_silent(self, now: float, actions: Actions[R]) -> None:
        """Drop what clients of a copy hold that were not heard of for long.

        Of dealt units nothing is dropped before the dispatcher says that a client is gone.
        """
        if self.is_dealt:
            return
        answers, lost = self._hand_out.forget_silent(now)
        if lost:
            actions.warnings.append(
                f"task {self.task_id}: {lost} elements were dropped: the client that they were "
                "sent to did not acknowledge them and was not heard of for long"
            )
        self._answer(answers, actions)

    def _answer(self, answers: list[tuple[R, Answer]], actions: Actions[R]) -> None:
        actions.answers += answers
        if self._waits_for_room and self._hand_out.has_room:
            self._waits_for_room = False
            actions.resumes.append(self.producer)
            most = self._hand_out.portion_elements
            if most is not None:
                actions.most[self.producer] = most

    # --- the producer ---------------------------------------------------------------------------

    def produced(self, portion: Portion, actions: Actions[R]) -> None:
        """Take a portion."""
        self._waits_for_room = self.left is None
        if self.producer in actions.resumes:
            actions.resumes.remove(self.producer)  # it takes up the room that there was before
        self._answer(self._hand_out.add(portion), actions)

    def ended(self, failure: str | None, actions: Actions[R]) -> None:
        """Take note that no portion will follow, and why, if the task failed."""
        self._has_ended, self._failure = True, failure
        self._waits_for_room = False
        dealt = 0 if self._units is None or failure is not None else self._units.dealt
        if self._units is not None:
            # A thread of the plan that read ahead may have waited for more.
            self._units.is_over, self._units.ask_at = True, math.inf
        self._hand_out.conclude(failed=failure is not None, cut=self._is_cut)
        self._answer(self._hand_out.exhaust(dealt), actions)
        if self._hand_out.dropped:
            actions.warnings.append(
                f"task {self.task_id}: the last {self._hand_out.dropped} elements are too few for "
                "a round of all consumers, and go to nobody (remainder='drop')"
            )

    def needs_units(self, now: float, actions: Actions[R]) -> None:
        """Take note that the producer waits for units."""
        assert self._units is not None, f"task {self.task_id} is dealt no units"
        self._units.need(now)
        self._end_units(actions)

    # --- the dispatcher -------------------------------------------------------------------------

    @property
    def ask_at(self) -> float:
        """When the dispatcher is to be asked for units."""
        return math.inf if self._units is None else self._units.ask_at

    def ask_for_units(self, now: float) -> GetSplit | None:
        """Return what to ask the dispatcher now, if anything."""
        units = self._units
        if units is None or units.ask_at > now:
            return None
        units.ask_at = math.inf
        return GetSplit(
            worker_id=self._worker_id,
            task_id=self.task_id,
            task_token=self.ticket,
            assignment_number=units.number,
            max_splits=units.want,
            num_done=first_missing(self._hand_out.done),
        )

    def granted(
        self, asked: GetSplit, granted: GetSplitReply, now: float, actions: Actions[R]
    ) -> None:
        """Take what the dispatcher answered."""
        assert self._units is not None
        units = self._units.take(granted, now)
        if units is not None:
            self._hand_out.deal(*units, granted.ordinals)
        if units is not None:
            # With what it deals, the dispatcher keeps what is done.
            self._hand_out.forget_done(asked.num_done)
        if self.left is not None or self._has_ended:
            # They are handed back, or come back with the others of a task that failed.
            self._units.ask_at = math.inf
        elif units is not None:
            self._units.is_over = self._units.is_over or granted.is_last
            actions.grants.append(
                Grant(
                    producer=self.producer,
                    units=units,
                    is_alone=granted.is_poison_candidate,
                    rows=granted.ordinals,
                    done=asked.num_done,
                )
            )
        else:
            if granted.flush and self._paused_after < self._units.number:
                self._paused_after = self._units.number
                self._units.is_wanted, self._units.ask_at = False, math.inf
                actions.grants.append(Grant(producer=self.producer, is_pause=True))
            elif granted.wait:
                actions.waits.append(self.producer)
            self._end_units(actions)

    def files_to_say(self) -> CommitFiles | None:
        """Return what to say of files that are whole, if anything."""
        unheard = self._hand_out.unheard
        if unheard is None or self.left is not None:
            return None
        number, files, done = unheard
        return CommitFiles(
            worker_id=self._worker_id,
            task_id=self.task_id,
            task_token=self.ticket,
            report_number=number,
            files=files,
            num_done=done,
        )

    def files_heard(self, number: int, actions: Actions[R]) -> None:
        """Take note that the dispatcher has heard of files."""
        self._hand_out.heard(number)
        self._answer([], actions)

    def _end_units(self, actions: Actions[R]) -> None:
        units = self._units
        if units is not None and units.is_over and units.is_wanted and not self._has_ended:
            units.is_wanted, units.ask_at = False, math.inf
            actions.grants.append(Grant(producer=self.producer))

    @property
    def may_report(self) -> bool:
        """Whether it is over, and nobody knows yet."""
        return (
            self._has_ended
            and self.left is None
            and not self.is_finished
            and self.finish_at == math.inf
            and self._hand_out.may_finish
        )

    def report(self) -> FinishTask | FailTask:
        """Return what to say to the dispatcher when it is over."""
        if self._failure is None:
            return FinishTask(
                worker_id=self._worker_id,
                task_id=self.task_id,
                task_token=self.ticket,
                cut_short=self._is_cut,
                num_done=first_missing(self._hand_out.done) if self.is_dealt else 0,
                num_assigned=None if self._units is None else self._units.dealt,
            )
        return self.failed(self._failure)

    def failed(self, reason: str) -> FailTask:
        """Return what to say to the dispatcher if the task fails."""
        return FailTask(
            worker_id=self._worker_id, task_id=self.task_id, task_token=self.ticket, reason=reason
        )

    def finish(self, actions: Actions[R]) -> None:
        """Let the clients hear that it is over."""
        if not self.is_finished:
            self.is_finished, self.finish_at = True, math.inf
            self._answer(self._hand_out.finish(), actions)

    # --- the owner ------------------------------------------------------------------------------

    def cut(self, actions: Actions[R]) -> None:
        """Take no more units, produce no more of a copy; deliver what there is."""
        self._is_cut = self._is_cut or not self._has_ended
        if self._units is None:
            if not self._has_ended:
                actions.cuts.append(self.producer)
            return
        self._units.is_over = True
        # What the dispatcher grants just now is delivered.
        if not self._units.is_asked:
            self._end_units(actions)

    def call_off(self, refusal: Exception, actions: Actions[R]) -> Left:
        """Refuse everybody from now on, except for what was given before; end the producer."""
        if self.left is None:
            answers, self.left = self._hand_out.call_off(refusal)
            actions.answers += answers
            self._waits_for_room = False
            if self._units is not None:
                self._units.ask_at = math.inf
            if not self._has_ended:
                actions.closes.append(self.producer)
        return self.left

    def hand_back(self) -> ReturnSplits | None:
        """Return what to say of the units of which nothing was given to anybody, if there are any.

        To be called when the task is called off, and what it asked for is here.
        """
        if self._units is None or self._failure is not None or self.left is None:
            return None
        units = subtracted(first(self._units.dealt), self.left.touched)
        if not units:
            return None
        return ReturnSplits(
            worker_id=self._worker_id,
            task_id=self.task_id,
            task_token=self.ticket,
            splits=units,
        )


def is_ticket(shown: str, ticket: str) -> bool:
    """Whether a ticket that somebody shows is this one."""
    return hmac.compare_digest(shown.encode(errors="replace"), ticket.encode())


def wrong_ticket(task_id: int) -> CancelledError:
    """Return the error for a request that does not show the task's ticket.

    For whoever asks it is as if the task had been called off: what became of its reading, only a
    dispatcher knows.
    """
    return CancelledError(
        f"the request shows another ticket than that of task {task_id} on this worker: it belongs "
        "to a reading that another incarnation of the dispatcher began (it was restarted without "
        "its journal), or to no reading of this service at all; iterate over the dataset again, "
        "and run the dispatcher with `fault_tolerant_mode` so that restarts are not noticed"
    )


def was_deleted(task_id: int) -> CancelledError:
    """Return the error for the clients of a task that the dispatcher wants no more."""
    return CancelledError(
        f"task {task_id} has been deleted: its iteration was released, because its clients closed "
        "it or were not heard of for too long; iterate over the dataset again"
    )
