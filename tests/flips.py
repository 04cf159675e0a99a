"""Random bits of a federation's homes are flipped: each is mended or named, and none gives another result unnoticed.

    python tests/flips.py --flips 1000
    python tests/flips.py --seed 17

A coordinator and its devices are killed in the middle of a round, or have finished. Then one bit of one file that they
keep is flipped, whose times stay as they were, and the job goes on to its end, or its result is read. Or the job goes
on first, and the bit is flipped under the running processes. A flip has to come to one of these:

    same      the result is that of the run without it, bit for bit
    refused   there is no result; an error, a warning or the run's log says what is damaged
    noted     the run has gone on with private state that was begun anew, and its log says so
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # else tests/fedquilt, which a script finds first, is taken for the package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from homes import Federation, is_nth_update

from fedquilt.arrays import tensors
from fedquilt.coordinator.rounds.events import AnyEvent, JobEnded
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import scores
from fedquilt.core import FedquiltError
from fedquilt.tools.artefacts import export

KINDS = (("scaffold", "raw"), ("fedavg", "int8"), ("local", "raw"), ("fedavg", "topk"))
NAMED = re.compile(
    r"damaged|malformed|cannot (use|be read|be used)|not a fedquilt message|written by a newer|is gone|is missing"
)
Verdict = Literal["same", "refused", "noted", "SILENT"]


@dataclass(frozen=True)
class Result:
    verdict: Verdict
    file: str
    said: str = ""


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def hearing() -> Iterator[list[str]]:
    log, heard = logging.getLogger("fedquilt"), Heard()
    before = log.propagate
    log.addHandler(heard)
    log.propagate = False
    try:
        yield heard.lines
    finally:
        log.removeHandler(heard)
        log.propagate = before


class Ground:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._states: dict[str, list[str]] = {}
        self._read: dict[str, str] = {}
        for method, codec in KINDS:
            name = f"{method}-{codec}"
            live = Federation(folder / "live", method, rounds=5, codec=codec).create()
            when = is_nth_update(3, 2)

            def killed(event: AnyEvent, when=when, live=live, name=name) -> bool:  # type: ignore[no-untyped-def]
                if not when(event):
                    return False
                shutil.copytree(live.folder, folder / f"{name}-half")  # with the write-ahead log, as SIGKILL leaves it
                return True

            live.run(killed)
            live.run()
            self._states[name] = live.states()
            with Store(live.folder / "coordinator") as store:
                row = store.find_job("sim")
                found = scores.RunScores({}, (scores.EvaluationScore(5, 0.5, 12, 1.25, "a" * 64),))
                scores.write_scores(scores.scores_path(store.home, row.id), found)
            (folder / "live").rename(folder / f"{name}-whole")
            with self._at(f"{name}-whole") as whole:
                self._read[name] = self._told(whole)

    def play(self, seed: int) -> Result:
        roll = random.Random(seed)
        method, codec = roll.choice(KINDS)
        name = f"{method}-{codec}"
        situation = roll.choices(("half", "on", "whole"), (4, 3, 3))[0]
        with self._at(f"{name}-whole" if situation == "whole" else f"{name}-half") as federation:
            flipped, event_count = [], roll.randint(1, 12)

            def later(event: AnyEvent) -> bool:
                flipped.append(_flip(roll, federation.folder, True) if len(flipped) == event_count - 1 else "")
                return False

            if situation != "on":
                flipped.append(_flip(roll, federation.folder, situation == "half"))
            with hearing() as lines:
                try:
                    if situation == "whole":
                        same, notes = self._as_before(name, federation)
                    else:
                        same, notes = self._gone_on(name, federation, later if situation == "on" else None)
                except (FedquiltError, TimeoutError) as error:
                    same, notes = False, [str(error)]
        file = f"{name} {situation} {''.join(flipped)}"
        said = "; ".join([*notes, *lines])
        if same:
            return Result("same", file, said)
        if "starting with new private state" in said:
            return Result("noted", file, said)
        return Result("refused" if NAMED.search(said) else "SILENT", file, said)

    def _gone_on(
        self, name: str, federation: Federation, told: Callable[[AnyEvent], bool] | None
    ) -> tuple[bool, list[str]]:
        federation.run(told or (lambda event: False))
        last = federation.facts()[-1]
        done = isinstance(last, JobEnded) and last.status == "done"
        notes = [last.reason if isinstance(last, JobEnded) else "", *federation.notes()]
        return done and federation.states() == self._states[name], notes

    def _as_before(self, name: str, federation: Federation) -> tuple[bool, list[str]]:
        return self._told(federation) == self._read[name], []

    def _told(self, federation: Federation) -> str:
        with Store(federation.folder / "coordinator") as store:
            row = store.find_job("sim")
            events = [(at, event) for _, at, event in store.read_events(row.id)]
            found = export.load_result(store, row.id)
            payload = tensors.encode_tensors(found.tensors)
            told = scores.read_scores(store.home, row)
            return f"{row} {events} {found.meta} {told} {payload.hex()}".replace(str(federation.folder), "")

    @contextlib.contextmanager
    def _at(self, name: str) -> Iterator[Federation]:
        method, codec = name.rsplit("-", 1)[0].split("-")
        shutil.copytree(self.folder / name, self.folder / "live")
        try:
            yield Federation(self.folder / "live", method, rounds=5, codec=codec)
        finally:
            shutil.rmtree(self.folder / "live")


def _flip(roll: random.Random, folder: Path, devices: bool) -> str:
    kept = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = roll.choice([path for path in kept if path.suffix != ".npz" and (devices or not _device(folder, path))])
    before = path.stat()
    with path.open("r+b") as file:
        bit = roll.randrange(8 * before.st_size)
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return f"{path.relative_to(folder)}, bit {bit}"


def _device(folder: Path, path: Path) -> bool:
    return path.relative_to(folder).parts[0].startswith("dev-")


@contextlib.contextmanager
def ground() -> Iterator[Ground]:
    shared = Path("/dev/shm")  # thousands of fsyncs, of files nobody keeps
    folder = Path(tempfile.mkdtemp(prefix="fedquilt-flips-", dir=shared if shared.is_dir() else None))
    try:
        with hearing():
            made = Ground(folder)
        yield made
    finally:
        shutil.rmtree(folder)


def main() -> int:
    """Play the seeds that the command line names. Returns 1 if a flip changed a result without a word, else 0."""
    parser = argparse.ArgumentParser(description="flip random bits of a federation's homes")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.flips) if options.seed is None else [options.seed]
    counts: Counter[str] = Counter()
    with ground() as made:
        for seed in seeds:
            result = made.play(seed)
            counts[result.verdict] += 1
            if result.verdict == "SILENT" or options.seed is not None:
                print(f"seed {seed}: {result.verdict}: {result.file}: {result.said[:2000]}", flush=True)
    report = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("same", "refused", "noted", "SILENT"))
    print(f"{len(seeds)} flips: {report}")
    return 1 if counts["SILENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
