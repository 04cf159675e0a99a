"""Packages installed into a folder of their own, as pip leaves them: modules and a dist-info with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "outside"
POINTS = {
    "fedquilt.methods": {"fedavgm": "outside_fl:METHOD"},
    "fedquilt.networks": {"tanh": "outside_fl:network"},
    "fedquilt.data": {"moons": "outside_fl:moons"},
}


def install(
    site: Path, name: str, modules: Mapping[str, str], points: Mapping[str, Mapping[str, str]], version: str = "1.0"
) -> Path:
    """Put a distribution with these modules (file name -> text) and entry points into `site`, which is returned."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line for group, each in points.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in each.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for file, text in modules.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)
    return site


def example(site: Path, version: str = "1.0", more: str = "") -> Path:
    """The package of examples/outside, with further lines at its end."""
    text = (EXAMPLE / "outside_fl.py").read_text() + more
    return install(site, "outside-fl", {"outside_fl.py": text}, POINTS, version)
