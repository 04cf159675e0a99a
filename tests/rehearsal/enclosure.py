"""Enclosure of a command: private mounts, process ids and control groups.

The kernel removes the enclosure when its first process ends, which is killed with the process that created the
enclosure. So after `kill -9` no process and no mount remains. An empty control group may remain, which the next
enclosure removes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

WORDS: Final = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_S: Final = 90.0  # time for the orderly end of a container in the enclosure
CGROUPS: Final = Path("/sys/fs/cgroup")
GROUP: Final = "fedquilt-rehearsal-"  # followed by the process id of its maker
OURS, BOARDS, HUB = "rehearsal", "boards", "hub"  # groups below it: of this program, and of each container


def run_enclosed(words: Sequence[str]) -> int:
    with (
        use_own_groups(),
        subprocess.Popen([*WORDS, *words], stdin=subprocess.DEVNULL, start_new_session=True) as process,
    ):
        told = False

        def forward_signal(number: int, frame: FrameType | None) -> None:
            nonlocal told
            if not told:
                told = True
                os.killpg(process.pid, signal.SIGTERM)

        before = {number: signal.signal(number, forward_signal) for number in SIGNALS}
        try:
            while not told:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(0.2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(STOP_S)
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# -- control groups -------------------------------------------------------------------------------


def find_own_groups(cgroup: str, mounted: Path = CGROUPS) -> list[Path]:
    found = []
    for line in cgroup.splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            top = mounted / "unified" if (mounted / "unified").is_dir() else mounted
        elif names == "name=systemd":
            top = mounted / "systemd"
        else:
            continue
        if (top / "cgroup.procs").is_file():
            found.append(top / path.strip("/"))
    return found


@contextlib.contextmanager
def use_own_groups() -> Iterator[None]:
    before, name = find_own_groups(Path("/proc/self/cgroup").read_text()), f"{GROUP}{os.getpid()}"
    for group in before:
        for stale in group.glob(f"{GROUP}*"):
            if not Path("/proc", stale.name.removeprefix(GROUP)).exists():  # its maker was killed
                remove_group(stale)
        with contextlib.suppress(OSError):  # containers work without, where groups may not be made
            for leaf in (OURS, BOARDS, HUB):
                (group / name / leaf).mkdir(parents=True, exist_ok=True)
            (group / name / OURS / "cgroup.procs").write_text("0")
            for whole in (group, group / name):
                with contextlib.suppress(OSError):  # version 1 holds this controller, or others live in the group
                    (whole / "cgroup.subtree_control").write_text("+memory")
    try:
        yield
    finally:
        for group in before:
            with contextlib.suppress(OSError):
                (group / "cgroup.procs").write_text("0")
            remove_group(group / name)


def remove_group(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def container_group_files(leaf: str = BOARDS) -> list[Path]:
    groups = find_own_groups(Path("/proc/self/cgroup").read_text())
    return [group.parent / leaf / "cgroup.procs" for group in groups if group.name == OURS]
