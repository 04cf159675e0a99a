"""Pinning of a board's clocks within its owner's limits, and restoring them.

Before the first change the settings of the board are written to a journal and synced. The journal is deleted only when
everything is restored: a start after a kill -9 finds the journal and restores.
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
COOLER_C: Final = 5.0  # clocks held before overheating are held again only this far below the limit


class RestoreJournal(WireMessage, frozen=True):
    boot: str | None  # another boot of the board resets clocks; only a mode survives it
    settings: BoardControlState
    put: str | None = None  # mode that a hold has set; None: the owner's own
    # `controls.status_fingerprint` as of then: another one means that the owner has set a mode since
    mark: str | None = None


class ClockPin:
    """Pinned clocks of a board. Call `restore_after_crash` first and `restore` last.

    Args:
        state: Folder of the journal, which must survive a restart of the board as power modes do.
        hottest_c: Degrees Celsius above which nothing is pinned.
        max_w: Watts above which no point is pinned, or None for no limit.
        watts: Function that returns the power of a point, or None if unknown. By default, the client's `busy_w`.
        put: Function that writes a value to a kernel file.
        nvpmodel: Function that runs nvpmodel with arguments and returns its output or None. By default, the board's
            program.
    """

    def __init__(
        self,
        root: Path,
        state: Path,
        *,
        hottest_c: float = 85.0,
        max_w: float | None = None,
        watts: Callable[[OperatingPoint], float | None] | None = None,
        put: Callable[[Path, str], None] = lambda path, value: _write_value(path, value),
        nvpmodel: Callable[..., str | None] | None = None,
    ) -> None:
        self.point: OperatingPoint | None = None  # held now
        self.hottest_c, self.max_w = hottest_c, max_w
        self._watts = watts or (lambda point: point.busy_w)
        self.root, self._put = root, put
        self._nvpmodel = nvpmodel or self._run_nvpmodel
        self._mode_put: str | None = None  # mode that a hold has set; None: the owner's own
        self._mark: str | None = None  # of nvpmodel's status when it was last looked at
        self._journal = state / "clocks.json"
        self._saved: BoardControlState | None = None  # settings before; None: nothing was changed
        self._cooling = False
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"no folder {state} for the clocks' journal: {error.strerror}; name another") from None

    def restore_after_crash(self) -> list[str]:
        try:
            journal = msgspec.json.decode(self._journal.read_bytes(), type=RestoreJournal)
        except FileNotFoundError:
            return []
        except (OSError, *DECODE_ERRORS) as error:
            with contextlib.suppress(OSError):
                self._journal.replace(self._journal.with_suffix(".unreadable"))
            return [f"{self._journal} cannot be read ({error}): clocks stay as they are until the board is restarted"]
        self._saved, self._mode_put, self._mark = journal.settings, journal.put, journal.mark
        if journal.boot != self._boot_id():
            self._saved, self._mark = msgspec.structs.replace(journal.settings, levers=()), None
        return self.restore()

    def pin(self, point: OperatingPoint) -> OperatingPoint:
        """Pin the clocks at `point`. Return the point reported by the board.

        Clocks pinned before and not named by this point are restored.
        """
        try:
            self._require_cool()
            self._require_power_within(point)
            return self._check_and_pin(point)
        except ClockError as error:
            left = self.restore()
            end = f"; NOT as before: {'; '.join(left)}" if left else "; the board's own settings hold"
            raise ClockError(f"{error}{end}") from None

    def restore(self) -> list[str]:
        """Restore the board's own settings. Return sentences on failures, or [] if nothing is left to do."""
        self.point = None
        if self._saved is None:
            return []
        left: list[str] = []
        try:
            self._adopt_owner_mode()
            self._set_mode(controls.discover_controls(self.root), self._saved.mode)
        except ClockError as error:
            left.append(str(error))
        found = controls.discover_controls(self.root)
        left += self._apply_writes(controls.restore_writes(found, self._saved))
        for name in controls.offline_policies(self.root, self._saved, found.find_mode(self._saved.mode)):
            left.append(f"{name} is restored once one of its cores is on again")
        if not left:
            self._saved = self._mode_put = None
            self._delete_journal()
        return left

    @property
    def needs_restore(self) -> bool:
        return self._saved is not None and self.point is None

    def unpin_if_required(self) -> str | None:
        hot = controls.hottest_zone_c(self.root)
        if self._cooling and hot is not None and hot < self.hottest_c - COOLER_C:
            self._cooling = False
        if self.point is None:
            return None
        try:
            why = self._adopt_owner_mode()
        except ClockError as error:
            why = f"let go: {error}"
        if why is None and (heat := self._overheat_reason(hot, self.hottest_c)) is not None:
            self._cooling = True
            why = f"let go: {heat}, the limit is {self.hottest_c:g} C"
        if why is not None:
            self.restore()
        return why

    def current_mode(self) -> str | None:
        said = self._nvpmodel("-q") or ""
        told = next((line.partition(":")[2].strip() for line in said.splitlines() if "Power Mode:" in line), None)
        return told or controls.read_mode_name(self.root)

    def owner_mode(self) -> str | None:
        """Return the power mode set by the owner, even while another is pinned, or None if unknown."""
        return self.current_mode() if self._saved is None or self._mode_put is None else self._saved.mode

    def control_limits(self, found: ClockControls, owner: str | None) -> owner_limits.Bounds:
        before = found.read_state(None) if self._saved is None else self._saved
        return owner_limits.control_limits(found, found.find_mode(owner), {old.name: old.high for old in before.levers})

    # -- how ----------------------------------------------------------------------------------

    def _check_and_pin(self, point: OperatingPoint) -> OperatingPoint:
        self._adopt_owner_mode()
        found = controls.discover_controls(self.root)
        owner = self.owner_mode() if found.modes else None
        mode, most = found.find_mode(point.name), self.control_limits(found, owner)
        writes = controls.pin_writes(found, point)  # before anything is changed
        owner_limits.require_within_limits(found, point, most, owner)
        if mode is not None and not controls.is_same_mode(mode.name, owner):
            owner_limits.require_mode_within(found.find_mode(owner), mode, owner)
            limited = owner_limits.find_tighter_limit(
                found, most, owner_limits.control_limits(found, found.find_mode(owner))
            )
            if limited:  # nvpmodel would raise it to the cap of the mode
                raise ClockError(
                    f"mode {mode.name} is not set: {limited} is limited below the power mode of this board"
                )
        if self._saved is None:
            self._mark = controls.status_fingerprint(self.root)
            saved = found.read_state(owner)
            self._write_journal(saved)
            self._saved = saved
        wanted = mode.name if mode else self._saved.mode
        # Setting a mode again replaces the settings of the previous point.
        again = self.point is not None and wanted != self._saved.mode
        changed = self._set_mode(found, wanted, again)
        if changed:
            found = controls.discover_controls(self.root)  # the new mode has other cores and policies
            writes = controls.pin_writes(found, point)
        self._record_new_controls(found)
        self._require_restorable({write.lever for write in writes})
        held = {write.lever.kind for write in writes}
        others = [lever.kind for lever in found.found if lever.kind not in held]
        # a mode has limits of its own
        back = [] if changed and mode else controls.restore_writes(found, self._saved, others)
        wrong = self._apply_writes([*back, *writes], most)
        if wrong:
            raise ClockError("; ".join(wrong))
        became = _point_with_reported_clocks(point, found)
        owner_limits.require_within_limits(found, became, most, owner)  # a memory clock may have rounded up
        self.point = became
        return became

    def _adopt_owner_mode(self) -> str | None:
        """Adopt a power mode set by the owner since the last call. Return a text on the change, or None.

        The limits of the new mode are restored then, as the old ones might exceed its caps.
        """
        if self._saved is None:
            return None
        mark, ours = controls.status_fingerprint(self.root), self._mode_put or self._saved.mode
        if mark is not None and mark == self._mark:
            return None
        now = self.current_mode()
        if now is None or (controls.is_same_mode(now, ours) and (None in (mark, self._mark, self._mode_put))):
            self._mark = mark
            return None
        found = controls.discover_controls(self.root)
        mode = found.find_mode(now)
        before, saved = self._saved.mode, self._saved
        saved = (
            msgspec.structs.replace(saved, mode=now)
            if mode is None
            else owner_limits.state_after_mode_change(saved, found, mode)
        )
        self._mode_put, self._mark = None, mark
        self._write_journal(saved)
        self._saved = saved
        return f"let go: the owner has set the power mode {now} (before: {before or 'not known'})"

    def _require_cool(self) -> None:
        limit = self.hottest_c - (COOLER_C if self._cooling else 0.0)
        if (heat := self._overheat_reason(controls.hottest_zone_c(self.root), limit)) is not None:
            raise ClockError(f"{heat}, clocks are held up to {limit:g} C: let the board cool")

    def _overheat_reason(self, hot: float | None, limit: float) -> str | None:
        """Return why the board may be too hot: a zone above `limit`, or zones without a reading, else None."""
        if hot is not None:
            return f"the hottest zone is at {hot:g} C" if hot > limit else None
        return "no thermal zone answers" if sysfs.thermal_zone_files(self.root / "sys/class/thermal") else None

    def _require_power_within(self, point: OperatingPoint) -> None:
        if self.max_w is None:
            return
        watts = self._watts(point)
        if watts is None or watts > self.max_w:
            draws = "draws nobody knows how much" if watts is None else f"draws {watts:g} W"
            raise ClockError(
                f"{point.name!r} {draws}, and no point above {self.max_w:g} W is held here ([governor] max_w)"
            )

    def _record_new_controls(self, found: ClockControls) -> None:
        assert self._saved is not None
        known = {old.name for old in self._saved.levers}
        new = tuple(lever.read_state() for lever in found.found if lever.name not in known)
        if new:
            saved = msgspec.structs.replace(self._saved, levers=(*self._saved.levers, *new))
            self._write_journal(saved)
            self._saved = saved

    def _require_restorable(self, wanted: set[ClockControl]) -> None:
        assert self._saved is not None
        known = {old.name: old for old in self._saved.levers}
        for lever in sorted(wanted, key=lambda lever: lever.name):
            for name in ("low", "high", "lock"):
                path = getattr(lever, name)
                if path is not None and getattr(known[lever.name], name) is None:
                    raise ClockError(f"{lever.name} cannot be held: {path} did not say how it was set before")

    def _apply_writes(self, writes: list[ControlWrite], most: owner_limits.Bounds = MappingProxyType({})) -> list[str]:
        """Write and read back. Return sentences on failures. A rate above its limit is not locked."""
        wrong: list[str] = []
        for write in writes:
            lever = write.lever
            now, bound = controls.read_number(lever.rate), most.get(lever.name)
            if write.file == lever.lock and write.value and bound is not None and (now is None or now > bound):
                wrong.append(f"{write.file} is left open: {lever.rate} says {now}, and {bound} is permitted")
                continue
            try:
                self._put(write.file, str(write.value))
            except OSError as error:
                wrong.append(f"{write.file} does not take {write.value}: {error.strerror}")
        failed = " ".join(wrong)
        for write, said in controls.read_back(writes):
            if not write.is_applied(said) and str(write.file) not in failed:
                wrong.append(f"{write.file} was set to {write.value} and says {said if said else 'nothing'}")
        return wrong

    def _set_mode(self, found: ClockControls, name: str | None, again: bool = False) -> bool:
        """Set a mode unless it is set already. Return whether nvpmodel was called."""
        mode = None if name is None else found.find_mode(name)
        if mode is None:
            return False
        before = self.current_mode()
        if controls.is_same_mode(before, mode.name) and not again:
            return False
        owner_limits.require_same_gpu_masks(found.find_mode(before), mode)
        assert self._saved is not None
        self._mode_put = None if controls.is_same_mode(mode.name, self._saved.mode) else mode.name
        self._write_journal(self._saved)  # before the change: what is found after a kill is not the owner's
        said = self._nvpmodel("-m", str(mode.id))
        after, self._mark = self.current_mode(), controls.status_fingerprint(self.root)
        self._write_journal(self._saved)
        if not controls.is_same_mode(after, mode.name):
            why = "it needs a restart of the board" if "reboot" in (said or "").lower() else f"it is in {after} still"
            raise ClockError(f"nvpmodel did not go to mode {mode.name}: {why}")
        return True

    def _run_nvpmodel(self, *arguments: str) -> str | None:
        """Return nvpmodel's output whatever its exit status, or None if it is missing, cannot start or times out."""
        # Its question about a restart gets no input and so is never confirmed.
        program = self.root / NVPMODEL
        if not sysfs.is_visible(program):
            return None
        try:
            done = subprocess.run(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=NVPMODEL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode(errors="replace")

    # -- the journal --------------------------------------------------------------------------

    def _boot_id(self) -> str | None:
        return controls.read_line(self.root / "proc/sys/kernel/random/boot_id")

    def _write_journal(self, saved: BoardControlState) -> None:
        try:
            REAL.write_atomically(
                self._journal, msgspec.json.encode(RestoreJournal(self._boot_id(), saved, self._mode_put, self._mark))
            )
        except OSError as error:
            raise ClockError(f"no clock is touched, as {self._journal} cannot be written: {error.strerror}") from None

    def _delete_journal(self) -> None:
        try:
            REAL.unlink(self._journal)
            REAL.sync(self._journal.parent)
        except OSError as error:
            log.warning("%s stays: %s", self._journal, error.strerror)


def _point_with_reported_clocks(point: OperatingPoint, found: ClockControls) -> OperatingPoint:
    hz = {}
    for kind, wanted in (("cpu", point.cpu_hz), ("gpu", point.gpu_hz), ("emc", point.emc_hz)):
        told = [
            value * lever.unit_hz
            for lever in found.found
            if lever.kind == kind
            and (value := controls.read_number(lever.rate if lever.rate is not None else lever.high)) is not None
        ]
        hz[f"{kind}_hz"] = wanted if wanted is None else float(min(told, default=wanted))
    return msgspec.structs.replace(point, **hz)


def _write_value(path: Path, value: str) -> None:
    number = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(number, value.encode())
    finally:
        os.close(number)
