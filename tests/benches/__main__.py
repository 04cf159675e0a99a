"""Benchmarks of fedquilt on this machine, with limits and with baselines of the same run.

    python -m tests.benches idle
    python -m tests.benches coordinator --agents 200 3000 10000 --rounds 10
    python -m tests.benches sim --data MNIST/raw --with flower pfl

The exit code is 1 if a figure misses its limit. It is 12 if other processes disturbed a benchmark of times, which then
has no verdict.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from fedquilt.tools.boards.gpu_check.load_meter import MAX_OTHER_LOAD, LoadMeter
from tests.benches.figures import format_figures

BUSY: Final = 12  # exit code
TIMED: Final = ("blobs", "coordinator", "sim", "stitch")  # benches that other processes disturb


def run_bench(name: str, measure: Callable[..., dict[str, Any]], arguments: dict[str, Any]) -> int:
    """Run a benchmark, print each measurement and the result, and return the exit code."""
    load, other_share = LoadMeter(), 0.0

    def report(row: str) -> None:
        nonlocal other_share
        other_share = max(other_share, share := load.measure_share())
        print(f"{row} (other processes: {share:.0%} of the processors)", flush=True)

    result = measure(**arguments, **({"report": report} if name in TIMED else {}))
    if busy := other_share > MAX_OTHER_LOAD:
        for figure in result["figures"].values():
            figure["reached"] = None
    print("\n".join([*result.get("lines", []), *format_figures(result)]))
    if busy:
        reason = f"other processes used up to {other_share:.0%} of the processors"
        print(f"benchmark is invalid: {reason}. Stop them and repeat the benchmark.", file=sys.stderr)
        return BUSY
    return 0 if all(figure["reached"] for figure in result["figures"].values()) else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benches", description=(__doc__ or "").splitlines()[0])
    benches = parser.add_subparsers(dest="name", metavar="WHAT", required=True)
    benches.add_parser("idle", help="memory of an idle agent and coordinator")
    benches.add_parser("blobs", help="blob transfers by HTTP and MQTT, and by TCP")
    benches.add_parser("energy", help="energy of FedStitch under each policy of the governor")
    stitch = benches.add_parser("stitch", help="block scoring, and naive scoring")
    stitch.add_argument("--size", type=int, default=64, help="size of images in pixels")
    stitch.add_argument("--images", type=int, default=64, help="scored images")
    memory = benches.add_parser("memory", help="memory of a device that stitches under small budgets")
    memory.add_argument("--size", type=int, default=224, help="size of images in pixels")
    coordinator = benches.add_parser("coordinator", help="processor time of an update, duration of a round")
    coordinator.add_argument("--agents", type=int, nargs="+", default=[200, 3000], help="numbers of devices")
    coordinator.add_argument("--rounds", type=int, default=6)
    coordinator.add_argument("--after", type=int, default=0, help="also run the first fleet after so many rounds")
    sim = benches.add_parser("sim", help="simulated fleets, a bare PyTorch loop and other simulators")
    sim.add_argument(
        "--data", type=Path, required=True, help="folder of IDX images of 28x28, such as MNIST's raw folder"
    )
    sim.add_argument("--with", dest="beside", nargs="+", default=[], choices=("flower", "pfl"))
    sim.add_argument("--only", nargs="+", default=[], choices=("W1", "W2"), help="workloads")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(make_parser().parse_args(arguments))
    name = options.pop("name")
    return run_bench(name, importlib.import_module(f"tests.benches.{name}").measure, options)


if __name__ == "__main__":
    sys.exit(main())
