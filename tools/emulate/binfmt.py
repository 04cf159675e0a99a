"""Temporary entry for aarch64 programs in the kernel's binfmt_misc table.

With the flag F the kernel keeps the emulator open, so that root file systems need no emulator (Linux,
Documentation/admin-guide/binfmt-misc.rst). A shell with private mounts, in which the table is visible, waits on a pipe.
It removes the entry when the pipe is closed, also if this process is killed.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from fedquilt.core import JobError
from fedquilt.tools.emulate import programs

PLACE: Final = "/proc/sys/fs/binfmt_misc"
NAME: Final = "fedquilt-aarch64"
# elf(5): 64 bits, little-endian, version 1; e_type executable or shared; e_machine EM_AARCH64 (0xb7)
MAGIC: Final = bytes.fromhex("7f454c460201010000000000000000000200b700")
MASK: Final = bytes.fromhex("ffffffffffffff00fffffffffffffffffeffffff")

LIST: Final = 'for name in *; do test "$name" = register || { echo "[$name]"; cat "$name"; }; done'
REMOVE: Final = f"if test -e {NAME}; then echo -1 > {NAME}; fi"
HOLD: Final = f"""{REMOVE}
read -r entry && printf %s "$entry" > register && echo held && cat > /dev/null
{REMOVE}"""

InTable = Callable[[str], list[str]]


def in_table(commands: str) -> list[str]:
    mount = f"mount -t binfmt_misc binfmt_misc {PLACE} && cd {PLACE} || exit 1"
    return ["unshare", "--mount", "sh", "-c", f"{mount}\n{commands}"]


def line(emulator: Path) -> str:
    magic, mask = ("".join(f"\\x{byte:02x}" for byte in some) for some in (MAGIC, MASK))
    return f":{NAME}:M::{magic}:{mask}:{emulator}:F"


def entries(listed: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    entry: dict[str, str] = {}
    for text in listed.splitlines():
        if text.startswith("["):
            entry = found.setdefault(text[1:-1], {})
        else:
            key, _, value = text.partition(" ")
            entry[key.rstrip(":")] = value
    return found


def serves(entry: dict[str, str]) -> bool:
    """Whether programs for aarch64 run by it in any root file system."""
    magic = bytes.fromhex(entry.get("magic", ""))
    return (
        "enabled" in entry and "F" in entry.get("flags", "") and magic[:5] == MAGIC[:5] and magic[18:20] == MAGIC[18:20]
    )


@contextlib.contextmanager
def register_emulator(emulator: Path, table: InTable = in_table) -> Iterator[str]:
    try:
        there = entries(programs.run(table(LIST)))
    except JobError as error:
        raise JobError(f"{error}: is binfmt_misc in this kernel (modprobe binfmt_misc), and is this root?") from None
    other = next((name for name, entry in there.items() if name != NAME and serves(entry)), None)
    if other is not None:
        yield f"by {other}, which was there and stays"
        return
    with subprocess.Popen(
        table(HOLD),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for us: it ends when we are done
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        print(line(emulator), file=holder.stdin, flush=True)
        said = holder.stdout.readline().strip()
        if said != "held":
            raise JobError(f"the kernel does not take the entry {NAME} in {PLACE}: {said}")
        yield f"by {emulator}, until this ends"
