"""A board that is upgraded without a network."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from waiting import wait_until

from fedquilt.core import BlobRef, FedquiltError
from fedquilt.edge_agent import settings as agents
from fedquilt.edge_agent.releases.release_kind import CheckResult
from fedquilt.edge_agent.upgrade import launcher
from fedquilt.edge_agent.upgrade.agent_release import AgentKind, LaunchInfo
from fedquilt.wire import DesiredRelease

FLASHED = "f"


class Board:
    """A board's versions, and its agent's kind of release; each `start` is another process of it."""

    def __init__(self, folder: Path, **upgrade: Any) -> None:
        self.folder, self.versions = folder, folder / "versions"
        self.table: dict[str, Any] = {
            "device": "d",
            "home": str(folder / "home"),
            "upgrade": {"unsigned": True, **upgrade},
        }
        self.connected, self.restarts, self.quiet, self.serial = True, 0, 0, 0
        self.start()

    def start(self, running: str | None = None, **changes: Any) -> None:
        choice = launcher.read_choice(self.versions)
        running = running if running is not None else "" if choice is None else choice.current
        packages = tuple(path for path in sys.path if path.endswith("site-packages"))
        started = LaunchInfo(
            str(self.versions), FLASHED, running, ("agent", "a.toml"), packages, changes.pop("fallback_reason", "")
        )
        self.restarted = False

        def restart() -> None:
            self.restarts += 1

        def quiet() -> None:
            self.quiet += 1

        settings = agents.parse_settings(self.table)
        self.kind = AgentKind(started, settings, lambda: self.connected, restart, cancel_alarm=quiet, **changes)

    def release(self, file: Path) -> DesiredRelease:
        self.serial += 1
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        return DesiredRelease(
            rollout="r", kind="agent", serial=self.serial, blob=BlobRef(sha256, file.stat().st_size), name="9.9.9"
        )

    def verdict(self, file: Path) -> CheckResult:
        """What the check says of a bundle."""
        release = self.release(file)
        try:
            self.kind.stage(release, file)
            self.kind.start_check(release)
        except FedquiltError as error:
            return CheckResult(str(error), {})

        return wait_until(self.kind.poll_check, "the check ends")

    def take(self, file: Path) -> str:
        """Check a bundle, put it on trial, and begin anew as its version; the version's name."""
        assert self.verdict(file) == CheckResult("", {})
        release = self.release(file)
        self.kind.activate(release)
        assert release.blob is not None
        self.start()
        return release.blob.sha256

    @property
    def kept(self) -> list[str]:
        """Names of all that is in the folder of versions."""
        return sorted(os.listdir(self.versions)) if self.versions.is_dir() else []
