"""A rehearsal: its fleet, its root file system, and each check on a booted board."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt import config
from fedquilt.coordinator.facts import Answered, Declined, Ended
from fedquilt.coordinator.store import Store
from fedquilt.core import FedquiltError, JobError, LinkError
from fedquilt.tools import demo
from fedquilt.tools.emulate import enclosure, guest, layouts
from fedquilt.tools.emulate.checks import Checks, NotHere
from fedquilt.tools.emulate.container import Container, until
from fedquilt.tools.emulate.hub import Hub
from fedquilt.tools.emulate.journal import reason, starts
from fedquilt.tools.emulate.layouts import Layout
from fedquilt.tools.emulate.listener import Heard
from fedquilt.tools.emulate.released import HOOK, Released, target
from fedquilt.tools.emulate.rollouts import job
from fedquilt.tools.emulate.site import HOST, STOP_S, Site, free_ports, last, running, stop
from fedquilt.tools.flash import own_python

PACKAGES: Final = (*guest.PACKAGES, "systemd-sysv", "dbus")  # what a booted system needs beside the least Debian
MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}  # the kernel's name -> Debian's and flash's
DEVICE: Final = "rehearsed"


AGENT, CLOCKS, ENROL = "fedquilt-agent.service", "fedquilt-clocks.service", "fedquilt-enrol.service"
FIRST: Final[Layout] = ("jetson-orin-nx", 6)  # the board on which everything is checked; others are only booted
USER: Final = "fedquilt"
BUDGET: Final = "256MB"
DATA: Final = "/srv/digits.npz"  # in the root file system
# folders of the root file systems and of the board's files, removed in the end
MADE: Final = ("root", "board", "hub")
JOB: Final = "job.toml"
HOG: Final = (400_000, 32, 32)  # pictures that take 1.6 GB as floats, and 1 MB on disk: all are black
ONLINE_S: Final = 90.0
BACK_S: Final = 60.0  # systemd waits 10 s before it starts the agent anew, 5 s for the helper
HANGS_S: Final = 150.0  # the watchdog's 60 s, then as above
RUN_S: Final = 180.0
TRIES: Final = 2  # starts of an agent that ends by itself before it is given up


class Rehearsal:
    """One rehearsal: its fleet on loopback, its root file system, and one boot of it after the other."""

    def __init__(self, folder: Path, checks: Checks, stack: contextlib.ExitStack) -> None:
        self.folder, self.checks, self._stack = folder, checks, stack
        self.root, self.tree, self._hub = (folder / name for name in MADE)
        broker, endpoint, self._port = free_ports(3)
        self.site = Site(folder, broker, endpoint)
        self.board: Container | None = None
        self.layout = FIRST
        self._runs = 0

    def clean(self) -> None:
        """Stop what is booted; only logs and results are left."""
        self.down()
        for path in (self.root, self.tree, self._hub):
            shutil.rmtree(path, ignore_errors=True)

    # -- before the first boot --

    def prepare(self, out: Path, mirror: str | None) -> None:
        """A fleet of its own on loopback, and a flashed root file system, made with the commands an operator types."""
        self._debian, self._wheels = self._base(out, mirror), out / "wheels"
        self.checks.say("an authority, certificates, a token, a job; the broker and the enrolment endpoint")
        self.site.found(DEVICE)
        self._prepare()
        self._stack.enter_context(
            running(self.site.mosquitto(), self.folder, self.folder / "mosquitto.log", self.site.broker)
        )
        self._stack.enter_context(
            running(self.site.enrolment(), self.folder, self.folder / "enrol.log", self.site.endpoint)
        )
        self.listener = self.site.listener(DEVICE)
        self._stack.callback(self.listener.close)
        self.checks.say("flash a copy of the base system")
        own_python.run(["cp", "--archive", "--reflink=auto", str(self._debian), str(self.root)])
        self._flash()

    def _base(self, out: Path, mirror: str | None) -> Path:
        base = base_folder(out)
        if not base.exists():
            mirror = mirror or own_python.debian_mirror(guest.SUITE)
            self.checks.say(f"debootstrap: Debian {guest.SUITE} for {machine()} from {mirror}")
            guest.make(base, mirror, self.folder / "debootstrap.log", machine(), PACKAGES)
        return base

    def _prepare(self) -> None:
        table = {**job("job"), "cohort": {"deadline_s": RUN_S}}
        (self.folder / JOB).write_text(config.text(table))
        self.site.fedquilt("prepare", JOB)

    def _flash(self) -> None:
        data = {"path": DATA, "share": 0, "shares": 1}
        models = {"serve": f"{HOST}:{self._port}", "hook": list(HOOK)}
        (self.folder / "agent.toml").write_text(
            config.text({**self.site.board(DEVICE, BUDGET, data), "models": models})
        )
        self._data(demo.HERE / "digits.npz")
        self.site.fedquilt(
            *("flash", "agent.toml", *target(machine(), self._wheels)),
            *("--token", f"{DEVICE}.token", "--rootfs", str(self.root)),
        )
        (self.root / "var/log/journal").mkdir(exist_ok=True)

    def _data(self, path: Path) -> None:
        target = self.root / DATA.lstrip("/")
        shutil.copyfile(path, target)
        target.chmod(0o644)

    # -- one boot --

    def up(self, layout: Layout) -> Container:
        """Boot the root file system as that board."""
        self.down()
        self.layout = layout
        files = layouts.lay(layout, self.tree, self.root)
        log = self.folder / f"console-{_name(layout, '-')}.log"
        groups = tuple(enclosure.for_boards())
        self.board = Container(self.root, files, log, groups=groups)
        self.board.boot()
        return self.board

    def down(self) -> None:
        """Save the boot's journal, and shut the container down."""
        board, self.board = self.board, None
        if board is None:
            return
        with contextlib.suppress(FedquiltError, OSError):
            (self.folder / f"journal-{_name(self.layout, '-')}.txt").write_text(board.journal())
        board.stop()

    def _online(self, before: frozenset[str], limit_s: float) -> Heard:
        """Messages of the agent once it is online by another start than those given.

        Raises:
            LinkError: the agent is not online; gives the reason from its journal.
        """
        assert self.board is not None
        board, looked_s, started = self.board, time.monotonic(), starts(self.board.journal(AGENT))

        def hope() -> bool:  # give up on an agent that ends again and again
            nonlocal looked_s
            if time.monotonic() < looked_s + 2:
                return True
            looked_s = time.monotonic()
            return starts(board.journal(AGENT)) <= started + TRIES

        def there(heard: Heard) -> bool:
            whole = heard.profile is not None and heard.telemetry is not None
            return bool(heard.online) and heard.online not in before and whole

        if not self.listener.until(there, limit_s, hope):
            raise LinkError(f"not online; its journal ends: {reason(board.journal(AGENT))}")
        return self.listener.heard

    # -- checks --

    def comes_up(self, layout: Layout) -> None:
        """Boot the same root file system as another board, and compare its agent's profile."""
        with self.checks(f"online as {_name(layout)}") as seen:
            seen.append(self._comes_up(layout))

    def _comes_up(self, layout: Layout) -> str:
        before = self.listener.heard.begun
        began_s = time.monotonic()
        self.up(layout)
        heard = self._online(before, ONLINE_S)
        assert heard.profile is not None
        assert heard.telemetry is not None
        wanted = layouts.expected(self.tree)
        if wrong := layouts.differences(wanted, heard.profile, heard.telemetry):
            raise JobError("; ".join(wrong))
        told = heard.telemetry
        return (
            f"{heard.profile.board}, {len(heard.profile.points)} operating points, {told.power_w:.2f} W, "
            f"{told.temperature_c:.1f} degrees; {time.monotonic() - began_s:.0f} s after power on"
        )

    def whole(self, layout: Layout) -> None:
        """Carry out every check on one board."""
        self.comes_up(layout)
        if self.board is None:
            self.checks.give_up(f"{_name(layout)} has not booted")
            return
        board = self.board
        with self.checks("the board's user, and files that root alone may read") as seen:
            seen.append(self._shut(board))
        if not self.listener.heard.online:
            self.checks.give_up(f"the agent of {_name(layout)} is not online")
            return
        with self.checks("a task, held at an operating point") as seen:
            seen.append(self._task())
        with self.checks("SIGSTOP of the agent: found by systemd's watchdog") as seen:
            seen.append(self._returns(board, signal.SIGSTOP, HANGS_S, "watchdog"))
        with self.checks("a task beyond its memory: killed alone") as seen:
            seen.append(self._hog(board))
        with self.checks("kill -9 of the agent: back") as seen:
            seen.append(self._returns(board, signal.SIGKILL, BACK_S, "signal"))
        with self.checks("kill -9 of the clock helper: back") as seen:
            seen.append(self._helper(board))
        with self.checks("after all that a task, held at an operating point") as seen:
            seen.append(self._task())
        with self.checks("memory limits of unit and task, by the kernel") as seen:
            seen.append(self._limit(board))
        self.listener.close()
        Released(self.site, board, DEVICE, self._port).check(self.checks, target(machine(), self._wheels))
        Hub(self.site, self._debian, self._hub, JOB).check(self.checks, target(machine(), self._wheels))

    def _shut(self, board: Container) -> str:
        """Check that the agent's user is an ordinary one, which cannot read debugfs."""
        properties = board.unit(AGENT)
        mode, owner = board.run("stat", "--format=%a %U", "/sys/kernel/debug").split()
        if (mode, owner) != ("700", "root"):
            raise JobError(f"/sys/kernel/debug is {owner}'s with mode {mode}")
        as_user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups")
        refused = board.fails(*as_user, "ls", "/sys/kernel/debug")
        if refused is None:
            raise JobError(f"{USER} may look into /sys/kernel/debug")
        if properties["User"] != USER:
            raise JobError(f"the agent runs as {properties['User']}")
        number = board.run("id", "--user", USER).strip()
        return f"{USER} ({number}); {refused.split(':', 1)[-1].strip()}"

    def _task(self) -> str:
        """Check a round of this board: its clocks are held meanwhile, and the board's own afterwards."""
        before = layouts.clocks(self.tree)
        facts = self._run(lambda facts: any(isinstance(fact, Ended) for fact in facts))
        done = [fact for fact in facts if isinstance(fact, Answered)]
        ended = [fact for fact in facts if isinstance(fact, Ended)]
        if not done or ended[-1].status != "done":
            declined = [fact.reason for fact in facts if isinstance(fact, Declined)]
            raise JobError(f"no task was done: {'; '.join(declined) or last(self.folder / 'run.log')}")
        usage = done[-1].update.usage
        if usage.point is None:
            assert self.board is not None
            raise JobError(f"the task was held at no operating point: {reason(self.board.journal(AGENT))}")
        if not until(lambda: layouts.clocks(self.tree) == before, 15.0):
            others = [name for name, value in layouts.clocks(self.tree).items() if before.get(name) != value]
            raise JobError(f"the board's own clocks are not back after the task: {', '.join(others)}")
        peak = "unknown" if usage.peak_bytes is None else f"{usage.peak_bytes / 1e6:.0f} MB"
        return f"{usage.examples} examples in {usage.wall_s:.2f} s at {usage.point}, peak {peak}; own clocks back"

    def _returns(self, board: Container, number: signal.Signals, limit_s: float, result: str) -> str:
        """Check that systemd restarts an agent that a signal has ended, and that the agent comes online again."""
        before, restarts = self.listener.heard.begun, int(board.unit(AGENT)["NRestarts"])
        began_s = time.monotonic()
        pid = board.kill(number, AGENT)
        self._online(before, limit_s)
        now = board.unit(AGENT)
        if f"result '{result}'" not in board.journal(AGENT):
            raise JobError(f"the agent is back, but systemd's journal does not say result '{result}'")
        if int(now["NRestarts"]) != restarts + 1:
            raise JobError(f"systemd has started it anew {int(now['NRestarts']) - restarts} times, not once")
        took_s = time.monotonic() - began_s
        return f"process {pid} ended (result '{result}'), {now['MainPID']} online after {took_s:.0f} s"

    def _hog(self, board: Container) -> str:
        """Check that data which no longer fits ends the task and leaves the agent's process alive."""
        images = np.zeros(HOG, np.uint8)
        classes = np.zeros(HOG[0], np.uint8)
        kept = self.folder / "hog.npz"
        np.savez_compressed(kept, x_train=images, y_train=classes, x_test=images[:10], y_test=classes[:10])
        before = board.unit(AGENT)
        self._data(kept)
        try:
            facts = self._run(lambda facts: any(isinstance(fact, Declined) for fact in facts))
        finally:
            self._data(demo.HERE / "digits.npz")
            kept.unlink()
        declined = [fact for fact in facts if isinstance(fact, Declined)]
        if not declined or declined[-1].code != "memory":
            said = f"{declined[-1].code}: {declined[-1].reason}" if declined else last(self.folder / "run.log")
            raise JobError(f"the task did not end for want of memory: {said}")
        after = board.unit(AGENT)
        if (after["MainPID"], after["NRestarts"]) != (before["MainPID"], before["NRestarts"]):
            raise JobError("the agent did not survive it")
        if not self.listener.until(lambda heard: bool(heard.online), BACK_S):
            raise JobError("the agent is not online after it")
        how = "by the kernel (cgroup v2)" if "kernel" in declined[-1].reason else "by the agent's watch on its size"
        return f"{how}: {declined[-1].reason.split(':')[0]}; the agent is process {after['MainPID']} as before"

    def _helper(self, board: Container) -> str:
        restarts, began_s = int(board.unit(CLOCKS)["NRestarts"]), time.monotonic()
        pid = board.kill(signal.SIGKILL, CLOCKS)

        def back() -> bool:
            now = board.unit(CLOCKS)
            return now["ActiveState"] == "active" and int(now["NRestarts"]) == restarts + 1

        if not until(back, BACK_S):
            raise LinkError(f"not back; its journal ends: {reason(board.journal(CLOCKS))}")
        now = board.unit(CLOCKS)["MainPID"]
        return f"process {pid} killed, {now} answers after {time.monotonic() - began_s:.0f} s"

    def _limit(self, board: Container) -> str:
        """Check the unit's memory limit in the kernel, and the task's within it, after a first task."""
        told = board.unit(AGENT)
        group = f"/sys/fs/cgroup{told['ControlGroup']}"
        if board.fails("test", "-e", f"{group}/memory.max") is not None:
            raise NotHere(
                f"systemd holds MemoryMax={told['MemoryMax']}, but this kernel's memory controller is not in "
                "cgroup v2: a task is held by the agent's watch alone"
            )
        limit = board.run("cat", f"{group}/memory.max").strip()
        if limit != told["MemoryMax"]:
            raise JobError(f"the kernel holds the unit to {limit}, and systemd was told {told['MemoryMax']}")
        if board.fails("test", "-e", f"{group}/task/memory.max") is not None:
            raise JobError("the agent has made no control group for its task, though the unit's is handed over to it")
        return f"the unit's memory.max is {limit}, its task's {board.run('cat', f'{group}/task/memory.max').strip()}"

    # -- the coordinator's side --

    def _run(self, enough: Callable[[list[Any]], bool]) -> list[Any]:
        """Run a job as an operator does until its facts suffice or it ends; returns the facts."""
        self._runs += 1
        home = self.folder / f"runs-{self._runs}"
        words = self.site.words("run", JOB, *self.site.coordinator(home.name))
        log, facts = self.folder / "run.log", list[Any]()

        def look() -> bool:
            facts[:] = _facts(home)
            return enough(facts) or process.poll() is not None

        with log.open("ab") as out:
            process = subprocess.Popen(
                words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            try:
                if not until(look, RUN_S):
                    raise LinkError(f"fedquilt run came to nothing within {RUN_S:g} s: {last(log)} ({log})")
            finally:
                stop(process, STOP_S)
        facts[:] = _facts(home)
        return facts


def machine() -> str:
    """Name of this machine's architecture in Debian.

    Raises:
        JobError: flash has no target for it.
    """
    name = os.uname().machine
    if name not in MACHINES:
        raise JobError(f"a board is rehearsed on {' or '.join(MACHINES)}, and this machine is {name}")
    return MACHINES[name]


def base_folder(out: Path) -> Path:
    """Folder of the base system for this machine's architecture."""
    return out / f"{guest.SUITE}-{machine()}-booted"


def _name(layout: Layout, between: str = " with JetPack ") -> str:
    return f"{layout[0]}{between}{layout[1]}"


def _facts(home: Path) -> list[Any]:
    """Facts that a run's coordinator has noted so far."""
    if not (home / "fedquilt.db").exists():
        return []
    with Store(home) as store:
        return [fact for row in store.jobs() for _, _, fact in store.facts(row.id)]
