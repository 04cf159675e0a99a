"""Benchmark of reading a board's sensors ten times a second.

Each board is read in a process of its own that has imported the agent first, so that the growth is what the
sensors add to it. The Jetsons are trees of plain files (`fedquilt.profiles.fake_trees`): what their kernels take
to ask a real sensor is not in the figures, what Python and the file system take is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from fedquilt.profiles.fake_trees import write_fake_board
from fedquilt.tools.report.thresholds import compare_at_most, format_figures

HERTZ = 10
READINGS = 50  # readings at that pace, and as many before, unmeasured
AT_ONCE = 1000  # readings one after another, in a processor that is awake
BOARDS = (("jetson_agx_orin", "jetson-agx-orin", 6), ("jetson_tx2", "jetson-tx2", 4))
CHILD = "import sys; from fedquilt.tools.lab.bench import sensors; sensors.sample(sys.argv[1], int(sys.argv[2]))"


def measure(readings: int = READINGS) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        roots = {"this_host": Path("/")}
        for name, board, jetpack in BOARDS:
            roots[name] = Path(folder) / name
            write_fake_board(roots[name], board, jetpack)
        boards = {name: _run_sampling(root, readings) for name, root in roots.items()}
    figures = {}
    for name, told in boards.items():
        figures[f"processor_{name}"] = compare_at_most(told["paced_s"] * HERTZ * 100, 1.0, "% of a core")
        figures[f"resident_growth_{name}"] = compare_at_most(told["growth_bytes"] / 1e6, 3.0, "MB")
    return {"bench": "sensors", "hertz": HERTZ, "readings": readings, "boards": boards, "figures": figures}


def _run_sampling(root: Path, readings: int) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-c", CHILD, str(root), str(readings)], check=True, capture_output=True)
    told: dict[str, Any] = msgspec.json.decode(ran.stdout)
    ratios = {f"ratio_to_{other}": round(told["paced_s"] / told[f"{other}_s"], 2) for other in ("waking", "at_once")}
    return {**told, **ratios}


def sample(root: str, readings: int) -> None:
    """Read the board under `root` in this process and print what that took, as JSON."""
    import fedquilt.edge_agent.agent  # noqa: F401  (it holds this anyway)
    from fedquilt.edge_agent import devices

    before = _resident_bytes()
    device = devices.create_device("auto", Path(root))

    def read() -> None:
        device.read_sensors(time.monotonic())

    _time_paced(read, readings, 0.0)
    paced_s = _time_paced(read, readings, 1 / HERTZ)
    growth = _resident_bytes() - before
    waking_s = _time_paced(lambda: None, readings, 1 / HERTZ)
    at_once_s = _time_paced(read, AT_ONCE, 0.0)
    reading = msgspec.to_builtins(device.read_sensors(time.monotonic()))
    known = sorted(name for name, value in reading.items() if value not in (None, {}))
    told = {"paced_s": paced_s, "waking_s": waking_s, "at_once_s": at_once_s, "growth_bytes": growth}
    print(msgspec.json.encode({"board": device.board, **told, "tells": known}).decode())


def _time_paced(do: Callable[[], None], times: int, pause_s: float) -> float:
    before = time.process_time()
    for _ in range(times):
        time.sleep(pause_s)
        do()
    return (time.process_time() - before) / times


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def lines(result: dict[str, Any]) -> list[str]:
    shown = format_figures(result)
    for name, told in result["boards"].items():
        each = f"{told['paced_s'] * 1e6:.0f} us a reading, {told['ratio_to_waking']}x of waking up and doing nothing"
        shown.append(f"    {name.replace('_', ' ')} ({told['board']}): {each}; tells {', '.join(told['tells'])}")
    return shown
