"""Emulation of a flashed board's architecture on this machine (`fedquilt emulate`).

The board is a Debian for arm64 in a folder, whose programs run in qemu's user emulation. `board flash` installs an
agent, and the commands of the agent's units are started: the agent enrols and takes part in the rounds of a stitching
job, over TLS, with a broker on loopback. A kernel, systemd's limits and sandbox, a GPU, clocks and meters are not
emulated. Times are the emulator's, many times a board's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import JobError, LinkError
from fedquilt.formats import toml
from fedquilt.host.disk import disk_errors
from fedquilt.tools.emulate import binfmt, guest, host, native_comparison, programs, units
from fedquilt.tools.emulate.guest import Guest
from fedquilt.tools.emulate.host import HostMachine
from fedquilt.tools.emulate.rollouts import RolloutDriver, job_table
from fedquilt.tools.emulate.site import STOP_S, LoopbackFleet, find_free_ports, last, run_server, stop_process
from fedquilt.tools.lab import demo
from fedquilt.tools.simulation.agents import FleetPlan, run_fleet_virtually

HERE: Final = Path(__file__).parent
DEVICE: Final = "emulated"
BUDGET: Final = "1GB"  # a task's process; the emulator's own translations count with it
DEADLINE_S: Final = 900.0
ONLINE_S: Final = 300.0
DEPLOYED_S: Final = 900.0  # longest that a rollout may take in the emulator
DATA: Final = "/srv/digits.npz"  # in the root file system


class SingleBoard(FleetPlan):
    """One board that has all the data. Its random draws depend on its name."""

    def make_agent_tables(self, run: str = "") -> list[dict[str, Any]]:
        return [{**table, "device": DEVICE} for table in super().make_agent_tables(run)]


@dataclass
class EmulationSteps:
    """Report of steps, with the seconds that each took."""

    quiet: bool = False
    taken: dict[str, float] = field(default_factory=dict)  # step -> seconds

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[list[str]]:
        """Time a step; words appended to the list are printed after it."""
        self._print_text(f"{what} ...", end="")
        notes: list[str] = []
        began_s = time.monotonic()
        try:
            yield notes
        except BaseException:
            self._print_text("")
            raise
        self.taken[what] = round(time.monotonic() - began_s, 2)
        self._print_text(f" {self.taken[what]:.1f} s" + "".join(f"; {note}" for note in notes))

    def _print_text(self, text: str, end: str = "\n") -> None:
        if not self.quiet:
            print(text, end=end, flush=True)


def system(out: Path) -> Path:
    """Folder of the root file system."""
    return out / f"{guest.SUITE}-arm64"


def check_machine(out: Path, machine: HostMachine | None = None) -> HostMachine:
    here = machine or HostMachine.detect(out.resolve())
    host.require_all(here, system(out.resolve()).exists())
    return here


def main(out: Path, mirror: str | None, rounds: int | None, format: str, machine: HostMachine | None = None) -> int:
    out, machine = out.resolve(), check_machine(out, machine)
    root = system(out)
    folder = out / time.strftime("%Y%m%d-%H%M%S")
    with disk_errors(f"make {folder}"):
        folder.mkdir(parents=True)
    emulator = Path(machine.programs["qemu-aarch64-static"])
    steps = EmulationSteps(quiet=format == "json")
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.interrupt_on_signals())
        stack.enter_context(host.hold_lock(emulator))
        with steps("have the kernel run aarch64 programs") as notes:
            notes.append(stack.enter_context(binfmt.register_emulator(emulator)))
        board = _ensure_root(root, mirror, folder, steps)
        result = {**_run_proof(board, folder, rounds, steps, stack), "versions": _read_versions(board, emulator)}
    result |= {"seconds": steps.taken, "folder": str(folder)}
    (folder / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    if format == "json":
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(native_comparison.lines(result)))
    return 0 if native_comparison.agrees(result) else 8


def _ensure_root(root: Path, mirror: str | None, folder: Path, steps: EmulationSteps) -> Guest:
    if root.exists():
        with steps(f"take the root file system that is in {root}"):
            return Guest(root)
    mirror = mirror or programs.debian_mirror(guest.SUITE)
    with steps(f"debootstrap: Debian {guest.SUITE} for arm64 from {mirror}") as notes:
        made = guest.create_root(root, mirror, folder / "debootstrap.log")
        size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        notes.append(f"{size / 1e6:.0f} MB")
    return made


# -- the proof ------------------------------------------------------------------------------------


def _run_proof(
    board: Guest, folder: Path, rounds: int | None, steps: EmulationSteps, stack: contextlib.ExitStack
) -> dict[str, Any]:
    plan = _write_job(folder, rounds)
    site = LoopbackFleet(folder, *find_free_ports(2))
    with steps("an authority, a broker's and a coordinator's certificates, a token for the board"):
        site.issue_identities(DEVICE)
    with steps("flash the root file system") as notes:
        notes.append(_flash_board(site, board, plan))
    with steps("start the broker and the enrolment endpoint"):
        stack.enter_context(run_server(site.write_broker_config(), folder, folder / "mosquitto.log", site.broker))
        stack.enter_context(run_server(site.enrolment_command(), folder, folder / "enrol.log", site.endpoint))
    with steps("first boot: fedquilt-setup and fedquilt-enrol, in it") as notes:
        for name in ("fedquilt-setup", "fedquilt-enrol"):
            notes.append(_run_oneshot(board, units.read(board, name), folder / f"{name}.log"))
    with steps("start fedquilt-agent, in it, until it is online") as notes:
        agent, said = _start_agent(site, board, folder / "fedquilt-agent.log", stack)
        notes.append(said)
    with steps("fedquilt run: the job's rounds") as notes:
        _run_rounds(site, agent, folder)
        with Store(folder / "runs") as store:
            run = store.readable_jobs()[-1].id
            notes.append(store.stored_status(run))
    with steps("a model deployed to it, a worse one refused") as notes:
        notes.append(_deploy_models(site, board, folder / "fedquilt-agent.log"))
    with steps("the same job with one simulated board on this machine's own processor"):
        native, _ = _run_natively(plan, folder / "native")
    with Store(folder / "runs") as store, Store(folder / "native") as other:
        found = native_comparison.compare((store, run), (other, native))
    return {"run": run, **native_comparison.table(found)}


def _write_job(folder: Path, rounds: int | None) -> FleetPlan:
    table = toml.read_toml(demo.HERE / "job.toml")
    table["rounds"] = rounds or table["rounds"]
    table["cohort"] = {"deadline_s": DEADLINE_S}
    table["fleet"] = {"devices": 1, "boards": ["x86-host"], "budgets": [BUDGET]}
    table["data"] = {**table["data"], "path": str(demo.HERE / "digits.npz")}
    (folder / "job.toml").write_text(toml.format_toml(table))
    return SingleBoard(jobs.load_job(folder / "job.toml"), demo.HERE / "bundle", folder / "native", 1)


def _flash_board(site: LoopbackFleet, board: Guest, plan: FleetPlan) -> str:
    data = {**plan.make_agent_tables()[0]["data"], "path": DATA}
    (site.folder / "agent.toml").write_text(toml.format_toml(site.agent_table(DEVICE, BUDGET, data)))
    shutil.copyfile(plan.job.data["path"], board.root / DATA.lstrip("/"))
    (board.root / DATA.lstrip("/")).chmod(0o644)
    where = ["--rootfs", str(board.root)]
    site.run_fedquilt("board", "uninstall", "--purge", *where)
    site.run_fedquilt(
        *("board", "flash", "agent.toml", "--target", "arm64", "--python", guest.PYTHON, "--token", f"{DEVICE}.token"),
        *where,
    )
    return next(line for line in site.log.read_text().splitlines() if line.startswith(f"{DEVICE}: "))


def _run_oneshot(board: Guest, service: units.UnitService, log: Path) -> str:
    with log.open("ab") as out:
        process = units.start(board, service, out)
    try:
        code = process.wait(ONLINE_S)
    except subprocess.TimeoutExpired:
        raise LinkError(f"{service.name} has not ended after {ONLINE_S:g} s: {last(log)} ({log})") from None
    finally:
        stop_process(process, STOP_S)
    if code:
        raise JobError(f"{service.name} ended with {code}: {last(log)} ({log})")
    return f"{service.name}: {last(log)}" if log.stat().st_size else f"{service.name}: done"


def _start_agent(
    site: LoopbackFleet, board: Guest, log: Path, stack: contextlib.ExitStack
) -> tuple[subprocess.Popen[bytes], str]:
    listener = site.create_listener(DEVICE)
    stack.callback(listener.close)
    notices = units.StatusNotices(board)
    stack.callback(notices.close)
    with log.open("ab") as out:
        process = units.start(board, units.read(board, "fedquilt-agent"), out, notices.inside)
    stack.callback(stop_process, process, units.STOP_S)

    def online(said: Mapping[str, str]) -> bool:  # online at the broker, with or without a coordinator
        return said.get("READY") == "1" and bool(listener.receive(0.0).online)

    if not notices.wait(online, ONLINE_S, lambda: process.poll() is None):
        told = notices.said.get("STATUS") or last(log)
        raise LinkError(f"the agent is not online after {ONLINE_S:g} s: {told} ({log})")
    return process, notices.said.get("STATUS", "ready")


def _run_rounds(site: LoopbackFleet, agent: subprocess.Popen[bytes], folder: Path) -> None:
    words = site.fedquilt_command("run", "job.toml", *site.coordinator_options())
    (folder / "job.bundle").symlink_to(demo.HERE / "bundle")
    log = folder / "run.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while process.poll() is None:
            if agent.poll() is not None:
                agents = folder / "fedquilt-agent.log"
                raise JobError(f"the agent has ended with {agent.returncode}: {last(agents)} ({agents})")
            time.sleep(0.1)
    finally:
        stop_process(process, STOP_S)
    if process.returncode:
        raise JobError(f"fedquilt run ended with {process.returncode}: {last(log)} ({log})")


def _deploy_models(site: LoopbackFleet, board: Guest, log: Path) -> str:
    rollouts = RolloutDriver(site, DEVICE, lambda: last(log), DEPLOYED_S)
    link = board.root / "var/lib/fedquilt/models/current"
    with rollouts.run_coordinator():
        rollouts.train_model(job_table("first", cohort={"deadline_s": DEADLINE_S}))
        told = rollouts.deploy_committed("model", "first").heard[DEVICE].metrics
        model = os.readlink(link)
        rollouts.train_model(job_table("second", seed=1, cohort={"deadline_s": DEADLINE_S}))
        refused = rollouts.deploy_refused("model", "second", "--min-gain", "50pt").heard[DEVICE].reason
    if os.readlink(link) != model:
        raise JobError(f"the second model was refused, and {os.readlink(link)} is in use, not {model}")
    return f"{model}: accuracy {told['accuracy']:.1%}, {told['latency_s'] * 1e3:.1f} ms an answer; the other: {refused}"


def _run_natively(plan: FleetPlan, home: Path) -> tuple[str, str]:
    home.mkdir()
    with (home / "log.txt").open("w") as log, contextlib.redirect_stdout(log):
        return run_fleet_virtually(plan)


def _read_versions(board: Guest, emulator: Path) -> dict[str, str]:
    python = "/opt/fedquilt/current/bin/python"
    code = "import numpy, onnxruntime, platform as p; print(p.machine(), p.python_version(), numpy.__version__, "
    machine, *found = board.run(python, "-c", f"{code} onnxruntime.__version__)").split()
    return {
        "qemu": programs.run([str(emulator), "--version"]).split("\n")[0].split("version ")[-1],
        "machine": f"{machine} ({guest.CPU})",
        **dict(zip(("python", "numpy", "onnxruntime"), found, strict=True)),
    }
