"""`fedquilt emulate`: the proof that what is flashed runs on the boards' architecture, without a board.

A Debian for arm64 in a folder, its programs run by qemu's user emulation; `fedquilt flash` puts an agent into
it, and the commands of its units are started there: the agent enrols and stitches in a job's rounds, over TLS, with a
broker on loopback. Not emulated: a kernel, systemd's limits and sandbox, a GPU, clocks and meters. Times are the
emulator's, many times a board's.
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

from fedquilt import config
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.store import Store
from fedquilt.core import JobError, LinkError
from fedquilt.disk import doing
from fedquilt.tools import demo
from fedquilt.tools.emulate import beside, binfmt, guest, host, units
from fedquilt.tools.emulate.guest import Guest
from fedquilt.tools.emulate.host import Machine
from fedquilt.tools.emulate.rollouts import Rollouts, job
from fedquilt.tools.emulate.site import STOP_S, Site, free_ports, last, running, stop
from fedquilt.tools.flash import own_python
from fedquilt.tools.simulation.agents import Plan, virtually

HERE: Final = Path(__file__).parent
DEVICE: Final = "emulated"
BUDGET: Final = "1GB"  # a task's process; the emulator's own translations count with it
DEADLINE_S: Final = 900.0
ONLINE_S: Final = 300.0
DEPLOYED_S: Final = 900.0  # longest that a rollout may take in the emulator
DATA: Final = "/srv/digits.npz"  # in the root file system


class Lone(Plan):
    """One board that has all the data. Its random draws depend on its name."""

    def agents(self, run: str = "") -> list[dict[str, Any]]:
        """Tables of the agents: this board's alone."""
        return [{**table, "device": DEVICE} for table in super().agents(run)]


@dataclass
class Steps:
    """Report of steps, with the seconds that each took."""

    quiet: bool = False
    taken: dict[str, float] = field(default_factory=dict)  # step -> seconds

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[list[str]]:
        """Time a step; words appended to the list are printed after it."""
        self._say(f"{what} ...", end="")
        notes: list[str] = []
        began_s = time.monotonic()
        try:
            yield notes
        except BaseException:
            self._say("")
            raise
        self.taken[what] = round(time.monotonic() - began_s, 2)
        self._say(f" {self.taken[what]:.1f} s" + "".join(f"; {note}" for note in notes))

    def _say(self, text: str, end: str = "\n") -> None:
        if not self.quiet:
            print(text, end=end, flush=True)


def system(out: Path) -> Path:
    """Folder of the root file system."""
    return out / f"{guest.SUITE}-arm64"


def required(out: Path, machine: Machine | None = None) -> Machine:
    """Look at this machine, unless its facts are given; returned where it has everything that an emulation needs.

    Raises:
        JobError: something is missing; says what, and the command that mends it.
    """
    here = machine or Machine.here(out.resolve())
    host.require(here, system(out.resolve()).exists())
    return here


def main(out: Path, mirror: str | None, rounds: int | None, format: str, machine: Machine | None = None) -> int:
    """Run the whole emulation; everything started or registered has ended when this returns or raises.

    Returns 8 if the emulated board's scores differ from this machine's.

    Args:
        out: folder of the root file system, which a later call reuses, and of each run.
        mirror: of Debian; None: the one that apt uses here.
        rounds: at most; None: until the search has found its network.
        format: "text", or "json" for the result as one line.
        machine: facts of this machine; None: looked up.

    Raises:
        JobError: a requirement is missing here; a step failed.
        LinkError: the broker or the agent does not come up.
        StoreError: the folder cannot be used.
    """
    out, machine = out.resolve(), required(out, machine)
    root = system(out)
    folder = out / time.strftime("%Y%m%d-%H%M%S")
    with doing(f"make {folder}"):
        folder.mkdir(parents=True)
    emulator = Path(machine.programs["qemu-aarch64-static"])
    steps = Steps(quiet=format == "json")
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.interruptible())
        stack.enter_context(host.alone(emulator))
        with steps("have the kernel run aarch64 programs") as notes:
            notes.append(stack.enter_context(binfmt.registered(emulator)))
        board = _system(root, mirror, folder, steps)
        result = {**_proof(board, folder, rounds, steps, stack), "versions": _versions(board, emulator)}
    result |= {"seconds": steps.taken, "folder": str(folder)}
    (folder / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    if format == "json":
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(beside.lines(result)))
    return 0 if beside.agrees(result) else 8


def _system(root: Path, mirror: str | None, folder: Path, steps: Steps) -> Guest:
    if root.exists():
        with steps(f"take the root file system that is in {root}"):
            return Guest(root)
    mirror = mirror or own_python.debian_mirror(guest.SUITE)
    with steps(f"debootstrap: Debian {guest.SUITE} for arm64 from {mirror}") as notes:
        made = guest.make(root, mirror, folder / "debootstrap.log")
        size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        notes.append(f"{size / 1e6:.0f} MB")
    return made


# -- the proof ------------------------------------------------------------------------------------


def _proof(board: Guest, folder: Path, rounds: int | None, steps: Steps, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Flash a root file system, and carry out a job's rounds in it."""
    plan = _job(folder, rounds)
    site = Site(folder, *free_ports(2))
    with steps("an authority, a broker's and a coordinator's certificates, a token for the board"):
        site.found(DEVICE)
    with steps("flash the root file system") as notes:
        notes.append(_flash(site, board, plan, folder.parent / "wheels"))
    with steps("start the broker and the enrolment endpoint"):
        stack.enter_context(running(site.mosquitto(), folder, folder / "mosquitto.log", site.broker))
        stack.enter_context(running(site.enrolment(), folder, folder / "enrol.log", site.endpoint))
    with steps("first boot: fedquilt-setup and fedquilt-enrol, in it") as notes:
        for name in ("fedquilt-setup", "fedquilt-enrol"):
            notes.append(_oneshot(board, units.read(board, name), folder / f"{name}.log"))
    with steps("start fedquilt-agent, in it, until it is online") as notes:
        agent, said = _agent(site, board, folder / "fedquilt-agent.log", stack)
        notes.append(said)
    with steps("fedquilt run: the job's rounds") as notes:
        _run(site, agent, folder)
        with Store(folder / "runs") as store:
            run = store.jobs()[-1].id
            notes.append(store.status(run))
    with steps("a model deployed to it, a worse one refused") as notes:
        notes.append(_deployed(site, board, folder / "fedquilt-agent.log"))
    with steps("the same job with one simulated board on this machine's own processor"):
        native, _ = _quietly(plan, folder / "native")
    with Store(folder / "runs") as store, Store(folder / "native") as other:
        found = beside.compare((store, run), (other, native))
    return {"run": run, **beside.table(found)}


def _job(folder: Path, rounds: int | None) -> Plan:
    """The demo's search, by one board that has all of its images."""
    table = config.read(demo.HERE / "job.toml")
    table["rounds"] = rounds or table["rounds"]
    table["cohort"] = {"deadline_s": DEADLINE_S}
    table["fleet"] = {"devices": 1, "boards": ["x86-host"], "budgets": [BUDGET]}
    table["data"] = {**table["data"], "path": str(demo.HERE / "digits.npz")}
    (folder / "job.toml").write_text(config.text(table))
    return Lone(jobs.load(folder / "job.toml"), demo.HERE / "bundle", folder / "native", 1)


def _flash(site: Site, board: Guest, plan: Plan, wheels: Path) -> str:
    """Flash as an operator would, after removing an earlier emulation; returns what was written, in words."""
    data = {**plan.agents()[0]["data"], "path": DATA}
    (site.folder / "agent.toml").write_text(config.text(site.board(DEVICE, BUDGET, data)))
    shutil.copyfile(plan.job.data["path"], board.root / DATA.lstrip("/"))
    (board.root / DATA.lstrip("/")).chmod(0o644)
    where = ["--rootfs", str(board.root)]
    site.fedquilt("flash", "--uninstall", "--purge", *where)
    site.fedquilt(
        *("flash", "agent.toml", "--target", "arm64", "--python", guest.PYTHON, "--token", f"{DEVICE}.token"),
        *("--constraint", str(HERE / "constraints.txt"), "--wheels", str(wheels), *where),
    )
    return next(line for line in site.log.read_text().splitlines() if line.startswith(f"{DEVICE}: "))


def _oneshot(board: Guest, service: units.Service, log: Path) -> str:
    """Run a service that ends; returns its last line of output."""
    with log.open("ab") as out:
        process = units.start(board, service, out)
    try:
        code = process.wait(ONLINE_S)
    except subprocess.TimeoutExpired:
        raise LinkError(f"{service.name} has not ended after {ONLINE_S:g} s: {last(log)} ({log})") from None
    finally:
        stop(process, STOP_S)
    if code:
        raise JobError(f"{service.name} ended with {code}: {last(log)} ({log})")
    return f"{service.name}: {last(log)}" if log.stat().st_size else f"{service.name}: done"


def _agent(site: Site, board: Guest, log: Path, stack: contextlib.ExitStack) -> tuple[subprocess.Popen[bytes], str]:
    """Start the agent; returns its status in words once it is online. The stack ends it."""
    listener = site.listener(DEVICE)
    stack.callback(listener.close)
    notices = units.Notices(board)
    stack.callback(notices.close)
    with log.open("ab") as out:
        process = units.start(board, units.read(board, "fedquilt-agent"), out, notices.inside)
    stack.callback(stop, process, units.STOP_S)

    def online(said: Mapping[str, str]) -> bool:  # online at the broker, with or without a coordinator
        return said.get("READY") == "1" and bool(listener.listen(0.0).online)

    if not notices.wait(online, ONLINE_S, lambda: process.poll() is None):
        told = notices.said.get("STATUS") or last(log)
        raise LinkError(f"the agent is not online after {ONLINE_S:g} s: {told} ({log})")
    return process, notices.said.get("STATUS", "ready")


def _run(site: Site, agent: subprocess.Popen[bytes], folder: Path) -> None:
    """The operator's `fedquilt run`, while the agent lives."""
    words = site.words("run", "job.toml", "--bundle", str(demo.HERE / "bundle"), *site.coordinator())
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
        stop(process, STOP_S)
    if process.returncode:
        raise JobError(f"fedquilt run ended with {process.returncode}: {last(log)} ({log})")


def _deployed(site: Site, board: Guest, log: Path) -> str:
    """Deploy a model trained in the system, which commits it, and one with too high a limit, which it refuses."""
    rollouts = Rollouts(site, DEVICE, lambda: last(log), DEPLOYED_S)
    link = board.root / "var/lib/fedquilt/models/current"
    with rollouts.served():
        rollouts.trained(job("first", cohort={"deadline_s": DEADLINE_S}))
        told = rollouts.brought("deploy", "first").heard[DEVICE].metrics
        model = os.readlink(link)
        rollouts.trained(job("second", seed=1, cohort={"deadline_s": DEADLINE_S}))
        refused = rollouts.refused("deploy", "second", "--min-gain", "50pt").heard[DEVICE].reason
    if os.readlink(link) != model:
        raise JobError(f"the second model was refused, and {os.readlink(link)} is in use, not {model}")
    return f"{model}: accuracy {told['accuracy']:.1%}, {told['latency_s'] * 1e3:.1f} ms an answer; the other: {refused}"


def _quietly(plan: Plan, home: Path) -> tuple[str, str]:
    home.mkdir()
    with (home / "log.txt").open("w") as log, contextlib.redirect_stdout(log):
        return virtually(plan)


def _versions(board: Guest, emulator: Path) -> dict[str, str]:
    """Versions of the emulator, and of the programs in it."""
    python = "/opt/fedquilt/current/bin/python"
    code = "import numpy, onnxruntime, platform as p; print(p.machine(), p.python_version(), numpy.__version__, "
    machine, *found = board.run(python, "-c", f"{code} onnxruntime.__version__)").split()
    return {
        "qemu": own_python.run([str(emulator), "--version"]).split("\n")[0].split("version ")[-1],
        "machine": f"{machine} ({guest.CPU})",
        **dict(zip(("python", "numpy", "onnxruntime"), found, strict=True)),
    }
