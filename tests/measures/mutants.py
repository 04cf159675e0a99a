"""Share of seeded mutants of our modules that the tests notice.

    python -m tests.measures.mutants --count 300 --seed 0
    python -m tests.measures.mutants --count 20 --packages models --tests tests/models

A mutant is one small change in a clone of HEAD. Statements are drawn at equal distances from all statements in order
of their path, so that each package and folder has its share. A mutant is run with test files that execute its
statement. If all of them would take longer than --seconds, those come first of which the largest part is about the
changed module, so the share is a lower bound. The map of test files to lines is made once a commit, with coverage.py,
and kept in nightly/mutants. Lines of processes that tests kill are missing in it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Final

from coverage import CoverageData

from tests.measures.__main__ import PACKAGES, ROOT, source_files

COMPARISONS: Final = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
)
FLIPPED: Final = dict([*COMPARISONS, *(pair[::-1] for pair in COMPARISONS), (ast.And, ast.Or), (ast.Or, ast.And)])
NOT_RUN: Final = ("annotation", "returns", "decorator_list")  # fields of nodes that make no decisions at run time
SYMMETRIC: Final = ("min", "max")
own: Final = threading.local()
COVERAGE: Final = """
[run]
data_file = {folder}/lines
parallel = true
patch =
    subprocess
    _exit
disable_warnings = no-data-collected, module-not-imported, no-ctracer, module-not-measured
include =
    {include}
"""


@dataclass(frozen=True)
class Mutant:
    path: str
    line: int
    kind: str
    old: str
    new: str
    lines: range  # of the statement, to the end of the change
    source: bytes  # of the changed module

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class TestFile:
    path: str
    seconds: float
    passed: bool
    lines: dict[str, list[int]]


def own_expressions(node: ast.AST) -> Iterator[ast.expr]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            inside = not isinstance(child, ast.stmt | ast.JoinedStr | ast.ExceptHandler | ast.match_case)
            if isinstance(child, ast.AST) and inside and field not in NOT_RUN:
                if isinstance(child, ast.expr):
                    yield child
                yield from own_expressions(child)


def expression_changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    match node:
        case ast.Compare(left, [operator, *rest], comparators) if type(operator) in FLIPPED:
            yield "comparison", node, ast.Compare(left, [FLIPPED[type(operator)](), *rest], comparators)
        case ast.BoolOp(operator, values):
            yield "and/or", node, ast.BoolOp(FLIPPED[type(operator)](), values)
        case ast.Constant(bool() as value):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield "constant", node, ast.Constant(2 * value + 1)
        case ast.Call(function, [first, second, *rest], keywords):
            same = ast.dump(first) == ast.dump(second) or ast.unparse(function) in SYMMETRIC
            if not same and not any(isinstance(each, ast.Starred) for each in (first, second)):
                yield "swapped arguments", node, ast.Call(function, [second, first, *rest], keywords)
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield "negated condition", test, ast.UnaryOp(ast.Not(), test)


def statement_changes(statement: ast.stmt) -> list[tuple[str, ast.AST, ast.AST]]:
    found: list[tuple[str, ast.AST, ast.AST]] = []
    match statement:
        case ast.ClassDef():  # its own expressions are bases and options such as frozen=True
            return found
        case ast.Expr(ast.Call(function)) if ast.unparse(function).startswith("log."):
            return found
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Assign([ast.Attribute() | ast.Subscript()]):
            found.append(("removed statement", statement, ast.Pass()))
    for node in (statement, *own_expressions(statement)):
        found += expression_changes(node)
    return found


def make_mutant(path: str, source: bytes, statement: ast.stmt, change: tuple[str, ast.AST, ast.AST]) -> Mutant:
    kind, node, changed = change
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    text = ast.unparse(ast.fix_missing_locations(changed))
    text = f"({text})" if isinstance(changed, ast.expr) else text
    new = source[:first] + text.encode() + source[end:]
    old = " ".join(source[first:end].decode().split())
    return Mutant(path, node.lineno, kind, old, text, range(statement.lineno, node.end_lineno + 1), new)


def draw_mutants(root: Path, packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    sites = []
    for path in (path for package in packages for path in source_files(package, root)):
        source = path.read_bytes()
        tree = ast.parse(source)
        conditions = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        typing = {id(each) for node in conditions if "TYPE_CHECKING" in ast.dump(node.test) for each in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt) and id(node) not in typing and (changes := statement_changes(node)):
                sites.append((path.relative_to(root).as_posix(), source, node, changes))
    randomness, mutants = random.Random(seed), []
    offset = randomness.random()
    for number in range(min(count, len(sites))):
        path, source, statement, changes = sites[int((number + offset) * len(sites) / min(count, len(sites)))]
        kind = randomness.choice(sorted({kind for kind, _, _ in changes}))  # constants do not crowd out the others
        change = randomness.choice([change for change in changes if change[0] == kind])
        mutants.append(make_mutant(path, source, statement, change))
    randomness.shuffle(mutants)
    return mutants


def make_clone(folder: str) -> Path:
    own.clone = Path(tempfile.mkdtemp(dir=folder)).resolve()
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(own.clone)], check=True)
    return own.clone


def run_pytest(words: Sequence[str], limit_s: float, *wrapper: str) -> int | None:
    env = {**os.environ, "PYTHONPATH": str(own.clone), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, *wrapper, "-m", "pytest", "-p", "no:cacheprovider", *words]
    process = subprocess.Popen(
        command, cwd=own.clone, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def map_test_file(path: str, maps: Path) -> TestFile:
    stored = maps / f"{path.replace('/', '.')}.json"
    if stored.exists():
        return TestFile(**json.loads(stored.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        config, lines = Path(folder, "config"), defaultdict[str, set[int]](set)
        include = "\n    ".join(str(own.clone / package / "*") for package in PACKAGES)
        config.write_text(COVERAGE.format(folder=folder, include=include), encoding="utf-8")
        began_s = time.monotonic()
        status = run_pytest([path], 1800, "-m", "coverage", "run", f"--rcfile={config}")
        seconds = time.monotonic() - began_s
        for file in Path(folder).glob("lines.*"):
            data = CoverageData(str(file))
            data.read()
            for name in data.measured_files():
                lines[Path(name).resolve().relative_to(own.clone).as_posix()] |= set(data.lines(name) or ())
    passed = status == 0 or (status == 1 and run_pytest([path], 1800) == 0)  # some fail while they are measured
    found = TestFile(path, seconds, passed, {name: sorted(numbers) for name, numbers in lines.items()})
    stored.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return found


def choose_tests(mutant: Mutant, tests: Sequence[TestFile], seconds: float) -> list[TestFile]:
    changed, chosen = set(mutant.lines), list[TestFile]()
    covering = [test for test in tests if test.passed and not changed.isdisjoint(test.lines.get(mutant.path, ()))]
    for test in sorted(covering, key=lambda test: -len(test.lines[mutant.path]) / sum(map(len, test.lines.values()))):
        if sum(each.seconds for each in chosen) + test.seconds <= seconds:
            chosen.append(test)
    return chosen or sorted(covering, key=lambda test: test.seconds)[:1]


def run_mutant(mutant: Mutant, tests: Sequence[TestFile], seconds: float, end_s: float) -> str:
    chosen, fate = choose_tests(mutant, tests, seconds), "not run"
    if time.monotonic() < end_s:
        path = own.clone / mutant.path
        original = path.read_bytes()
        replace_module(path, mutant.source)
        limit_s = 30 + 3 * sum(test.seconds for test in chosen)
        status = run_pytest(["-x", *(test.path for test in chosen)], limit_s) if chosen else 0
        replace_module(path, original)
        fate = "timeout" if status is None else "killed" if status else "survived" if chosen else "uncovered"
    print(f"{fate} ({len(chosen)} test files) {mutant}", flush=True)
    return fate


def replace_module(path: Path, source: bytes) -> None:
    path.write_bytes(source)
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawing")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="top-level packages to change")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="test files, or folders of them")
    parser.add_argument("--seconds", type=float, default=40, help="time for the tests of one mutant")
    parser.add_argument("--minutes", type=float, default=170, help="time after which no mutant is started")
    given = parser.parse_args()
    end_s = time.monotonic() + 60 * given.minutes
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    maps = ROOT / "nightly" / "mutants" / head[:12]
    maps.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(os.cpu_count(), "", make_clone, (folder,)) as pool,
    ):
        root = make_clone(folder)
        places = [root / place for place in given.tests]
        files = {path for place in places for path in (place.rglob("test_*.py") if place.is_dir() else [place])}
        names = sorted(path.relative_to(root).as_posix() for path in files)
        tests = list(pool.map(map_test_file, names, repeat(maps)))
        failed = [test.path for test in tests if not test.passed]
        print(f"{len(tests)} test files; left out, as they fail or skip without a mutant: {' '.join(failed) or 'none'}")
        mutants = draw_mutants(root, given.packages, given.count, given.seed)
        fates = list(pool.map(run_mutant, mutants, repeat(tests), repeat(given.seconds), repeat(end_s)))
    print_rates(mutants, fates)


def print_rates(mutants: Sequence[Mutant], fates: Sequence[str]) -> None:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    print("\nsurvivors:")
    for mutant, fate in sorted(zip(mutants, fates, strict=True), key=lambda pair: (pair[0].path, pair[0].line)):
        for name in (mutant.path.split("/")[0], "all"):
            counts[name][fate] += 1
        if fate in ("survived", "uncovered"):
            print(f"  {fate:9} {mutant}")
    print()
    for name, fates_of in sorted(counts.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        run, killed = fates_of.total() - fates_of["not run"], fates_of["killed"] + fates_of["timeout"]
        others = ", ".join(f"{fates_of[fate]} {fate}" for fate in ("timeout", "survived", "uncovered", "not run"))
        print(f"{name}: {killed} of {run} killed ({killed / max(run, 1):.0%}): {others}")


if __name__ == "__main__":
    main()
