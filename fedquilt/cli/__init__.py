"""The `fedquilt` command: one file per verb in this folder. What runs a command line is in `entry`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, as `entry.main`. Ctrl-C ends it without a traceback, also while it is imported.

    Returns:
        The exit code, as `fedquilt --help` lists them.

    Raises:
        SystemExit: 0 after --help and --version, 2 for words that the command line does not take.
    """
    try:
        from fedquilt.cli import entry

        return entry.main(argv)
    except KeyboardInterrupt:
        return 130
