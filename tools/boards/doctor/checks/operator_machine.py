"""Checks of the operator's machine for `fedquilt board flash` and the certificate authority."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final

from fedquilt.tools.boards.doctor.findings import Finding, ok, warning

MODULES: Final = (
    ("FQ601", "packaging", "`fedquilt board flash` resolves wheels with it", "pip install 'fedquilt[flash]'"),
    ("FQ602", "pip", "`fedquilt board flash` downloads wheels with it", "python3 -m ensurepip"),
    ("FQ603", "cryptography", "`fedquilt identity` and `enrol` need it", "pip install 'fedquilt[identity]'"),
)


def check_operator_machine(
    has_module: Callable[[str], bool] = lambda name: find_spec(name) is not None,
    has_program: Callable[[str], bool] = lambda name: shutil.which(name) is not None,
) -> list[Finding]:
    told = []
    for number, name, why, mend in MODULES:
        if has_module(name):
            told.append(ok(number, f"{name} is installed"))
        else:
            told.append(warning(number, f"{name} is not installed: {why}", mend))
    if has_program("ssh"):
        told.append(ok("FQ604", "there is an ssh program"))
    else:
        said = "there is no ssh program: `fedquilt board flash --ssh` reaches no board, --rootfs and an archive do"
        told.append(warning("FQ604", said, "sudo apt install openssh-client"))
    return told
