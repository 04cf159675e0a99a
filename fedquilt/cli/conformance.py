"""`fedquilt conformance`."""

from __future__ import annotations

import logging

from fedquilt.cli.commands import argument, verb, wordy


@verb()
@argument("name", "Name of a method, module:name, or an installed package.")
def conformance(name: str) -> int:
    """Check a method, or everything that a package adds, against the rules that fedquilt's own methods follow."""
    from fedquilt import progress
    from fedquilt.testing import package

    if not wordy():  # a check that fails is told in its line
        logging.getLogger("fedquilt").setLevel(logging.CRITICAL)
    failed = 0
    with progress.during(f"checking {name}"):
        for good, line in package.lines(name):
            failed += not good
            progress.LINE.aside(line)
    print(f"{failed} failed" if failed else "it conforms")
    return 8 if failed else 0
