"""Stand-ins for producers whose elements go to files: a file is the list of the atoms in it."""

from __future__ import annotations

import json
import random

from headrace.service import messages
from headrace.service.worker.portion import Portion
from tests.simulation.production import Element, Grant, Need, Production

__all__ = ["FileSteps"]


class FileSteps:
    """What the producer of a task that writes files does, as `worker/file_producer.py` says.

    Args:
        steps: What one for clients does.
        chance: Decides when files have a good size.
    """

    def __init__(self, steps: Production, chance: random.Random) -> None:
        self._steps, self._chance = steps, chance
        self._held: list[Element] = []
        self._files = self._done = self._touched = self._said = 0

    def send(self, grant: Grant | None) -> Need | float | Portion:
        """Go on; return what is needed, how long it takes, or files that are whole."""
        while True:
            step = self._steps.send(grant)
            grant = None
            if not isinstance(step, Portion):
                return step
            if step.error is not None:
                raise StopIteration(str(step.error))
            self._held += step.buffers  # type: ignore[arg-type]
            self._done, self._touched = step.done_to, max(step.touched, step.done_to)
            if step.count:
                is_due = self._is_whole and self._chance.random() < 0.2
            else:
                is_due = self._has_whole_ones  # after a pause, or at the end
            if is_due:
                return self._say()

    def let_wait(self) -> Portion | None:
        """Return what is whole, where units are waited for in vain."""
        return self._say() if self._has_whole_ones else None

    @property
    def _is_whole(self) -> bool:
        return self._done >= self._touched

    @property
    def _has_whole_ones(self) -> bool:
        return self._is_whole and (bool(self._held) or self._done > self._said)

    def _say(self) -> Portion:
        files: tuple[messages.SavedFile, ...] = ()
        if self._held:
            atoms = json.dumps([atom for element in self._held for atom in element])
            files = (messages.SavedFile(self._files, len(self._held), 1, atoms),)
            self._files += 1
        before, self._said = self._said, self._done
        self._held = []
        return Portion(
            first=0, files=files, done_from=before, done_to=self._done, touched=self._touched
        )
