"""Boards that a bundle can be made for: which Python they ship or get, and which wheels they take."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from fedquilt.core import JobError


@dataclass(frozen=True)
class Target:
    """What decides which wheels run.

    Args:
        python: "3.10"; "" where it depends on the board's system.
        glibc: minor version of the oldest glibc 2 there.
        index: package index of wheels that PyPI does not have for this board; "": none.
        systemd: its version there. Before 247 it hands no credentials to a service, before 239 it knows no group of
            system calls for services.
        brings: whether it needs a Python that comes along in the bundle (`own_python`).
    """

    name: str
    machine: str  # as `uname -m` says
    python: str
    glibc: int
    interpreter: str = ""  # its path on the board
    index: str = ""
    systemd: int = 249
    brings: bool = False

    @property
    def local(self) -> str:
        """Tag of wheels built for one kind of board, as NVIDIA tags its own; PyPI takes none of them."""
        return f"linux_{self.machine}"

    @property
    def platforms(self) -> tuple[str, ...]:
        """Tags of wheels that run on any system with that glibc, newest first (PEP 600)."""
        return (
            *(f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, 16, -1)),
            f"manylinux2014_{self.machine}",
        )

    def environment(self) -> dict[str, str]:
        """Environment in which markers are evaluated (PEP 508)."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


NVIDIA_JP6: Final = "https://pypi.jetson-ai-lab.io/jp6/cu126"  # wheels with the GPU for JetPack 6; PyPI has none
# Python and glibc of Ubuntu 22.04 and 24.04, on which JetPack 6 and 7 are built, and of Debian 12 and 13
BROUGHT: Final = "/opt/fedquilt/current/python/bin/python"
KNOWN: Final = {
    "jetpack4": Target(
        "jetpack4", "aarch64", "3.11", 36, systemd=237, brings=True
    ),  # the glibc is the brought Python's
    "jetpack5": Target("jetpack5", "aarch64", "3.11", 36, systemd=245, brings=True),
    "jetpack6": Target("jetpack6", "aarch64", "3.10", 35),
    "jetpack6-gpu": Target("jetpack6-gpu", "aarch64", "3.10", 35, index=NVIDIA_JP6),
    "jetpack7": Target("jetpack7", "aarch64", "3.12", 39),
    "raspberry-pi-os": Target("raspberry-pi-os", "aarch64", "3.11", 36),  # bookworm; trixie has 3.13
    "arm64": Target("arm64", "aarch64", "", 27),
    "amd64": Target("amd64", "x86_64", "", 27),
}
OWN_PYTHON: Final = (
    "flash one that comes along: `fedquilt flash ... --target jetpack5 --own-python FILE` (jetpack4 on a Nano or TX2); "
    "`python -m fedquilt.tools.flash.own_python FILE` makes it. Stitching then runs on the CPU"
)


def find(name: str, python: str | None = None, interpreter: str | None = None) -> Target:
    """A target by its name, with another Python or interpreter than its own if given.

    Raises:
        JobError: unknown; a version that fedquilt does not run on.
    """
    if name not in KNOWN:
        raise JobError(f"no target {name!r}: one of {', '.join(KNOWN)}")
    target = KNOWN[name]
    python = python or target.python
    if not python:
        raise JobError(f"--target {name} is any system: say which Python it has, `--python 3.11` (`python3 -V` there)")
    found = re.fullmatch(r"3\.(\d+)", python)
    if found is None or int(found[1]) < 10:
        raise JobError(f"--python {python}: fedquilt needs 3.10 or newer; {OWN_PYTHON}")
    if interpreter is not None and not re.fullmatch(r"(/[A-Za-z0-9._+-]+)+", interpreter):
        raise JobError(f"--interpreter {interpreter}: the whole path on the board is wanted, of plain letters")
    if target.brings and interpreter is None:
        return replace(target, python=python, interpreter=f"{BROUGHT}{python}")
    return replace(target, python=python, interpreter=interpreter or f"/usr/bin/python{python}", brings=False)
