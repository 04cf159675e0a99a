"""examples/containers: commands that fedquilt takes, images and services that podman builds and starts.

The base is a Debian that debootstrap makes, or the archive of one with PACKAGES that FEDQUILT_TEST_BASE names: no
registry has to give it. An index of Python packages is needed. It takes minutes, and root: `make nightly`.
"""

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import LIMIT_S, wait_until

import command_lines
from fedquilt import __version__
from fedquilt.formats import toml
from fedquilt.tools.lab import demo
from tests.rehearsal import host
from tests.rehearsal.container import find_container_process
from tests.rehearsal.releases import job_table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "containers"
BASE = os.environ.get("FEDQUILT_TEST_BASE", "")
HOME = "/var/lib/fedquilt"  # in the containers
PACKAGES = ("python3", "python3-venv", "mosquitto")
HYBRID = Path("/sys/fs/cgroup/unified")  # control groups of versions 1 and 2 side by side, which crun refuses
FILES = {"ca": "ca.crt", "cert": "device.crt", "key": "device.key"}  # of the board, beside its agent.toml
BROKER = """FROM localhost/base
RUN usermod --uid 1883 mosquitto && groupmod --gid 1883 mosquitto \\
    && mkdir -p /mosquitto/data && chown mosquitto:mosquitto /mosquitto/data
CMD ["/usr/sbin/mosquitto", "-c", "/mosquitto/config/mosquitto.conf"]
"""  # in the place of eclipse-mosquitto, whose broker runs as 1883, too


def test_every_command_of_an_image_or_service_is_one():
    yaml = pytest.importorskip("yaml")
    text = (FOLDER / "Containerfile").read_text()
    commands = [json.loads(words) for words in re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)]
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    ours = [service for service in services.values() if "build" in service]
    for service in ours:
        assert f" AS {service['build']['target']}\n" in text
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    commands += [service["command"] for service in ours]
    assert len(commands) == 4
    commands += [words[1:] for line in said(FOLDER) if (words := shlex.split(line))[0] == "fedquilt"]
    for words in commands:
        command_lines.parsed(words)


def test_the_services_get_files_that_are_there_or_that_the_readme_makes():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    made = " ".join(said(FOLDER))
    mounted = {name: [volume.split(":") for volume in service["volumes"]] for name, service in services.items()}
    for place, *_ in (volume for volumes in mounted.values() for volume in volumes):
        known = (FOLDER / place).is_file() or f" {place.removeprefix('./')}" in made
        assert known if place.startswith("./") else place in ("runs", "broker")
    (kept,) = re.findall(r"^persistence_location (.*)/$", (FOLDER / "mosquitto.conf").read_text(), re.MULTILINE)
    assert ["broker", kept] in mounted["broker"]
    assert f"include_dir {mounted['broker'][1][1]}\n" in (FOLDER / "mosquitto.conf").read_text()
    assert f"--installed {mounted['broker'][1][1]}" in made


class Podman:
    def __init__(self, folder: Path) -> None:
        nofile, nproc = (resource.getrlimit(of)[1] for of in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
        tables = {
            "containers": {"default_ulimits": [f"nofile={nofile}:{nofile}", f"nproc={nproc}:{nproc}"]},
            "engine": {"cgroup_manager": "cgroupfs"},
            "network": {"network_backend": "netavark", "network_config_dir": str(folder / "networks")},
        }
        if HYBRID.is_dir():
            tables["engine"]["runtime"] = "runc"
        (folder / "containers.conf").write_text(toml.format_toml(tables))
        driver = "overlay" if "overlay" in Path("/proc/filesystems").read_text() else "vfs"
        storage = {"driver": driver, "graphroot": str(folder / "root"), "runroot": str(folder / "run")}
        (folder / "storage.conf").write_text(toml.format_toml({"storage": storage}))
        files = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
        self._environment = {**os.environ, **{key: str(folder / name) for key, name in files.items()}}
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]
        )
        wait_until(lambda: find_container_process(self._holder.pid), "the namespaces", 30.0)
        self._inside = find_container_process(self._holder.pid)
        self("ip", "link", "set", "lo", "up")

    def __call__(self, *words: str, cwd: Path | None = None) -> str:
        done = self.try_(*words, cwd=cwd)
        assert done.returncode == 0, f"{' '.join(words[:4])}: {done.stdout[-1000:]} {done.stderr[-3000:]}"
        return done.stdout

    def try_(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "--target", str(self._inside), "--net", "--mount", "--pid", f"--wd={cwd or Path.cwd()}"]
        return subprocess.run(
            [*enter, *words], capture_output=True, text=True, env=self._environment, stdin=subprocess.DEVNULL
        )

    def end(self) -> None:
        self.try_("podman", "rm", "--all", "--force", "--time", "5")
        self._holder.kill()
        self._holder.wait()


def hindrance() -> str:
    missing = [name for name in ("podman", "podman-compose", "unshare", "nsenter") if shutil.which(name) is None]
    if not Path("/usr/lib/podman/netavark").exists() or not Path("/usr/lib/podman/aardvark-dns").exists():
        missing += ["netavark", "aardvark-dns"]
    if HYBRID.is_dir() and not shutil.which("runc"):
        missing.append("runc")
    if missing:
        return f"not installed: {', '.join(missing)}; apt install podman podman-compose netavark aardvark-dns runc"
    if os.geteuid() != 0:
        return "namespaces for the containers' network need root"
    if f"{sys.version_info.major}.{sys.version_info.minor}" != host.PYTHON:
        return f"the images' wheels are made with Python {host.PYTHON}"
    return "" if BASE or shutil.which("debootstrap") else "no base image: apt install debootstrap"


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    if why := hindrance():
        pytest.skip(why)
    folder, archive = tmp_path_factory.mktemp("podman"), BASE
    if not archive:
        host.create_root(folder / "base", host.debian_mirror(), folder / "log", PACKAGES)
        archive = str(folder / "base.tar")
        subprocess.run(["tar", "-C", folder / "base", "-cf", archive, "--exclude=./dev", "."], check=True)
    called = Podman(folder)
    try:
        called("podman", "import", archive, "localhost/base")
        alone = called.try_("podman", "run", "--rm", "--network", "none", "localhost/base", "true")
        if alone.returncode:
            pytest.skip(f"podman runs no container here: {alone.stderr.strip()[-300:]}")
        (folder / "Containerfile").write_text(BROKER)
        called("podman", "build", "--network", "none", "--tag", "docker.io/library/eclipse-mosquitto:2", str(folder))
        yield called
    finally:
        called.end()
        shutil.rmtree(folder, ignore_errors=True)


def said(folder: Path) -> list[str]:
    (block,) = re.findall(r"```console\n(\$ pip wheel.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    commands = [line.removeprefix("$ ") for line in block.splitlines()]
    assert commands.pop() == "podman-compose up -d"
    return commands


@pytest.mark.nightly
def test_the_compose_file_serves_a_fleet_whose_board_is_a_container_too(podman, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(FOLDER, site)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in said(site):
        line = line.replace("sudo ", "").replace("hub.site", "enrolment").replace('"fedquilt[', f'"{ROOT}[')
        subprocess.run(["sh", "-ec", line], cwd=site, env=environment, check=True, stdout=subprocess.DEVNULL)
    text = (site / "compose.yaml").read_text()
    (site / "compose.yaml").write_text(text.replace("hub.site", "enrolment"))
    for role in ("coordinator", "agent"):
        built = ("--build-arg", "BASE=localhost/base", "--network", "none", "--target", role)
        podman("podman", "build", *built, "--tag", f"localhost/fedquilt-{role}", str(site))
        image = ("podman", "run", "--rm", "--network", "none", f"localhost/fedquilt-{role}")
        assert __version__ in podman(*image, "--version")
        assert podman(*image[:-1], "--entrypoint", "id", image[-1], "-u").strip() == "10001"
    compose = ("podman-compose", "--project-name", "fleet")
    podman(*compose, "up", "-d", "--no-build", cwd=site)

    def logs(name):
        done = podman.try_("podman", "logs", name)
        return done.stdout + done.stderr

    def logged(name, words, count=1):
        wait_until(
            lambda: logs(name).count(words) >= count,
            f"{words!r} of {name}",
            LIMIT_S,
            diagnostics=lambda: logs(name)[-2000:],
        )

    logged("fleet_coordinator_1", "connected to the broker")
    _board(podman, site)
    logged("agent", "connected to")
    inside = ("podman", "exec", "fleet_coordinator_1", "fedquilt")
    for name in ("job.toml", "job.bundle"):
        podman("podman", "cp", str(site / name), f"fleet_coordinator_1:{HOME}/{name}")
    run = (*inside, "run", f"{HOME}/job.toml", "--home", f"{HOME}/runs")
    assert "done" in podman(*run)
    for name, words in (("fleet_coordinator_1", "connected to the broker"), ("agent", "connected to")):
        pid = podman("podman", "inspect", "--format", "{{.State.Pid}}", name).strip()
        podman("kill", "-KILL", pid)
        logged(name, words, 2)
    assert "done" in podman(*run)
    podman(*inside, "backup", "save", f"{HOME}/runs", f"{HOME}/backup.tar")
    podman(*inside, "backup", "restore", f"{HOME}/backup.tar", f"{HOME}/again")
    rows = json.loads(podman(*inside, "ls", "--home", f"{HOME}/again", "--format", "json"))
    assert [row["status"] for row in rows] == ["done", "done"]
    podman(*compose, "down", cwd=site)


def _board(podman: Podman, site: Path) -> None:
    token = podman(
        "podman", "exec", "fleet_enrolment_1", "fedquilt", "identity", "token", "boxed", "--ca", f"{HOME}/ca"
    )
    board = site / "board"
    board.mkdir()
    (board / "token").write_text(token.split()[0] + "\n")
    shutil.copy(site / "etc/coordinator/ca.crt", board)
    shutil.copy(demo.HERE / "digits.npz", board)
    own = {name: f"/etc/fedquilt/{file}" for name, file in FILES.items()}
    table = {
        "device": "boxed",
        "home": f"{HOME}/home",
        "budget": "512MB",
        "broker": {"url": "mqtts://broker:8883", **own},
        "enrol": {"url": "https://enrolment:8884"},
        "data": {"path": "/etc/fedquilt/digits.npz", "share": 0, "shares": 1},
    }
    (board / "agent.toml").write_text(toml.format_toml(table))
    subprocess.run(["chown", "-R", "10001:10001", str(board)], check=True)
    places = ("--volume", f"{board}:/etc/fedquilt", "--volume", f"agent:{HOME}", "--network", "fleet_default")
    podman(
        *("podman", "run", "--rm", *places, "localhost/fedquilt-agent"),
        *("identity", "enrol", "/etc/fedquilt/agent.toml", "--wait"),
    )
    podman("podman", "run", "--detach", "--name", "agent", "--restart", "always", *places, "localhost/fedquilt-agent")
    (site / "job.toml").write_text(toml.format_toml(job_table("boxes")))
    subprocess.run([sys.executable, "-m", "fedquilt.cli", "prepare", "job.toml"], cwd=site, check=True)
    subprocess.run(["chmod", "-R", "a+rX", "job.toml", "job.bundle"], cwd=site, check=True)
