"""Launcher of the agent: starts the chosen version, and rolls back a new version that fails.

    python launch.py FOLDER [argument of `fedquilt`]...

The service manager starts this file instead of the agent, and again whenever the agent has ended. The launcher imports
only the standard library and nothing of the versions between which it chooses, so that no version can break it. FOLDER
contains the remote upgrades:

    FOLDER/choice.json      current and previous version, and the state of a trial
    FOLDER/<sha256>/        virtual environments, named by their bundles

If FOLDER is empty or unusable, the launcher starts the version that it was installed with ("flashed"). The launcher
becomes the agent by exec, so that the service manager watches the same process.

A version on trial gets `MAX_STARTS` starts, and `ONLINE_S` seconds in each to reach its broker. An alarm that survives
the exec ends the process unless the agent cancels the alarm. Then the launcher chooses the previous version.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

CHOICE: Final = "choice.json"
LAUNCH_INFO_VARIABLE: Final = "FEDQUILT_LAUNCHED"  # environment variable with the launcher's information
SAFE_PATH_VARIABLE: Final = "PYTHONSAFEPATH"  # from Python 3.11 on: import nothing from the working directory
START_CODE: Final = "import sys; sys.path[:] = filter(None, sys.path); from fedquilt.cli import main; sys.exit(main())"
MAX_STARTS: Final = 3  # starts of a version on trial
ONLINE_S: Final = 300.0
MAX_NUMBER: Final = 1e12  # maximum starts or seconds in choice.json: above, the file is damaged
_ENVIRONMENT: Final = re.compile(r"[0-9a-f]{64}\Z")

USAGE: Final = """usage: launcher FOLDER agent agent.toml

Start the agent, in the version of the latest upgrade.

  FOLDER  Folder for upgrades, empty at first and writable by the agent's user.

Let a service with Restart=always start this command: an upgrade ends the agent."""


class VersionChoice(NamedTuple):
    """Content of choice.json. Versions are sha256 of bundles, and "" is the flashed version."""

    flashed: str  # id of the flashed installation: another flashing makes the upgrades invalid
    current: str = ""
    previous: str | None = None  # None without a previous version
    trying: bool = False  # `current` is on trial
    starts: int = 0  # starts of the version on trial
    online: bool = False  # whether the version has reached its broker since the last start
    began_s: float = 0.0  # time of the last start in seconds since boot
    boot: str = ""  # id of that boot
    returned: str = ""  # reason of the rollback to `current`
    failed: str = ""  # version that was rolled back


def parse_choice(text: str) -> VersionChoice | None:
    try:
        table = json.loads(text)
        fields = {name: table[name] for name in VersionChoice._fields if name in table}
        choice = VersionChoice(**fields)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    names = (choice.current, choice.failed, *(() if choice.previous is None else (choice.previous,)))
    if not all(isinstance(name, str) and (name == "" or _ENVIRONMENT.match(name)) for name in names):
        return None
    texts = (choice.flashed, choice.boot, choice.returned)
    numbers = (choice.starts, choice.began_s)
    if not all(isinstance(item, str) for item in texts):
        return None
    if not all(isinstance(number, int | float) and 0 <= number <= MAX_NUMBER for number in numbers):
        return None
    return choice if isinstance(choice.trying, bool) and isinstance(choice.online, bool) else None


def format_choice(choice: VersionChoice) -> str:
    return json.dumps(choice._asdict(), indent=1) + "\n"


def read_choice(folder: Path) -> VersionChoice | None:
    try:
        return parse_choice((folder / CHOICE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_choice(folder: Path, choice: VersionChoice) -> None:
    part = folder / f"{CHOICE}.new"
    with open(part, "w", encoding="utf-8") as file:
        file.write(format_choice(choice))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / CHOICE)
    entries = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(entries)
    finally:
        os.close(entries)


def python_path(folder: Path, version: str) -> Path:
    return folder / version / "bin" / "python"


def fedquilt_command(program: str, arguments: Sequence[str]) -> list[str]:
    return [program, "-c", START_CODE, *arguments]


def roll_back(choice: VersionChoice, reason: str) -> VersionChoice:
    return VersionChoice(choice.flashed, choice.previous or "", returned=reason, failed=choice.current)


def describe_roll_back(choice: VersionChoice) -> str:
    current = choice.current[:12] or "the flashed version"
    return f"version {choice.failed[:12]} rolled back to {current}: {choice.returned}"


def choose_version(
    choice: VersionChoice | None, flashed: str, boot: str, now_s: float, folder: Path
) -> tuple[VersionChoice, str]:
    """Return the choice to store and start, with a message on a change or "". Starts on trial are counted."""
    if choice is None:
        return VersionChoice(flashed), ""
    if choice.flashed != flashed:
        message = f"version {choice.current[:12]} is void: the board was flashed again" if choice.current else ""
        return VersionChoice(flashed), message
    if choice.current and not python_path(folder, choice.current).exists():
        choice = roll_back(choice, "its environment or its Python is missing")
    elif choice.trying and not choice.online and choice.boot == boot and now_s - choice.began_s >= ONLINE_S:
        choice = roll_back(choice, f"it was not online within {ONLINE_S:g} s")
    elif choice.trying and choice.starts >= MAX_STARTS:
        choice = roll_back(choice, f"it ended {choice.starts} times before it was confirmed")
    elif choice.trying:
        return choice._replace(starts=choice.starts + 1, online=False, boot=boot, began_s=now_s), ""
    else:
        return choice, ""
    if choice.current and not python_path(folder, choice.current).exists():
        choice = choice._replace(current="")
    return choice, describe_roll_back(choice)


def launch_info(
    folder: Path, flashed: str, running: str, arguments: list[str], fallback_reason: str = ""
) -> dict[str, Any]:
    """Return launcher data for the agent. `fallback_reason` is why the chosen version does not run, or ""."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return {
        "folder": str(folder),
        "flashed": flashed,
        "running": running,
        "arguments": arguments,
        "packages": packages,
        "fallback_reason": fallback_reason,
    }


def installation_id(folder: Path) -> str:
    try:
        return str(json.loads((folder / "bundle.json").read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(folder)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _print_message(sentence: str) -> None:
    print(f"fedquilt: {sentence}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"]):
        return print(USAGE)
    if not arguments or arguments[0].startswith("-"):
        sys.exit(USAGE)
    folder, fedquilt_arguments = Path(arguments[0]).absolute(), arguments[1:]
    flashed, stored_choice = installation_id(Path(__file__).resolve().parent), read_choice(folder)
    choice, message = choose_version(
        stored_choice, flashed, _boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME), folder
    )
    fallback_reason = ""
    while True:
        if message:
            _print_message(message)
        if choice != stored_choice and (stored_choice is not None or choice != VersionChoice(flashed)):
            try:
                write_choice(folder, choice)
            except OSError as error:
                fallback_reason = f"{folder / CHOICE} cannot be written ({error.strerror}), so the trial is impossible"
                _print_message(f"{fallback_reason}: the flashed version is started")
                choice = VersionChoice(flashed)  # a trial without counted starts would never end
        program = str(python_path(folder, choice.current)) if choice.current else sys.executable
        os.environ[SAFE_PATH_VARIABLE] = "1"
        os.environ[LAUNCH_INFO_VARIABLE] = json.dumps(
            launch_info(folder, flashed, choice.current, fedquilt_arguments, fallback_reason)
        )
        if choice.trying and not choice.online:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, ONLINE_S)
        try:
            os.execv(program, fedquilt_command(program, fedquilt_arguments))  # noqa: S606 (no shell is wanted)
        except OSError as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if not choice.current:
                sys.exit(f"fedquilt: {program} cannot be started ({error.strerror}): flash this board again")
            stored_choice, choice = choice, roll_back(choice, f"it cannot be started ({error.strerror})")
            message = describe_roll_back(choice)


if __name__ == "__main__":
    main(sys.argv[1:])
