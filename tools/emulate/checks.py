"""Checks of a rehearsal: each has a name, how it went and what was seen."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fedquilt.core import FedquiltError

How = Literal["ok", "failed", "not here"]


class NotHere(FedquiltError):
    """The check is impossible on this machine; the text says what is missing."""


@dataclass(frozen=True)
class Check:
    """One of them. "not here" is neither good nor bad: this machine lacks what it takes."""

    name: str
    how: How
    seen: str
    seconds: float


@dataclass
class Checks:
    """Checks so far, told as they end."""

    quiet: bool = False
    done: list[Check] = field(default_factory=list)
    gave_up: str | None = None  # why not everything was tried

    @property
    def held(self) -> bool:
        """Whether something was checked, everything was tried and nothing failed."""
        return bool(self.done) and self.gave_up is None and all(check.how != "failed" for check in self.done)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[list[str]]:
        """A check; what is appended to the list is what was seen. A named error is its failure, and goes no further."""
        seen: list[str] = []
        began_s = time.monotonic()
        how: How = "ok"
        try:
            yield seen
        except NotHere as error:
            how, seen = "not here", [str(error)]
        except (FedquiltError, OSError) as error:
            how, seen = "failed", [str(error)]
        check = Check(name, how, "; ".join(seen), round(time.monotonic() - began_s, 1))
        self.done.append(check)
        self.say(line(check))

    def give_up(self, why: str) -> None:
        """Report the remaining checks as not tried."""
        self.gave_up = why
        self.say(f"nothing more is tried on this board: {why}")

    def say(self, text: str) -> None:
        """Print a line, unless quiet."""
        if not self.quiet:
            print(text, flush=True)

    def table(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {"held": self.held, "gave_up": self.gave_up, "checks": [asdict(check) for check in self.done]}

    def lines(self, folder: str) -> list[str]:
        """The end of it, for people: what failed, and where the journals are."""
        failed = [check.name for check in self.done if check.how == "failed"]
        absent = [check.name for check in self.done if check.how == "not here"]
        said = [f"{len(self.done)} checks: {len(self.done) - len(failed) - len(absent)} held"]
        said += [f"failed: {', '.join(failed)}"] if failed else []
        said += [f"cannot be shown on this machine: {', '.join(absent)}"] if absent else []
        said += [f"not everything was tried: {self.gave_up}"] if self.gave_up else []
        return ["; ".join(said), f"journals and logs: {folder}"]


def line(check: Check) -> str:
    """A row of the table."""
    return f"{check.how:9} {check.name}: {check.seen} ({check.seconds:.1f} s)"
