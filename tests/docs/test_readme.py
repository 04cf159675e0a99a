"""Every command of the README is run, in its order, with the README's own files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fedquilt.tools.demo
from fedquilt import config
from fedquilt.coordinator import settings
from fedquilt.coordinator.facts import Answered
from fedquilt.coordinator.store import Store

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [line[2:] for block in re.findall(r"```console\n(.*?)```", README, re.S) for line in block.splitlines()]
FILES = {
    found[0]: block
    for block in re.findall(r"```toml\n(.*?)```", README, re.S)
    if (found := re.findall(r"^# (\S+\.toml)", block))
}
DATA = Path(os.environ.get("FEDQUILT_TEST_DATA", ROOT.parent / "shared" / "data"))
LIMIT_S = 120.0

# run elsewhere: by whoever runs this, by tests/tools/test_demo.py, and too long to be a test
ELSEWHERE = {
    "make demo",
    "make test",
    "fedquilt run-model fedquilt-demo/stitched.onnx fedquilt-demo/held-out.npz",
    "sudo fedquilt emulate --out emulated",
    "sudo fedquilt emulate --systemd --out emulated",
    "fedquilt doctor agent.toml",
    "fedquilt doctor --home runs --broker mqtts://broker.site:8883 --ca ca.crt --cert coordinator.crt "
    "--key coordinator.key",
    "sudo fedquilt clocks serve --group fedquilt",
    "fedquilt clocks status",
    "fedquilt clocks hold cpu=1.2GHz,gpu=850MHz --dry-run",
    "fedquilt record --minutes 5 --out board.toml",
}


class Shell:
    """Runs commands in a folder, as typed; notes which ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: list[str] = []
        self.background: list[subprocess.Popen[bytes]] = []

    def arguments(self, typed: str, **replaced: str) -> list[str]:
        self.ran.append(typed)
        for old, new in replaced.items():
            typed = typed.replace({"broker": "mqtts://broker.site:8883", "port": "1883"}[old], new)
        typed = re.sub(r" --(ca|cert|key) \S+", "", typed) if replaced else typed
        words = shlex.split(typed)
        module = {"fedquilt": ["-m", "fedquilt.cli"], "python": []}[words[0]]
        return [sys.executable, *module, *words[1:]]

    def run(self, typed: str, code: int = 0, **replaced: str) -> str:
        done = subprocess.run(
            self.arguments(typed, **replaced), cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == code, f"{typed} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, typed: str, **replaced: str) -> subprocess.Popen[bytes]:
        with (self.folder / "background.log").open("ab") as log:
            process = subprocess.Popen(self.arguments(typed, **replaced), cwd=self.folder, stdout=log, stderr=log)
        self.background.append(process)
        return process


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A folder with the README's files and the demo's digits."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    shutil.copy(Path(fedquilt.tools.demo.__file__).parent / "digits.npz", tmp_path / "digits.npz")
    made = Shell(tmp_path)
    yield made
    for process in made.background:
        process.terminate()
    for process in made.background:
        process.wait(timeout=20)


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll what only other processes can change."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.05)


RESEARCHER = [
    "fedquilt prepare train.toml",
    "fedquilt fleet train.toml --devices 10 --link memory",
    "fedquilt fleet train.toml",
    "fedquilt ls",
    "fedquilt logs train",
    "fedquilt export train --out weights.safetensors",
    "fedquilt partition train.toml --out partition.svg",
    "fedquilt compare train.toml --methods fedavg fedprox scaffold --seeds 0 1 2 --set fedprox.mu=0.1 --target 0.8",
    "fedquilt report train --out train.html",
    "fedquilt methods fedpews",
    "fedquilt reproduce",
]
OPERATOR = [
    "fedquilt serve --home runs --broker mqtts://broker.site:8883 --ca ca.crt --cert coordinator.crt "
    "--key coordinator.key",
    "fedquilt agent agent.toml",
    "fedquilt run train.toml --home runs",
    "fedquilt logs train --home runs",
    "fedquilt stop train --home runs",
    "fedquilt resume train --home runs",
    "fedquilt broker --port 1883",
    "fedquilt why train --home runs",
]
CIFAR = [
    "fedquilt prepare cifar.toml",
    "fedquilt fleet cifar.toml --link memory",
    "fedquilt export cifar --out cifar.onnx",
]
REPLAY = ["python -m fedquilt.tools.simulation.faults --seed 17"]


def test_no_command_of_the_readme_is_left_out() -> None:
    """A new one needs a place in one of the lists above."""
    assert set(COMMANDS) == {*RESEARCHER, *OPERATOR, *CIFAR, *REPLAY, *ELSEWHERE}


def test_every_file_of_the_readme_is_valid(tmp_path: Path) -> None:
    """Jobs and agents are parsed strictly."""
    from fedquilt.edge_agent import settings as agents

    assert set(FILES) == {"train.toml", "agent.toml", "careful.toml", "cifar.toml"}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        table = config.read(tmp_path / name)
        assert agents.parse(table) if name == "agent.toml" else settings.parse(table)


def test_the_researchers_way_in(shell: Shell) -> None:
    """Prepare, a fleet on virtual time, a fleet of processes, and what came of them."""
    pytest.importorskip("torch", reason="prepare makes a network's first weights with torch")
    shown = [shell.run(command) for command in RESEARCHER]
    assert shown[3].count("done") == 2
    assert "held-out examples" in shown[4]
    assert (shell.folder / "weights.safetensors").stat().st_size > 1000
    assert "<svg" in (shell.folder / "partition.svg").read_text()
    assert all(method in shown[7] for method in ("fedavg", "fedprox", "scaffold"))
    assert "</html>" in (shell.folder / "train.html").read_text()
    assert "fedpews-table2" in shown[10]


def test_the_operators_way_in(shell: Shell) -> None:
    """Broker, coordinator and agent stay up; a job is submitted, watched, stopped and resumed."""
    pytest.importorskip("torch", reason="prepare makes a network's first weights with torch")
    job = shell.folder / "train.toml"
    job.write_text(job.read_text().replace("[params]", "[params]\nepochs = 300"))  # time enough to be stopped
    agent = shell.folder / "agent.toml"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    url = f"mqtt://127.0.0.1:{port}"
    agent.write_text(re.sub(r'\n(ca|cert|key) = ".*"', "", agent.read_text()).replace("mqtts://broker.site:8883", url))
    home = shell.folder / "runs"

    shell.run("fedquilt prepare train.toml")
    shell.start(OPERATOR[6], port=port)
    shell.start(OPERATOR[0], broker=url)
    until(lambda: (home / "fedquilt.db").exists(), "the coordinator's store")
    shell.start(OPERATOR[1])
    run = shell.start(OPERATOR[2])

    def answered() -> bool:
        with Store(home) as store:
            return any(isinstance(f, Answered) for row in store.jobs() for _, _, f in store.facts(row.id))

    until(answered, "the first answer")
    assert "asked orin-07" in shell.run(OPERATOR[3])
    assert "orin-07" in shell.run(OPERATOR[7])
    shell.run(OPERATOR[4])
    assert run.wait(timeout=LIMIT_S) == 9, (shell.folder / "background.log").read_text()
    assert "done" in shell.run(OPERATOR[5])
    assert set(OPERATOR) <= set(shell.ran)


def test_stitching_for_cifar_with_imagenet_donors(shell: Shell) -> None:
    """The same job on files in place of downloads, and on a smaller scale."""
    weights = DATA / "weights"
    if not weights.is_dir():
        pytest.skip(f"no pre-trained weights in {weights} (FEDQUILT_TEST_DATA names another folder)")
    pytest.importorskip("torch", reason="prepare cuts donors with torch")
    job = shell.folder / "cifar.toml"
    text = job.read_text()
    for file in ("mobilenet_v2-torchvision-v1-bnfolded.pt", "squeezenet1_1-onnxzoo-gluon.pt"):
        text = text.replace('weights = "DEFAULT"', f'weights = "{weights / file}"', 1)
    text = text.replace('path = "cifar"\nformat = "torchvision"\ndataset = "CIFAR10"\ndownload = true\n', "")
    text = text.replace("[data]\n", f'[data]\npath = "{DATA / "cifar10-10k.npz"}"\nlimit = 300\n')
    text = text.replace("expansions = 24", "expansions = 1").replace("depth = 20", "depth = 3")
    text = text.replace("samples = 64", "samples = 8")
    text = text.replace("size = 10", "size = 2", 1).replace("devices = 100", "devices = 2")
    job.write_text(text)
    for command in CIFAR:
        shell.run(command)
    assert (shell.folder / "cifar.onnx").stat().st_size > 10_000


def test_a_seed_can_be_played_again(shell: Shell) -> None:
    """As a failing test's message says."""
    assert "1 seeds" in shell.run(REPLAY[0])
