"""Hold a board's clocks at one operating point within its owner's bounds, and restore the settings afterwards.

Before its first change it writes the board's settings to a journal, on disk for good (fsync). The journal goes
only when everything is restored: a start after a kill -9 finds it and restores.
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

from fedquilt.core import UNDECODABLE, ClockError, OperatingPoint, StoreError, Wired
from fedquilt.disk import REAL
from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.clocks import controls, envelope, modes
from fedquilt.edge_agent.clocks.controls import Lever, Levers, Settings, Write

log = logging.getLogger("fedquilt.clocks")

NVPMODEL: Final = "usr/sbin/nvpmodel"
NVPMODEL_S: Final = 5.0
COOLER_C: Final = 5.0  # clocks held before overheating are held again only this far below the limit


class Journal(Wired, frozen=True):
    """Settings before the first change."""

    boot: str | None  # another boot of the board resets clocks; only a mode survives it
    settings: Settings
    put: str | None = None  # mode that a hold has set; None: the owner's own
    mark: str | None = None  # `modes.mark` as of then: another one means that the owner has set a mode since


class Clamp:
    """Clocks of the board below `root`. Call `recover` first, and `restore` at the end.

    Args:
        state: folder of the journal; it has to outlive a restart of the board, as nvpmodel's mode does.
        hottest_c: degrees Celsius above which nothing is held.
        max_w: watts above which no point is held; None: no such limit.
        watts: power of a point in watts, or None for an unknown one; default: the `busy_w` that its client says.
        dry_run: log the writes, and write nothing.
        put: writes one value to one of the kernel's files.
        nvpmodel: runs nvpmodel with arguments and returns its output, or None; default: the board's own program.

    Raises:
        StoreError: the folder cannot be made.
    """

    def __init__(
        self,
        root: Path,
        state: Path,
        *,
        hottest_c: float = 85.0,
        max_w: float | None = None,
        watts: Callable[[OperatingPoint], float | None] | None = None,
        dry_run: bool = False,
        put: Callable[[Path, str], None] = lambda path, value: _put(path, value),
        nvpmodel: Callable[..., str | None] | None = None,
    ) -> None:
        self.point: OperatingPoint | None = None  # held now
        self.hottest_c, self.max_w = hottest_c, max_w
        self._watts = watts or (lambda point: point.busy_w)
        self.root, self._dry_run, self._put = root, dry_run, put
        self._nvpmodel = nvpmodel or self._program
        self._mode_put: str | None = None  # mode that a hold has set; None: the owner's own
        self._mark: str | None = None  # of nvpmodel's status when it was last looked at
        self._journal = state / "clocks.json"
        self._saved: Settings | None = None  # settings before; None: nothing was changed
        self._cooling = False
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"no folder {state} for the clocks' journal: {error.strerror}; name another") from None

    def recover(self) -> list[str]:
        """Restore the changes of a killed process; returns sentences on what could not be restored."""
        if self._dry_run:
            return []
        try:
            journal = msgspec.json.decode(self._journal.read_bytes(), type=Journal)
        except FileNotFoundError:
            return []
        except (OSError, *UNDECODABLE) as error:
            with contextlib.suppress(OSError):
                self._journal.replace(self._journal.with_suffix(".unreadable"))
            return [f"{self._journal} cannot be read ({error}): clocks stay as they are until the board is restarted"]
        self._saved, self._mode_put, self._mark = journal.settings, journal.put, journal.mark
        if journal.boot != self._boot():
            self._saved, self._mark = msgspec.structs.replace(journal.settings, levers=()), None
        return self.restore()

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold the clocks at `point`; returns the point that the board reports afterwards.

        Clocks that another point held and this one does not name return to the board.

        Raises:
            ClockError: too hot, beyond the owner's bounds, not on the board's lists, or not accepted; then nothing
                is held any more.
        """
        try:
            self._check_heat()
            self._check_power(point)
            return self._hold(point)
        except ClockError as error:
            left = self.restore()
            end = f"; NOT as before: {'; '.join(left)}" if left else "; the board's own settings hold"
            raise ClockError(f"{error}{end}") from None

    def restore(self) -> list[str]:
        """Restore the board's own settings. Returns sentences on failures; []: nothing is left to do."""
        self.point = None
        if self._saved is None or self._dry_run:
            return []
        left: list[str] = []
        try:
            self._follow()
            self._set_mode(controls.discover(self.root), self._saved.mode)
        except ClockError as error:
            left.append(str(error))
        found = controls.discover(self.root)
        left += self._apply(controls.undo(found, self._saved))
        for name in controls.unplugged(self.root, self._saved, found.mode(self._saved.mode)):
            left.append(f"{name} is restored once one of its cores is on again")
        if not left:
            self._saved = self._mode_put = None
            self._forget()
        return left

    @property
    def owes(self) -> bool:
        """Whether some of the board's own settings are still to be restored."""
        return self._saved is not None and self.point is None

    def watch(self) -> str | None:
        """Release if the board is too hot or its owner has changed the power mode: returns the reason, or None."""
        hot = controls.hottest_c(self.root)
        if self._cooling and hot is not None and hot < self.hottest_c - COOLER_C:
            self._cooling = False
        if self.point is None:
            return None
        try:
            why = self._follow()
        except ClockError as error:
            why = f"let go: {error}"
        if why is None and (heat := self._too_hot(hot, self.hottest_c)) is not None:
            self._cooling = True
            why = f"let go: {heat}, the limit is {self.hottest_c:g} C"
        if why is not None:
            self.restore()
        return why

    def mode(self) -> str | None:
        """Present mode of nvpmodel by name, as it says or by its status; None: there is none, or it is not known."""
        said = self._nvpmodel("-q") or ""
        told = next((line.partition(":")[2].strip() for line in said.splitlines() if "Power Mode:" in line), None)
        return told or modes.present(self.root)

    def owner(self) -> str | None:
        """The owner's mode by name: that of before the hold, if the hold has set another. None: not known."""
        return self.mode() if self._saved is None or self._mode_put is None else self._saved.mode

    def bounds(self, found: Levers, owner: str | None) -> envelope.Bounds:
        """Highest value of each lever in the owner's mode and within the limits that were there before the hold."""
        before = found.settings(None) if self._saved is None else self._saved
        return envelope.bounds(found, found.mode(owner), {old.name: old.high for old in before.levers})

    # -- how ----------------------------------------------------------------------------------

    def _hold(self, point: OperatingPoint) -> OperatingPoint:
        self._follow()
        found = controls.discover(self.root)
        owner = self.owner() if found.modes else None
        mode, most = found.mode(point.name), self.bounds(found, owner)
        writes = controls.plan(found, point)  # before anything is changed
        envelope.check(found, point, most, owner)
        if mode is not None and not modes.same(mode.name, owner):
            envelope.check_mode(found.mode(owner), mode, owner)
            limited = envelope.below(found, most, envelope.bounds(found, found.mode(owner)))
            if limited:  # nvpmodel would raise it to the cap of the mode
                raise ClockError(
                    f"mode {mode.name} is not set: {limited} is limited below the power mode of this board"
                )
        if self._dry_run:
            log.info("would set %s", "; ".join([*([f"mode {mode.name}"] if mode else []), *map(str, writes)]))
            self.point = point
            return point
        if self._saved is None:
            self._mark = modes.mark(self.root)
            saved = found.settings(owner)
            self._remember(saved)
            self._saved = saved
        wanted = mode.name if mode else self._saved.mode
        again = self.point is not None and wanted != self._saved.mode  # settings of the previous point go with it
        changed = self._set_mode(found, wanted, again)
        if changed:
            found = controls.discover(self.root)  # other cores are on now, so other policies exist
            writes = controls.plan(found, point)
        self._complete(found)
        self._check_saved({write.lever for write in writes})
        held = {write.lever.kind for write in writes}
        others = [lever.kind for lever in found.found if lever.kind not in held]
        back = [] if changed and mode else controls.undo(found, self._saved, others)  # a mode has limits of its own
        wrong = self._apply([*back, *writes], most)
        if wrong:
            raise ClockError("; ".join(wrong))
        became = _became(point, found)
        envelope.check(found, became, most, owner)  # a memory clock may have rounded up
        self.point = became
        return became

    def _follow(self) -> str | None:
        """Take over a mode that the owner has set since the hold began; returns a sentence on it, or None.

        What is restored then are the limits of the new mode: the old ones would let the clocks beyond its caps.
        """
        if self._saved is None or self._dry_run:
            return None
        mark, ours = modes.mark(self.root), self._mode_put or self._saved.mode
        if mark is not None and mark == self._mark:
            return None
        now = self.mode()
        if now is None or (modes.same(now, ours) and (None in (mark, self._mark, self._mode_put))):
            self._mark = mark
            return None
        found = controls.discover(self.root)
        mode = found.mode(now)
        before, saved = self._saved.mode, self._saved
        saved = msgspec.structs.replace(saved, mode=now) if mode is None else envelope.moved(saved, found, mode)
        self._mode_put, self._mark = None, mark
        self._remember(saved)
        self._saved = saved
        return f"let go: the owner has set the power mode {now} (before: {before or 'not known'})"

    def _check_heat(self) -> None:
        limit = self.hottest_c - (COOLER_C if self._cooling else 0.0)
        if (heat := self._too_hot(controls.hottest_c(self.root), limit)) is not None:
            raise ClockError(f"{heat}, clocks are held up to {limit:g} C: let the board cool")

    def _too_hot(self, hot: float | None, limit: float) -> str | None:
        """Sentence on a board that is too hot, or whose thermal zones have all stopped to answer; None: neither."""
        if hot is not None:
            return f"the hottest zone is at {hot:g} C" if hot > limit else None
        return "no thermal zone answers" if sysfs.zones(self.root / "sys/class/thermal") else None

    def _check_power(self, point: OperatingPoint) -> None:
        if self.max_w is None:
            return
        watts = self._watts(point)
        if watts is None or watts > self.max_w:
            draws = "draws nobody knows how much" if watts is None else f"draws {watts:g} W"
            raise ClockError(f"{point.name!r} {draws}, and no point above {self.max_w:g} W is held here (--max-w)")

    def _complete(self, found: Levers) -> None:
        """Remember the settings of new levers: those of cores that a mode has switched on."""
        assert self._saved is not None
        known = {old.name for old in self._saved.levers}
        new = tuple(lever.setting() for lever in found.found if lever.name not in known)
        if new:
            saved = msgspec.structs.replace(self._saved, levers=(*self._saved.levers, *new))
            self._remember(saved)
            self._saved = saved

    def _check_saved(self, wanted: set[Lever]) -> None:
        """Refuse levers whose present setting cannot be read, as it could not be restored."""
        assert self._saved is not None
        known = {old.name: old for old in self._saved.levers}
        for lever in sorted(wanted, key=lambda lever: lever.name):
            for name in ("low", "high", "lock"):
                path = getattr(lever, name)
                if path is not None and getattr(known[lever.name], name) is None:
                    raise ClockError(f"{lever.name} cannot be held: {path} did not say how it was set before")

    def _apply(self, writes: list[Write], most: envelope.Bounds = MappingProxyType({})) -> list[str]:
        """Write, then read back; returns sentences on failures. A rate beyond its bound is not locked."""
        wrong: list[str] = []
        for write in writes:
            lever = write.lever
            now, bound = controls.number(lever.rate), most.get(lever.name)
            if write.file == lever.lock and write.value and bound is not None and (now is None or now > bound):
                wrong.append(f"{write.file} is left open: {lever.rate} says {now}, and {bound} is permitted")
                continue
            try:
                self._put(write.file, str(write.value))
            except OSError as error:
                wrong.append(f"{write.file} does not take {write.value}: {error.strerror}")
        failed = " ".join(wrong)
        for write, said in controls.said(writes):
            if not write.took(said) and str(write.file) not in failed:
                wrong.append(f"{write.file} was set to {write.value} and says {said if said else 'nothing'}")
        return wrong

    def _set_mode(self, found: Levers, name: str | None, again: bool = False) -> bool:
        """Set the mode if it differs or `again` is set; returns whether nvpmodel was called.

        Raises:
            ClockError: it did not change, or cannot without a restart of the board.
        """
        mode = None if name is None else found.mode(name)
        if mode is None:
            return False
        before = self.mode()
        if modes.same(before, mode.name) and not again:
            return False
        envelope.check_masks(found.mode(before), mode)
        assert self._saved is not None
        self._mode_put = None if modes.same(mode.name, self._saved.mode) else mode.name
        self._remember(self._saved)  # before the change: what is found after a kill is not the owner's
        said = self._nvpmodel("-m", str(mode.id))
        after, self._mark = self.mode(), modes.mark(self.root)
        self._remember(self._saved)
        if not modes.same(after, mode.name):
            why = "it needs a restart of the board" if "reboot" in (said or "").lower() else f"it is in {after} still"
            raise ClockError(f"nvpmodel did not go to mode {mode.name}: {why}")
        return True

    def _program(self, *arguments: str) -> str | None:
        """Output of nvpmodel; None: there is none, or it fails. Its question about a restart is never answered yes."""
        program = self.root / NVPMODEL
        if not sysfs.there(program):
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

    def _boot(self) -> str | None:
        return controls.text(self.root / "proc/sys/kernel/random/boot_id")

    def _remember(self, saved: Settings) -> None:
        try:
            REAL.put(self._journal, msgspec.json.encode(Journal(self._boot(), saved, self._mode_put, self._mark)))
        except OSError as error:
            raise ClockError(f"no clock is touched, as {self._journal} cannot be written: {error.strerror}") from None

    def _forget(self) -> None:
        try:
            REAL.unlink(self._journal)
            REAL.sync(self._journal.parent)
        except OSError as error:
            log.warning("%s stays: %s", self._journal, error.strerror)


def _became(point: OperatingPoint, found: Levers) -> OperatingPoint:
    """The point with the frequencies that the board reports: the lowest of each kind."""
    hz = {}
    for kind, wanted in (("cpu", point.cpu_hz), ("gpu", point.gpu_hz), ("emc", point.emc_hz)):
        told = [
            value * lever.unit_hz
            for lever in found.found
            if lever.kind == kind
            and (value := controls.number(lever.rate if lever.rate is not None else lever.high)) is not None
        ]
        hz[f"{kind}_hz"] = wanted if wanted is None else float(min(told, default=wanted))
    return msgspec.structs.replace(point, **hz)


def _put(path: Path, value: str) -> None:
    """Write once, as the kernel's files require; never creates a file."""
    number = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(number, value.encode())
    finally:
        os.close(number)
