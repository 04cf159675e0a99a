"""Kinds of releases: what is done to exchange a model, the agent or its settings, in steps that can be killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from fedquilt.wire import Release


class Verdict(NamedTuple):
    """Result of a check: why the release is refused, or "", and the measured numbers."""

    refused: str
    metrics: Mapping[str, float]
    note: str = ""  # remark on a release that is accepted: its accuracy was not measured


class Kind(Protocol):
    """One kind of release. Every method can be called again after a kill at any moment, with the same outcome.

    Methods at the end of this class have defaults, for kinds without such a step.
    """

    def current(self) -> str:
        """Blob (sha256) of the release in use; "": what the board was flashed with."""
        ...

    def stage(self, release: Release, blob: Path | None) -> None:
        """Lay the release beside what is in use, verified; nothing is exchanged yet.

        Raises:
            ModelError: the release cannot be used on this board; says why.
            StoreError: the release cannot be written.
        """
        ...

    def begin_check(self, release: Release) -> None:
        """Start the check in a process of its own, within the board's budget."""
        ...

    def checked(self) -> Verdict | None:
        """Result of the check; None: the check goes on."""
        ...

    def swap(self, release: Release) -> None:
        """Put the release in use, atomically, and keep what was in use as the previous one.

        An agent that was killed while a release soaked calls `swap` again for what is in use: a hook runs once more.

        Raises:
            StoreError: the exchange cannot be written; the release before stays in use.
        """
        ...

    def ill(self) -> str:
        """Reason why the release in use does not hold up; "": there is none.

        `ill` is asked while a release soaks, and by an agent that begins and finds a release swapped or about to be:
        the answer is why this process runs without that release, if something outside the agent has returned from it.
        """
        ...

    def back(self) -> bool:
        """Put the previous release in use again; False: there is none.

        Raises:
            StoreError: the return cannot be written; it is tried again.
        """
        ...

    def drop(self) -> None:
        """End a check that goes on, and delete staged releases that are not in use."""
        ...

    def keep(self) -> None:
        """Note that the release in use has held its soak, before anything says so.

        Raises:
            StoreError: it cannot be written; it is tried again.
        """
        return

    def settled(self) -> bool:
        """Whether an exchange is complete: no hook runs any more."""
        return True

    def unable(self) -> str:
        """Short reason why no release of this kind can ever be used here; "": there is none."""
        return ""

    def need_bytes(self, release: Release) -> int:
        """Memory that the check of a release will take; it is not begun while the board has less."""
        return 0

    def fds(self) -> Sequence[int]:
        """File descriptors that become readable when there is something to ask for."""
        return ()
