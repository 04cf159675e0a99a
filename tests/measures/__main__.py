"""Counts of names, docstrings, files and modules of one path that may only fall.

    python -m tests.measures            # compare with measured.toml, exit code 1 if a count rose
    python -m tests.measures --write    # store lower counts

`make check` runs the comparison.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from pathlib import Path
from typing import Final

from fedquilt.formats import toml
from tests.measures import packs, passed_modules, plain_english

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("coordinator", "edge_agent", "fedquilt", "models", "profiles", "tools")
STORED: Final = Path(__file__).with_name("measured.toml")
PAPER_NAMES: Final = ("Params", "State")  # each method has its own
MOST_FILES: Final = 12  # in a folder
PLUGIN_FOLDERS: Final = ("fedquilt/methods", "fedquilt/cli")  # methods and commands
MOST_LINES: Final = 600  # of a file


def source_files(package: str, root: Path = ROOT) -> list[Path]:
    folder = root / package
    files = sorted(folder.rglob("*.py"))
    return [path for path in files if not any(up.is_symlink() for up in path.parents if up.is_relative_to(folder))]


def count_all() -> dict[str, int]:
    counts: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    for package in PACKAGES:
        counts[f"odd docstrings in {package}"] = 0
        folders: Counter[Path] = Counter()
        for path in source_files(package):
            source = path.read_text(encoding="utf-8")
            folders[path.parent] += 1
            counts["lines"] += source.count("\n")
            counts[f"files of more than {MOST_LINES} lines"] += source.count("\n") > MOST_LINES
            for _, what, kinds, _ in plain_english.check_python(str(path), source):
                if what == "docstring":
                    counts["docstrings"] += 1
                    counts[f"odd docstrings in {package}"] += plain_english.score(kinds) >= 2
                elif what == "name":
                    counts["names that are a lone participle or adverb"] += 1
            tree = ast.parse(source)
            counts["variables that are a lone participle, adverb or pronoun"] += len(plain_english.odd_variables(tree))
            classes.update(node.name.lstrip("_") for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        for folder, files in folders.items():
            plugins = folder.relative_to(ROOT).as_posix() in PLUGIN_FOLDERS
            counts[f"folders of more than {MOST_FILES} files"] += files > MOST_FILES and not plugins
    counts["lines of the core"] = packs.count_core_lines().total()
    counts["classes"] = classes.total()
    counts["classes whose name another class has"] = sum(
        number for name, number in classes.items() if number > 1 and name not in PAPER_NAMES
    )
    counts.update({f"modules that {name}": len(path) for name, path in passed_modules.find_paths().items()})
    return dict(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the counts")
    given = parser.parse_args()
    counts = count_all()
    stored = toml.read_toml(STORED)["counts"] if STORED.exists() else {}
    risen = {name for name, count in counts.items() if count > stored.get(name, count)}
    for name, count in counts.items():
        print(f"{count:8,}  {name}" + (f" (at most {stored[name]:,})" if name in risen else ""))
    if given.write:
        STORED.write_text("[counts]\n" + "".join(f'"{name}" = {count}\n' for name, count in counts.items()), "utf-8")
        return 0
    if risen:
        print(f"{len(risen)} counts rose. Rename or delete, or store a justified rise with --write.", file=sys.stderr)
    return bool(risen)


if __name__ == "__main__":
    sys.exit(main())
