"""A kind of release whose disk, check and health a test has in its hands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from one_agent import Site

from fedquilt.core import BlobRef
from fedquilt.edge_agent.releases.release_kind import CheckResult, ReleaseKind
from fedquilt.wire import DesiredRelease, ReleaseStatus


class ToyKind(ReleaseKind):
    """What is in use, and what was before; both outlive the agent's process, as a disk does.

    A call of a method that is named in `fails` raises that, once.
    """

    def __init__(self) -> None:
        self.running, self.previous = "", "none"  # blobs; "none": there is none
        self.verdict: CheckResult | None = CheckResult("", {"accuracy": 0.9})
        self.illness, self.hook_runs, self.need = "", False, 0
        self.lasting = ""  # illness of what was before
        self.fails: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.staged: bytes | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if (error := self.fails.pop(name, None)) is not None:
            raise error

    def current_sha256(self) -> str:
        return self.running

    def stage(self, release: DesiredRelease, blob: Path | None) -> None:
        self._called("stage")
        self.staged = None if blob is None else blob.read_bytes()

    def start_check(self, release: DesiredRelease) -> None:
        self._called("check")

    def poll_check(self) -> CheckResult | None:
        return self.verdict

    def activate(self, release: DesiredRelease) -> None:
        self._called("swap")
        assert release.blob is not None
        if self.running != release.blob.sha256:
            self.running, self.previous = release.blob.sha256, self.running

    def unhealthy_reason(self) -> str:
        return self.illness

    def roll_back(self) -> bool:
        self._called("back")
        self.illness = self.lasting
        if self.previous == "none":
            return False
        self.running, self.previous = self.previous, "none"
        return True

    def confirm(self) -> None:
        self._called("keep")

    def discard_unused(self) -> None:
        self._called("drop")

    def is_settled(self) -> bool:
        return not self.hook_runs

    def check_memory_bytes(self, release: DesiredRelease) -> int:
        return self.need


def release(serial: int = 1, blob: BlobRef | None = None, **changes: Any) -> DesiredRelease:
    """A release of a model, with a soak of ten seconds."""
    values: dict[str, Any] = {"rollout": f"r{serial}", "kind": "model", "soak_s": 10.0, "name": f"v{serial}"}
    return DesiredRelease(**{**values, "serial": serial, "blob": blob, **changes})


def deploy(site: Site, serial: int = 1, **changes: object) -> DesiredRelease:
    """Publish a release of a blob of its own, as the coordinator does."""
    wanted = release(serial, site.depot.store_bytes(b"model %d" % serial), **changes)
    site.say("model", wanted, retain=True)
    return wanted


def last(site: Site) -> ReleaseStatus:
    return site.all("installed")[-1]
