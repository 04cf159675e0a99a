"""Rollouts to a board that is emulated or rehearsed, by the commands of an operator, beside a coordinator."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from fedquilt import config
from fedquilt.coordinator.rollouts import Rollout
from fedquilt.coordinator.store import Store
from fedquilt.core import JobError
from fedquilt.tools import demo
from fedquilt.tools.emulate.container import until
from fedquilt.tools.emulate.site import STOP_S, Site, last, stop

HOME: Final = "releases"  # the coordinator's home in the site's folder
PHASED: Final = ("--canary", "50", "--phases", "100", "--soak", "2s")
BEGIN_S: Final = 60.0


def job(name: str, **more: Any) -> dict[str, Any]:
    """A small job on the demo's digits, as a table."""
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
class Rollouts:
    """A coordinator of its own for one board.

    Args:
        reason: the last message of the board's agent.
        limit_s: most that a rollout may take.
    """

    site: Site
    device: str
    reason: Callable[[], str]
    limit_s: float = 300.0

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Run the coordinator for the duration of the body."""
        log = self.site.folder / "serve.log"
        words = self.site.words("serve", *self.site.coordinator(HOME))
        with log.open("ab") as out:
            process = subprocess.Popen(
                words, cwd=self.site.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        try:
            if not until((self.site.folder / HOME / "fedquilt.db").exists, BEGIN_S, lambda: process.poll() is None):
                raise JobError(f"the coordinator does not come up: {last(log)} ({log})")
            yield
        finally:
            stop(process, STOP_S)

    def trained(self, table: dict[str, Any]) -> None:
        """Carry out a job of `job`."""
        path = f"{table['name']}.toml"
        (self.site.folder / path).write_text(config.text(table))
        self.site.fedquilt("prepare", path)
        self.site.fedquilt("run", path, "--home", HOME)

    def brought(self, *words: str) -> Rollout:
        """Carry out a rollout that the board commits."""
        return self._until("done", "committed", *words, *PHASED)

    def refused(self, *words: str) -> Rollout:
        """Carry out a rollout that the board refuses."""
        return self._until("aborted", "refused", *words, *PHASED)

    def taken_back(self, *words: str) -> Rollout:
        """Take the latest rollout back: the board returns to its earlier release."""
        return self._until("rolled back", "returned", *words)

    def _until(self, status: str, phase: str, *words: str) -> Rollout:
        self.site.fedquilt(*words, "--home", HOME)
        kind = "agent" if words[0] == "upgrade" else "model"
        found: list[Rollout] = []

        def there() -> bool:
            with Store(self.site.folder / HOME) as store:
                found[:] = [kept.state for kept in store.rollouts.all() if kept.state.plan.kind == kind]
            heard = found[-1].heard.get(self.device)
            return found[-1].status == status and heard is not None and heard.phase == phase

        if not until(there, self.limit_s, lambda: not found or found[-1].status in ("queued", "running", status)):
            heard = found[-1].heard.get(self.device) if found else None
            told = f"{heard.phase}: {heard.reason}" if heard else "nothing"
            raise JobError(
                f"`fedquilt {' '.join(words[:2])}` is {found[-1].status if found else 'not there'}, the board said "
                f"{told}; its agent said last: {self.reason()}; the coordinator: {last(self.site.folder / 'serve.log')}"
            )
        return found[-1]
