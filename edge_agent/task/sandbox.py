"""Sandbox of a process of tasks or checks, where the kernel has seccomp and Landlock.

    python -m fedquilt.edge_agent.task.sandbox PROGRAM PRIVATE PARENT

The process enters the sandbox before any library is imported, then becomes the module PROGRAM.

A task loads graphs, networks and data that other people have made. If malicious content takes over the process, the
process can send nothing except its result, reach no other process's memory, leave no process group, and write no file
outside its private folders. The agent trusts no file in these folders: it copies a result before checking the copy.
Without seccomp and Landlock, the task runs without a sandbox (see docs/security.md).

seccomp and Landlock apply to the calling thread and its later children, so that `enter_sandbox` must run before any
library starts threads.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import struct
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 4, 22, 38, 2
OUT, CACHE, TEMPORARY, LIBRARIES = "out", "cache", "tmp", "libraries"  # private folders of a task's process
CHECK = "check"  # folder in the agent's home with the private folders of a check's process
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, equal on all architectures
VERSION_FLAG, PATH_BENEATH = 1, 1
MIN_LANDLOCK_VERSION: Final = 2  # first version that permits renaming files between permitted folders
TRUNCATE_LANDLOCK_VERSION: Final = 3
WRITES: Final = 1 << 1 | sum(1 << bit for bit in range(4, 14))  # rights to write, create, delete and move files
TRUNCATES: Final = 1 << 14

EPERM, UNIX, NETLINK = 1, 1, 16
LOAD, EQUAL, GREATER_OR_EQUAL, RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of classic BPF on 32-bit words
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | EPERM
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENT_OFFSET = 0, 4, 16  # offsets in struct seccomp_data, little-endian


class SystemCalls(NamedTuple):
    architecture: int
    socket: int
    denied: Sequence[int]  # ptrace, process_vm_readv/writev, io_uring_setup, pidfd_getfd, setsid, setpgid


CALLS: Final = {
    "x86_64": SystemCalls(0xC000003E, 41, (101, 310, 311, 425, 438, 112, 109)),
    "aarch64": SystemCalls(0xC00000B7, 198, (117, 270, 271, 425, 438, 157, 154)),
}


TASK_PROGRAM: Final = "fedquilt.edge_agent.task.main"
CHECK_PROGRAM: Final = "fedquilt.edge_agent.releases.check_process"


def task_command(private: Path, program: str = TASK_PROGRAM) -> tuple[str, ...]:
    """Return the command of a task or check process, which can write only folders below `private`."""
    return (sys.executable, "-m", "fedquilt.edge_agent.task.sandbox", program, str(private))


def protect_memory() -> None:
    """Prevent the user's processes from tracing or writing the memory of this process."""
    _prctl(PR_SET_DUMPABLE, 0)


def enter_sandbox(private: Path) -> None:
    for name in (OUT, CACHE, TEMPORARY, LIBRARIES):
        (private / name).mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(private / TEMPORARY)
    os.environ["XDG_CACHE_HOME"] = str(private / LIBRARIES)
    os.environ["CUDA_CACHE_PATH"] = str(private / LIBRARIES / "nv")
    apply_restrictions(writable_folders(private))


def apply_restrictions(writable: Iterable[Path]) -> tuple[str, ...]:
    """Restrict this process permanently. Return the applied restrictions, from "files" and "network".

    "files" denies writes outside `writable`. "network" denies sockets, and system calls that reach other processes.
    """
    if _prctl(PR_SET_NO_NEW_PRIVS, 1):
        return ()
    return tuple(
        name
        for name, is_applied in (("files", _restrict_files(writable)), ("network", _restrict_network()))
        if is_applied
    )


def available_restrictions() -> tuple[str, ...]:
    files = _landlock_version() >= MIN_LANDLOCK_VERSION
    network = platform.machine() in CALLS and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")
    return tuple(name for name, is_available in (("files", files), ("network", network)) if is_available)


def writable_folders(private: Path) -> list[Path]:
    """Return the folders that a task's process may write.

    The parent folder `private` is not writable, so that a task cannot replace a folder by a link.
    """
    return [*(private / name for name in (OUT, CACHE, TEMPORARY, LIBRARIES)), Path("/dev"), Path("/proc")]


def _restrict_files(writable: Iterable[Path]) -> bool:
    version = _landlock_version()
    if version < MIN_LANDLOCK_VERSION:
        return False
    handled_access = WRITES | (TRUNCATES if version >= TRUNCATE_LANDLOCK_VERSION else 0)
    ruleset_fd = _system_call(CREATE_RULESET, struct.pack("=Q", handled_access), 8, 0)
    if ruleset_fd < 0:
        return False
    try:
        for folder in writable:
            try:
                folder_fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                if _system_call(ADD_RULE, ruleset_fd, PATH_BENEATH, struct.pack("=Qi", handled_access, folder_fd), 0):
                    return False
            finally:
                os.close(folder_fd)
        return _system_call(RESTRICT_SELF, ruleset_fd, 0) == 0
    finally:
        os.close(ruleset_fd)


def _restrict_network() -> bool:
    calls = CALLS.get(platform.machine())
    if calls is None or sys.byteorder != "little":
        return False
    program = _build_seccomp_program(calls)
    instructions = ctypes.create_string_buffer(b"".join(program))
    filter_struct = struct.pack("@HP", len(program), ctypes.addressof(instructions))
    return _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(filter_struct)) == 0


def _build_seccomp_program(calls: SystemCalls) -> list[bytes]:
    """Return a seccomp filter that denies `calls.denied` and sockets other than Unix and Netlink."""
    tests = [
        (LOAD, ARCHITECTURE_OFFSET, None),
        (EQUAL, calls.architecture, "next or refuse"),
        (LOAD, NUMBER_OFFSET, None),
        (GREATER_OR_EQUAL, 0x40000000, "refuse"),  # the x32 numbers of x86-64
        *((EQUAL, number, "refuse") for number in calls.denied),
        (EQUAL, calls.socket, "next or allow"),
        (LOAD, ARGUMENT_OFFSET, None),
        (EQUAL, UNIX, "allow"),
        (EQUAL, NETLINK, "allow"),
    ]
    refuse, allow = len(tests), len(tests) + 1
    program = []
    for index, (code, number, jump) in enumerate(tests):
        to_refuse, to_allow = refuse - index - 1, allow - index - 1
        jumps = {
            None: (0, 0),
            "refuse": (to_refuse, 0),
            "allow": (to_allow, 0),
            "next or refuse": (0, to_refuse),
            "next or allow": (0, to_allow),
        }[jump]
        program.append(struct.pack("=HBBI", code, *jumps, number))
    return [*program, struct.pack("=HBBI", RETURN, 0, 0, REFUSE), struct.pack("=HBBI", RETURN, 0, 0, ALLOW)]


def _landlock_version() -> int:
    """Return the kernel's Landlock version, or a number below 1 if Landlock is missing or off."""
    return _system_call(CREATE_RULESET, None, 0, VERSION_FLAG)


def _system_call(number: int, *arguments: int | bytes | None) -> int:
    c_arguments = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *c_arguments))


def _prctl(option: int, argument: int, pointer: object = 0) -> int:
    zero = ctypes.c_ulong(0)
    third = zero if pointer == 0 else pointer
    return int(ctypes.CDLL(None).prctl(ctypes.c_int(option), ctypes.c_ulong(argument), third, zero, zero))


if __name__ == "__main__":
    enter_sandbox(Path(sys.argv[2]))
    importlib.import_module(sys.argv[1]).main()
