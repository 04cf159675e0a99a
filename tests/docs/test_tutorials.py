"""Every command of the tutorials is run, in their folder, with the files that they show."""

import re
import socket
from pathlib import Path

import pytest

import documents
from fedquilt.coordinator import settings
from fedquilt.coordinator.storage.store import Store
from fedquilt.edge_agent import settings as agents
from fedquilt.formats import toml

TUTORIALS = "docs/tutorials"
SIMULATE = [
    "fedquilt init --method fedprox --data digits --devices 4 --rounds 5 --out first.toml",
    "fedquilt prepare train.toml",
    "fedquilt simulate train.toml --devices 10",
    "fedquilt simulate train.toml --link embedded",
    "fedquilt ls",
    "fedquilt logs train",
    "fedquilt report train --out train.html",
    "fedquilt model export train --out weights.safetensors",
    "fedquilt lab partition train.toml --out partition.svg",
    "fedquilt compare train.toml --methods fedavg fedprox --seeds 0 1 --set fedprox.mu=0.1 --target 0.7",
    "fedquilt methods fedpews",
    "fedquilt lab reproduce",
]
SERVE, AGENT, DEVICES, RUN, LOGS, WHY, STOP, RESUME, BROKER = [
    "fedquilt serve --home runs --broker mqtts://broker.site:8883 --ca ca.crt --cert coordinator.crt "
    "--key coordinator.key",
    "fedquilt agent agent.toml",
    "fedquilt devices --home runs",
    "fedquilt run train.toml --home runs",
    "fedquilt logs train --home runs",
    "fedquilt why train --home runs",
    "fedquilt stop train --home runs",
    "fedquilt resume train --home runs",
    "fedquilt broker --listen 127.0.0.1:1883",
]
# tested elsewhere, or too long or too privileged for a test: test_pages.py parses them
PARSED = {
    "fedquilt doctor agent.toml",
    "fedquilt doctor --home runs --broker mqtts://broker.site:8883 --ca ca.crt --cert coordinator.crt "
    "--key coordinator.key",
}
STITCH = [
    "fedquilt prepare cifar.toml",
    "fedquilt simulate cifar.toml --link memory",
    "fedquilt model export cifar --out cifar.onnx",
]


def tutorial(name: str, folder: Path) -> list[str]:
    """Write the files that a tutorial shows into the folder, and return the commands that it shows."""
    page = f"{TUTORIALS}/{name}.md"
    for file, text in documents.files(page).items():
        (folder / file).write_text(text)
    return documents.commands(page)


@pytest.mark.parametrize(
    "page", [f"{TUTORIALS}/{name}.md" for name in ("simulate", "fleet", "stitch")] + ["docs/energy.md"]
)
def test_every_file_that_is_shown_is_valid(page, tmp_path):
    shown = documents.files(page)
    assert shown
    for name, text in shown.items():
        (tmp_path / name).write_text(text)
        table = toml.read_toml(tmp_path / name)
        assert agents.parse_settings(table) if name == "agent.toml" else settings.parse_job(table)


def test_a_first_job_on_one_machine(shell):
    assert tutorial("simulate", shell.folder) == SIMULATE
    shown = dict(zip(SIMULATE, map(shell.run, SIMULATE), strict=True))
    assert shown["fedquilt ls"].count("done") == 2
    assert "accuracy" in shown["fedquilt logs train"]
    assert (shell.folder / "first.toml").exists()
    assert (shell.folder / "weights.safetensors").stat().st_size > 1000
    assert "<svg" in (shell.folder / "partition.svg").read_text()
    assert all(method in shown[SIMULATE[9]] for method in ("fedavg", "fedprox"))
    assert "</html>" in (shell.folder / "train.html").read_text()
    assert "fedpews-table2" in shown["fedquilt lab reproduce"]
    table = "".join(documents.blocks(f"{TUTORIALS}/simulate.md", "text"))
    documents.require_lines(table, "".join(shown.values()), tolerance=0.2)  # for other processors


def test_a_fleet_of_real_boards(shell):
    tutorial("simulate", shell.folder)
    shown = tutorial("fleet", shell.folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    url = f"mqtt://127.0.0.1:{port}"
    agent = shell.folder / "agent.toml"
    agent.write_text(re.sub(r'\n(ca|cert|key) = ".*"', "", agent.read_text()).replace("mqtts://broker.site:8883", url))
    home = shell.folder / "runs"

    def submitted():
        with Store(home) as store:
            return bool(store.readable_jobs())

    shell.run("fedquilt prepare train.toml")
    shell.start(BROKER, port=port)
    shell.start(SERVE, broker=url)
    shell.until((home / "fedquilt.db").exists, "the coordinator's store")
    run = shell.start(RUN)
    shell.until(submitted, "the job in the store")
    shell.run(STOP)
    assert run.wait(timeout=documents.LIMIT_S) == 9, shell.log()
    shell.start(AGENT)
    assert "done" in shell.run(RESUME)
    assert "1 board: 1 online" in shell.run(DEVICES)
    assert "orin-07" in shell.run(LOGS)
    assert "orin-07" in shell.run(WHY)
    assert set(shown) == set(shell.ran[1:]) | PARSED


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
    text = text.replace('path = "cifar"\ndataset = "CIFAR10"\ndownload = true\n', "")
    text = text.replace("[data]\n", f'[data]\npath = "{data / "cifar10-10k.npz"}"\nlimit = 300\n')
    text = text.replace("expansions = 24", "expansions = 1").replace("depth = 20", "depth = 3")
    text = text.replace("samples = 64", "samples = 8")
    text = text.replace("size = 10", "size = 2", 1).replace("devices = 100", "devices = 2")
    job.write_text(text)
    for command in STITCH:
        shell.run(command)
    assert (shell.folder / "cifar.onnx").stat().st_size > 10_000
