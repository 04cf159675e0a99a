"""Benchmarks against baselines of the same run (`fedquilt lab bench WHAT`)."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from fedquilt.console import progress
from fedquilt.core import JobError, LinkError
from fedquilt.tools.report.thresholds import MAX_OTHER_LOAD, LoadMeter, format_figures

BUSY: Final = 12  # exit code of a benchmark whose machine was busy
START_S: Final = 10.0


def run_and_print(what: str, format: str, arguments: Mapping[str, Any]) -> int:
    """Run the module `what` of this package, and print each measurement and the result.

    Return 0, 1 if a figure missed its limit, or BUSY if other processes disturbed a benchmark of times.
    """
    bench = importlib.import_module(f"fedquilt.tools.lab.bench.{what}")
    options = signature(bench.measure).parameters
    load, other_share = LoadMeter(), 0.0

    def report(row: str) -> None:
        nonlocal other_share
        other_share = max(other_share, share := load.measure_share())
        show = progress.LINE.print_to_stdout if format == "text" else progress.LINE.print_lines
        show(f"{row} (other processes: {share:.0%} of the processors)")

    with contextlib.nullcontext() if "show" in options else progress.show_progress(f"bench {what}"):
        result = bench.measure(**arguments, **({"report": report} if "report" in options else {}))
    progress.LINE.end_operation()
    if "report" in options:
        result["others_share"] = round(other_share, 3)
    if busy := other_share > MAX_OTHER_LOAD:
        for figure in result["figures"].values():
            figure["reached"] = None
    if format == "json":
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        print("\n".join(getattr(bench, "format_result", format_figures)(result)))
    if busy:
        reason = f"other processes used up to {other_share:.0%} of the processors"
        progress.LINE.print_lines(f"benchmark is invalid: {reason}. Stop them and repeat the benchmark.")
        return BUSY
    return 0 if all(figure["reached"] for figure in result["figures"].values()) else 1


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_mosquitto(folder: Path, port: int, settings: str = "") -> subprocess.Popen[bytes]:
    """Start Mosquitto on a port of this machine, and return the process when it accepts connections.

    `settings` are further lines of mosquitto.conf. Raise JobError if Mosquitto is missing, LinkError if it fails.
    """
    program = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        raise JobError("Mosquitto is not installed: apt install mosquitto")
    config = folder / "mosquitto.conf"
    user = psutil.Process().username()  # a broker started by root would change to the user "mosquitto"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\nuser {user}\n{settings}")
    log_path = folder / "mosquitto.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen([program, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=log)
    limit_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < limit_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            time.sleep(0.05)
    process.kill()
    process.wait()
    log_text = " ".join(log_path.read_text(errors="replace").split())[-300:] or "no message"
    raise LinkError(f"mosquitto accepts no connections on port {port} ({log_text}): repeat the benchmark")
