"""The `fedquilt` command, with one file per verb in this folder. `entry` runs a command line."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    try:
        from fedquilt.cli import entry

        return entry.main(argv)
    except KeyboardInterrupt:
        return 130
