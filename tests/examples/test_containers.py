"""examples/containers: commands that fedquilt takes, and images that podman builds and that say their version.

The build needs podman, an index of Python packages and a base image that no registry has to give: FEDQUILT_TEST_BASE is
an archive of a root file system with Python and its venv module, such as debootstrap makes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import command_lines
from fedquilt import __version__

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "containers"
BASE = os.environ.get("FEDQUILT_TEST_BASE", "")


def test_every_command_of_an_image_or_service_is_one() -> None:
    """And what a service builds is a stage of the Containerfile."""
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
    for words in commands:
        command_lines.parsed(words)


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Podman with storage of its own, which has the base image."""
    if shutil.which("podman") is None or not BASE:
        pytest.skip("podman is not installed, or FEDQUILT_TEST_BASE names no archive of a base system")
    folder = tmp_path_factory.mktemp("podman")
    own = ["podman", "--storage-driver", "vfs", "--root", str(folder / "root"), "--runroot", str(folder / "run")]

    def call(*words: str, cwd: Path | None = None) -> str:
        done = subprocess.run([*own, *words], capture_output=True, text=True, cwd=cwd, check=False)
        assert done.returncode == 0, f"podman {words[0]}: {done.stderr[-2000:]}"
        return done.stdout

    call("import", BASE, "fedquilt-base")
    yield call
    call("unshare", "rm", "-rf", str(folder)) if os.geteuid() else shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("role", ["coordinator", "agent"])
def test_podman_builds_an_image_that_runs_as_an_ordinary_user(
    podman: Callable[..., str], tmp_path: Path, role: str
) -> None:
    """It finds fedquilt, writes its volume, and is not root."""
    shutil.copy(FOLDER / "Containerfile", tmp_path)
    extras = {"coordinator": "identity,metrics", "agent": "identity,onnx"}[role]
    wheels = [sys.executable, "-m", "pip", "wheel", "-q", "--wheel-dir", str(tmp_path / "wheels"), f"{ROOT}[{extras}]"]
    subprocess.run(wheels, check=True)
    built = ("--build-arg", "BASE=localhost/fedquilt-base", "--network", "host", "--isolation", "chroot")
    podman("build", *built, "--target", role, "--tag", role, str(tmp_path))
    run, image = ("run", "--rm", "--ulimit", "host", "--network", "none", "--cgroups", "disabled"), f"localhost/{role}"
    assert __version__ in podman(*run, image, "--version")
    assert podman(*run, "--entrypoint", "id", image, "-u").strip() == "10001"
    podman(*run, "--entrypoint", "touch", image, "/var/lib/fedquilt/written")
