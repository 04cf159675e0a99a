"""Packs: parts of the product that can be deleted, and the lines of the core that stay without them.

python -m tests.measures.packs            # lines of the core by folder, and of each pack
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKS: Final[dict[str, tuple[str, ...]]] = {  # pack -> its folders and files, with those of its commands
    "boards": ("tools/boards", "fedquilt/cli/board.py", "fedquilt/cli/flash.py"),
    "lab": ("tools/lab", "fedquilt/cli/lab.py"),
    "operations": ("tools/operations", "fedquilt/cli/dash.py"),
    "ray": ("tools/simulation/ray_workers.py",),
    "stitching": (
        "models/stitching",
        "fedquilt/methods/afl.py",
        "fedquilt/methods/fedstitch.py",
        "tools/artefacts/dry_run_donors.py",
        "tools/experiments/baselines.py",
    ),
    "submodels": (
        *(f"models/partial/{name}.py" for name in ("dual_copy", "output_cache", "torch_masks")),
        "models/partial/width.py",
        *(f"fedquilt/methods/{name}.py" for name in ("_subnetworks", "depthfl", "fedepth", "fedlps", "fedpews")),
        *(f"fedquilt/methods/{name}.py" for name in ("fedpews_fixed", "fedsq", "fjord", "heterofl")),
    ),
}
CORE: Final = ("coordinator", "edge_agent", "fedquilt", "models", "profiles", "tools/simulation")
PLUGINS: Final = (  # methods and networks, which other packages can add as well
    "fedquilt/methods",
    "models/networks/architectures.py",
)


LINKED: Final = ("coordinator", "edge_agent", "models", "profiles", "tools")  # folders that fedquilt/ has links to
CORE_TESTS: Final = (
    *("tests/coordinator", "tests/edge_agent", "tests/fedquilt", "tests/methods", "tests/models", "tests/profiles"),
    *("tests/simulation", "tests/tools/identity", "tests/tools/simulation"),  # but not tests of all verbs
)


def is_below(file: str, places: tuple[str, ...]) -> bool:
    return any(file == place or file.startswith(f"{place}/") for place in places)


def count_lines(places: tuple[str, ...], without: tuple[str, ...] = ()) -> Counter[str]:
    counts: Counter[str] = Counter()
    for place in places:
        folder = ROOT / place
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*.py")):
            linked = any(up.is_symlink() for up in path.parents if up.is_relative_to(ROOT))
            if not linked and not is_below(path.relative_to(ROOT).as_posix(), without):
                counts[place] += path.read_text(encoding="utf-8").count("\n")
    return counts


def count_core_lines() -> Counter[str]:
    return count_lines(CORE, (*(place for places in PACKS.values() for place in places), *PLUGINS))


def copy_core(folder: Path) -> None:
    skipped = shutil.ignore_patterns("__pycache__")
    for name in ("fedquilt", *LINKED, "tests", "examples", "pyproject.toml"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(ROOT / name, folder)
    for place in (folder / place for places in PACKS.values() for place in places):
        shutil.rmtree(place) if place.is_dir() else place.unlink()


def find_core_tests() -> list[str]:
    files = [path for place in CORE_TESTS for path in sorted((ROOT / place).rglob("test_*.py"))]
    around = {path.parent: path for path in (ROOT / "tests").rglob("conftest.py")}
    return [
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.parent.name != "cli"
        and not any(needs_packs(each) for each in (path, *(around[up] for up in path.parents if up in around)))
    ]


@cache
def needs_packs(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        if isinstance(node, ast.Constant) and node.value == "lab":  # the demo's data by their path
            return True
    files = {name: name.replace(".", "/") for name in names}
    packs = tuple(place.removeprefix("fedquilt/").removesuffix(".py") for places in PACKS.values() for place in places)
    if any(is_below(file.removeprefix("fedquilt/"), packs) for file in files.values()):
        return True
    helpers = [ROOT / f"tests/{file}.py" for file in files.values()] + [ROOT / f"{file}.py" for file in files.values()]
    return any(needs_packs(each) for each in helpers if each.is_file() and each.is_relative_to(ROOT / "tests"))


def run_core_tests(tests: list[str]) -> int:
    assert tests, "no test of the core is found: a conftest.py around them imports a pack"
    with tempfile.TemporaryDirectory() as folder:
        copy_core(Path(folder))
        env = {**os.environ, "PYTHONPATH": folder}
        words = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(os.cpu_count()), *tests)
        return subprocess.run(words, cwd=folder, env=env).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--test", action="store_true", help="run the core's tests without packs")
    if parser.parse_args().test:
        return run_core_tests(find_core_tests())
    core = count_core_lines()
    for name, count in core.items():
        print(f"{count:8,}  {name}")
    print(f"{core.total():8,}  core")
    for name, places in PACKS.items():
        print(f"{count_lines(places).total():8,}  pack {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
