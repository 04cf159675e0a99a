"""Kinds of releases: models, the agent and its settings, installed in steps that may be killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from fedquilt.wire import DesiredRelease


class CheckResult(NamedTuple):
    refusal_reason: str  # why the release is refused, or ""
    metrics: Mapping[str, float]
    note: str = ""  # note on an accepted release whose accuracy was not measured
    killed_externally: bool = False  # whether the check's process was killed from outside


class ReleaseKind(Protocol):
    """Kind of release. Each method can be repeated after a kill at any moment.

    Methods from `start_check` on have defaults, for kinds without such a step.
    """

    def current_sha256(self) -> str:
        """Return the sha256 of the release in use, or "" if no release was installed."""
        ...

    def stage(self, release: DesiredRelease, blob: Path | None) -> None:
        """Write and verify a release without activating it. `blob` is the release's file, if there is one.

        Raises:
            ModelError: If the release cannot be used on this device. The text gives the reason.
            StoreError: If the release cannot be written.
        """
        ...

    def activate(self, release: DesiredRelease) -> None:
        """Activate a staged release atomically. The release in use becomes the previous one.

        After a kill during the soak, this is called again for the release in use, and a hook runs once more.

        Raises:
            StoreError: If the change cannot be written. The earlier release stays in use.
        """
        ...

    def roll_back(self) -> bool:
        """Activate the previous release. Return whether there is one.

        Raises:
            StoreError: If the change cannot be written. The caller tries again.
        """
        ...

    def start_check(self, release: DesiredRelease) -> None:
        """Start to check a staged release. Raise ModelError if checks are impossible on this device."""
        return

    def poll_check(self) -> CheckResult | None:
        """Return the result of the check, or None while it runs."""
        return CheckResult("", {})

    def unhealthy_reason(self) -> str:
        """Return why the release in use is unhealthy, or "".

        This is called during the soak, and at the agent's start after an activation. A roll-back outside the agent is a
        reason too.
        """
        return ""

    def discard_unused(self) -> None:
        """End a running check, and delete staged releases that are not in use."""
        return

    def confirm(self) -> None:
        """Record that the release in use has passed its soak. Call before the success is published.

        Raises:
            StoreError: If the record cannot be written. The caller tries again.
        """
        return

    def is_settled(self) -> bool:
        """Return whether an activation is complete and no hook runs."""
        return True

    def unsupported_reason(self) -> str:
        """Return in a few words why this device can never use such releases, or "" if it can."""
        return ""

    def check_memory_bytes(self, release: DesiredRelease) -> int:
        """Return the memory that a check needs. The check waits until that much is free."""
        return 0

    def fds(self) -> Sequence[int]:
        return ()
