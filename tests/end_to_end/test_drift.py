"""From drift to a job: all as processes, the agent and the model runner as an ordinary user."""

from __future__ import annotations

import http.client
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_models import DIGITS, network
from ordinary import User
from processes import NETWORK, TABLE, Processes
from waiting import until

from fedquilt.arrays import tensors
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle, toml

pytest.importorskip("onnxruntime")

FEDQUILT = (sys.executable, "-m", "fedquilt.cli")


def armed(folder: Path) -> Path:
    """A job of one round that waits for drift and its owner."""
    first = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
    job_bundle.write_bundle(folder / "job.bundle", {"network": NETWORK, "flops": 9600}, {"model": first})
    trigger = {"drift_above": 0.3, "boards": "100%", "approve": True}
    params = {**TABLE["params"], "epochs": 1}
    table = {**TABLE, "rounds": 1, "params": params, "trigger": trigger}
    (folder / "job.toml").write_text(toml.format_toml(table))
    return folder / "job.toml"


def test_inputs_that_change_start_a_job_once_its_owner_agrees(
    tmp_path: Path, mosquitto: Callable[..., Any], processes: Processes, user: User
) -> None:
    """A model is deployed and served; digits become brighter; the job waits, is approved, and is done by the board.

    Meanwhile another model is deployed, which the runner takes up.
    """
    broker, runs, home = mosquitto(), tmp_path / "runs", ("--home", str(tmp_path / "runs"))

    def told(*words: str) -> str:
        done = subprocess.run([*FEDQUILT, *words, *home], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    processes.start("coordinator", tmp_path / "serve.log", "serve", *home, "--broker", broker.url)
    until((runs / "fedquilt.db").exists, "the coordinator's home")
    shutil.copy(DIGITS, user.home / "digits.npz")
    table = {"device": "d", "home": str(user.home / "d"), "budget": "600MB", "telemetry_s": 1.0, "warm_s": 0.0}
    data = {"path": str(user.home / "digits.npz"), "partition": "iid", "share": 0, "shares": 4}
    settings = {**table, "broker": {"url": broker.url}, "data": data}
    (user.home / "agent.toml").write_text(toml.format_toml(settings))
    log = tmp_path / "agent.log"
    user.start(*FEDQUILT, "agent", str(user.home / "agent.toml"), log=log, OMP_NUM_THREADS="1")

    def deploy(name: str, payload: bytes) -> None:
        (tmp_path / f"{name}.onnx").write_bytes(payload)
        told("rollout", "model", str(tmp_path / f"{name}.onnx"), "--soak", "1s")

    models = user.home / "d/models"
    deploy("first", network())
    until((models / "current").exists, "the first model", told=log.read_text)
    said = tmp_path / "runner.log"
    user.start(*FEDQUILT, "model", "serve", str(models), "--listen", "127.0.0.1:0", log=said)
    port = until(lambda: re.search(r"answers at http://127\.0\.0\.1:(\d+)/", said.read_text()), "its address")[1]

    def ask(method: str, path: str, body: bytes | None = None) -> Any:
        line = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        line.request(method, path, body)
        answer = line.getresponse()
        found = json.loads(answer.read())
        line.close()
        assert answer.status == 200, found
        return found

    with np.load(DIGITS) as held:
        x, y = held["x_train"], held["y_train"]

    def send(x: np.ndarray, y: np.ndarray) -> None:
        file = io.BytesIO()
        np.savez(file, x=x, y=y)
        ask("POST", "/v1/classify", file.getvalue())

    def board() -> Any:
        return next((each for each in json.loads(told("devices", "--format", "json")) if each["device"] == "d"), {})

    send(x[:600], y[:600])
    until(lambda: board().get("drift") == 0.0 and board()["accuracy"] > 0.8, "what the runner tells", pause_s=0.5)
    assert "is armed" in told("run", str(armed(tmp_path)), "--broker", broker.url)
    (waiting,) = (each for each in json.loads(told("ls", "--format", "json")) if each["status"] == "armed")
    assert waiting["waits"] == "drift 0.3: 0 of 1 boards that tell are beyond, at least 1 needed"

    send(255 - x[600:1200], y[600:1200])

    def unapproved() -> str | None:
        rows = json.loads(told("ls", "--format", "json"))
        return next((each["run"] for each in rows if each["status"] == "waiting for approval"), None)

    run = until(unapproved, "the job", pause_s=0.5, told=(tmp_path / "serve.log").read_text)
    until(lambda: board()["accuracy"] < 0.8, "the accuracy of what is answered now", pause_s=0.5)
    assert "begins" in told("resume", run)
    first = ask("GET", "/v1/health")["model"]
    deploy("second", network(gain=2))
    until(lambda: ask("GET", "/v1/health")["model"] != first, "the second model", told=log.read_text)

    def ended() -> str:
        rows = {each["run"]: each["status"] for each in json.loads(told("ls", "--format", "json"))}
        return rows[run] if rows[run] not in ("queued", "running") else ""

    assert until(ended, "the job's end", pause_s=0.5, told=log.read_text) == "done"
    lines = told("logs", run)
    assert "[trigger]: 1 of 1 boards that tell are beyond drift 0.3: d (drift " in lines
    assert "approved by " in lines
