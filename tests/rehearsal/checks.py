"""Checks of a rehearsal with their outcomes, and messages in the journal of a unit."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from fedquilt.core import FedquiltError

How = Literal["ok", "failed", "not here"]
SAID: Final = re.compile(r"\S+ +\d+ \S+ \S+ ([^\[: ]+)(?:\[\d+\])?: (.*)")  # journalctl --output=short-precise


class CheckUnavailableError(FedquiltError): ...


@dataclass(frozen=True)
class RehearsalCheck:
    name: str
    how: How
    seen: str


@dataclass
class CheckLog:
    done: list[RehearsalCheck] = field(default_factory=list)
    gave_up: str | None = None  # why not everything was tried

    @property
    def all_passed(self) -> bool:
        return bool(self.done) and self.gave_up is None and all(check.how != "failed" for check in self.done)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[list[str]]:
        seen: list[str] = []
        began_s = time.monotonic()
        how: How = "ok"
        try:
            yield seen
        except CheckUnavailableError as error:
            how, seen = "not here", [str(error)]
        except (FedquiltError, OSError) as error:
            how, seen = "failed", [str(error)]
        self.done.append(RehearsalCheck(name, how, "; ".join(seen)))
        print(f"{how:9} {name}: {'; '.join(seen)} ({time.monotonic() - began_s:.1f} s)", flush=True)

    def give_up(self, why: str) -> None:
        self.gave_up = why
        print(f"nothing more is tried on this board: {why}", flush=True)

    def format_summary(self, folder: str) -> list[str]:
        failed = [check.name for check in self.done if check.how == "failed"]
        absent = [check.name for check in self.done if check.how == "not here"]
        said = [f"{len(self.done)} checks: {len(self.done) - len(failed) - len(absent)} held"]
        said += [f"failed: {', '.join(failed)}"] if failed else []
        said += [f"cannot be shown on this machine: {', '.join(absent)}"] if absent else []
        said += [f"not everything was tried: {self.gave_up}"] if self.gave_up else []
        return ["; ".join(said), f"journals and logs: {folder}"]


def count_restarts(journal: str) -> int:
    return journal.count("Scheduled restart job")


def last_message(journal: str) -> str:
    said = [found[2] for found in map(SAID.match, journal.splitlines()) if found and found[1] != "systemd"]
    return said[-1][:300] if said else "(it said nothing)"
