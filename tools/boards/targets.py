"""Kinds of boards for which a bundle can be built, with their Python and wheel tags."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from fedquilt.core import JobError


@dataclass(frozen=True)
class BundleTarget:
    """A kind of board, and the properties that select its wheels.

    Attributes:
        python: Version such as "3.10", or "" if it depends on the board's system.
        glibc: Minor version of the oldest supported glibc 2.
        index: Package index of wheels for this board that are not on PyPI, or "".
        systemd: Version of systemd. Credentials require 247.
    """

    name: str
    machine: str  # as `uname -m` prints
    python: str
    glibc: int
    interpreter: str = ""  # path on the board
    index: str = ""
    systemd: int = 249

    @property
    def local_platform(self) -> str:
        # tag of NVIDIA's own builds, which PyPI does not accept
        return f"linux_{self.machine}"

    @property
    def platforms(self) -> tuple[str, ...]:
        # newest first (PEP 600)
        return (
            *(f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, 16, -1)),
            f"manylinux2014_{self.machine}",
        )

    def marker_environment(self) -> dict[str, str]:
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


NUMPY_2: Final = b"numpy._core._multiarray_umath"  # imported by code that was compiled with NumPy 2
NVIDIA_JP6: Final = "https://pypi.jetson-ai-lab.io/jp6/cu126"  # wheels with the GPU for JetPack 6; PyPI has none
# Python and glibc of Ubuntu 22.04 and 24.04, on which JetPack 6 and 7 are built, and of Debian 12 and 13
TARGETS: Final = {
    "jetpack5": BundleTarget("jetpack5", "aarch64", "", 31, systemd=245),
    "jetpack6": BundleTarget("jetpack6", "aarch64", "3.10", 35),
    "jetpack6-gpu": BundleTarget("jetpack6-gpu", "aarch64", "3.10", 35, index=NVIDIA_JP6),
    "jetpack7": BundleTarget("jetpack7", "aarch64", "3.12", 39),
    "raspberry-pi-os": BundleTarget("raspberry-pi-os", "aarch64", "3.11", 36),  # bookworm; trixie has 3.13
    "arm64": BundleTarget("arm64", "aarch64", "", 27),
    "amd64": BundleTarget("amd64", "x86_64", "", 27),
}
OWN_PYTHON: Final = (
    "install one on the board and name it, as in `fedquilt board flash ... --target jetpack5 --python "
    "/opt/python3.11/bin/python3.11`"
)


def find_target(name: str, python: str | None = None) -> BundleTarget:
    """Return a target by name, with `python` (a version such as "3.11", or a path) instead of its Python.

    Raise JobError if the target is unknown, or if its Python is unknown or unsupported.
    """
    if name not in TARGETS:
        raise JobError(f"unknown target {name!r}: choose one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    python = python or target.python
    if not python:
        raise JobError(
            f"--target {name} needs --python with the board's Python, 3.10 or newer: a version, --python 3.11, or a "
            "path, --python /opt/python3.11/bin/python3.11"
        )
    interpreter = None
    if "/" in python:
        path_match = re.fullmatch(r"(?:/[A-Za-z0-9._+-]+)*/python(3\.\d+)", python)
        if path_match is None:
            raise JobError(
                f"--python {python} is not an absolute path ending in python3.N: write the path on the board"
            )
        interpreter, python = python, path_match[1]
    match = re.fullmatch(r"3\.(\d+)", python)
    if match is None or int(match[1]) < 10:
        raise JobError(f"--python {python}: fedquilt needs 3.10 or newer; {OWN_PYTHON}")
    return replace(target, python=python, interpreter=interpreter or f"/usr/bin/python{python}")
