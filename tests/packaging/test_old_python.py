"""A Python that is too old is refused at once, by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt import cli

ROOT = Path(__file__).parents[2]
OLD = f"""#!/bin/sh
exec {sys.executable} -c 'import sys; sys.version_info, sys.version = (3, 9, 18), "3.9.18"; exec(sys.argv[1])' "$2"
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is needed")
def test_make_refuses_it_before_it_makes_an_environment(tmp_path: Path) -> None:
    """With the version, and how another one is named."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    old = tmp_path / "old"
    old.write_text(OLD)
    old.chmod(0o755)
    made = subprocess.run(["make", "demo", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode != 0
    assert f"fedquilt needs Python 3.10 or newer, and {old} is 3.9.18: name another, as in" in made.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile", "old", "pyproject.toml"]


def test_the_command_refuses_it_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, before anything is imported that an older Python cannot read."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match=r"^Python .* is too old for fedquilt: start it with Python 3\.10 or newer"):
        cli.main(["--version"])
