"""What the project's pages show (commands, files, Python), and a folder to run the commands in, as typed."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

from waiting import wait_until

from fedquilt.coordinator.rounds import events

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "tools" / "lab" / "demo" / "digits.npz"
_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?![\w.]*\w)")
LIMIT_S = 300.0  # for one command; a page's commands take seconds on an idle machine


def pages() -> list[Path]:
    """Every page that people read."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        ROOT / "examples" / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def blocks(page: str, kind: str) -> list[str]:
    """The fenced blocks of a kind in a page, named from the project's folder."""
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """Every command of a page, without its prompt."""
    return [line[2:] for block in blocks(page, "console") for line in block.splitlines()]


def files(page: str) -> dict[str, str]:
    """The files that a page shows in full, by name: blocks whose first line is the name as a comment."""
    return {found[1]: block for block in blocks(page, "toml") if (found := re.match(r"# (\S+\.toml)\n", block))}


def require_lines(shown: str, printed: str, tolerance: float) -> None:
    """Require that `printed` has each line that a page shows.

    Numbers that stand alone, with brackets or with a unit differ by at most the share `tolerance`: with `math.inf`,
    only the text between them counts. Several spaces count as one. A line "..." marks omitted lines.
    """
    found = [_split_numbers(line) for line in printed.splitlines()]
    for line in shown.splitlines():
        assert line == "..." or any(_is_same_line(_split_numbers(line), other, tolerance) for other in found), line


def _split_numbers(line: str) -> list[str]:
    return _NUMBER.split(" ".join(line.split()))


def _is_same_line(one: list[str], other: list[str], tolerance: float) -> bool:
    if one[::2] != other[::2]:  # the text between numbers
        return False
    numbers = zip(one[1::2], other[1::2], strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=tolerance) for a, b in numbers)


def run_python(page: str, folder: Path) -> str:
    """Run a page's Python blocks one after the other in a fresh interpreter. Returns what they print."""
    script = folder / "page.py"
    script.write_text("\n\n".join(blocks(page, "python")))
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{page}: {done.stdout}{done.stderr}"
    return done.stdout


class Shell:
    """Runs commands in a folder, as typed; a context manager that ends what it has started.

    Attributes:
        ran: the commands, as typed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: list[str] = []
        self._background: list[subprocess.Popen[bytes]] = []

    def run(self, typed: str, code: int = 0, **replaced: str) -> str:
        """Run a command to its end, which has to be `code`. Returns what it prints."""
        done = subprocess.run(
            self._words(typed, **replaced), cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == code, f"{typed} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, typed: str, **replaced: str) -> subprocess.Popen[bytes]:
        """Start a command that stays up; what it prints goes to `background.log`."""
        with (self.folder / "background.log").open("ab") as log:
            process = subprocess.Popen(self._words(typed, **replaced), cwd=self.folder, stdout=log, stderr=log)
        self._background.append(process)
        return process

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll what only other processes can change."""
        wait_until(condition, what, LIMIT_S, diagnostics=self.log)

    def log(self) -> str:
        """What the commands in the background have printed."""
        return (self.folder / "background.log").read_text()

    def _words(self, typed: str, broker: str = "", port: str = "") -> list[str]:
        """A command's words, with this machine's broker and without TLS where one is given."""
        self.ran.append(typed)
        if broker:
            typed = re.sub(r" --(ca|cert|key) \S+", "", re.sub(r"mqtts?://broker\.site:\d+", broker, typed))
        if port:
            typed = typed.replace("1883", port)
        words = shlex.split(typed.replace("$PWD", str(self.folder)))
        program = {"fedquilt": [sys.executable, "-m", "fedquilt.cli"], "python": [sys.executable]}
        return [*program.get(words[0], words[:1]), *words[1:]]

    def __enter__(self) -> Shell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        for process in self._background:
            process.terminate()
        for process in self._background:
            process.wait(timeout=60)


def data() -> Path:
    """Where real data and weights are, if they are anywhere."""
    return Path(os.environ.get("FEDQUILT_TEST_DATA", ROOT.parent / "shared" / "data"))


def format_mermaid_diagram() -> str:
    """The table of a job's events as the diagram of the page."""
    arrows: dict[tuple[events.Phase, events.Phase], list[str]] = {}
    for event, moves in events.TRANSITIONS.items():
        for before, afters in moves.items():
            for after in afters:
                arrows.setdefault((before, after), []).append(event)
    order = sorted(arrows, key=lambda pair: (events.PHASES.index(pair[0]), events.PHASES.index(pair[1])))
    lines = [f"    {before} --> {after}: {', '.join(arrows[before, after])}" for before, after in order]
    return "\n".join(["stateDiagram-v2", "    [*] --> new", *lines, "    done --> [*]"])
