"""A save in virtual time: workers write files, the dispatcher counts them, no client reads.

A file is stood in for by the list of the elements in it. What must hold beside the promises of all
runs: the save ends; where it did not fail, the files that count hold each element once; it fails
only where an element raises, or workers died.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from typing import Any

from headrace.errors import HeadraceError
from headrace.service import messages
from headrace.service.dispatcher import updates
from headrace.service.modes.distributed_save.publisher import ask_core
from headrace.service.modes.distributed_save.records import FilesSaved
from headrace.service.modes.distributed_save.saves import LookAtSaves, NoteSave
from tests.simulation import promises
from tests.simulation.cast import Cast
from tests.simulation.run import run
from tests.simulation.scenario import DYNAMIC, Scenario, scenario_of
from tests.simulation.world import BrokenPromiseError

__all__ = ["SaveCast", "run_save", "save_scenario_of"]

_SAVE = "0" * 16
_PLAN = b"a pickled plan"
_MOST_DEATHS = 3


def save_scenario_of(seed: int) -> Scenario:
    """Return what a seed stands for where a dataset is saved."""
    scenario = scenario_of(seed)
    return dataclasses.replace(
        scenario,
        in_order=False,
        kind="everything" if scenario.kind == "forgetful" else scenario.kind,
        mode=DYNAMIC,
        visitation=None,
        clients=0,
        limits=dataclasses.replace(scenario.limits, keeps_journal=True),
    )


class SaveCast(Cast):
    """Workers, a dispatcher, and whoever asks it to save and looks after the directory."""

    option = "--save"

    def begin(self) -> None:
        super().begin()
        self.world.at(1.0, self._look_after_directory)

    @property
    def is_over(self) -> bool:
        return self.dispatcher.is_up and bool(
            (save := self.dispatcher.state.saves.get(_SAVE)) and save.is_closed
        )

    def _look_after_directory(self) -> None:
        self.world.at(self.world.chance.random(), self._look_after_directory)
        if not self.dispatcher.is_running:
            return
        before = len(self.dispatcher.disk.history)
        try:
            self._do()
        except HeadraceError as error:
            self.world.note("directory", "cannot be looked after", error)
        self.dispatcher._tell(before)

    def _do(self) -> None:
        if _SAVE not in self.dispatcher.state.saves:
            self._begin_save()
        for work in self._ask(LookAtSaves(known={})).saves:
            if not work.is_open:
                self._ask(NoteSave(save=_SAVE, what="opened"))
            elif work.is_over:
                self._ask(NoteSave(save=_SAVE, what="closed"))

    def _begin_save(self) -> None:
        digest = hashlib.sha256(_PLAN).digest()
        self._ask(messages.PutPlan(digest=digest, offset=0, total=len(_PLAN), part=_PLAN))
        registered = self._ask(
            messages.RegisterDataset(
                token="token",
                digest=digest,
                fingerprint="fingerprint",
                element_spec=b"spec",
                cardinality=-2,
                positions=self.scenario.plan.size,
                anonymous=True,
                origins=True,
            )
        )
        self._ask(
            messages.BeginSave(
                save=_SAVE,
                dataset_id=registered.dataset_id,
                path="/saved",
                plan="digest",
                spec=b"",
                seed=7,
            )
        )

    def _ask(self, question: Any) -> Any:
        return ask_core(self.dispatcher._core.handle, question)


def run_save(scenario: Scenario, *, last: int = 40) -> SaveCast:
    """Run a scenario; check every promise.

    Raises:
        AssertionError: One is broken.
    """
    cast = SaveCast(scenario)
    run(scenario, cast=cast, check=_check_at_end, last=last)
    return cast


def _require(holds: bool, promise: str, *about: object) -> None:
    if not holds:
        raise BrokenPromiseError(f"{promise}: {' '.join(map(str, about))}")


def _check_at_end(cast: Cast) -> None:
    promises.check_now(cast, thoroughly=True)
    plan, history = cast.scenario.plan, cast.dispatcher.disk.history
    save = cast.dispatcher.state.saves[_SAVE]
    _require(save.is_closed, "a save ends", save)
    if save.error:
        deaths = sum(isinstance(fact, updates.WorkerLost) for fact in history)
        allowed = (
            plan.broken
            or ("raises" in save.error and bool(plan.failing))
            or ("given up, because" in save.error and deaths >= _MOST_DEATHS)
        )
        _require(allowed, "a save fails for a reason that the scenario gives", save.error)
        return
    found = Counter(
        tuple(atom)
        for fact in history
        if isinstance(fact, FilesSaved)
        for file in fact.files
        for atom in json.loads(file.form)
    )
    everything = plan.everything()
    twice = [atom for atom, times in found.items() if times > 1]
    _require(not twice, "nothing is saved twice", twice[:5])
    missing = sorted(everything - found.keys())
    _require(not missing, "everything is saved", missing[:5], len(missing))
    strange = sorted(found.keys() - everything)
    _require(not strange, "nothing is saved that is not there", strange[:5])
