"""The commands, as an operator types them; and a federation of boards that enrolled by them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT_S

from fedquilt.arrays import tensors
from fedquilt.cli import main
from fedquilt.coordinator import settings
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle, toml
from fedquilt.tools.simulation import agents

DIGITS = Path(agents.__file__).parents[1] / "lab" / "demo" / "digits.npz"
NETWORK = {"name": "mlp", "inputs": 64, "hidden": [16], "classes": 10}
JOB = """
name = "digits"
method = "fedavg"
engine = "numpy"
rounds = 1
[params]
lr = 0.1
batch = 8
epochs = 1
[cohort]
min_devices = 2
deadline_s = 60.0
[fleet]
devices = 2
boards = ["jetson-nano"]
budgets = ["256MB"]
[data]
path = "{digits}"
partition = "iid"
"""


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main([*words]) == code
    both = capsys.readouterr()
    return both.out + both.err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["identity", "init"]) == 0
    return tmp_path


def agent_toml(folder: Path, **more: Any) -> Path:
    files = {"ca": "ca.crt", "cert": "device.crt", "key": "device.key"}
    folder.mkdir()
    (folder / "ca.crt").write_bytes(Path("fedquilt-ca/ca.crt").read_bytes())
    table = {"device": "orin-7", "home": "home", "broker": {"url": "mqtts://127.0.0.1", **files}, **more}
    (folder / "agent.toml").write_text(toml.format_toml(table))
    return folder / "agent.toml"


def test_a_board_without_a_network_enrols_by_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = str(agent_toml(folder / "board"))
    asked = said(capsys, "identity", "request", board, "orin.csr")
    signed = said(capsys, "identity", "sign", "orin.csr", "--device", "orin-7")
    (fingerprint,) = set(re.findall(r"[0-9a-f]{64}", asked + signed))
    assert "orin-7 is enrolled, until" in said(capsys, "identity", "accept", board, "orin.crt")
    assert "orin-7 is enrolled, until" in said(capsys, "identity", "enrol", board)
    listed = json.loads(said(capsys, "identity", "list", "--format", "json"))["certificates"]
    assert [(one["name"], one["kind"], one["key_id"]) for one in listed] == [("orin-7", "device", fingerprint)]
    assert "of 'orin-7', not of orin-8" in said(capsys, "identity", "sign", "orin.csr", "--device", "orin-8", code=2)


def test_a_port_that_there_is_not_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broker", "config", "--host", "h", "--out", "b", "--listen", "0.0.0.0:99999"]) == 2
    assert "'0.0.0.0:99999' is not a valid address" in capsys.readouterr().err
    assert not (folder / "b").exists()


def test_no_token_is_made_for_the_coordinators_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["identity", "token", "coordinator"]) == 2
    assert "`fedquilt identity issue coordinator`" in capsys.readouterr().err


def test_a_token_is_shown_once_or_written_for_its_owner_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["identity", "token", "orin-*"]) == 0
    shown = capsys.readouterr()
    assert re.fullmatch(r"[\w-]{32}\n", shown.out)
    assert "for one board named orin-*" in shown.err
    assert shown.out.strip() not in shown.err + said(capsys, "identity", "list")
    Path("file").touch()
    assert "file/token" in said(capsys, "identity", "token", "orin-6", "--out", "file/token", code=6)
    assert "orin-6" not in said(capsys, "identity", "list")
    told = said(capsys, "identity", "token", "orin-7", "--out", "new/folder/token")
    assert Path("new/folder/token").stat().st_mode & 0o777 == 0o600
    assert Path("new/folder/token").read_text().strip() not in told


def test_revoking_says_how_brokers_hear_of_it_and_the_list_shows_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "coordinator.crt" in said(capsys, "identity", "issue", "coordinator", "--out", "own")
    assert Path("own/coordinator.key").stat().st_mode & 0o777 == 0o600
    assert "systemctl reload mosquitto" in said(capsys, "identity", "revoke", "coordinator")
    assert re.search(r"coordinator +coordinator +revoked 20", said(capsys, "identity", "list"))
    assert "identity token orin-7" in said(capsys, "identity", "issue", "orin-7", code=2)
    site = ("identity", "issue", "plant", "--role", "site")
    assert "plant.crt" in said(capsys, *site, "--boards", "cam-*", "--most-boards", "4")
    assert re.search(r"plant +site +valid until", said(capsys, "identity", "list"))
    assert "--role site needs --boards and --most-boards" in said(capsys, *site, code=2)
    assert "write names" in said(capsys, *site, "--boards", "*-cam", "--most-boards", "4", code=2)
    assert "repeat `fedquilt broker config`" in said(capsys, "identity", "issue", "tower", "--role", "observer")
    assert re.search(r"tower +observer +valid until", said(capsys, "identity", "list"))
    assert "an observer's name" in said(capsys, "identity", "issue", "tower", "--host", "tower.site", code=2)
    assert "a coordinator's name" in said(capsys, "identity", "issue", "coordinator", "--role", "observer", code=2)
    assert "has no certificate or token" in said(capsys, "identity", "revoke", "orin-9", code=2)
    assert "has an authority already" in said(capsys, "identity", "init", code=2)
    assert "identity init --ca none" in said(capsys, "identity", "list", "--ca", "none", code=6)


class Processes(list[subprocess.Popen[str]]):
    def start(self, log: Path, *words: str) -> subprocess.Popen[str]:
        with log.open("w") as out:
            self.append(subprocess.Popen([sys.executable, "-m", "fedquilt.cli", *words], stdout=out, stderr=out))
        return self[-1]


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    for process in made:
        process.kill()
        process.wait()


def listening(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    found = re.search(r"on port (\d+)", process.stdout.readline())
    assert found is not None
    return int(found[1])


def test_an_operator_brings_up_a_fleet_that_only_its_boards_can_join(
    folder: Path, mosquitto: Callable[..., Any], processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    etc = folder / "etc"
    said(capsys, "broker", "config", "--host", "127.0.0.1", "--out", "etc", "--installed", str(etc))
    said(capsys, "identity", "issue", "coordinator", "--out", "own")
    url = mosquitto(*(etc / "fedquilt.conf").read_text().splitlines()[2:]).url.replace("mqtt://", "mqtts://")
    serve = [sys.executable, "-m", "fedquilt.cli", "identity", "serve", "--listen", "127.0.0.1:0"]
    with (folder / "enrol.log").open("w") as log:
        endpoint = subprocess.Popen([*serve, "--host", "localhost"], stdout=subprocess.PIPE, stderr=log, text=True)
    processes.append(endpoint)
    port = listening(endpoint)

    (folder / "job.toml").write_text(JOB.format(digits=DIGITS))
    first = tensors.encode_tensors(numpy_engine.init_tensors(NETWORK, seed=0))
    job_bundle.write_bundle(folder / "job.bundle", {"network": NETWORK, "flops": 9600}, {"model": first})
    plan = agents.FleetPlan(settings.load_job(folder / "job.toml"), folder / "job.bundle", folder / "boards")
    for table in plan.make_agent_tables():
        device = table["device"]
        files = {"ca": "ca.crt", "cert": "device.crt", "key": "device.key"}
        more = {**table, "home": "home", "broker": {"url": url, **files}, "enrol": {"url": f"https://localhost:{port}"}}
        board = agent_toml(folder / device, **more)
        said(capsys, "identity", "token", device, "--out", f"{device}/token")
        assert f"{device} is enrolled, until" in said(capsys, "identity", "enrol", str(board), "--wait")
        processes.start(folder / f"{device}.log", "agent", str(board))
    endpoint.send_signal(signal.SIGTERM)
    assert endpoint.wait(timeout=LIMIT_S) == 0
    assert endpoint.stdout is not None
    endpoint.stdout.close()
    assert (folder / "enrol.log").read_text().count("enrolled jetson-nano-0") == 2

    own = ("--ca", "fedquilt-ca/ca.crt", "--cert", "own/coordinator.crt", "--key", "own/coordinator.key")
    run = processes.start(folder / "run.log", "run", "job.toml", "--broker", url, *own)
    assert run.wait(timeout=LIMIT_S) == 0, (folder / "run.log").read_text()
    stolen = ("--ca", "fedquilt-ca/ca.crt", "--cert", "jetson-nano-00/device.crt", "--key", "jetson-nano-00/device.key")
    processes[1].kill()  # the board's own agent
    thief = processes.start(folder / "thief.log", "run", "job.toml", "--broker", url, *stolen)
    assert thief.wait(timeout=LIMIT_S) == 2
    told = (folder / "thief.log").read_text()
    assert "is of 'jetson-nano-00', not of 'coordinator'" in told
