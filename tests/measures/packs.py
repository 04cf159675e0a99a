"""Packs: parts of the product that can be deleted, and the lines of the core that stay without them.

python -m tests.measures.packs            # lines of the core by folder, and of each pack
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKS: Final[dict[str, tuple[str, ...]]] = {  # pack -> its folders and files, with those of its commands
    "boards": (
        "tools/boards",
        *(f"fedquilt/cli/{verb}.py" for verb in ("board", "clocks", "doctor", "flash", "record")),
    ),
    "lab": (
        "tools/lab",
        *(f"fedquilt/cli/{verb}.py" for verb in ("bench", "demo", "init", "lab", "reproduce")),
    ),
    "operations": ("tools/operations", "fedquilt/cli/dash.py"),
    "stitching": (
        "models/stitching",
        "fedquilt/methods/afl.py",
        "fedquilt/methods/fedstitch.py",
        "tools/artefacts/dry_run_donors.py",
        "tools/artefacts/quantization.py",
        "tools/experiments/baselines.py",
    ),
}
CORE: Final = ("coordinator", "edge_agent", "fedquilt", "models", "profiles", "tools/simulation")
PLUGINS: Final = (  # methods and networks, which other packages can add as well
    "fedquilt/methods",
    "models/networks/sequence.py",
    "models/networks/small_networks.py",
    "models/networks/vit.py",
)


def is_below(file: str, places: tuple[str, ...]) -> bool:
    return any(file == place or file.startswith(f"{place}/") for place in places)


def count_lines(places: tuple[str, ...], without: tuple[str, ...] = ()) -> Counter[str]:
    """Return the lines of Python files by the place that they are in. Files behind links do not count."""
    counts: Counter[str] = Counter()
    for place in places:
        folder = ROOT / place
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*.py")):
            linked = any(up.is_symlink() for up in path.parents if up.is_relative_to(ROOT))
            if not linked and not is_below(path.relative_to(ROOT).as_posix(), without):
                counts[place] += path.read_text(encoding="utf-8").count("\n")
    return counts


def count_core_lines() -> Counter[str]:
    """Return the core's lines by folder, without packs and plug-ins."""
    return count_lines(CORE, (*(place for places in PACKS.values() for place in places), *PLUGINS))


def main() -> None:
    """Print the lines of the core and of each pack."""
    core = count_core_lines()
    for name, count in core.items():
        print(f"{count:8,}  {name}")
    print(f"{core.total():8,}  core")
    for name, places in PACKS.items():
        print(f"{count_lines(places).total():8,}  pack {name}")


if __name__ == "__main__":
    main()
