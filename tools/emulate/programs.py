"""Programs of this machine, and the Debian archive that its apt knows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Final

from fedquilt.core import JobError

TARGETS: Final = ("apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)|$(LABEL)")

Run = Callable[[Sequence[str]], str]


def run(words: Sequence[str], given: str = "") -> str:
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    except OSError as error:
        raise JobError(f"{words[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["(it said nothing)"]
        raise JobError(f"{' '.join(words[:4])} ... ended with {done.returncode}: {said[-1]}")
    return done.stdout


def debian_mirror(suite: str, listed: Run = run) -> str:
    try:
        rows = [line.split("|") for line in listed([*TARGETS, "Created-By: Packages"]).splitlines()]
    except JobError as error:
        rows, why = [], f"apt does not say where Debian is ({error})"
    else:
        why = "apt knows no archive of Debian's here"
    theirs = [row for row in rows if row[2:] == ["main", "Debian", "Debian"]]
    # another release's will do: an archive holds them all
    for row in sorted(theirs, key=lambda row: row[1] != suite):
        return row[0].rstrip("/")
    raise JobError(f"{why}: name one with --mirror URL, or run `apt-get update` if its lists are missing")
