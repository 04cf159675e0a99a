"""The kernel's entry for aarch64: there while it is needed, and only then. The table is a folder here."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from fedquilt.core import JobError
from fedquilt.tools.emulate import binfmt

QEMU = Path("/usr/bin/qemu-aarch64-static")
OTHER = f"""enabled
interpreter {QEMU}
flags: F
offset 0
magic 7f454c460201010000000000000000000200b700
mask ffffffffffffff00fffffffffffffffffeffffff
"""
REMOVED = "-1\n"  # what makes the kernel remove an entry, here its last content


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A folder such as the kernel's, but that what is written stays."""
    (tmp_path / "register").touch()
    (tmp_path / "status").write_text("enabled\n")
    return tmp_path


def within(table: Path) -> binfmt.InTable:
    return lambda commands: ["sh", "-c", f"cd {table}\n{commands}"]


def test_what_is_registered_fits_programs_for_aarch64_and_no_others() -> None:
    """By the first 20 bytes of an ELF file, as the kernel compares them."""
    fields = binfmt.line(QEMU).split(":")
    assert fields[1:4] == ["fedquilt-aarch64", "M", ""]
    assert fields[6:] == [str(QEMU), "F"]
    magic, mask = (bytes.fromhex(field.replace("\\x", "")) for field in fields[4:6])

    def fits(machine: int, kind: int, bits: int = 2, abi: int = 0) -> bool:
        head = b"\x7fELF" + bytes([bits, 1, 1, abi]) + bytes(8) + struct.pack("<HH", kind, machine)
        return all((a ^ b) & c == 0 for a, b, c in zip(head, magic, mask, strict=True))

    assert fits(0xB7, 2)  # an executable
    assert fits(0xB7, 3)  # a position-independent one
    assert fits(0xB7, 3, abi=3)  # as some compilers mark it
    assert not fits(0xB7, 1)  # an object file
    assert not fits(0x3E, 2)  # x86-64: this machine's own
    assert not fits(0xB7, 2, bits=1)


@pytest.mark.parametrize("problem", [None, ValueError, KeyboardInterrupt])
def test_an_entry_is_made_and_removed_whatever_happens(table: Path, problem: type[BaseException] | None) -> None:
    """A failure inside and Ctrl-C too."""
    entry = table / binfmt.NAME
    try:
        with binfmt.register_emulator(QEMU, within(table)) as said:
            assert (table / "register").read_text() == binfmt.line(QEMU)
            assert said == f"by {QEMU}, until this ends"
            entry.write_text(OTHER)  # as the kernel does
            if problem:
                raise problem
    except (ValueError, KeyboardInterrupt):
        pass
    assert entry.read_text() == REMOVED


def test_an_entry_is_removed_when_its_maker_is_killed(table: Path) -> None:
    """By the shell that waits for the end of a pipe."""
    code = (
        "import sys, time; from pathlib import Path; from fedquilt.tools.emulate import binfmt\n"
        "with binfmt.register_emulator(Path('/q'), lambda commands: ['sh', '-c', f'cd {sys.argv[1]}\\n{commands}']):\n"
        "    print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(table)], stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"\n"
        (table / binfmt.NAME).write_text(OTHER)
        os.kill(maker.pid, signal.SIGKILL)
    until(lambda: (table / binfmt.NAME).read_text() == REMOVED, "the entry is taken away")


def test_an_entry_that_was_there_is_used_and_stays(table: Path) -> None:
    """A distribution's own, if it serves roots that do not have the emulator."""
    (table / "qemu-aarch64").write_text(OTHER)
    with binfmt.register_emulator(QEMU, within(table)) as said:
        assert said == "by qemu-aarch64, which was there and stays"
    assert (table / "register").read_text() == ""
    assert (table / "qemu-aarch64").read_text() == OTHER


@pytest.mark.parametrize(
    "other",
    [
        OTHER.replace("enabled", "disabled"),
        OTHER.replace("flags: F", "flags: OC"),  # it would look for the emulator within the root
        OTHER.replace("b700", "3e00"),
        OTHER.replace("7f454c4602", "7f454c4601"),
        "enabled\ninterpreter /usr/bin/jexec\nflags: \nextension .jar\n",
    ],
)
def test_an_entry_that_does_not_serve_is_left_alone(table: Path, other: str) -> None:
    """Ours stands beside it."""
    (table / "other").write_text(other)
    with binfmt.register_emulator(QEMU, within(table)) as said:
        assert said.startswith(f"by {QEMU}")
    assert (table / "other").read_text() == other


def test_one_of_ours_that_was_left_behind_is_removed_first(table: Path) -> None:
    """Nobody else uses that name."""
    (table / binfmt.NAME).write_text(OTHER)
    with binfmt.register_emulator(QEMU, within(table)) as said:
        assert said.startswith(f"by {QEMU}")
        assert (table / binfmt.NAME).read_text() == REMOVED


def test_a_kernel_that_refuses_is_told(table: Path) -> None:
    """With its reason; and one that has no such table, with what may help."""
    (table / "register").unlink()
    (table / "register").mkdir()
    with (
        pytest.raises(JobError, match=r"does not take the entry fedquilt-aarch64 .*register.*[Dd]irectory"),
        binfmt.register_emulator(QEMU, within(table)),
    ):
        pass
    with (
        pytest.raises(JobError, match=r"is binfmt_misc in this kernel \(modprobe binfmt_misc\)"),
        binfmt.register_emulator(QEMU, lambda commands: ["false"]),
    ):
        pass
