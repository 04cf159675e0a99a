"""The kernel's table of foreign programs (binfmt_misc): an entry for aarch64 while it is needed, and no longer.

With the flag F the kernel holds the emulator open, so that it serves programs in a root file system that
does not have it (Linux, Documentation/admin-guide/binfmt-misc.rst). A shell with mounts of its own sees the
table and waits on a pipe: it removes the entry when the pipe ends, also by this process being killed.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from fedquilt.core import JobError
from fedquilt.tools.flash import own_python

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
    """What runs shell commands in the table's folder. The mount is in a namespace of its own, and goes with them."""
    mount = f"mount -t binfmt_misc binfmt_misc {PLACE} && cd {PLACE} || exit 1"
    return ["unshare", "--mount", "sh", "-c", f"{mount}\n{commands}"]


def line(emulator: Path) -> str:
    """What registers the emulator for aarch64."""
    magic, mask = ("".join(f"\\x{byte:02x}" for byte in some) for some in (MAGIC, MASK))
    return f":{NAME}:M::{magic}:{mask}:{emulator}:F"


def entries(listed: str) -> dict[str, dict[str, str]]:
    """Entry -> its lines, key by key, of what LIST says."""
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
def registered(emulator: Path, table: InTable = in_table) -> Iterator[str]:
    """Programs for aarch64 run while in it; says how. An entry that was there is used and stays.

    Raises:
        JobError: the kernel has no such table, or refuses.
    """
    try:
        there = entries(own_python.run(table(LIST)))
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
