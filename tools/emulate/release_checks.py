"""Checks of over-the-air upgrades, models and the model runner on a booted board."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fedquilt.core import JobError, LinkError
from fedquilt.tools.emulate import guest
from fedquilt.tools.emulate.checks import CheckLog
from fedquilt.tools.emulate.container import Container, wait_until
from fedquilt.tools.emulate.journal import last_message
from fedquilt.tools.emulate.rollouts import RolloutDriver, job_table
from fedquilt.tools.emulate.site import HOST, LoopbackFleet
from fedquilt.tools.lab import demo

AGENT, RUNNER, USER = "fedquilt-agent.service", "fedquilt-serve-model.service", "fedquilt-runner"
MODELS: Final = "/var/lib/fedquilt-models"
HOOKED: Final = f"{MODELS}/hooked"  # file that lists the models which the hook has seen
HOOK: Final = ("/bin/sh", "-c", 'readlink "$FEDQUILT_MODELS/current" >> "$FEDQUILT_MODELS/hooked"')
ANSWERS_S: Final = 60.0


@dataclass
class ReleaseChecks:
    """Rollouts to one board by the commands of an operator.

    Args:
        port: Port of the board's model runner.
    """

    site: LoopbackFleet
    board: Container
    device: str
    port: int

    def run_checks(self, checks: CheckLog, target: Sequence[str]) -> None:
        self._rollouts = RolloutDriver(self.site, self.device, lambda: last_message(self.board.read_journal(AGENT)))
        with self._rollouts.run_coordinator():
            with checks("an upgrade over the air, and the version before again") as seen:
                seen.append(self._check_upgrade(target))
            with checks("a model that was trained here: checked, exchanged, the owner's hook") as seen:
                seen.append(self._check_model(job_table("first")))
            with checks("the model runner's own service answers with it") as seen:
                seen.append(self._check_answers())
            with checks("another model, and the one before again: the runner follows") as seen:
                seen.append(self._check_model_change())
        with checks("kill -9 of the model runner: back, with the same model") as seen:
            seen.append(self._check_runner_restart())

    # -- the agent --

    def _check_upgrade(self, target: Sequence[str]) -> str:
        self.site.run_fedquilt("rollout", "build", "agents.tar", *target)
        began_s, flashed = time.monotonic(), self._agent_interpreter()
        self._rollouts.deploy_committed("agent", "agents.tar")
        new, took_s = self._agent_interpreter(), time.monotonic() - began_s
        if new == flashed or not new.startswith("/var/lib/fedquilt-agent/"):
            raise JobError(f"the rollout is done, and the agent's process is {new}")
        if (state := self.board.unit_properties(AGENT))["ActiveState"] != "active":
            raise JobError(f"the rollout is done, and {AGENT} is {state['ActiveState']}")
        began_s = time.monotonic()
        self._rollouts.roll_back("back", "agent")
        if (now := self._agent_interpreter()) != flashed:
            raise JobError(f"it was taken back, and the agent's process is {now}")
        size = (self.site.folder / "agents.tar").stat().st_size / 1e6
        return f"{size:.1f} MB, {new} after {took_s:.0f} s; {now} again after {time.monotonic() - began_s:.0f} s"

    def _agent_interpreter(self) -> str:
        pid = self.board.unit_properties(AGENT)["MainPID"]
        return self.board.run("cat", f"/proc/{pid}/cmdline").split("\0")[0] if pid != "0" else ""

    # -- models --

    def _check_model(self, table: dict[str, Any]) -> str:
        self._rollouts.train_model(table)
        began_s = time.monotonic()
        found = self._rollouts.deploy_committed("model", table["name"])
        said = found.heard[self.device].metrics
        if not (model := self._current_model()):
            raise JobError(f"the rollout is done, and {MODELS}/current leads nowhere")
        hooked = self.board.run("cat", HOOKED).split()
        if hooked[-1:] != [model]:
            raise JobError(f"the hook has seen {hooked}, and {model} is in use")
        return f"{model}, accuracy {said['accuracy']:.1%}, hook run; {time.monotonic() - began_s:.0f} s"

    def _current_model(self) -> str:
        return self.board.run("readlink", f"{MODELS}/current").strip()

    def _check_answers(self) -> str:
        self._wait_until_answered(self._current_model())
        with np.load(demo.HERE / "digits.npz") as digits, io.BytesIO() as file:
            np.save(file, digits["x_test"][0])
            truth, said = int(digits["y_test"][0]), self._send_request("POST", "/v1/classify", file.getvalue())
        owner = self.board.unit_properties(RUNNER)["User"]
        as_user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups")
        for does in (("ls", "/var/lib/fedquilt"), ("rm", f"{MODELS}/current"), ("cat", "/etc/fedquilt/device.key")):
            if self.board.error_of(*as_user, *does) is None:
                raise JobError(f"the runner's user may {' '.join(does)}")
        return f"{said['class']} for a {truth}; as {owner}, who may neither read the agent's home nor exchange a model"

    def _check_model_change(self) -> str:
        first = self._current_model()
        self._check_model(job_table("second", seed=1, rounds=2))
        second = self._current_model()
        began_s = time.monotonic()
        self._wait_until_answered(second)
        took_s = time.monotonic() - began_s
        self._rollouts.roll_back("back", "model")
        if self._current_model() != first:
            raise JobError(f"it was taken back, and {self._current_model()} is in use, not {first}")
        self._wait_until_answered(first)
        return f"{first} -> {second}, which answers {took_s:.0f} s after its rollout's end; {first} answers again"

    def _check_runner_restart(self) -> str:
        model, restarts, began_s = (
            self._current_model(),
            int(self.board.unit_properties(RUNNER)["NRestarts"]),
            time.monotonic(),
        )
        pid = self.board.kill_unit(signal.SIGKILL, RUNNER)
        if not wait_until(lambda: self.board.unit_properties(RUNNER)["MainPID"] not in ("0", str(pid)), ANSWERS_S):
            raise LinkError(f"not back; its journal ends: {last_message(self.board.read_journal(RUNNER))}")
        self._wait_until_answered(model)
        if (times := int(self.board.unit_properties(RUNNER)["NRestarts"]) - restarts) != 1:
            raise JobError(f"systemd has started it anew {times} times, not once")
        return f"process {pid} killed, {model} answers after {time.monotonic() - began_s:.0f} s"

    def _wait_until_answered(self, model: str) -> None:
        said: dict[str, Any] = {}

        def is_answering() -> bool:
            with contextlib.suppress(OSError, ValueError):
                said.update(self._send_request("GET", "/v1/health"))
            return str(said.get("model", "")).startswith(model)

        if not wait_until(is_answering, ANSWERS_S):
            why = said or last_message(self.board.read_journal(RUNNER))
            raise LinkError(f"the runner does not answer with {model}: {why}")

    def _send_request(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        link = http.client.HTTPConnection(HOST, self.port, timeout=10.0)
        with contextlib.closing(link):
            link.request(method, path, body)
            answer = link.getresponse()
            found: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200:
            raise JobError(f"{method} {path}: {answer.status} {found}")
        return found


def flash_options(machine: str) -> list[str]:
    return ["--target", machine, "--python", guest.PYTHON, "--extras", "onnx"]
