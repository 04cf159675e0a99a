"""Random boards, power modes, deadlines and faults: nothing is ever held, nor written, beyond the owner's bounds.

    python -m tests.envelope_cases --cases 0-99999

One case is one board made of files, with a simulated nvpmodel and a kernel that refuses, caps and rounds. What is
permitted is taken from the layouts' own tables, not from the code that is tried. A failure names its case, and any case
can be played again alone.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from fedquilt.core import ClockError, OperatingPoint, StoreError, WorkEstimate
from fedquilt.edge_agent.clocks import controls
from fedquilt.edge_agent.clocks.client import HelperStatus
from fedquilt.edge_agent.clocks.clock_pin import ClockPin
from fedquilt.edge_agent.clocks.helper import read_clock_state
from fedquilt.edge_agent.devices import linux
from fedquilt.edge_agent.power import governor
from tests import fake_boards
from tests.fake_boards import write_fake_board

EVERY: Final = [(board, jetpack) for board, one in fake_boards.BOARDS.items() for jetpack in one.jetpacks]
ROUNDED: Final = 1.01  # nvpmodel's caps are rounded: 850 MHz means 854.25
OTHERS: Final = ("15340000.vic", "bwmgr")  # devfreq devices that are no GPU
ON: Final[dict[Path, int]] = {}  # root of a board -> number of its cores that are on
STEPS: Final = 3  # of one case


class Outside(AssertionError):
    """Something was written or held beyond the owner's bounds."""


def once(find: Callable[[Path], controls.ClockControls]) -> Callable[[Path], controls.ClockControls]:
    """`controls.discover_controls`, cached: the folders and lists of a tree do not change."""
    found: dict[tuple[object, ...], controls.ClockControls] = {}

    def discover(root: Path) -> controls.ClockControls:
        key = (root, ON.get(root))
        if key not in found:
            found[key] = find(root)
        return found[key]

    return discover


class World:
    """One board made of files, its owner, and a kernel with faults."""

    def __init__(self, folder: Path, board: str, jetpack: int) -> None:
        self.root, self.state = folder / "root", folder / "state"
        self.layout = fake_boards.BOARDS[board]
        write_fake_board(self.root, board, jetpack)
        self.gpu = next(path for path in (self.root / "sys/class/devfreq").iterdir() if path.name not in OTHERS)
        self.policies = {
            cores[0]: self.root / f"sys/devices/system/cpu/cpufreq/policy{cores[0]}" for cores in self.layout.policies
        }
        caps = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/kernel/nvpmodel_emc_cap/emc_iso_cap")
        self.emc_cap = next((self.root / cap for cap in caps if (self.root / cap).exists()), None)
        self.bwmgr = self.root / "sys/class/devfreq/bwmgr"  # Thor's memory clock
        self.cores = [core for cores in self.layout.policies for core in cores]
        self.faults = random.Random(0)
        self.odds, self.celsius, self.max_temperature_c = 0.0, 40.0, 85.0
        self.max_w: float | None = None
        self.own: dict[Path, int] = {}  # limits that the owner has written by hand
        self.clamp: ClockPin | None = None
        self.tick = 0
        self.set(self.layout.default)
        self.device = linux.detect(self.root, clocks=self)
        self.widest: set[str] = set()

    # -- the owner and the kernel --

    def set(self, number: int) -> None:
        """As nvpmodel does: cores, limits and its status, which is new each time."""
        self.mode, mode = number, self.layout.modes[number]
        if ON.get(self.root) != mode.cores:
            ON[self.root] = mode.cores
            for place, core in enumerate(self.cores):
                self.write(self.root / f"sys/devices/system/cpu/cpu{core}/online", int(place < mode.cores))
        for folder in self.policies.values():
            self.limits(folder / "scaling_min_freq", folder / "scaling_max_freq", self.layout.cpu_khz, mode.cpu * 1000)
        self.limits(
            self.gpu / "min_freq", self.gpu / "max_freq", [m * 1e6 for m in self.layout.gpu_mhz], mode.gpu * 1e6
        )
        if self.emc_cap is not None:
            self.write(self.emc_cap, round(mode.emc * 1e6) if mode.emc > 0 else 0)
        else:
            self.limits(self.bwmgr / "min_freq", self.bwmgr / "max_freq", (204e6, self.layout.emc_mhz * 1e6), -1)
        status = self.root / "var/lib/nvpmodel/status"
        status.write_text(f"pmode:{number:04d}\n")
        self.tick += 1

        os.utime(status, ns=(self.tick, self.tick))

    def limits(self, low: Path, high: Path, listed: Sequence[float], cap: float) -> None:
        below = [value for value in listed if cap < 0 or value <= cap * ROUNDED]
        self.write(low, round(min(listed)))
        self.write(high, round(max(below, default=min(listed))))

    def write(self, path: Path, value: int) -> None:
        path.write_text(f"{value}\n")

    def nvpmodel(self, *arguments: str) -> str | None:
        if self.faults.random() < self.odds:
            return None
        if arguments[0] == "-m":
            owner = self.owner
            self.set(int(arguments[1]))
            self.owner = owner
        return f"NV Power Mode: {self.layout.modes[self.mode].name}\n"

    def put(self, path: Path, value: str) -> None:
        """The kernel: it refuses, caps or ignores now and then, and rounds the memory's rate up."""
        if not path.exists():
            raise OSError(errno.ENOENT, "No such file")
        self.inside(path, float(value) if value.lstrip("-").isdigit() else 0.0, "written")
        fault = self.faults.random() / self.odds if self.odds else 1.0
        if fault < 0.4:
            raise OSError(errno.EINVAL, "Invalid argument")
        if fault < 0.7:
            return
        path.write_text(f"{value}\n")

    # -- what is permitted --

    def bound(self, path: Path) -> float:
        """Highest value of a file in the owner's mode and under his own limits."""
        mode = self.layout.modes[self.owner]
        if path.name == "scaling_max_freq":
            cap = mode.cpu * 1000 if mode.cpu > 0 else max(self.layout.cpu_khz)
            cap = max(cap, min(self.layout.cpu_khz))
        elif path.parent.name == "bwmgr":
            return self.layout.emc_mhz * 1e6 if path.name == "max_freq" else float("inf")
        elif path.name == "max_freq":
            cap = max(mode.gpu, min(self.layout.gpu_mhz)) * 1e6 if mode.gpu > 0 else max(self.layout.gpu_mhz) * 1e6
        elif path == self.emc_cap or path.name == "rate":
            cap = (mode.emc if mode.emc > 0 else self.layout.emc_mhz) * 1e6
        else:
            return float("inf")
        return min(cap * ROUNDED, self.own.get(path, float("inf")) * ROUNDED)

    def inside(self, path: Path, value: float, how: str) -> None:
        if path.name == "online":
            raise Outside(f"{path} was {how}: cores are the owner's")
        if value > self.bound(path):
            name = self.layout.modes[self.owner].name
            raise Outside(f"{path} was {how} as {value:g}, and mode {name} permits {self.bound(path):g}")

    def check(self) -> None:
        """Every limit and every core on the board, and the point that is held."""
        for file in [*(each / "scaling_max_freq" for each in self.policies.values()), self.gpu / "max_freq"]:
            self.inside(file, float(file.read_text()), "left")
        if self.emc_cap is not None:
            self.inside(self.emc_cap, float(self.emc_cap.read_text()), "left")
        clock = self.root / "sys/kernel/debug/bpmp/debug/clk/emc"
        owes = (
            self.clamp is not None and self.clamp.needs_restore
        )  # the kernel refuses to open the lock: the helper tries again
        if not owes and (clock / "rate").exists() and (clock / "mrq_rate_locked").read_text().strip() == "1":
            self.inside(clock / "rate", float((clock / "rate").read_text()), "locked")
        mode = self.layout.modes[self.owner]
        for core in self.cores[mode.cores :]:
            if (self.root / f"sys/devices/system/cpu/cpu{core}/online").read_text().strip() != "0":
                raise Outside(f"core {core} is on, and mode {mode.name} turned it off")
        point = None if self.clamp is None else self.clamp.point
        if point is not None and self.max_w is not None and (point.busy_w is None or point.busy_w > self.max_w):
            raise Outside(f"{point} is held, and the limit is {self.max_w:g} W")

    # -- the clock helper, without its socket --

    def pin(self, point: OperatingPoint) -> OperatingPoint:
        assert self.clamp is not None
        if self.celsius > self.max_temperature_c:
            try:
                held = self.clamp.pin(point)
            except ClockError:
                raise
            raise Outside(f"{held} is held at {self.celsius:g} C, and the limit is {self.max_temperature_c:g} C")
        return self.clamp.pin(point)

    def unpin(self) -> None:
        assert self.clamp is not None
        self.clamp.restore()

    def send_keepalive(self, now_s: float) -> None:
        pass

    def request_status(self) -> HelperStatus:
        found = controls.discover_controls(self.root)
        if self.clamp is None:
            return HelperStatus(clocks=tuple(map(read_clock_state, found.controls)))
        owner = self.clamp.owner_mode()
        most = self.clamp.control_limits(found, owner)
        clocks = tuple(read_clock_state(lever, most.get(lever.name)) for lever in found.controls)
        return HelperStatus(clocks=clocks, mode=owner, modes=tuple(mode.name for mode in found.modes))

    def heat(self, celsius: float) -> None:
        self.celsius = celsius
        zones = (self.root / "sys/class/thermal").iterdir()
        (next(zone for zone in zones if (zone / "type").read_text().strip() != "PMIC-Die") / "temp").write_text(
            f"{celsius * 1000:.0f}\n"
        )


def play(world: World, case: int) -> int:
    """Play a case; returns how many points were held in it. Raises Outside."""
    luck = random.Random(case)
    world.odds, world.own, world.faults = 0.0, {}, random.Random(case + 1)
    for file in ("clocks.json", "clocks.new", "clocks.unreadable"):
        (world.state / file).unlink(missing_ok=True)
    lock = world.root / "sys/kernel/debug/bpmp/debug/clk/emc/mrq_rate_locked"
    if lock.exists():
        lock.write_text("0\n")
    world.owner = luck.randrange(len(world.layout.modes))
    world.set(world.owner)
    world.heat(luck.uniform(35, 75))
    world.max_temperature_c = luck.choice([70.0, 80.0, 85.0])
    world.max_w = luck.choice([None, None, luck.uniform(2, 40)])
    if luck.random() < 0.2:  # the owner has lowered a limit by hand
        file = world.gpu / "max_freq"
        now = int(file.read_text())
        lower = [round(mhz * 1e6) for mhz in world.layout.gpu_mhz if round(mhz * 1e6) <= now]
        world.own[file] = luck.choice(lower)
        world.write(file, world.own[file])
    world.odds = luck.choice([0.0, 0.0, 0.05, 0.3])
    clamp = lambda: ClockPin(  # noqa: E731
        world.root,
        world.state,
        max_temperature_c=world.max_temperature_c,
        max_w=world.max_w,
        write_file=world.put,
        nvpmodel=world.nvpmodel,
    )
    world.clamp, held = clamp(), 0
    for step in range(STEPS):
        event = luck.random()
        try:
            if event < 0.45:
                held += by_governor(world, luck, step)
            elif event < 0.6:
                held += by_anyone(world, luck)
            elif event < 0.8:  # the owner changes the mode; limits by hand go with it
                world.owner, world.own = luck.randrange(len(world.layout.modes)), {}
                world.set(world.owner)
                if luck.random() < 0.3:
                    continue  # the helper looks once a second: whatever comes before its next look has to notice
                world.clamp.unpin_if_required()
            elif event < 0.88:
                world.clamp.restore()
            elif event < 0.94:
                world.heat(luck.uniform(60, 100))
                world.clamp.unpin_if_required()
                if world.celsius > world.max_temperature_c and world.clamp.point is not None:
                    raise Outside(f"a point is held at {world.celsius:g} C")
            else:  # killed, and started again
                world.clamp = clamp()
                world.clamp.restore_after_crash()
        except (ClockError, StoreError):
            pass
        world.check()
    world.odds = 0.0
    if left := world.clamp.restore():
        raise Outside(f"not restored, though the kernel takes every value again: {'; '.join(left)}")
    world.check()
    return held


def by_governor(world: World, luck: random.Random, step: int) -> int:
    """A task with a deadline, as the agent takes it."""
    assert world.device is not None
    world.device._update_points_after_mode_change(float(step))  # part of `read`, whose sensors take most of its time
    rule = governor.GovernorPolicy(luck.choice(["energy", "paper", "max"]), max_w=world.max_w)  # type: ignore[arg-type]
    work = WorkEstimate(flops=10 ** luck.uniform(9, 13), read_bytes=10 ** luck.uniform(6, 10))
    point = governor.choose_operating_point(
        rule, world.device.points, work, 10 ** luck.uniform(-1, 3), world.device.idle_w
    )
    if point is None:
        return 0
    if world.max_w is not None and (point.busy_w or 0) > world.max_w:
        raise Outside(f"{point} is chosen, and the limit is {world.max_w:g} W")
    world.device.pin_clocks(point)
    return 1


def by_anyone(world: World, luck: random.Random) -> int:
    """A point from anywhere on the board's lists, or one of its modes, sent to the helper past the agent."""
    layout = world.layout
    some: Callable[[Sequence[float], float], float | None] = lambda values, unit: (  # noqa: E731
        luck.choice(values) * unit if luck.random() < 0.8 else None
    )
    name = luck.choice([mode.name for mode in layout.modes]) if luck.random() < 0.3 else "typed"
    busy_w = luck.choice([None, luck.uniform(1, 60)])
    world.pin(
        OperatingPoint(name, some(layout.cpu_khz, 1e3), some(layout.gpu_mhz, 1e6), some((204, layout.emc_mhz), 1e6),
                       busy_w=busy_w)
    )  # fmt: skip
    return 1


def every(folder: Path) -> list[World]:
    """A world for each board and JetPack."""
    return [World(folder / f"{board}-{jetpack}", board, jetpack) for board, jetpack in EVERY]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the cases; 1 when one went outside."""
    parser = argparse.ArgumentParser(description="try to hold boards beyond their owners' bounds")
    parser.add_argument("--cases", default="0-99999", help="one, or first-last")
    first, _, last = parser.parse_args(arguments).cases.partition("-")
    numbers, began_s, held = range(int(first), int(last or first) + 1), time.monotonic(), 0
    outside = 0
    controls.discover_controls = once(controls.discover_controls)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        worlds = every(Path(folder))
        for count, case in enumerate(numbers, 1):
            try:
                held += play(worlds[case % len(worlds)], case)
            except Outside as error:
                outside += 1
                print(f"case {case}, {EVERY[case % len(EVERY)]}: {error}", flush=True)
            if count % 1000 == 0:
                print(f"{count} of {len(numbers)} cases, {held} holds, {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{len(numbers)} cases, {held} points held, {outside} outside; {time.monotonic() - began_s:.0f} s")
    return 1 if outside or held < len(numbers) // 10 else 0  # a helper that holds nothing proves nothing


if __name__ == "__main__":
    sys.exit(main())
