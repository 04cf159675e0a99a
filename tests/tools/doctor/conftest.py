"""A healthy board made of files, for tests to plant one fault each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedquilt.formats import toml
from fedquilt.tools.boards import doctor
from fedquilt.tools.boards.doctor import ExaminationTarget
from fedquilt.tools.boards.doctor.findings import Finding
from tests import fake_boards

NOW_S = 1_795_000_000.0  # November 2026


@dataclass
class Board:
    root: Path
    table: dict[str, Any] = field(default_factory=dict)
    clock_s: float = NOW_S
    free: int = 100 * 10**9

    @property
    def settings(self) -> Path:
        return self.root / "etc/fedquilt/agent.toml"

    def write(self, name: str, text: object) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        return path

    def package(self, name: str, version: str, *requires: str, **files: str) -> None:
        site = "usr/lib/python3/dist-packages"
        lines = "".join(f"Requires-Dist: {one}\n" for one in requires)
        self.write(
            f"{site}/{name}-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}",
        )
        for inside, text in files.items():
            self.write(f"{site}/{name.replace('-gpu', '').replace('-', '_')}/{inside.replace('__', '/')}", text)

    def shipped(self) -> Path:
        return self.write("etc/fedquilt/agent.toml", toml.format_toml(self.table))

    def examine(self, *names: str) -> list[Finding]:
        wanted = ExaminationTarget(settings=self.shipped(), root=self.root)
        found = doctor.select_groups(wanted, clock_s=self.clock_s, free=lambda folder: self.free)
        chosen = {name: group for name, group in found.items() if not names or name in names}
        return [one for one in doctor.run_groups(chosen) if one.severity != "ok"]

    def only(self, *names: str) -> Finding:
        found = self.examine(*(names or ("machine",)))
        assert len(found) == 1, found
        return found[0]

    def require(self, number: str, severity: str | None = None, *said: str, fix: str = "") -> None:
        found = self.only()
        assert (found.number, found.severity) == (number, severity or found.severity)
        assert [part for part in said if part not in found.sentence] == []
        assert re.search(fix, found.fix or ""), found.fix


@pytest.fixture
def board(tmp_path: Path) -> Board:
    made = Board(tmp_path / "root")
    fake_boards.write_fake_board(made.root, "jetson-orin-nano", 6)
    made.write("usr/bin/python3.10", "")
    made.write("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory hugetlb pids")
    made.write("etc/systemd/system/fedquilt-agent.service", "[Service]\nDelegate=memory\nMemoryMax=75%")
    made.write("srv/images/a/0.pgm", "P5 1 1 255\n0")
    (made.root / "var/lib/fedquilt").mkdir(parents=True)
    made.package("numpy", "1.26.4")
    made.package("onnxruntime-gpu", "1.23.0", **{"capi__libonnxruntime_providers_cuda.so": ""})
    made.table = {
        "device": "orin-07",
        "home": "/var/lib/fedquilt",
        "broker": {"url": "mqtt://127.0.0.1:1"},
        "data": {"path": "/srv/images"},
        "governor": {"policy": "board"},
    }
    return made
