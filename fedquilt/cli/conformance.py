"""`fedquilt conformance`."""

from __future__ import annotations

import logging

from fedquilt.cli.commands import argument, verb, verbosity


@verb()
@argument("name", "Name of a method, module:name, or an installed package.")
def conformance(name: str) -> int:
    """Check that a method, or all plug-ins of a package, follow fedquilt's rules."""
    from fedquilt.console import progress
    from fedquilt.testing import package_checks

    if not verbosity():  # a check that fails is told in its line
        logging.getLogger("fedquilt").setLevel(logging.CRITICAL)
    failed = 0
    with progress.show_progress(f"checking {name}"):
        for good, line in package_checks.check_package(name):
            failed += not good
            progress.LINE.print_to_stdout(line)
    print(f"{failed} failed" if failed else "it conforms")
    return 8 if failed else 0
