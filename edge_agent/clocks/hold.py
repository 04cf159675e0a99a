"""Hold a board's clocks at one operating point, and restore the previous settings afterwards.

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
from typing import Final

import msgspec

from fedquilt.core import ClockError, OperatingPoint, StoreError, Wired
from fedquilt.disk import REAL
from fedquilt.edge_agent import sysfs
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.controls import Lever, Levers, Mode, Settings, Write

log = logging.getLogger("fedquilt.clocks")

NVPMODEL: Final = "usr/sbin/nvpmodel"
NVPMODEL_S: Final = 5.0
COOLER_C: Final = 5.0  # clocks held before overheating are held again only this far below the limit


class Journal(Wired, frozen=True):
    """Settings before the first change."""

    boot: str | None  # another boot of the board resets clocks; only a mode survives it
    settings: Settings


class Clamp:
    """Clocks of the board below `root`. Call `recover` first, and `restore` at the end.

    Args:
        state: folder of the journal; it has to outlive a restart of the board, as nvpmodel's mode does.
        dry_run: log the writes, and write nothing.
        put: writes one value to one of the kernel's files.

    Raises:
        StoreError: the folder cannot be made.
    """

    def __init__(
        self,
        root: Path,
        state: Path,
        *,
        hottest_c: float = 85.0,
        dry_run: bool = False,
        put: Callable[[Path, str], None] = lambda path, value: _put(path, value),
    ) -> None:
        self.point: OperatingPoint | None = None  # held now
        self.hottest_c = hottest_c
        self.root, self._dry_run, self._put = root, dry_run, put
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
        except (OSError, msgspec.DecodeError) as error:
            with contextlib.suppress(OSError):
                self._journal.replace(self._journal.with_suffix(".unreadable"))
            return [f"{self._journal} cannot be read ({error}): clocks stay as they are until the board is restarted"]
        self._saved = journal.settings
        if journal.boot != self._boot():
            self._saved = msgspec.structs.replace(journal.settings, levers=())
        return self.restore()

    def hold(self, point: OperatingPoint) -> OperatingPoint:
        """Hold the clocks at `point`; returns the point that the board reports afterwards.

        Clocks that another point held and this one does not name return to the board.

        Raises:
            ClockError: too hot, not on the board's lists, or not accepted; then nothing is held any more.
        """
        try:
            self._check_heat()
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
            self._set_mode(controls.discover(self.root), self._saved.mode)
        except ClockError as error:
            left.append(str(error))
        found = controls.discover(self.root)
        left += self._apply(controls.undo(found, self._saved))
        if not left:
            self._saved = None
            self._forget()
        return left

    @property
    def owes(self) -> bool:
        """Whether some of the board's own settings are still to be restored."""
        return self._saved is not None and self.point is None

    def watch(self) -> str | None:
        """Release if the board is too hot: returns the reason, or None."""
        hot = controls.hottest_c(self.root)
        if self._cooling and (hot is None or hot < self.hottest_c - COOLER_C):
            self._cooling = False
        if self.point is None or hot is None or hot <= self.hottest_c:
            return None
        self._cooling = True
        self.restore()
        return f"let go: the hottest zone is at {hot:g} C, the limit is {self.hottest_c:g} C"

    def mode(self) -> str | None:
        """Present mode of nvpmodel by name; None: there is no nvpmodel, or it does not answer."""
        said = self._nvpmodel("-q") or ""
        return next((line.partition(":")[2].strip() for line in said.splitlines() if "Power Mode:" in line), None)

    # -- how ----------------------------------------------------------------------------------

    def _hold(self, point: OperatingPoint) -> OperatingPoint:
        found = controls.discover(self.root)
        mode = found.mode(point.name)
        if mode is None or self._dry_run:
            writes = controls.plan(found, point)  # before anything is changed
            if self._dry_run:
                log.info("would set %s", "; ".join([*([f"mode {mode.name}"] if mode else []), *map(str, writes)]))
                self.point = point
                return point
        if self._saved is None:
            saved = found.settings(self.mode() if found.modes else None)
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
        wrong = self._apply([*back, *writes])
        if wrong:
            raise ClockError("; ".join(wrong))
        self.point = _became(point, found)
        return self.point

    def _check_heat(self) -> None:
        hot = controls.hottest_c(self.root)
        limit = self.hottest_c - (COOLER_C if self._cooling else 0.0)
        if hot is not None and hot > limit:
            raise ClockError(f"the hottest zone is at {hot:g} C, clocks are held up to {limit:g} C: let the board cool")

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

    def _apply(self, writes: list[Write]) -> list[str]:
        """Write, then read back; returns sentences on failures."""
        wrong: list[str] = []
        for write in writes:
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
        if before is not None and controls.plain(before) == controls.plain(mode.name) and not again:
            return False
        _check_masks(found.mode(before or ""), mode)
        said = self._nvpmodel("-m", str(mode.id))
        after = self.mode()
        if after is None or controls.plain(after) != controls.plain(mode.name):
            why = "it needs a restart of the board" if "reboot" in (said or "").lower() else f"it is in {after} still"
            raise ClockError(f"nvpmodel did not go to mode {mode.name}: {why}")
        return True

    def _nvpmodel(self, *arguments: str) -> str | None:
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
            REAL.put(self._journal, msgspec.json.encode(Journal(boot=self._boot(), settings=saved)))
        except OSError as error:
            raise ClockError(f"no clock is touched, as {self._journal} cannot be written: {error.strerror}") from None

    def _forget(self) -> None:
        try:
            REAL.unlink(self._journal)
            REAL.sync(self._journal.parent)
        except OSError as error:
            log.warning("%s stays: %s", self._journal, error.strerror)


def _check_masks(before: Mode | None, after: Mode) -> None:
    if before is not None and set(before.masks) != set(after.masks):
        raise ClockError(
            f"mode {after.name} switches other parts of the GPU on than {before.name}, which needs a restart of the "
            f"board: `sudo nvpmodel -m {after.id}` and restart"
        )


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
