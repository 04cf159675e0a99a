"""Rehearsal of a board: its root file system, and the checks on the booted board."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.coordinator.rounds.events import JobEnded, TaskDeclined, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import FedquiltError, JobError, LinkError
from fedquilt.formats import toml
from fedquilt.tools.lab import demo
from tests.rehearsal import enclosure, host, layouts
from tests.rehearsal.checks import CheckLog, CheckUnavailableError, count_restarts, last_message
from tests.rehearsal.container import Container, wait_until
from tests.rehearsal.coordinator import CoordinatorHost
from tests.rehearsal.fleet import (
    HOST,
    STOP_S,
    LoopbackFleet,
    ReceivedMessages,
    find_free_ports,
    last,
    run_server,
    stop_process,
)
from tests.rehearsal.layouts import Layout
from tests.rehearsal.releases import HOOK, ReleaseChecks, flash_options, job_table

DEVICE: Final = "rehearsed"
AGENT, CLOCKS = "fedquilt-agent.service", "fedquilt-clocks.service"
FIRST: Final[Layout] = ("jetson-orin-nx", 6)  # board with all checks; other boards are only booted
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
    def __init__(self, folder: Path, checks: CheckLog, stack: contextlib.ExitStack) -> None:
        self.folder, self.checks, self._stack = folder, checks, stack
        self.root, self.tree, self._hub = (folder / name for name in MADE)
        broker, endpoint, self._port = find_free_ports(3)
        self.site = LoopbackFleet(folder, broker, endpoint)
        self.board: Container | None = None
        self.layout = FIRST
        self._runs = 0

    def clean_up(self) -> None:
        self.shut_down()
        for path in (self.root, self.tree, self._hub):
            shutil.rmtree(path, ignore_errors=True)

    # -- before the first boot --

    def prepare_fleet(self, out: Path, mirror: str | None) -> None:
        self._debian = self._ensure_base(out, mirror)
        print("an authority, certificates, a token, a job; the broker and the enrolment endpoint", flush=True)
        self.site.issue_identities(DEVICE)
        self._prepare_job()
        self._stack.enter_context(
            run_server(self.site.write_broker_config(), self.folder, self.folder / "mosquitto.log", self.site.broker)
        )
        self._stack.enter_context(
            run_server(self.site.enrolment_command(), self.folder, self.folder / "enrol.log", self.site.endpoint)
        )
        self.listener = self.site.create_listener(DEVICE)
        self._stack.callback(self.listener.close)
        print("flash a copy of the base system", flush=True)
        host.run_program("cp", "--archive", "--reflink=auto", str(self._debian), str(self.root))
        self._flash()

    def _ensure_base(self, out: Path, mirror: str | None) -> Path:
        base = host.base_root(out)
        if not base.exists():
            mirror = mirror or host.debian_mirror()
            print(f"debootstrap: Debian {host.SUITE} for {host.debian_architecture()} from {mirror}", flush=True)
            host.create_root(base, mirror, self.folder / "debootstrap.log")
        return base

    def _prepare_job(self) -> None:
        table = {**job_table("job"), "cohort": {"deadline_s": RUN_S}}
        (self.folder / JOB).write_text(toml.format_toml(table))
        self.site.run_fedquilt("prepare", JOB)

    def _flash(self) -> None:
        data = {"path": DATA, "share": 0, "shares": 1}
        models = {"serve": f"{HOST}:{self._port}", "hook": list(HOOK)}
        (self.folder / "agent.toml").write_text(
            toml.format_toml({**self.site.agent_table(DEVICE, BUDGET, data), "models": models})
        )
        self._copy_data(demo.HERE / "digits.npz")
        self.site.run_fedquilt(
            *("board", "flash", "agent.toml", *flash_options()),
            *("--token", f"{DEVICE}.token", "--rootfs", str(self.root)),
        )
        (self.root / "var/log/journal").mkdir(exist_ok=True)

    def _copy_data(self, path: Path) -> None:
        target = self.root / DATA.lstrip("/")
        shutil.copyfile(path, target)
        target.chmod(0o644)

    # -- one boot --

    def boot_board(self, layout: Layout) -> Container:
        self.shut_down()
        self.layout = layout
        files = layouts.write_layout(layout, self.tree, self.root)
        log = self.folder / f"console-{_format_layout(layout, '-')}.log"
        groups = tuple(enclosure.container_group_files())
        self.board = Container(self.root, files, log, groups=groups)
        self.board.boot()
        return self.board

    def shut_down(self) -> None:
        board, self.board = self.board, None
        if board is None:
            return
        with contextlib.suppress(FedquiltError, OSError):
            (self.folder / f"journal-{_format_layout(self.layout, '-')}.txt").write_text(board.read_journal())
        board.stop()

    def _wait_until_online(self, before: frozenset[str], limit_s: float) -> ReceivedMessages:
        assert self.board is not None
        board, looked_s, started = self.board, time.monotonic(), count_restarts(self.board.read_journal(AGENT))

        def has_tries_left() -> bool:  # give up on an agent that ends again and again
            nonlocal looked_s
            if time.monotonic() < looked_s + 2:
                return True
            looked_s = time.monotonic()
            return count_restarts(board.read_journal(AGENT)) <= started + TRIES

        def is_online(heard: ReceivedMessages) -> bool:
            whole = heard.profile is not None and heard.telemetry is not None
            return bool(heard.online) and heard.online not in before and whole

        if not self.listener.wait_until(is_online, limit_s, has_tries_left):
            raise LinkError(f"not online; its journal ends: {last_message(board.read_journal(AGENT))}")
        return self.listener.heard

    # -- checks --

    def check_start(self, layout: Layout) -> None:
        with self.checks(f"online as {_format_layout(layout)}") as seen:
            seen.append(self._compare_profile(layout))

    def _compare_profile(self, layout: Layout) -> str:
        before = self.listener.heard.begun
        began_s = time.monotonic()
        self.boot_board(layout)
        heard = self._wait_until_online(before, ONLINE_S)
        assert heard.profile is not None
        assert heard.telemetry is not None
        wanted = layouts.read_expected_profile(self.tree)
        if wrong := layouts.find_differences(wanted, heard.profile, heard.telemetry):
            raise JobError("; ".join(wrong))
        told = heard.telemetry
        return (
            f"{heard.profile.board}, {len(heard.profile.points)} operating points, {told.power_w:.2f} W, "
            f"{told.temperature_c:.1f} degrees; {time.monotonic() - began_s:.0f} s after power on"
        )

    def check_board(self, layout: Layout) -> None:
        self.check_start(layout)
        if self.board is None:
            self.checks.give_up(f"{_format_layout(layout)} has not booted")
            return
        board = self.board
        with self.checks("the board's user, and files that root alone may read") as seen:
            seen.append(self._check_permissions(board))
        if not self.listener.heard.online:
            self.checks.give_up(f"the agent of {_format_layout(layout)} is not online")
            return
        with self.checks("a task, held at an operating point") as seen:
            seen.append(self._check_task())
        with self.checks("SIGSTOP of the agent: found by systemd's watchdog") as seen:
            seen.append(self._check_restart(board, signal.SIGSTOP, HANGS_S, "watchdog"))
        with self.checks("a task beyond its memory: killed alone") as seen:
            seen.append(self._check_memory_kill(board))
        with self.checks("kill -9 of the agent: back") as seen:
            seen.append(self._check_restart(board, signal.SIGKILL, BACK_S, "signal"))
        with self.checks("kill -9 of the clock helper: back") as seen:
            seen.append(self._check_helper_restart(board))
        with self.checks("after all that a task, held at an operating point") as seen:
            seen.append(self._check_task())
        with self.checks("memory limits of unit and task, by the kernel") as seen:
            seen.append(self._check_memory_limit(board))
        self.listener.close()
        ReleaseChecks(self.site, board, DEVICE, self._port).run_checks(self.checks, flash_options())
        CoordinatorHost(self.site, self._debian, self._hub, JOB).run_checks(self.checks, flash_options())

    def _check_permissions(self, board: Container) -> str:
        properties = board.unit_properties(AGENT)
        mode, owner = board.run("stat", "--format=%a %U", "/sys/kernel/debug").split()
        if (mode, owner) != ("700", "root"):
            raise JobError(f"/sys/kernel/debug is {owner}'s with mode {mode}")
        as_user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups")
        refused = board.error_of(*as_user, "ls", "/sys/kernel/debug")
        if refused is None:
            raise JobError(f"{USER} may look into /sys/kernel/debug")
        if properties["User"] != USER:
            raise JobError(f"the agent runs as {properties['User']}")
        number = board.run("id", "--user", USER).strip()
        return f"{USER} ({number}); {refused.split(':', 1)[-1].strip()}"

    def _check_task(self) -> str:
        before = layouts.read_clock_files(self.tree)
        facts = self._run_job(lambda facts: any(isinstance(fact, JobEnded) for fact in facts))
        done = [fact for fact in facts if isinstance(fact, UpdateAccepted)]
        ended = [fact for fact in facts if isinstance(fact, JobEnded)]
        if not done or ended[-1].status != "done":
            declined = [fact.reason for fact in facts if isinstance(fact, TaskDeclined)]
            raise JobError(f"no task was done: {'; '.join(declined) or last(self.folder / 'run.log')}")
        usage = done[-1].update.usage
        if usage.point is None:
            assert self.board is not None
            raise JobError(f"the task was held at no operating point: {last_message(self.board.read_journal(AGENT))}")
        if not wait_until(lambda: layouts.read_clock_files(self.tree) == before, 15.0):
            others = [name for name, value in layouts.read_clock_files(self.tree).items() if before.get(name) != value]
            raise JobError(f"the board's own clocks are not back after the task: {', '.join(others)}")
        peak = "unknown" if usage.peak_bytes is None else f"{usage.peak_bytes / 1e6:.0f} MB"
        return f"{usage.examples} examples in {usage.wall_s:.2f} s at {usage.point}, peak {peak}; own clocks back"

    def _check_restart(self, board: Container, number: signal.Signals, limit_s: float, result: str) -> str:
        before, restarts = self.listener.heard.begun, int(board.unit_properties(AGENT)["NRestarts"])
        began_s = time.monotonic()
        pid = board.kill_unit(number, AGENT)
        self._wait_until_online(before, limit_s)
        now = board.unit_properties(AGENT)
        if f"result '{result}'" not in board.read_journal(AGENT):
            raise JobError(f"the agent is back, but systemd's journal does not say result '{result}'")
        if int(now["NRestarts"]) != restarts + 1:
            raise JobError(f"systemd has started it anew {int(now['NRestarts']) - restarts} times, not once")
        took_s = time.monotonic() - began_s
        return f"process {pid} ended (result '{result}'), {now['MainPID']} online after {took_s:.0f} s"

    def _check_memory_kill(self, board: Container) -> str:
        images = np.zeros(HOG, np.uint8)
        classes = np.zeros(HOG[0], np.uint8)
        kept = self.folder / "hog.npz"
        np.savez_compressed(kept, x_train=images, y_train=classes, x_test=images[:10], y_test=classes[:10])
        before = board.unit_properties(AGENT)
        self._copy_data(kept)
        try:
            facts = self._run_job(lambda facts: any(isinstance(fact, TaskDeclined) for fact in facts))
        finally:
            self._copy_data(demo.HERE / "digits.npz")
            kept.unlink()
        declined = [fact for fact in facts if isinstance(fact, TaskDeclined)]
        if not declined or declined[-1].code != "memory":
            said = f"{declined[-1].code}: {declined[-1].reason}" if declined else last(self.folder / "run.log")
            raise JobError(f"the task did not end for want of memory: {said}")
        after = board.unit_properties(AGENT)
        if (after["MainPID"], after["NRestarts"]) != (before["MainPID"], before["NRestarts"]):
            raise JobError("the agent did not survive it")
        if not self.listener.wait_until(lambda heard: bool(heard.online), BACK_S):
            raise JobError("the agent is not online after it")
        how = "by the kernel (cgroup v2)" if "kernel" in declined[-1].reason else "by the agent's watch on its size"
        return f"{how}: {declined[-1].reason.split(':')[0]}; the agent is process {after['MainPID']} as before"

    def _check_helper_restart(self, board: Container) -> str:
        restarts, began_s = int(board.unit_properties(CLOCKS)["NRestarts"]), time.monotonic()
        pid = board.kill_unit(signal.SIGKILL, CLOCKS)

        def is_back() -> bool:
            now = board.unit_properties(CLOCKS)
            return now["ActiveState"] == "active" and int(now["NRestarts"]) == restarts + 1

        if not wait_until(is_back, BACK_S):
            raise LinkError(f"not back; its journal ends: {last_message(board.read_journal(CLOCKS))}")
        now = board.unit_properties(CLOCKS)["MainPID"]
        return f"process {pid} killed, {now} answers after {time.monotonic() - began_s:.0f} s"

    def _check_memory_limit(self, board: Container) -> str:
        told = board.unit_properties(AGENT)
        group = f"/sys/fs/cgroup{told['ControlGroup']}"
        if board.error_of("test", "-e", f"{group}/memory.max") is not None:
            raise CheckUnavailableError(
                f"systemd holds MemoryMax={told['MemoryMax']}, but this kernel's memory controller is not in "
                "cgroup v2: a task is held by the agent's watch alone"
            )
        limit = board.run("cat", f"{group}/memory.max").strip()
        if limit != told["MemoryMax"]:
            raise JobError(f"the kernel holds the unit to {limit}, and systemd was told {told['MemoryMax']}")
        if board.error_of("test", "-e", f"{group}/task/memory.max") is not None:
            raise JobError("the agent has made no control group for its task, though the unit's is handed over to it")
        return f"the unit's memory.max is {limit}, its task's {board.run('cat', f'{group}/task/memory.max').strip()}"

    # -- the coordinator's side --

    def _run_job(self, enough: Callable[[list[Any]], bool]) -> list[Any]:
        self._runs += 1
        home = self.folder / f"runs-{self._runs}"
        words = self.site.fedquilt_command("run", JOB, *self.site.coordinator_options(home.name))
        log, facts = self.folder / "run.log", list[Any]()

        def is_finished() -> bool:
            facts[:] = _read_events(home)
            return enough(facts) or process.poll() is not None

        with log.open("ab") as out:
            process = subprocess.Popen(
                words, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            try:
                if not wait_until(is_finished, RUN_S):
                    raise LinkError(f"fedquilt run came to nothing within {RUN_S:g} s: {last(log)} ({log})")
            finally:
                stop_process(process, STOP_S)
        facts[:] = _read_events(home)
        return facts


def _format_layout(layout: Layout, between: str = " with JetPack ") -> str:
    return f"{layout[0]}{between}{layout[1]}"


def _read_events(home: Path) -> list[Any]:
    if not (home / "fedquilt.db").exists():
        return []
    with Store(home) as store:
        return [fact for row in store.readable_jobs() for _, _, fact in store.read_events(row.id)]
