"""Rollouts to a booted board by the commands of an operator: upgrades, models and the model runner."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fedquilt.coordinator.rounds.rollout import Rollout
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError, LinkError
from fedquilt.formats import toml
from fedquilt.tools.lab import demo
from tests.rehearsal import host
from tests.rehearsal.checks import CheckLog, last_message
from tests.rehearsal.container import Container, wait_until
from tests.rehearsal.fleet import HOST, STOP_S, LoopbackFleet, last, stop_process

AGENT, RUNNER, USER = "fedquilt-agent.service", "fedquilt-serve-model.service", "fedquilt-runner"
MODELS: Final = "/var/lib/fedquilt-models"
HOOKED: Final = f"{MODELS}/hooked"  # file that lists the models which the hook has seen
HOOK: Final = ("/bin/sh", "-c", 'readlink "$FEDQUILT_MODELS/current" >> "$FEDQUILT_MODELS/hooked"')
ANSWERS_S: Final = 60.0
HOME: Final = "releases"  # the coordinator's home in the site's folder
PHASED: Final = ("--phases", "50", "100", "--soak", "2s")
BEGIN_S: Final = 60.0
ROLLOUT_S: Final = 300.0


def flash_options() -> list[str]:
    machine = host.debian_architecture()
    return ["--target", machine, "--python", host.PYTHON, "--extras", "onnx"]


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
        with self._run_coordinator():
            with checks("an upgrade over the air, and the version before again") as seen:
                seen.append(self._check_upgrade(target))
            with checks("a model that was trained here: checked, exchanged, the owner's hook") as seen:
                self._train_model(job_table("first"))
                seen.append(self._check_model("first"))
            with checks("the model runner's own service answers with it") as seen:
                seen.append(self._check_answers())
            with checks("another model: refused, exchanged, and the one before again; the runner follows") as seen:
                seen.append(self._check_model_change())
        with checks("kill -9 of the model runner: back, with the same model") as seen:
            seen.append(self._check_runner_restart())

    # -- an operator --

    @contextlib.contextmanager
    def _run_coordinator(self) -> Iterator[None]:
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

    def _train_model(self, table: dict[str, Any]) -> None:
        path = f"{table['name']}.toml"
        (self.site.folder / path).write_text(toml.format_toml(table))
        self.site.run_fedquilt("prepare", path)
        self.site.run_fedquilt("run", path, "--home", HOME)

    def _deploy_committed(self, *words: str) -> Rollout:
        return self._run_rollout("done", "committed", *words, *PHASED)

    def _roll_back(self, *words: str) -> Rollout:
        return self._run_rollout("rolled back", "returned", *words)

    def _run_rollout(self, status: str, phase: str, *words: str) -> Rollout:
        self.site.run_fedquilt("rollout", *words, "--home", HOME)
        kind = "agent" if "agent" in words[:2] else "model"
        found: list[Rollout] = []

        def is_reached() -> bool:
            with Store(self.site.folder / HOME) as store:
                found[:] = [kept.state for kept in store.rollouts.readable_rollouts() if kept.state.plan.kind == kind]
            heard = found[-1].reports.get(self.device)
            return found[-1].status == status and heard is not None and heard.phase == phase

        # a rollout is rolled back by the coordinator, some time after the command
        under_way = ("done",) if status == "rolled back" else ("queued", "running")
        if not wait_until(is_reached, ROLLOUT_S, lambda: not found or found[-1].status in (*under_way, status)):
            heard = found[-1].reports.get(self.device) if found else None
            told = f"{heard.phase}: {heard.reason}" if heard else "nothing"
            agent, coordinator = last_message(self.board.read_journal(AGENT)), last(self.site.folder / "serve.log")
            raise JobError(
                f"`fedquilt rollout {' '.join(words[:2])}` is {found[-1].status if found else 'not there'}, the board "
                f"said {told}; its agent said last: {agent}; the coordinator: {coordinator}"
            )
        return found[-1]

    # -- the agent --

    def _check_upgrade(self, target: Sequence[str]) -> str:
        self.site.run_fedquilt("rollout", "build", "agents.tar", *target)
        began_s, flashed = time.monotonic(), self._agent_interpreter()
        self._deploy_committed("agent", "agents.tar")
        new, took_s = self._agent_interpreter(), time.monotonic() - began_s
        if new == flashed or not new.startswith("/var/lib/fedquilt-agent/"):
            raise JobError(f"the rollout is done, and the agent's process is {new}")
        if (state := self.board.unit_properties(AGENT))["ActiveState"] != "active":
            raise JobError(f"the rollout is done, and {AGENT} is {state['ActiveState']}")
        began_s = time.monotonic()
        self._roll_back("back", "agent")
        if (now := self._agent_interpreter()) != flashed:
            raise JobError(f"it was taken back, and the agent's process is {now}")
        size = (self.site.folder / "agents.tar").stat().st_size / 1e6
        return f"{size:.1f} MB, {new} after {took_s:.0f} s; {now} again after {time.monotonic() - began_s:.0f} s"

    def _agent_interpreter(self) -> str:
        pid = self.board.unit_properties(AGENT)["MainPID"]
        return self.board.run("cat", f"/proc/{pid}/cmdline").split("\0")[0] if pid != "0" else ""

    # -- models --

    def _check_model(self, name: str) -> str:
        began_s = time.monotonic()
        found = self._deploy_committed("model", name)
        said = found.reports[self.device].metrics
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
            truth, said = int(digits["y_test"][0]), self._send_request("POST", "/v1/predict", file.getvalue())
        owner = self.board.unit_properties(RUNNER)["User"]
        as_user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups")
        for does in (("ls", "/var/lib/fedquilt"), ("rm", f"{MODELS}/current"), ("cat", "/etc/fedquilt/device.key")):
            if self.board.error_of(*as_user, *does) is None:
                raise JobError(f"the runner's user may {' '.join(does)}")
        forbidden = "who may neither read the agent's home nor exchange a model"
        return f"{said['prediction']} for a {truth}; as {owner}, {forbidden}"

    def _check_model_change(self) -> str:
        first = self._current_model()
        self._train_model(job_table("second", seed=1, rounds=2))
        refused = self._run_rollout("aborted", "refused", "model", "second", "--min-gain", "50pt", *PHASED)
        if self._current_model() != first:
            raise JobError(f"the second model was refused, and {self._current_model()} is in use, not {first}")
        self._check_model("second")
        second = self._current_model()
        began_s = time.monotonic()
        self._wait_until_answered(second)
        took_s = time.monotonic() - began_s
        self._roll_back("back", "model")
        if self._current_model() != first:
            raise JobError(f"it was taken back, and {self._current_model()} is in use, not {first}")
        self._wait_until_answered(first)
        return (
            f"refused: {refused.reports[self.device].reason}; {first} -> {second}, which answers {took_s:.0f} s after "
            f"its rollout's end; {first} answers again"
        )

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
