"""examples/cluster: the Slurm script with a Slurm and a Ray that are played, and the manifests of a RayJob."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

import command_lines

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
SCRIPT = FOLDER / "slurm.sbatch"
SLURM = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_NNODES": "3", "SLURM_CPUS_PER_TASK": "16"}
PROGRAMS = {
    "scontrol": "test \"$*\" = 'show hostnames node[1-3]' && echo localhost && echo node2 && echo node3",
    "srun": 'echo "srun $*" >> said; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": 'echo "ray $* $RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> said; '
    'while [[ $1 != -- ]]; do shift; done; shift; "$@"; code=$?; echo "ray stop" >> said; exit $code',
}


def environment(folder: Path, programs: Mapping[str, str]) -> dict[str, str]:
    (folder / "bin").mkdir()
    for name, body in programs.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    return {**os.environ, **SLURM, "TMPDIR": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def test_the_script_starts_ray_on_all_nodes_and_the_command_on_the_first(tmp_path):
    env = environment(tmp_path, {**PROGRAMS, "fedquilt": 'echo "fedquilt $*" >> said; exit 8'})
    for _ in range(2):
        done = subprocess.run(["bash", str(SCRIPT), "job.toml", "/runs"], cwd=tmp_path, env=env, check=False)
        assert done.returncode == 8
    assert not list(tmp_path.glob("tmp.*"))  # nothing is left
    srun, ray, fedquilt, _, *again = (tmp_path / "said").read_text().splitlines()
    assert "--nodes=3 --ntasks=3" in srun
    assert "symmetric-run --address 127.0.0.1:6379 --min-nodes 3 --num-cpus=16 " in ray
    assert "dashboard" not in ray  # what `ray start` takes with --head alone, and these options go to all nodes
    assert fedquilt == "fedquilt simulate job.toml --engine ray --home /runs"
    command_lines.parsed(shlex.split(fedquilt)[1:])
    mode, token = ray.split()[-2:]
    assert mode == "token"
    assert re.fullmatch("[0-9a-f]{64}", token)
    assert not again[1].endswith(token)


@pytest.mark.parametrize(
    ("ray", "code"),
    [("echo Failed to start Ray >&2", 0), (PROGRAMS["ray"].replace("$code", "0"), 130)],
    ids=["not started", "interrupted"],
)
def test_a_ray_that_does_not_start_or_is_interrupted_fails_the_job(tmp_path, ray, code):
    env = environment(tmp_path, {**PROGRAMS, "ray": ray, "fedquilt": f"exit {code}"})
    done = subprocess.run(
        ["bash", str(SCRIPT), "job.toml"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "job.toml did not come to its end" in done.stderr


def test_the_script_without_a_job_says_how_it_is_called(tmp_path):
    env = environment(tmp_path, PROGRAMS)
    done = subprocess.run(["bash", str(SCRIPT)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "sbatch slurm.sbatch job.toml [HOME]" in done.stderr
    assert not (tmp_path / "said").exists()


def test_slurms_warning_before_the_time_is_up_reaches_the_command(tmp_path):
    waits = "trap 'echo ended >> said; exit 0' TERM; echo began >> said; sleep infinity & wait"
    env = environment(tmp_path, {**PROGRAMS, "fedquilt": waits})
    process = subprocess.Popen(["bash", str(SCRIPT), "job.toml"], cwd=tmp_path, env=env)
    said = tmp_path / "said"
    wait_until(lambda: said.exists() and "began\n" in said.read_text(), "the command", 60.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60)
    assert said.read_text().endswith("ended\nray stop\n")


@pytest.fixture
def job() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found = {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())}
    assert found.keys() == {"PersistentVolumeClaim", "RayJob"}
    claim = found["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"][1]
    assert claim["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]
    return found["RayJob"]["spec"]


def test_the_ray_jobs_commands_are_ours_and_its_files_are_mounted(job):
    shell, option, script = shlex.split(job["entrypoint"])
    assert (shell, option) == ("sh", "-c")
    commands = [shlex.split(part)[1:] for part in script.split("&&") if part.split()[0] == "fedquilt"]
    for words in commands:
        command_lines.parsed(words)
    (head,) = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    mounted = {each["name"]: each["mountPath"] for each in head["volumeMounts"]}
    assert commands[-1][-2:] == ["--home", mounted["runs"]]
    assert f"cp {mounted['job']}/*" in script


def test_the_ray_clusters_head_has_no_workers_and_asks_for_a_token(job):
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f'"ray[default]=={cluster["rayVersion"]}"' in (FOLDER / "Containerfile").read_text()
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [each for pod in pods for each in pod["template"]["spec"]["containers"]]
    assert {each["image"] for each in containers} == {"fedquilt-ray"}
    for each in containers:
        assert {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"} in each["env"]
