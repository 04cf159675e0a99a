"""Checks of what comes over the air to a booted board: a version of the agent, models and their runner."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.core import JobError, LinkError
from fedquilt.tools import demo
from fedquilt.tools.emulate import guest
from fedquilt.tools.emulate.checks import Checks
from fedquilt.tools.emulate.container import Container, until
from fedquilt.tools.emulate.journal import reason
from fedquilt.tools.emulate.rollouts import Rollouts, job
from fedquilt.tools.emulate.site import HOST, Site

AGENT, RUNNER, USER = "fedquilt-agent.service", "fedquilt-serve-model.service", "fedquilt-runner"
MODELS: Final = "/var/lib/fedquilt-models"
HOOKED: Final = f"{MODELS}/hooked"  # file that lists the models which the hook has seen
HOOK: Final = ("/bin/sh", "-c", 'readlink "$FEDQUILT_MODELS/current" >> "$FEDQUILT_MODELS/hooked"')
ANSWERS_S: Final = 60.0


@dataclass
class Released:
    """Rollouts to one board, by the commands that an operator types, while its coordinator serves.

    Args:
        port: at which the board's runner answers.
    """

    site: Site
    board: Container
    device: str
    port: int

    def check(self, checks: Checks, target: Sequence[str]) -> None:
        """Check everything. `target`: words of `fedquilt flash` for this kind of board."""
        self._rollouts = Rollouts(self.site, self.device, lambda: reason(self.board.journal(AGENT)))
        with self._rollouts.served():
            with checks("an upgrade over the air, and the version before again") as seen:
                seen.append(self._upgrade(target))
            with checks("a model that was trained here: checked, exchanged, the owner's hook") as seen:
                seen.append(self._model(job("first")))
            with checks("the model runner's own service answers with it") as seen:
                seen.append(self._answers())
            with checks("another model, and the one before again: the runner follows") as seen:
                seen.append(self._follows())
        with checks("kill -9 of the model runner: back, with the same model") as seen:
            seen.append(self._returns())

    # -- the agent --

    def _upgrade(self, target: Sequence[str]) -> str:
        self.site.fedquilt("flash", *target, "--upgrade", "agents.tar")
        began_s, flashed = time.monotonic(), self._program()
        self._rollouts.brought("upgrade", "agents.tar")
        new, took_s = self._program(), time.monotonic() - began_s
        if new == flashed or not new.startswith("/var/lib/fedquilt-agent/"):
            raise JobError(f"the rollout is done, and the agent's process is {new}")
        if (state := self.board.unit(AGENT))["ActiveState"] != "active":
            raise JobError(f"the rollout is done, and {AGENT} is {state['ActiveState']}")
        began_s = time.monotonic()
        self._rollouts.taken_back("upgrade", "--back")
        if (now := self._program()) != flashed:
            raise JobError(f"it was taken back, and the agent's process is {now}")
        size = (self.site.folder / "agents.tar").stat().st_size / 1e6
        return f"{size:.1f} MB, {new} after {took_s:.0f} s; {now} again after {time.monotonic() - began_s:.0f} s"

    def _program(self) -> str:
        """The interpreter of the agent's process, by its command line."""
        pid = self.board.unit(AGENT)["MainPID"]
        return self.board.run("cat", f"/proc/{pid}/cmdline").split("\0")[0] if pid != "0" else ""

    # -- models --

    def _model(self, table: dict[str, Any]) -> str:
        self._rollouts.trained(table)
        began_s = time.monotonic()
        found = self._rollouts.brought("deploy", table["name"])
        said = found.heard[self.device].metrics
        if not (model := self._current()):
            raise JobError(f"the rollout is done, and {MODELS}/current leads nowhere")
        hooked = self.board.run("cat", HOOKED).split()
        if hooked[-1:] != [model]:
            raise JobError(f"the hook has seen {hooked}, and {model} is in use")
        return f"{model}, accuracy {said['accuracy']:.1%}, hook run; {time.monotonic() - began_s:.0f} s"

    def _current(self) -> str:
        return self.board.run("readlink", f"{MODELS}/current").strip()

    def _answers(self) -> str:
        self._until_answered(self._current())
        with np.load(demo.HERE / "digits.npz") as digits, io.BytesIO() as file:
            np.save(file, digits["x_test"][0])
            truth, said = int(digits["y_test"][0]), self._ask("POST", "/v1/classify", file.getvalue())
        owner = self.board.unit(RUNNER)["User"]
        as_user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups")
        for does in (("ls", "/var/lib/fedquilt"), ("rm", f"{MODELS}/current"), ("cat", "/etc/fedquilt/device.key")):
            if self.board.fails(*as_user, *does) is None:
                raise JobError(f"the runner's user may {' '.join(does)}")
        return f"{said['class']} for a {truth}; as {owner}, who may neither read the agent's home nor exchange a model"

    def _follows(self) -> str:
        first = self._current()
        self._model(job("second", seed=1, rounds=2))
        second = self._current()
        began_s = time.monotonic()
        self._until_answered(second)
        took_s = time.monotonic() - began_s
        self._rollouts.taken_back("deploy", "--rollback")
        if self._current() != first:
            raise JobError(f"it was taken back, and {self._current()} is in use, not {first}")
        self._until_answered(first)
        return f"{first} -> {second}, which answers {took_s:.0f} s after its rollout's end; {first} answers again"

    def _returns(self) -> str:
        model, restarts, began_s = self._current(), int(self.board.unit(RUNNER)["NRestarts"]), time.monotonic()
        pid = self.board.kill(signal.SIGKILL, RUNNER)
        if not until(lambda: self.board.unit(RUNNER)["MainPID"] not in ("0", str(pid)), ANSWERS_S):
            raise LinkError(f"not back; its journal ends: {reason(self.board.journal(RUNNER))}")
        self._until_answered(model)
        if (times := int(self.board.unit(RUNNER)["NRestarts"]) - restarts) != 1:
            raise JobError(f"systemd has started it anew {times} times, not once")
        return f"process {pid} killed, {model} answers after {time.monotonic() - began_s:.0f} s"

    def _until_answered(self, model: str) -> None:
        """Wait until the runner answers with a model.

        Raises:
            LinkError: the runner does not; quotes its journal or its answer.
        """
        said: dict[str, Any] = {}

        def there() -> bool:
            with contextlib.suppress(OSError, ValueError):
                said.update(self._ask("GET", "/v1/health"))
            return str(said.get("model", "")).startswith(model)

        if not until(there, ANSWERS_S):
            why = said or reason(self.board.journal(RUNNER))
            raise LinkError(f"the runner does not answer with {model}: {why}")

    def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        link = http.client.HTTPConnection(HOST, self.port, timeout=10.0)
        with contextlib.closing(link):
            link.request(method, path, body)
            answer = link.getresponse()
            found: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200:
            raise JobError(f"{method} {path}: {answer.status} {found}")
        return found


def target(machine: str, wheels: Path) -> list[str]:
    """Words of `fedquilt flash` for a rehearsed board, whose Debian is for that machine."""
    return ["--target", machine, "--python", guest.PYTHON, "--extras", "onnx", "--wheels", str(wheels)]
