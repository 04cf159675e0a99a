"""The `fedquilt` command. `commands.SECTIONS` lists the files of the verbs."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    if sys.version_info < (3, 10):  # noqa: UP036  # possible in a checkout, which pip did not install
        sys.exit(f"Python {sys.version.split()[0]} is too old for fedquilt: start it with Python 3.10 or newer")
    try:
        from fedquilt.cli import entry

        return entry.main(argv)
    except KeyboardInterrupt:
        return 130
