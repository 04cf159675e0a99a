"""Releases of the agent: a new version is built beside the running one, checked and put on trial.

The launcher (`fedquilt.edge_agent.upgrade.launcher`) starts the version named in choice.json. This kind writes that
file and asks its process to end. The service manager then starts the launcher again. The running version is not
changed, so that a kill at any moment leaves either the old or the new version in use.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from fedquilt.core import DECODE_ERRORS, ModelError, shorten_error
from fedquilt.edge_agent.releases.process import ReleaseProcess
from fedquilt.edge_agent.releases.release_kind import CheckResult, ReleaseKind
from fedquilt.edge_agent.settings import AgentSettings
from fedquilt.edge_agent.upgrade import launcher
from fedquilt.edge_agent.upgrade.launcher import VersionChoice
from fedquilt.host import process_resources
from fedquilt.host.disk import REAL, Disk, disk_errors
from fedquilt.wire import DesiredRelease

if TYPE_CHECKING:
    from fedquilt.edge_agent.upgrade.environment_build import BuildRequest

log = logging.getLogger("fedquilt.agent")

COMMAND: Final = (sys.executable, "-m", "fedquilt.edge_agent.upgrade.environment_build")
CHECK_S: Final = 1800.0  # for unpacking, compiling and the new version's own check, on a slow card
CHECK_BYTES: Final = 300 << 20  # memory for the check: an agent, and the process of a small task
HIGHEST_NUMBER_FILE: Final = "newest"  # file with the highest number of a confirmed signed version
NO_LAUNCHER: Final = (
    "agent was not started by its launcher, which rolls back a version that does not start: flash the board again, or "
    "let the service manager start `python -m fedquilt.edge_agent.upgrade.launcher FOLDER agent agent.toml`"
)


class LaunchInfo(msgspec.Struct, frozen=True):
    folder: str
    flashed: str
    running: str  # sha256 of this process's version, or "" for the flashed version
    arguments: tuple[str, ...]
    packages: tuple[str, ...] = ()
    fallback_reason: str = ""  # why the chosen version does not run


def read_launch_info(environ: Mapping[str, str] = os.environ) -> LaunchInfo | None:
    try:
        return msgspec.json.decode(environ[launcher.LAUNCH_INFO_VARIABLE], type=LaunchInfo)
    except (KeyError, *DECODE_ERRORS):
        return None


def _cancel_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


class AgentKind(ReleaseKind):
    def __init__(
        self,
        launch_info: LaunchInfo | None,
        settings: AgentSettings,
        is_connected: Callable[[], bool],
        restart: Callable[[], None],
        *,
        disk: Disk = REAL,
        cancel_alarm: Callable[[], None] = _cancel_alarm,
        command: Sequence[str] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch_info, self._settings = launch_info, settings
        self._is_connected, self._restart, self._cancel_alarm = is_connected, restart, cancel_alarm
        self._disk, self._command, self._check = disk, command, ReleaseProcess(clock)
        self._staged: BuildRequest | None = None

    # -- choice.json --

    def _require_launcher(self) -> LaunchInfo:
        if self._launch_info is None:
            raise ModelError(NO_LAUNCHER)
        return self._launch_info

    def _versions_folder(self) -> Path:
        return Path(self._require_launcher().folder)

    def _read_choice(self) -> VersionChoice:
        started, file = self._require_launcher(), self._versions_folder() / launcher.CHOICE
        with disk_errors(f"read {file}"):
            if not self._disk.is_file(file):
                return VersionChoice(started.flashed)
            payload = self._disk.read(file)
        return launcher.parse_choice(payload.decode(errors="replace")) or VersionChoice(started.flashed)

    def _write_choice(self, choice: VersionChoice) -> None:
        file = self._versions_folder() / launcher.CHOICE
        with disk_errors(f"write {file}"):
            self._disk.make_folder(file.parent)
            self._disk.write_atomically(file, launcher.format_choice(choice).encode())

    def _highest_signed_number(self) -> int:
        """Return the highest number of any signed version that passed its trial on this device, or 0."""
        file = self._versions_folder() / HIGHEST_NUMBER_FILE
        with disk_errors(f"read {file}"):
            text = self._disk.read(file, 0, 32).decode(errors="replace").strip() if self._disk.is_file(file) else "0"
        if not re.fullmatch(r"[0-9]{1,16}", text):
            log.warning("%s is damaged: using the highest number of the installed versions", file)
            text = "0"
        choice = self._read_choice()
        versions = {choice.previous or "", "" if choice.trying else choice.current} - {""}
        return max([int(text), *(self._version_number(name) for name in versions)])

    def _version_number(self, name: str) -> int:
        """Return the number in a version's manifest, or 0 if unreadable. With unsigned bundles it is always 0."""
        if self._settings.upgrade.unsigned:
            return 0
        from fedquilt.edge_agent.upgrade import archive

        try:
            payload = self._disk.read(self._versions_folder() / name / archive.MANIFEST, 0, archive.MAX_MANIFEST_BYTES)
            return msgspec.json.decode(payload, type=archive.UpgradeManifest).number
        except (OSError, *DECODE_ERRORS):
            return 0

    def _record_number_if_highest(self, name: str) -> None:
        if (number := self._version_number(name)) > self._highest_signed_number():
            file = self._versions_folder() / HIGHEST_NUMBER_FILE
            with disk_errors(f"write {file}"):
                self._disk.write_atomically(file, str(number).encode())

    # -- as a kind of release --

    def unsupported_reason(self) -> str:
        # Without a launcher, nothing rolls back a version that fails.
        return "none: no launcher started the agent" if self._launch_info is None else ""

    def current_sha256(self) -> str:
        if self._launch_info is None:
            return ""
        return self._launch_info.running if self._launch_info.fallback_reason else self._read_choice().current

    def stage(self, release: DesiredRelease, blob: Path | None) -> None:
        started = self._require_launcher()
        if blob is None or release.blob is None:
            raise ModelError(
                "release of the agent has no bundle of wheels: build one with `fedquilt rollout build FILE`"
            )
        from fedquilt.edge_agent.upgrade import archive, environment_build  # here, as an idle agent reads no bundle

        with archive.open_bundle(blob) as bundle:
            environment_build.require_fitting_machine(bundle.manifest)
        choice = self._read_choice()
        if choice.returned or choice.failed:
            self._write_choice(choice._replace(returned="", failed=""))
        self._staged = environment_build.BuildRequest(
            bundle=str(blob),
            sha256=release.blob.sha256,
            folder=started.folder,
            arguments=started.arguments,
            packages=started.packages,
            ca=self._settings.broker.ca,
            unsigned=self._settings.upgrade.unsigned,
            highest_number=self._highest_signed_number(),
            parent=os.getpid(),
        )

    def start_check(self, release: DesiredRelease) -> None:
        assert self._staged is not None, "a release is staged before it is checked"
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in (launcher.LAUNCH_INFO_VARIABLE, "NOTIFY_SOCKET")
        }
        environ = {**process_resources.LIBRARY_ENVIRONMENT, **environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            self._check.start(self._command, CHECK_S, environ, msgspec.json.encode(self._staged))
        except OSError as error:
            raise ModelError(f"check of the release cannot be started: {error.strerror}") from None

    def poll_check(self) -> CheckResult | None:
        if self._check.process is None:
            return CheckResult("check was stopped", {})
        if (end := self._check.poll()) is None:
            return None
        if end.code is None:
            return CheckResult(f"check was stopped after its time limit of {CHECK_S:g} s", {})
        if end.code == 0:
            return CheckResult("", {})
        last_line = shorten_error(end.last_line.removeprefix("fedquilt: "), 900) or "check failed without output"
        if end.code < 0:
            reason = f"check was ended by {signal.Signals(-end.code).name}; last output: {last_line}"
            return CheckResult(reason, {}, killed_externally=end.code == -signal.SIGKILL)
        return CheckResult(last_line, {})

    def activate(self, release: DesiredRelease) -> None:
        assert release.blob is not None
        started, choice, sha256 = self._require_launcher(), self._read_choice(), release.blob.sha256
        if choice.current != sha256:
            if not launcher.python_path(self._versions_folder(), sha256).exists():
                raise ModelError(
                    f"environment {sha256[:12]} is missing in {self._versions_folder()}: send the release again"
                )
            self._write_choice(VersionChoice(started.flashed, sha256, choice.current, trying=True))
        if started.running != sha256:
            log.warning("agent restarts as version %s (%s)", release.name or sha256[:12], sha256[:12])
            self._restart()

    def unhealthy_reason(self) -> str:
        """Return why the launcher has rolled the version back, or "". Record that a trial version is online."""
        if self._launch_info is None:
            return NO_LAUNCHER
        choice = self._read_choice()
        if self._launch_info.fallback_reason or choice.returned:
            return self._launch_info.fallback_reason or choice.returned
        if choice.trying and not choice.online and self._launch_info.running == choice.current and self._is_connected():
            self._cancel_alarm()
            self._write_choice(choice._replace(online=True))
        return ""

    def is_settled(self) -> bool:
        if self._launch_info is None or self._launch_info.fallback_reason:
            return True
        choice = self._read_choice()
        return self._launch_info.running == choice.current and (not choice.trying or choice.online)

    def roll_back(self) -> bool:
        if self._launch_info is None:
            return False
        choice = self._read_choice()
        if choice.previous is None and not choice.failed:
            return False
        if choice.previous is not None:
            choice = launcher.roll_back(choice, "")
            self._write_choice(choice)
        if self._launch_info.running != choice.current:
            log.warning("agent restarts as the previous version")
            self._restart()
        return True

    def confirm(self) -> None:
        if self._launch_info is None:
            return
        choice = self._read_choice()
        if choice.trying and choice.online and self._launch_info.running == choice.current:
            self._record_number_if_highest(choice.current)
            self._write_choice(choice._replace(trying=False))

    def discard_unused(self) -> None:
        """Abort a running check, record a roll-back by the launcher, and delete unused versions."""
        self._check.stop()
        self._staged = None
        if self._launch_info is None:
            return
        choice = self._read_choice()
        if self._launch_info.fallback_reason and choice.current != self._launch_info.running:
            return self._write_choice(launcher.roll_back(choice, self._launch_info.fallback_reason))
        if choice.trying:
            return
        kept_versions = {choice.current, choice.previous, self._launch_info.running}
        folder = self._versions_folder()
        with disk_errors(f"list {folder}"):
            entries = self._disk.entries(folder) if self._disk.is_dir(folder) else []
        for entry in entries:
            if entry.is_dir and entry.name not in kept_versions:
                with disk_errors(f"remove {folder / entry.name}"):
                    self._disk.remove(folder / entry.name)

    def check_memory_bytes(self, release: DesiredRelease) -> int:
        return CHECK_BYTES
