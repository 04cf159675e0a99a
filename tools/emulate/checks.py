"""Checks of a rehearsal, with their outcomes and notes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fedquilt.core import FedquiltError

How = Literal["ok", "failed", "not here"]


class CheckUnavailableError(FedquiltError): ...


@dataclass(frozen=True)
class RehearsalCheck:
    name: str
    how: How
    seen: str
    seconds: float


@dataclass
class CheckLog:
    quiet: bool = False
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
        check = RehearsalCheck(name, how, "; ".join(seen), round(time.monotonic() - began_s, 1))
        self.done.append(check)
        self.print_line(format_check(check))

    def give_up(self, why: str) -> None:
        self.gave_up = why
        self.print_line(f"nothing more is tried on this board: {why}")

    def print_line(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def to_report(self) -> dict[str, Any]:
        return {"held": self.all_passed, "gave_up": self.gave_up, "checks": [asdict(check) for check in self.done]}

    def format_summary(self, folder: str) -> list[str]:
        failed = [check.name for check in self.done if check.how == "failed"]
        absent = [check.name for check in self.done if check.how == "not here"]
        said = [f"{len(self.done)} checks: {len(self.done) - len(failed) - len(absent)} held"]
        said += [f"failed: {', '.join(failed)}"] if failed else []
        said += [f"cannot be shown on this machine: {', '.join(absent)}"] if absent else []
        said += [f"not everything was tried: {self.gave_up}"] if self.gave_up else []
        return ["; ".join(said), f"journals and logs: {folder}"]


def format_check(check: RehearsalCheck) -> str:
    return f"{check.how:9} {check.name}: {check.seen} ({check.seconds:.1f} s)"
