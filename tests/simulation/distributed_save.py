"""Distributed saves: workers write files, the dispatcher counts them, no client reads.

What must hold beside the invariants of all runs: the save ends; where it did not fail, the files
that count hold each element once; it fails only where an element raises, or workers died.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

from headrace.errors import HeadraceError
from headrace.service.dispatcher import events
from headrace.service.messages import StartSave
from headrace.service.modes.distributed_save.publisher import call_core
from headrace.service.modes.distributed_save.records import FilesCommitted
from headrace.service.modes.distributed_save.requests import ListOpenSaves, ReportDirectory
from tests.simulation.cluster import PUT_PLAN, Cluster
from tests.simulation.invariants import check_now, duplicates
from tests.simulation.kernel import require, require_none
from tests.simulation.scenario import DYNAMIC, Scenario, scenario_of

__all__ = ["DistributedSave"]

_SAVE = "0" * 16
_MOST_DEATHS = 3


class DistributedSave(Cluster):
    """Workers, a dispatcher, and a user who asks it to save and looks after the directory."""

    mode = "save"

    @staticmethod
    def scenario_of(seed: int) -> Scenario:
        """Return what a seed stands for where a dataset is saved."""
        scenario = scenario_of(seed)
        name = scenario.kind_name
        return dataclasses.replace(
            scenario,
            in_order=False,
            kind_name="everything" if name == "forgetful" else name,
            mode=DYNAMIC,
            visitation=None,
            clients=0,
            limits=dataclasses.replace(scenario.limits, keeps_journal=True),
        )

    def start(self) -> None:
        super().start()
        self.simulation.call_later(1.0, self._look_after_directory)

    @property
    def is_over(self) -> bool:
        return self.dispatcher.is_up and bool(
            (save := self.dispatcher.state.saves.get(_SAVE)) and save.is_closed
        )

    def _look_after_directory(self) -> None:
        self.simulation.call_later(self.simulation.random.random(), self._look_after_directory)
        if self.dispatcher.is_running:
            with self.dispatcher.logged_events():
                try:
                    self._do_what_is_due()
                except HeadraceError as error:
                    self.simulation.log("directory", "cannot be looked after", error)

    def _do_what_is_due(self) -> None:
        if _SAVE not in self.dispatcher.state.saves:
            self._ask(PUT_PLAN)
            registered = self._ask(self.registration(anonymous=True))
            self._ask(
                StartSave(
                    save_id=_SAVE,
                    dataset_id=registered.dataset_id,
                    path="/saved",
                    plan_digest="digest",
                    spec=b"",
                    seed=7,
                )
            )
        for work in self._ask(ListOpenSaves(known_files={})).saves:
            if not work.is_open:
                self._ask(ReportDirectory(save_id=_SAVE, outcome="opened"))
            elif work.is_finished:
                self._ask(ReportDirectory(save_id=_SAVE, outcome="closed"))

    def _ask(self, question: Any) -> Any:
        return call_core(self.dispatcher.core.handle, question)

    def check_at_end(self) -> None:
        check_now(self, thoroughly=True)
        save = self.dispatcher.state.saves[_SAVE]
        require(save.is_closed, "a save ends", save)
        if save.error:
            require(self._may_have_failed(save.error), "a save fails for a reason", save.error)
            return
        saved = Counter(
            tuple(atom)
            for event in self.journaled(FilesCommitted)
            for file in event.files
            for atom in json.loads(file.form)
        )
        everything = self.scenario.plan.everything()
        require_none(duplicates(saved), "nothing is saved twice")
        require_none(sorted(everything - saved.keys()), "everything is saved")
        require_none(sorted(saved.keys() - everything), "nothing is saved that is not there")

    def _may_have_failed(self, error: str) -> bool:
        plan, deaths = self.scenario.plan, len(self.journaled(events.WorkerLost))
        raises = "raises" in error and bool(plan.failing)
        kills = "given up, because" in error and deaths >= _MOST_DEATHS
        return plan.broken or raises or kills
