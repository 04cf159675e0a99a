"""The package of examples/outside, installed into a folder beside fedquilt: its method, network and data set.

Every command is a process of its own that finds the package as pip would leave it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sites
from ordinary import User

from fedquilt.coordinator.rounds.events import RoundCommitted
from fedquilt.coordinator.storage.store import Store
from fedquilt.core.evaluation import main_metric_value
from fedquilt.formats import toml
from fedquilt.tools.broker import EmbeddedBroker

pytest.importorskip("torch")

COMMAND = "import sys; sys.path.remove(''); from fedquilt.cli import main; sys.exit(main())"  # as `fedquilt` starts
LIMIT_S = 240.0  # of a command; nothing waits so long unless something hangs
NAMES = {"method": "fedavgm", "network": "tanh", "data": "moons"}
CODE = {"method": "outside_fl:METHOD", "network": "outside_fl:network", "data": "outside_fl:moons"}


def job(names: Mapping[str, str], devices: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "name": "outside",
        "method": names["method"],
        "rounds": 3,
        "params": {"lr": 0.1, "beta": 0.5},
        "check": {"every": 1},
        "model": {"name": names["network"], "inputs": 2, "classes": 2},
        "data": {"dataset": names["data"], "partition": "dirichlet"},
        "fleet": {"devices": devices, "boards": ["jetson-orin-nano"], "budgets": ["1GB"]},
        **more,
    }


def environment(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def fedquilt(folder: Path, site: Path, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-c", COMMAND, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment(site), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def committed(home: Path) -> list[RoundCommitted]:
    with Store(home) as store:
        return [
            fact for _, _, fact in store.read_events(store.readable_jobs()[0].id) if isinstance(fact, RoundCommitted)
        ]


def test_an_outside_method_network_and_data_set_take_at_most_60_lines() -> None:
    assert len((sites.EXAMPLE / "outside_fl.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    "names",
    [pytest.param(NAMES, id="entry points"), pytest.param(CODE, id="module:name", marks=pytest.mark.nightly)],
)
def test_they_run_under_fleet_and_compare(tmp_path: Path, names: Mapping[str, str]) -> None:
    """On virtual time and as compared methods; as module:name nothing is installed, the file lies in the folder."""
    site = sites.example(tmp_path / "site")
    if names is not NAMES:
        (site / "outside_fl.py").rename(tmp_path / "outside_fl.py")
        site = tmp_path / "nothing"
    (tmp_path / "job.toml").write_text(toml.format_toml(job(names)))
    fedquilt(tmp_path, site, "prepare", "job.toml")
    fedquilt(tmp_path, site, "simulate", "job.toml", "--link", "memory", "--home", "runs")
    rounds = committed(tmp_path / "runs")
    assert len(rounds) == 4  # the last one evaluates
    assert main_metric_value(rounds[-1].evaluation) > main_metric_value(rounds[0].evaluation)
    words = ("compare", "job.toml", "--methods", names["method"], "--seeds", "0", "--workers", "1")
    if names is NAMES:
        text = (site / "outside_fl.py").read_text()
        (site / "outside_fl.py").write_text(text.replace("= 0.7", "= 0.6"))
        said = fedquilt(tmp_path, site, *words, code=2)
        assert "package outside-fl 1.0" in said
        assert "`fedquilt prepare`" in said
        fedquilt(tmp_path, site, "prepare", "job.toml")
    assert names["method"] in fedquilt(tmp_path, site, *words)


# -- on boards ------------------------------------------------------------------------------------


class Agents:
    """Agents as processes of an ordinary user, each with its own packages, which that user may read alone."""

    def __init__(self, user: User, url: str) -> None:
        self._user, self.url = user, url
        self.log = user.folder / "agents.log"

    def start(self, device: str, site: Path, share: int, **more: Any) -> int:
        table = {
            "device": device,
            "home": str(self._user.home / device),
            "budget": "1GB",
            "board": "jetson-orin-nano",
            **more,
            "broker": {"url": self.url},
            "data": {"dataset": "moons", "partition": "iid", "share": share, "shares": 2},
        }
        settings = self._user.folder / f"{device}.toml"
        settings.write_text(toml.format_toml(table))
        words = (sys.executable, "-m", "fedquilt.cli", "agent", str(settings))
        more_environment = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        return self._user.start(*words, log=self.log, **more_environment).pid


@pytest.fixture
def agents(user: User) -> Iterator[Agents]:
    with EmbeddedBroker() as broker:
        yield Agents(user, broker.url)


def test_a_board_with_the_package_trains_and_those_without_it_or_with_another_content_are_not_asked(
    tmp_path: Path, user: User, agents: Agents
) -> None:
    """The coordinator waits for three boards and asks the one that has the very same files; `why` tells of the others.

    They are named with the package, both versions and the beginnings of their contents' digests. The agents are an
    ordinary user's, as on a board, and cannot write where the packages lie.
    """
    site, other = sites.example(user.folder / "site"), sites.example(user.folder / "other", "1.1", "\nMORE = 1\n")
    (tmp_path / "job.toml").write_text(toml.format_toml(job(NAMES, data={})))
    fedquilt(tmp_path, site, "prepare", "job.toml")
    started = [
        agents.start("same", site, 0),
        agents.start("newer", other, 1),
        agents.start("shut", site, 1, plugins=["something-else"]),
    ]
    assert {Path(f"/proc/{pid}").stat().st_uid for pid in started} == {user.uid}
    assert user.uid != 0
    fedquilt(tmp_path, site, "run", "job.toml", "--home", "runs", "--broker", agents.url)
    rounds = committed(tmp_path / "runs")
    assert len(rounds) == 4
    said = fedquilt(tmp_path, site, "why", "outside", "--home", "runs")
    assert "has package outside-fl 1.1 (" in said
    assert ", and the job needs 1.0 (" in said
    assert "lacks package outside-fl 1.0 (" in said
    assert "install that version on the device" in said


def test_conformance_tells_of_a_package_what_is_as_it_should_be_and_what_is_not(tmp_path: Path) -> None:
    """The example passes; a method that changes the state it is handed does not, and the exit code says so."""
    site = sites.example(tmp_path / "site")
    said = fedquilt(tmp_path, site, "lab", "conformance", "outside-fl")
    assert "it conforms" in said
    assert said.count("passed") >= 12
    broken = (
        "from dataclasses import replace\nfrom fedquilt.methods import fedavg\n"
        "def step(state, total):\n"
        "    new = fedavg.step(state, total)\n"
        "    for name, value in state.model.items():\n        value += 1\n"
        "    return new\n"
        "METHOD = replace(fedavg.METHOD, step=step)\n"
    )
    sites.install(site, "broken-fl", {"broken_fl.py": broken}, {"fedquilt.methods": {"broken": "broken_fl:METHOD"}})
    said = fedquilt(tmp_path, site, "lab", "conformance", "broken", code=8)
    assert "failed   fold and step keep state" in said
