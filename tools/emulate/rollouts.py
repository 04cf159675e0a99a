"""Rollouts to an emulated or rehearsed board by the commands of an operator."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from fedquilt.coordinator.rounds.rollout import Rollout
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError
from fedquilt.formats import toml
from fedquilt.tools.emulate.container import wait_until
from fedquilt.tools.emulate.site import STOP_S, LoopbackFleet, last, stop_process
from fedquilt.tools.lab import demo

HOME: Final = "releases"  # the coordinator's home in the site's folder
PHASED: Final = ("--phases", "50", "100", "--soak", "2s")
BEGIN_S: Final = 60.0


def job_table(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "method": "fedavg",
        "engine": "numpy",
        "rounds": 1,
        "labels": [str(digit) for digit in range(10)],
        "model": {"name": "mlp", "inputs": 64, "hidden": [32], "classes": 10},
        "data": {"path": str(demo.HERE / "digits.npz")},
        **more,
    }


@dataclass
class RolloutDriver:
    site: LoopbackFleet
    device: str
    reason: Callable[[], str]
    limit_s: float = 300.0

    @contextlib.contextmanager
    def run_coordinator(self) -> Iterator[None]:
        log = self.site.folder / "serve.log"
        words = self.site.fedquilt_command("serve", *self.site.coordinator_options(HOME))
        with log.open("ab") as out:
            process = subprocess.Popen(
                words, cwd=self.site.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        try:
            if not wait_until(
                (self.site.folder / HOME / "fedquilt.db").exists, BEGIN_S, lambda: process.poll() is None
            ):
                raise JobError(f"the coordinator does not come up: {last(log)} ({log})")
            yield
        finally:
            stop_process(process, STOP_S)

    def train_model(self, table: dict[str, Any]) -> None:
        path = f"{table['name']}.toml"
        (self.site.folder / path).write_text(toml.format_toml(table))
        self.site.run_fedquilt("prepare", path)
        self.site.run_fedquilt("run", path, "--home", HOME)

    def deploy_committed(self, *words: str) -> Rollout:
        return self._run_rollout("done", "committed", *words, *PHASED)

    def deploy_refused(self, *words: str) -> Rollout:
        return self._run_rollout("aborted", "refused", *words, *PHASED)

    def roll_back(self, *words: str) -> Rollout:
        return self._run_rollout("rolled back", "returned", *words)

    def _run_rollout(self, status: str, phase: str, *words: str) -> Rollout:
        self.site.run_fedquilt("rollout", *words, "--home", HOME)
        kind = "agent" if "agent" in words[:2] else "model"
        found: list[Rollout] = []

        def is_reached() -> bool:
            with Store(self.site.folder / HOME) as store:
                found[:] = [kept.state for kept in store.rollouts.readable_rollouts() if kept.state.plan.kind == kind]
            heard = found[-1].heard.get(self.device)
            return found[-1].status == status and heard is not None and heard.phase == phase

        if not wait_until(
            is_reached, self.limit_s, lambda: not found or found[-1].status in ("queued", "running", status)
        ):
            heard = found[-1].heard.get(self.device) if found else None
            told = f"{heard.phase}: {heard.reason}" if heard else "nothing"
            raise JobError(
                f"`fedquilt {' '.join(words[:2])}` is {found[-1].status if found else 'not there'}, the board said "
                f"{told}; its agent said last: {self.reason()}; the coordinator: {last(self.site.folder / 'serve.log')}"
            )
        return found[-1]
