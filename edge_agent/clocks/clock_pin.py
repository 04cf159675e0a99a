"""Pinned clocks of a board, within the owner's limits, and the restoration of the board's settings.

Before the first change the settings of the board are written to a journal and synced. The journal is deleted only when
everything is restored. After a kill, the next start finds the journal and restores the settings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from fedquilt.core import DECODE_ERRORS, ClockError, OperatingPoint, StoreError, WireMessage
from fedquilt.edge_agent.clocks import controls, owner_limits
from fedquilt.edge_agent.clocks.controls import BoardControlState, ClockControl, ClockControls, ControlWrite
from fedquilt.host import sysfs
from fedquilt.host.disk import REAL

log = logging.getLogger("fedquilt.clocks")

NVPMODEL: Final = "usr/sbin/nvpmodel"
NVPMODEL_S: Final = 5.0
COOLING_MARGIN_C: Final = 5.0  # after overheating, clocks are pinned again only below the limit minus this


class RestoreJournal(WireMessage, frozen=True):
    boot: str | None  # id of the boot: a reboot resets clocks, but not the mode
    settings: BoardControlState
    pinned_mode: str | None = None  # power mode set by pinning, or None in the owner's mode
    # A later `controls.status_fingerprint` that differs means that the owner has set another mode.
    mode_fingerprint: str | None = None


class ClockPin:
    """Pinned clocks of a board. Call `restore_after_crash` first and `restore` last.

    Args:
        state: Folder of the journal, which must survive a restart of the board as power modes do.
        max_temperature_c: Degrees Celsius above which nothing is pinned.
        max_w: Watts above which no point is pinned, or None for no limit.
        power_of_point: Function that returns the watts of a point, or None if unknown. By default, the
            `busy_w` that the client sends with the point.
        write_file: Function that writes a value to a kernel file.
        nvpmodel: Function that runs nvpmodel with arguments and returns its output or None. By default, the board's
            program.
    """

    def __init__(
        self,
        root: Path,
        state: Path,
        *,
        max_temperature_c: float = 85.0,
        max_w: float | None = None,
        power_of_point: Callable[[OperatingPoint], float | None] | None = None,
        write_file: Callable[[Path, str], None] = lambda path, value: _write_value(path, value),
        nvpmodel: Callable[..., str | None] | None = None,
    ) -> None:
        self.point: OperatingPoint | None = None
        self.max_temperature_c, self.max_w = max_temperature_c, max_w
        self._power_of_point = power_of_point or (lambda point: point.busy_w)
        self.root, self._write_file = root, write_file
        self._nvpmodel = nvpmodel or self._run_nvpmodel
        self._pinned_mode: str | None = None  # power mode set by pinning, or None in the owner's mode
        self._mode_fingerprint: str | None = None  # fingerprint of nvpmodel's status at the latest check
        self._journal = state / "clocks.json"
        self._saved: BoardControlState | None = None  # settings before pinning, or None if nothing was changed
        self._is_cooling = False
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"folder {state} for the clocks' journal cannot be made: {error.strerror}") from None

    def restore_after_crash(self) -> list[str]:
        """Restore the settings in the journal of a killed process. Return one sentence for each failure."""
        try:
            journal = msgspec.json.decode(self._journal.read_bytes(), type=RestoreJournal)
        except FileNotFoundError:
            return []
        except (OSError, *DECODE_ERRORS) as error:
            with contextlib.suppress(OSError):
                self._journal.replace(self._journal.with_suffix(".unreadable"))
            return [f"{self._journal} cannot be read ({error}): restart the board to restore its clocks"]
        self._saved, self._pinned_mode, self._mode_fingerprint = (
            journal.settings,
            journal.pinned_mode,
            journal.mode_fingerprint,
        )
        if journal.boot != self._boot_id():
            self._saved, self._mode_fingerprint = msgspec.structs.replace(journal.settings, controls=()), None
        return self.restore()

    def pin(self, point: OperatingPoint) -> OperatingPoint:
        """Pin an operating point. Return the point with the clocks that the board reports.

        Raises:
            ClockError: If the point is not permitted or cannot be set. All settings are then restored.
        """
        try:
            self._require_cool()
            self._require_power_within(point)
            return self._check_and_pin(point)
        except ClockError as error:
            failures = self.restore()
            outcome = (
                f"; NOT restored: {'; '.join(failures)}" if failures else "; the board's own settings are restored"
            )
            raise ClockError(f"{error}{outcome}") from None

    def restore(self) -> list[str]:
        """Restore the board's own settings. Return one sentence for each failure."""
        self.point = None
        if self._saved is None:
            return []
        failures: list[str] = []
        try:
            self._adopt_owner_mode()
            self._set_mode(controls.discover_controls(self.root), self._saved.mode)
        except ClockError as error:
            failures.append(str(error))
        clock_controls = controls.discover_controls(self.root)
        failures += self._apply_writes(controls.restore_writes(clock_controls, self._saved))
        for name in controls.offline_policies(self.root, self._saved, clock_controls.find_mode(self._saved.mode)):
            failures.append(f"{name} has all cores off: the helper restores its limits when a core is on again")
        if not failures:
            self._saved = self._pinned_mode = None
            self._delete_journal()
        return failures

    @property
    def needs_restore(self) -> bool:
        return self._saved is not None and self.point is None

    def unpin_if_required(self) -> str | None:
        """Unpin the clocks after overheating or a change of the power mode. Return the reason, or None."""
        hottest_c = controls.hottest_zone_c(self.root)
        if self._is_cooling and hottest_c is not None and hottest_c < self.max_temperature_c - COOLING_MARGIN_C:
            self._is_cooling = False
        if self.point is None:
            return None
        try:
            reason = self._adopt_owner_mode()
        except ClockError as error:
            reason = f"clocks unpinned: {error}"
        if reason is None and (overheat_reason := self._overheat_reason(hottest_c, self.max_temperature_c)) is not None:
            self._is_cooling = True
            reason = f"clocks unpinned: {overheat_reason}, the limit is {self.max_temperature_c:g} C"
        if reason is not None:
            self.restore()
        return reason

    def current_mode(self) -> str | None:
        output = self._nvpmodel("-q") or ""
        mode_name = next(
            (line.partition(":")[2].strip() for line in output.splitlines() if "Power Mode:" in line), None
        )
        return mode_name or controls.read_mode_name(self.root)

    def owner_mode(self) -> str | None:
        """Return the owner's power mode, even while pinned clocks use another one, or None if unknown."""
        return self.current_mode() if self._saved is None or self._pinned_mode is None else self._saved.mode

    def control_limits(self, clock_controls: ClockControls, owner: str | None) -> owner_limits.ControlLimits:
        settings = clock_controls.read_state(None) if self._saved is None else self._saved
        return owner_limits.control_limits(
            clock_controls, clock_controls.find_mode(owner), {state.name: state.high for state in settings.controls}
        )

    # -- steps --------------------------------------------------------------------------------

    def _check_and_pin(self, point: OperatingPoint) -> OperatingPoint:
        self._adopt_owner_mode()
        clock_controls = controls.discover_controls(self.root)
        owner = self.owner_mode() if clock_controls.modes else None
        mode, limits = clock_controls.find_mode(point.name), self.control_limits(clock_controls, owner)
        writes = controls.pin_writes(clock_controls, point)  # before anything is changed
        owner_limits.require_within_limits(clock_controls, point, limits, owner)
        if mode is not None and not controls.is_same_mode(mode.name, owner):
            owner_limits.require_mode_within(clock_controls.find_mode(owner), mode, owner)
            limited_control = owner_limits.find_tighter_limit(
                clock_controls, limits, owner_limits.control_limits(clock_controls, clock_controls.find_mode(owner))
            )
            if limited_control:  # nvpmodel would raise the limit to the cap of the mode
                raise ClockError(
                    f"mode {mode.name} cannot be set: the owner has limited {limited_control} below the power mode"
                )
        if self._saved is None:
            self._mode_fingerprint = controls.status_fingerprint(self.root)
            saved = clock_controls.read_state(owner)
            self._write_journal(saved)
            self._saved = saved
        mode_name = mode.name if mode else self._saved.mode
        # Setting a mode again replaces the settings of the previous point.
        repeat = self.point is not None and mode_name != self._saved.mode
        changed = self._set_mode(clock_controls, mode_name, repeat)
        if changed:
            clock_controls = controls.discover_controls(self.root)  # the new mode has different cores and policies
            writes = controls.pin_writes(clock_controls, point)
        self._record_new_controls(clock_controls)
        self._require_restorable({write.control for write in writes})
        pinned_kinds = {write.control.kind for write in writes}
        other_kinds = [control.kind for control in clock_controls.controls if control.kind not in pinned_kinds]
        # the mode has set its own limits
        restores = [] if changed and mode else controls.restore_writes(clock_controls, self._saved, other_kinds)
        failures = self._apply_writes([*restores, *writes], limits)
        if failures:
            raise ClockError("; ".join(failures))
        reported_point = _point_with_reported_clocks(point, clock_controls)
        # A memory clock may have been rounded up.
        owner_limits.require_within_limits(clock_controls, reported_point, limits, owner)
        self.point = reported_point
        return reported_point

    def _adopt_owner_mode(self) -> str | None:
        """Record a power mode set by the owner since the last call. Return a sentence on the change, or None.

        `restore` then sets the limits of the new mode, because the earlier limits might exceed the caps of that mode.
        """
        if self._saved is None:
            return None
        fingerprint, expected_mode = controls.status_fingerprint(self.root), self._pinned_mode or self._saved.mode
        if fingerprint is not None and fingerprint == self._mode_fingerprint:
            return None
        current_mode = self.current_mode()
        if current_mode is None or (
            controls.is_same_mode(current_mode, expected_mode)
            and (None in (fingerprint, self._mode_fingerprint, self._pinned_mode))
        ):
            self._mode_fingerprint = fingerprint
            return None
        clock_controls = controls.discover_controls(self.root)
        mode = clock_controls.find_mode(current_mode)
        previous_mode, saved = self._saved.mode, self._saved
        saved = (
            msgspec.structs.replace(saved, mode=current_mode)
            if mode is None
            else owner_limits.state_after_mode_change(saved, clock_controls, mode)
        )
        self._pinned_mode, self._mode_fingerprint = None, fingerprint
        self._write_journal(saved)
        self._saved = saved
        return f"clocks unpinned: the power mode was changed from {previous_mode or '(unknown)'} to {current_mode}"

    def _require_cool(self) -> None:
        limit = self.max_temperature_c - (COOLING_MARGIN_C if self._is_cooling else 0.0)
        if (overheat_reason := self._overheat_reason(controls.hottest_zone_c(self.root), limit)) is not None:
            raise ClockError(f"{overheat_reason}, clocks are pinned only up to {limit:g} C: cool the board")

    def _overheat_reason(self, hottest_c: float | None, limit: float) -> str | None:
        """Return why the board is too hot to pin clocks, or None. Unreadable thermal zones are a reason too."""
        if hottest_c is not None:
            return f"the hottest zone is at {hottest_c:g} C" if hottest_c > limit else None
        return "no thermal zone can be read" if sysfs.thermal_zone_files(self.root / "sys/class/thermal") else None

    def _require_power_within(self, point: OperatingPoint) -> None:
        if self.max_w is None:
            return
        power_w = self._power_of_point(point)
        if power_w is None or power_w > self.max_w:
            power_text = "unknown power" if power_w is None else f"{power_w:g} W"
            raise ClockError(f"{point.name!r} has {power_text}, over the limit of {self.max_w:g} W ([governor] max_w)")

    def _record_new_controls(self, clock_controls: ClockControls) -> None:
        assert self._saved is not None
        known_names = {state.name for state in self._saved.controls}
        new_states = tuple(
            control.read_state() for control in clock_controls.controls if control.name not in known_names
        )
        if new_states:
            saved = msgspec.structs.replace(self._saved, controls=(*self._saved.controls, *new_states))
            self._write_journal(saved)
            self._saved = saved

    def _require_restorable(self, pinned_controls: set[ClockControl]) -> None:
        assert self._saved is not None
        states_by_name = {state.name: state for state in self._saved.controls}
        for control in sorted(pinned_controls, key=lambda control: control.name):
            for name in ("low", "high", "lock"):
                path = getattr(control, name)
                if path is not None and getattr(states_by_name[control.name], name) is None:
                    raise ClockError(
                        f"{control.name} cannot be pinned: {path} cannot be read, and so not restored later"
                    )

    def _apply_writes(
        self, writes: list[ControlWrite], limits: owner_limits.ControlLimits = MappingProxyType({})
    ) -> list[str]:
        """Write values and read them back. Return one sentence for each failure.

        A memory clock is not locked while its rate exceeds the limit in `limits`.
        """
        failures: list[str] = []
        for write in writes:
            control = write.control
            rate_value, limit = controls.read_number(control.rate), limits.get(control.name)
            if (
                write.file == control.lock
                and write.value
                and limit is not None
                and (rate_value is None or rate_value > limit)
            ):
                failures.append(f"{write.file} is not locked: {control.rate} is {rate_value}, the limit {limit}")
                continue
            try:
                self._write_file(write.file, str(write.value))
            except OSError as error:
                failures.append(f"{write.file} refused {write.value}: {error.strerror}")
        failed = " ".join(failures)
        for write, value in controls.read_back(writes):
            if not write.is_applied(value) and str(write.file) not in failed:
                failures.append(f"{write.file} was set to {write.value} and is {value if value else 'unreadable'}")
        return failures

    def _set_mode(self, clock_controls: ClockControls, name: str | None, repeat: bool = False) -> bool:
        """Set a mode with nvpmodel, if it is not set or with `repeat`. Return whether nvpmodel was called."""
        mode = None if name is None else clock_controls.find_mode(name)
        if mode is None:
            return False
        mode_before = self.current_mode()
        if controls.is_same_mode(mode_before, mode.name) and not repeat:
            return False
        owner_limits.require_same_gpu_masks(clock_controls.find_mode(mode_before), mode)
        assert self._saved is not None
        self._pinned_mode = None if controls.is_same_mode(mode.name, self._saved.mode) else mode.name
        self._write_journal(self._saved)  # before the change, because a mode found after a kill is not the owner's
        output = self._nvpmodel("-m", str(mode.id))
        mode_after, self._mode_fingerprint = self.current_mode(), controls.status_fingerprint(self.root)
        self._write_journal(self._saved)
        if not controls.is_same_mode(mode_after, mode.name):
            needs_reboot = "reboot" in (output or "").lower()
            reason = "the mode needs a restart of the board" if needs_reboot else f"the mode is still {mode_after}"
            raise ClockError(f"nvpmodel did not set mode {mode.name}: {reason}")
        return True

    def _run_nvpmodel(self, *arguments: str) -> str | None:
        """Return nvpmodel's output for any exit status, or None if nvpmodel cannot start or times out."""
        # Without input, nvpmodel's question about a restart is never confirmed.
        program = self.root / NVPMODEL
        if not sysfs.is_visible(program):
            return None
        try:
            process = subprocess.run(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=NVPMODEL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return process.stdout.decode(errors="replace")

    # -- the journal --------------------------------------------------------------------------

    def _boot_id(self) -> str | None:
        return controls.read_line(self.root / "proc/sys/kernel/random/boot_id")

    def _write_journal(self, saved: BoardControlState) -> None:
        try:
            REAL.write_atomically(
                self._journal,
                msgspec.json.encode(RestoreJournal(self._boot_id(), saved, self._pinned_mode, self._mode_fingerprint)),
            )
        except OSError as error:
            raise ClockError(
                f"clocks stay unchanged, because {self._journal} cannot be written: {error.strerror}"
            ) from None

    def _delete_journal(self) -> None:
        try:
            REAL.unlink(self._journal)
            REAL.sync(self._journal.parent)
        except OSError as error:
            log.warning("%s cannot be deleted: %s", self._journal, error.strerror)


def _point_with_reported_clocks(point: OperatingPoint, clock_controls: ClockControls) -> OperatingPoint:
    hz = {}
    for kind, requested_hz in (("cpu", point.cpu_hz), ("gpu", point.gpu_hz), ("emc", point.emc_hz)):
        reported_hz = [
            value * control.unit_hz
            for control in clock_controls.controls
            if control.kind == kind
            and (value := controls.read_number(control.rate if control.rate is not None else control.high)) is not None
        ]
        hz[f"{kind}_hz"] = requested_hz if requested_hz is None else float(min(reported_hz, default=requested_hz))
    return msgspec.structs.replace(point, **hz)


def _write_value(path: Path, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
