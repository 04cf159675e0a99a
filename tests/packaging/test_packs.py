"""The core works in a copy of the checkout without any pack."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from tests.measures import packs

IMPORTS = """
import importlib, json, pkgutil
import fedquilt
failed = []
modules = [each.name for each in pkgutil.walk_packages(fedquilt.__path__, "fedquilt.", onerror=failed.append)]
for name in modules:
    try:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed.append(f"{name}: {error}" if error.name.startswith("fedquilt") else "")
print(json.dumps([len(modules), [each for each in failed if each]]))
"""
JOB = """
name = "job"
method = "fedavg"
engine = "numpy"
rounds = 2
check = { every = 1 }
model = { name = "mlp", inputs = 4, hidden = [8], classes = 2 }
data = { path = "points.npz", partition = "iid" }
fleet = { devices = 2 }
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    core, empty = tmp_path_factory.mktemp("core"), tmp_path_factory.mktemp("empty")
    packs.copy_core(core)

    def run_python(*words: str, in_copy: bool = False) -> subprocess.CompletedProcess[str]:
        env = {"PYTHONPATH": str(core), "PATH": "/usr/bin:/bin", "HOME": str(empty)}
        cwd = core if in_copy else empty
        return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True)

    np.savez(empty / "points.npz", x=np.eye(4, dtype=np.float32).repeat(5, 0), y=np.arange(4).repeat(5) % 2)
    (empty / "job.toml").write_text(JOB)
    return run_python


def test_each_module_of_the_core_is_imported_without_packs(run: Run) -> None:
    """Modules of optional packages that this machine lacks are left out."""
    done = run("-c", IMPORTS)
    assert done.returncode == 0, done.stderr
    count, failed = json.loads(done.stdout.splitlines()[-1])
    assert (count > 250, failed) == (True, [])


def test_tests_of_the_core_pass_without_packs(run: Run) -> None:
    """Of the coordinator's decisions and an agent's. The others do in the stage "core" of `make nightly`."""
    chosen = ["tests/coordinator/test_rounds.py", "tests/edge_agent/test_plan.py"]
    assert set(chosen) <= set(packs.find_core_tests())
    done = run("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *chosen, in_copy=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_help_lists_the_verbs_of_the_core(run: Run) -> None:
    """And no verb of a pack."""
    shown = run("-m", "fedquilt.cli", "--help")
    verbs = {line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ") and line.strip()}
    assert shown.returncode == 0, shown.stderr
    assert {"simulate", "serve", "agent", "rollout", "compare", "identity"} <= verbs
    assert not verbs & {"board", "dash", "demo", "doctor", "init", "lab"}


def test_a_federation_is_prepared_simulated_and_shown_without_packs(run: Run) -> None:
    """Two rounds of FedAvg on two devices."""
    done = run("-m", "fedquilt.cli", "simulate", "job.toml", "--home", "runs")
    assert done.returncode == 0, done.stderr
    shown = run("-m", "fedquilt.cli", "ls", "--home", "runs", "--format", "json")
    (row,) = json.loads(shown.stdout)
    assert (row["status"], row["rounds"]) == ("done", 2)
    assert run("-m", "fedquilt.cli", "why", row["run"], "--home", "runs").returncode == 0


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("doctor", "the verb 'doctor' is not installed: install the package fedquilt"),
        ("simulate digits", "this needs the full package fedquilt, which is not installed: pip install"),
        ("rollout build b.zip --target jetpack6", "this needs the full package fedquilt, which is not installed"),
    ],
)
def test_what_needs_a_pack_names_the_package_to_install(run: Run, words: str, missing: str) -> None:
    """With exit code 2, that of a wrong command line."""
    refused = run("-m", "fedquilt.cli", *words.split())
    assert refused.returncode == 2
    assert missing in refused.stderr
