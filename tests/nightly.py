"""`make nightly`: everything that takes too long for `make test`, in stages. A stage that fails stops no other.

    python -m tests.nightly --list
    python -m tests.nightly --only faults matrix
    python -m tests.nightly --skip rehearsal --data FOLDER_WITH_MNIST

What a stage prints is shown as it comes and kept in the folder --out, a file for each stage. At the end a table says
of every stage whether it passed, how long it took and its last line; the exit code is 1 when one failed. A stage that
cannot run here is skipped, and the table says why; one whose tests were all skipped is, too, and its file says why.
Needs a checkout of the repository: the tests are part of it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tests.rehearsal import __main__ as rehearsal

ROOT: Final = Path(__file__).resolve().parents[1]  # of the checkout
SEEDS: Final = "0-99999"  # that `python -m tests.faults` plays
KILLS: Final = "200"
INPUTS: Final = "10000000"  # of `tests/fuzz.py`
FLOODS: Final = ("15", "100", "1000")  # messages a second: not much more than a board may send, and far more
BENCHES: Final = ("idle", "blobs", "energy", "stitch", "memory", "coordinator")  # `tests.benches sim` needs data
STORE: Final = ("tests/examples/test_s3_blobs.py",)
CONTAINERS: Final = "tests/examples/test_containers.py"
RAY: Final = ("tests/tools/simulation/test_ray.py", "tests/tools/simulation/test_ray_client.py")
PYTHONS: Final = ("3.10", "3.12", "3.13")  # beside the one that `make test` runs on
GRAPHS: Final = (  # tests of graphs that no board may run
    "tests/fedquilt/test_graph_check.py",
    "tests/edge_agent/test_onnx_engine.py",
)
ONNXRUNTIMES: Final = ("1.19.2", "1.23.2")  # that read any file a graph names: the oldest permitted, and JetPack 6's
ALL: Final = ("-m", "nightly or not nightly")
WITHOUT_TORCH: Final = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"

Result = Literal["passed", "FAILED", "skipped"]


@dataclass(frozen=True)
class Stage:
    """Commands that are run one after the other from the checkout's root, until one fails.

    Args:
        hindrance: why it cannot run here, in a sentence; "" where it can.
    """

    name: str
    about: str
    commands: tuple[tuple[str, ...], ...]
    hindrance: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a stage; `last` is the last line that it printed, or why it was skipped."""

    stage: str
    result: Result
    seconds: float
    last: str


# -- what there is --------------------------------------------------------------------------------


def stages(data: Path | None = None, *, python: str = sys.executable) -> list[Stage]:
    """Every stage, in the order in which they run.

    Args:
        data: a folder with MNIST's IDX files, for `tests.benches sim`.
        python: the interpreter of the checkout's own environment.
    """
    tests = (python, "-m", "pytest")
    found = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")
    without = "" if found else "Mosquitto is not installed: apt install mosquitto"
    given = "" if data else "it needs --data, a folder with MNIST's IDX files"
    return [
        Stage(
            "faults",
            "100,000 federations whose disks, networks, clocks and processes fail",
            ((python, "-m", "tests.faults", "--seeds", SEEDS, "--processes", str(os.cpu_count() or 1)),),
        ),
        Stage(
            "flips",
            "a thousand bits flipped in a federation's homes: each is mended or named",
            ((python, "tests/flips.py", "--flips", "1000"),),
        ),
        Stage(
            "fuzz",
            f"{INPUTS} mutated inputs for the decoders of both sides: only the errors that they name, memory flat",
            ((python, "tests/fuzz.py", "--inputs", INPUTS, "--processes", str(os.cpu_count() or 1)),),
        ),
        Stage(
            "kills",
            f"{KILLS} times SIGKILL to a coordinator, agents, tasks' processes, Mosquitto or onlookers: no bit changes",
            ((python, "tests/kills.py", "--kills", KILLS),),
            without,
        ),
        Stage(
            "hostile-board",
            "what a flood of an enrolled board costs a coordinator: memory, and processor time a minute",
            tuple((python, "tests/hostile_board.py", "--seconds", "60", "--rate", rate) for rate in FLOODS),
            without,
        ),
        Stage(
            "matrix",
            "the other tests marked nightly: each method with each network, graphs of pip packages",
            ((*tests, "-m", "nightly", f"--ignore={CONTAINERS}"),),
        ),
        Stage(
            "core",
            "the core's tests in a copy of the checkout without packs",
            ((python, "-m", "tests.measures.packs", "--test"),),
        ),
        Stage(
            "envelope",
            "100,000 random boards, power modes, deadlines and faults: no hold beyond the owner's bounds",
            ((python, "-m", "tests.envelope_cases", "--cases", "0-99999"),),
        ),
        Stage(
            "mutants",
            "300 mutants of our modules, each with tests that execute it: how many are noticed, in at most 3 hours",
            ((python, "-m", "tests.measures.mutants", "--count", "300", "--seed", "0"),),
        ),
        Stage(
            "rehearsal",
            "a flashed system booted with systemd, and its agent",
            ((python, "-m", "tests.rehearsal"),),
            rehearsal.hindrance(ROOT / rehearsal.OUT),
        ),
        Stage(
            "containers",
            "images and services of examples/containers: built and started by podman, with a board in a container",
            ((*tests, "-m", "nightly", "-rs", CONTAINERS),),
            "" if shutil.which("podman-compose") else "podman-compose is not installed: apt install podman-compose",
        ),
        *(
            Stage(f"bench-{name}", f"python -m tests.benches {name}", ((python, "-m", "tests.benches", name),))
            for name in BENCHES
        ),
        Stage(
            "bench-sim",
            "python -m tests.benches sim",
            ((python, "-m", "tests.benches", "sim", "--data", str(_images(data))),),
            given,
        ),
        *(
            _apart(
                f"python-{version}",
                f"what needs no torch, on Python {version}",
                ("-c", WITHOUT_TORCH),
                ("-m", "pytest"),
                version=version,
            )
            for version in PYTHONS
        ),
        *(
            _apart(
                f"onnxruntime-{version}",
                f"the check of graphs beside ONNX Runtime {version}",
                ("-m", "pytest", *GRAPHS),
                packages=(f"onnxruntime=={version}",),
            )
            for version in ONNXRUNTIMES
        ),
        # packages that the other tests do without: moto takes 147 MB, Ray with torch most of a gigabyte
        _apart(
            "s3",
            "models and updates by an S3-compatible store",
            ("-m", "pytest", *STORE, *ALL),
            packages=("moto[server]",),
        ),
        _apart(
            "ray",
            "each method on two Ray nodes: bits of one process; killed workers, lost nodes and nodes that differ",
            ("-m", "pytest", *RAY, *ALL),
            packages=("ray[client]>=2.50,<3", "torch"),
        ),
        _apart(
            "small-tables",
            "eight data sets with the job that `simulate` writes, compared with scikit-learn",
            ("-m", "fedquilt.cli", "lab", "reproduce", "tables"),
            packages=("scikit-learn", "torch"),
        ),
    ]


def _images(data: Path | None) -> Path | None:
    """The folder with MNIST's files: the one that is given, or where it lies in a folder of several sets."""
    places = (data / "MNIST" / "raw", data / "MNIST") if data else ()
    return next((place for place in places if place.is_dir()), data)


def _given(data: Path | None) -> Path | None:
    """The folder of data: as it is given, else the one that tests take."""
    place = data or Path(os.environ.get("FEDQUILT_TEST_DATA", ROOT.parent / "shared" / "data"))
    return place if data or place.is_dir() else None


def _apart(
    name: str, about: str, *commands: tuple[str, ...], packages: tuple[str, ...] = (), version: str = PYTHONS[0]
) -> Stage:
    """A stage in an environment of its own, with a Python of this version and these packages besides."""
    found, folder = interpreter(version), ROOT / f".venv-nightly-{name.removeprefix('python-')}"
    own = str(folder / "bin" / "python")
    pip = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", ".[dev]", *packages)
    return Stage(
        name,
        about,
        ((found or "", "-m", "venv", str(folder)), pip, *((own, *command) for command in commands)),
        "" if found else f"there is no Python {version} here: neither python{version} nor one of pyenv's",
    )


def interpreter(version: str, env: Mapping[str, str] = os.environ) -> str | None:
    """A Python of this version that starts: the newest of pyenv's, else the command of that name."""
    own = Path(env.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    numbered = [path for path in own.glob(f"{version}.*/bin/python") if path.parts[-3].split(".")[2].isdigit()]
    newest = sorted(numbered, key=lambda path: int(path.parts[-3].split(".")[2]), reverse=True)
    named = shutil.which(f"python{version}", path=env.get("PATH"))
    return next((each for each in (*map(str, newest), *([named] if named else [])) if _starts(each)), None)


def _starts(python: str) -> bool:
    """Whether it runs: a shim of pyenv's is there for versions that are not chosen, and then refuses."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    except OSError:
        return False


def chosen(every: Sequence[Stage], only: Iterable[str], skip: Iterable[str]) -> list[Stage]:
    """The stages to run; a name stands for all that begin with it.

    Raises:
        ValueError: no stage begins so; says what there is.
    """
    names = [stage.name for stage in every]
    for word in (*only, *skip):
        if not any(name.startswith(word) for name in names):
            raise ValueError(f"no stage is called {word!r}; there are: {', '.join(names)}")
    return [
        stage
        for stage in every
        if (not only or stage.name.startswith(tuple(only))) and not stage.name.startswith(tuple(skip) or ("\0",))
    ]


# -- running --------------------------------------------------------------------------------------


def play(stage: Stage, out: Path, report: Callable[[str], None] = print) -> Outcome:
    """Run a stage; what it prints is said and goes into `out`/NAME.log."""
    if stage.hindrance:
        return Outcome(stage.name, "skipped", 0.0, stage.hindrance)
    began_s, last = time.monotonic(), ""
    with (out / f"{stage.name}.log").open("w", encoding="utf-8") as log:
        for command in stage.commands:
            log.write(f"$ {' '.join(command)}\n")
            try:
                status, heard = _run(command, log.write, report)
            except OSError as error:
                status, heard = 127, f"{command[0]}: {error.strerror}"
                log.write(f"{heard}\n")
            last = heard or last
            if status:
                said = f"{last} (exit code {status} of {' '.join(command[:4])} ...)"
                return Outcome(stage.name, "FAILED", time.monotonic() - began_s, said)
    none = re.match(r"\d+ skipped(, \d+ deselected)? in ", last)  # so pytest ends where no test has passed
    return Outcome(stage.name, "skipped" if none else "passed", time.monotonic() - began_s, last)


def _run(command: Sequence[str], write: Callable[[str], object], report: Callable[[str], None]) -> tuple[int, str]:
    """(exit code, last line that is not empty) of a command, both of its outputs together."""
    last = ""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            write(line)
            report(line.rstrip("\n"))
            last = line.strip() or last
    return process.returncode, last


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """The table at the end."""
    width = max((len(outcome.stage) for outcome in outcomes), default=0)
    rows = [
        f"{outcome.stage:{width}}  {outcome.result:7}  {_time(outcome.seconds):>8}  {outcome.last}"
        for outcome in outcomes
    ]
    counts = {kind: sum(outcome.result == kind for outcome in outcomes) for kind in ("passed", "FAILED", "skipped")}
    return [*rows, "", ", ".join(f"{count} {kind}" for kind, count in counts.items())]


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are asked for; 1 when one failed, 2 when one that is asked for does not exist."""
    parser = argparse.ArgumentParser(prog="make nightly", description="run what takes too long for `make test`")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="these, or all that begin so")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STAGE", help="all but these")
    parser.add_argument("--data", type=Path, help="a folder with MNIST's IDX files; default: $FEDQUILT_TEST_DATA")
    parser.add_argument("--out", type=Path, default=Path("nightly"), help="a folder for the stages' output")
    parser.add_argument("--list", action="store_true", help="say which stages there are, and run none")
    options = parser.parse_args(arguments)
    try:
        some = chosen(stages(_given(options.data)), options.only, options.skip)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(f"{stage.name:18} {stage.hindrance or stage.about}" for stage in some))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for count, stage in enumerate(some, 1):
        print(f"\n[{count}/{len(some)}] {stage.name}: {stage.about}", flush=True)
        outcomes.append(play(stage, options.out, lambda line: print(line, flush=True)))
        print(f"{stage.name}: {outcomes[-1].result}", flush=True)
    print("\n" + "\n".join(summary(outcomes)))
    return 1 if any(each.result == "FAILED" for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
