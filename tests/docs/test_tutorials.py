"""Every command of the tutorials is run, in their folder, with the files that they show."""

import getpass
import math
import re
import socket
import subprocess
from pathlib import Path

import pytest
from mosquittos import MOSQUITTO

import documents
from fedquilt.coordinator import settings
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent import settings as agents
from fedquilt.formats import toml

TUTORIALS = "docs/tutorials"
SIMULATE = [
    "fedquilt simulate digits",
    "fedquilt ls",
    "fedquilt why job",
    "fedquilt logs job",
    "fedquilt lab partition job.toml --out partition.svg",
    "fedquilt model export job --out digits.onnx",
    "fedquilt model run digits.onnx digits.npz",
    "fedquilt simulate job.toml --devices 20",
    "fedquilt simulate job.toml --devices 3 --link embedded",
    "fedquilt compare job.toml --methods fedavg fedprox local --seeds 0 1 --rounds 10 --set fedprox.mu=0.1",
    "fedquilt methods fedprox",
]
METHOD = [
    "fedquilt compare job.toml --methods fedavg prox:METHOD --seeds 0 1 --rounds 10 --set prox:METHOD.mu=1.0",
    "fedquilt lab conformance prox:METHOD",
]
NETWORK = [
    "fedquilt simulate own.toml",
    "fedquilt model export own --out own.onnx",
    "fedquilt simulate spirals.toml",
]
COLOURS = ("red", "green", "blue")
SERVERS = (
    "mosquitto ",
    "fedquilt identity serve ",
    "fedquilt serve ",
    "fedquilt agent ",
)  # which run until they are stopped
STATUS = "fedquilt rollout status --home runs"
STITCH = [
    "fedquilt prepare cifar.toml",
    "fedquilt simulate cifar.toml",
    "fedquilt logs cifar",
    "fedquilt model evaluate cifar",
    "fedquilt model export cifar --out cifar.onnx",
    "fedquilt model export cifar --candidate 14 --out cheap.onnx",
]


def tutorial(name: str, folder: Path) -> list[str]:
    """Write the files that a tutorial shows into the folder, and return the commands that it shows."""
    page = f"{TUTORIALS}/{name}.md"
    for file, text in documents.files(page).items():
        (folder / file).write_text(text)
    return documents.commands(page)


def require_shown(name: str, printed: str, tolerance: float = math.inf) -> None:
    """Require the output that a tutorial shows. Numbers differ on other processors."""
    for block in documents.blocks(f"{TUTORIALS}/{name}.md", "text"):
        is_table = block.startswith("method ")  # its last column is no time
        documents.require_lines(block, printed, tolerance if is_table else math.inf)


@pytest.mark.parametrize(
    "page", [f"{TUTORIALS}/{name}.md" for name in ("fleet", "network", "stitch")] + ["docs/energy.md"]
)
def test_every_file_that_is_shown_is_valid(page, tmp_path):
    shown = documents.files(page)
    assert shown
    for name, text in shown.items():
        (tmp_path / name).write_text(text)
        table = toml.read_toml(tmp_path / name)
        assert agents.parse_settings(table) if "device" in table else settings.parse_job(table)


def test_a_simulated_federation(shell):
    assert tutorial("simulate", shell.folder) == SIMULATE
    (shell.folder / "digits.npz").unlink()  # the first command writes this file
    shown = dict(zip(SIMULATE, map(shell.run, SIMULATE), strict=True))
    require_shown("simulate", "".join(shown.values()), 0.2)
    assert shown["fedquilt ls"].count("done") == 1
    assert "update received" in shown["fedquilt why job"]
    assert "accuracy" in shown["fedquilt logs job"]
    assert len(list(shell.folder.glob("job-*.html"))) == 3
    assert "<svg" in (shell.folder / "partition.svg").read_text()
    assert "fedprox" in shown[SIMULATE[9]]


def test_a_method_of_ones_own(shell):
    shell.run("fedquilt simulate digits")
    (shell.folder / "prox.py").write_text(documents.blocks(f"{TUTORIALS}/method.md", "python")[0])
    assert tutorial("method", shell.folder) == METHOD
    require_shown("method", "".join(shell.run(each.replace("--rounds 10", "--rounds 2")) for each in METHOD))


def test_a_network_and_a_data_set_of_ones_own(shell):
    pytest.importorskip("torch", reason="the network is torch's")
    for file, code in zip(
        ("small_cnn.py", "spirals.py"), documents.blocks(f"{TUTORIALS}/network.md", "python"), strict=True
    ):
        (shell.folder / file).write_text(code)
    assert tutorial("network", shell.folder) == NETWORK
    for name in ("own.toml", "spirals.toml"):
        file = shell.folder / name
        file.write_text(re.sub(r"rounds = \d+", "rounds = 2", file.read_text()))  # as many lines, in less time
    require_shown("network", "".join(map(shell.run, NETWORK)))
    assert (shell.folder / "own.onnx").stat().st_size > 1000


class Fleet:
    def __init__(self, shell: documents.Shell) -> None:
        self.shell = shell
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self.ports = {"8883": str(one.getsockname()[1]), "8884": str(other.getsockname()[1])}
        self.agents: list[subprocess.Popen[bytes]] = []

    def use_free_ports(self, text: str) -> str:
        return re.sub("8883|8884", lambda found: self.ports[found[0]], text)

    def run(self, typed: str) -> str:
        if not typed.startswith(SERVERS):
            return self.shell.run(self.use_free_ports(typed))
        if typed.startswith("mosquitto "):
            with (self.shell.folder / "broker" / "fedquilt.conf").open("a") as conf:  # root would become another user
                conf.write(f"user {getpass.getuser()}\n")
        process = self.shell.start(self.use_free_ports(typed))
        if typed.startswith("fedquilt agent "):
            self.agents.append(process)
        elif typed.startswith("fedquilt serve "):
            self.shell.until((self.shell.folder / "runs" / "fedquilt.db").exists, "the coordinator's store")
        else:
            port = int(self.ports["8883" if typed.startswith("mosquitto ") else "8884"])
            self.shell.until(lambda: is_listening(port), typed)
        return ""

    def stop_agents(self) -> None:
        for process in self.agents:
            process.terminate()
            process.wait(timeout=documents.LIMIT_S)
        self.agents = []

    def until_printed(self, typed: str, *words: str) -> str:
        """Repeat a command until it prints the words, and return what it prints then."""
        printed = [""]

        def holds() -> bool:
            printed[0] = self.shell.run(typed)
            return all(word in printed[0] for word in words)

        self.shell.until(holds, f"{typed}: {words}")
        return printed[0]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def count_runs(home: Path) -> int:
    with Store(home) as store:
        return len(store.readable_jobs())


def test_three_devices_with_tls_and_a_rollout(shell):
    if MOSQUITTO is None:
        pytest.skip("Mosquitto is not installed: apt install mosquitto")
    fleet = Fleet(shell)
    shell.run("fedquilt simulate digits")
    *begin, devices, run, again, stop, resume, why, doctor = tutorial("fleet", shell.folder)
    red = shell.folder / "red.toml"
    red.write_text(fleet.use_free_ports(red.read_text()))
    [copies] = documents.blocks(f"{TUTORIALS}/fleet.md", "sh")
    subprocess.run(["sh", "-c", copies], cwd=shell.folder, check=True)
    assert {str(agents.load_settings(shell.folder / f"{name}.toml").device) for name in COLOURS} == set(COLOURS)
    for typed in begin:
        fleet.run(typed)
    require_shown("fleet", fleet.until_printed(devices, "3 online", "0/500 MB"))
    printed = fleet.run(run)
    assert "3 devices" in printed
    assert "done" in printed
    assert "coordinator is authenticated" in shell.log()
    assert "messages are unsigned" not in shell.log()
    kept = [
        path for name in COLOURS for path in Path(agents.load_settings(shell.folder / f"{name}.toml").home).rglob("*")
    ]
    assert any(path.parent.name == "blobs" for path in kept)
    assert [path for path in kept if path.stat().st_mode & 0o077] == []
    assert again == run
    starts = [typed for typed in begin if typed.startswith("fedquilt agent ")]
    fleet.stop_agents()  # so that the run cannot end before it is stopped
    following = shell.start(again)
    shell.until(lambda: count_runs(shell.folder / "runs") == 2, "the second run in the store")
    fleet.run(stop)
    assert following.wait(timeout=documents.LIMIT_S) == 9, shell.log()
    for typed in starts:
        fleet.run(typed)
    assert "done" in fleet.run(resume)
    assert all(name in fleet.run(why) for name in COLOURS)

    rollout, status, predict, back, status, change, status = tutorial("rollout", shell.folder)
    assert status == STATUS
    fleet.run(rollout)
    fleet.until_printed(STATUS, "done", "3 committed")
    require_shown("rollout", fleet.run(predict))
    fleet.run(back)
    fleet.until_printed(STATUS, "rolled back", "3 returned")
    fleet.run(change)
    fleet.until_printed(STATUS, "done", "3 committed")
    shell.until(lambda: shell.run(devices).count("0/300 MB") == 3, "the new budget on every device")
    fleet.stop_agents()
    fleet.run(doctor)


@pytest.mark.nightly
def test_stitching_for_cifar_with_imagenet_donors(shell):
    data = documents.data()
    if not (data / "weights").is_dir():
        pytest.skip(f"no pre-trained weights in {data / 'weights'} (FEDQUILT_TEST_DATA names another folder)")
    pytest.importorskip("torch", reason="prepare cuts donors with torch")
    assert tutorial("stitch", shell.folder) == STITCH
    job = shell.folder / "cifar.toml"
    text = job.read_text()
    for file in ("mobilenet_v2-torchvision-v1-bnfolded.pt", "squeezenet1_1-onnxzoo-gluon.pt"):
        text = text.replace('weights = "DEFAULT"', f'weights = "{data / "weights" / file}"', 1)
    text = text.replace('path = "cifar"\ndataset = "CIFAR10"\ndownload = true\nlimit = 10000\n', "")
    text = text.replace("[data]\n", f'[data]\npath = "{data / "cifar10-10k.npz"}"\nlimit = 300\n')
    text = text.replace("[cohort]\n", "[params]\nexpansions = 1\nsamples = 8\n\n[cohort]\n")
    text = text.replace("size = 10", "size = 2", 1).replace("devices = 100", "devices = 2")
    job.write_text(text)
    few = [command.replace("--candidate 14", "--candidate 1") for command in STITCH]  # as this search is smaller
    printed = "".join(map(shell.run, few))
    assert "donor mobilenet: 20 blocks, 14 MB" in printed
    assert "chosen: " in printed
    assert (shell.folder / "cifar.onnx").stat().st_size > 10_000
