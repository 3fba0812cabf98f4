"""Distributed saves: workers write files, the dispatcher commits them, no client reads.

Invariants in addition to those of all runs: the save ends; unless it failed, the committed files
contain each element once; it fails only if an element raises or workers crashed.
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
_MAX_DEATHS = 3


class DistributedSave(Cluster):
    """Cluster with a publisher that starts a save and manages its directory."""

    mode = "distributed_save"

    @staticmethod
    def scenario_of(seed: int) -> Scenario:
        """Return the scenario of a seed in which a dataset is saved."""
        scenario = scenario_of(seed)
        name = scenario.kind_name
        return dataclasses.replace(
            scenario,
            in_order=False,
            kind_name="all faults" if name == "no journal" else name,
            mode=DYNAMIC,
            visitation=None,
            clients=0,
            limits=dataclasses.replace(scenario.limits, keeps_journal=True),
        )

    def start(self) -> None:
        super().start()
        self.simulation.call_later(1.0, self._manage_directory)

    @property
    def is_over(self) -> bool:
        return self.dispatcher.is_up and bool(
            (save := self.dispatcher.state.saves.get(_SAVE)) and save.is_closed
        )

    def _manage_directory(self) -> None:
        self.simulation.call_later(self.simulation.random.random(), self._manage_directory)
        if self.dispatcher.is_running:
            with self.dispatcher.logged_events():
                try:
                    self._advance_save()
                except HeadraceError as error:
                    self.simulation.log("directory", "request fails", error)

    def _advance_save(self) -> None:
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
            require(
                self._may_have_failed(save.error), "a save fails for a permitted reason", save.error
            )
            return
        saved = Counter(
            tuple(atom)
            for event in self.journaled(FilesCommitted)
            for file in event.files
            for atom in json.loads(file.schema)
        )
        everything = self.scenario.plan.everything()
        require_none(duplicates(saved), "no element is saved twice")
        require_none(sorted(everything - saved.keys()), "every element is saved")
        require_none(sorted(saved.keys() - everything), "only existing elements are saved")

    def _may_have_failed(self, error: str) -> bool:
        plan, deaths = self.scenario.plan, len(self.journaled(events.WorkerLost))
        raises = "raises" in error and bool(plan.failing)
        kills = "abandoned, because" in error and deaths >= _MAX_DEATHS
        return plan.broken or raises or kills
