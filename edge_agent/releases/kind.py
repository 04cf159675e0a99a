"""Kinds of releases: what is done to exchange a model, the agent or its settings, in steps that can be killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from fedquilt.wire import Release


class Verdict(NamedTuple):
    """End of a check: measured numbers, and why the release is refused; "": it is not."""

    refused: str
    metrics: Mapping[str, float]
    note: str = ""  # what should be known of a release that is not refused: that its accuracy was not measured


class Kind(Protocol):
    """One kind of release. Every method can be called again after a kill at any moment, with the same outcome.

    A kind that inherits from this class has the methods at the end, which say that it has nothing to tell there.
    """

    def current(self) -> str:
        """The blob (sha256) that is in use; "": what the board was flashed with."""
        ...

    def stage(self, release: Release, blob: Path | None) -> None:
        """Lay the release beside what is in use, verified; nothing is exchanged yet.

        Raises:
            ModelError: it cannot be used on this board, and why.
            StoreError: it cannot be written.
        """
        ...

    def begin_check(self, release: Release) -> None:
        """Start the check in a process of its own, within the board's budget."""
        ...

    def checked(self) -> Verdict | None:
        """The end of the check; None: it goes on."""
        ...

    def swap(self, release: Release) -> None:
        """Put the release in use, atomically, and keep what was in use as the previous one.

        An agent that was killed while a release soaked calls `swap` again for what is in use: a hook runs once more.

        Raises:
            StoreError: it cannot be written; what was in use still is.
        """
        ...

    def ill(self) -> str:
        """Why what is in use does not hold up; "": it does.

        `ill` is asked while a release soaks, and by an agent that begins and finds a release swapped or about to be:
        the answer is why this process runs without that release, if something outside the agent has returned from it.
        """
        ...

    def back(self) -> bool:
        """Put the previous one in use again; False: there is none.

        Raises:
            StoreError: it cannot be written; it is tried again.
        """
        ...

    def drop(self) -> None:
        """End a check that goes on, and delete what is staged and not in use."""
        ...

    def settled(self) -> bool:
        """Whether an exchange has come to its end: it has not while a hook runs."""
        return True

    def unable(self) -> str:
        """Why no release of this kind can ever be put in use here, in a few words; "": one can."""
        return ""

    def need_bytes(self, release: Release) -> int:
        """Memory that the check of a release will take; it is not begun while the board has less."""
        return 0

    def fds(self) -> Sequence[int]:
        """File descriptors that become readable when there is something to ask for."""
        return ()
