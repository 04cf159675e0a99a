"""The README's commands, with their output, and its picture of the dashboard.

    python tests/readme.py            # end with 1 if something that the README shows is not printed
    python tests/readme.py --write    # and draw docs/pictures/dashboard.png again, which takes Chromium

Numbers differ from processor to processor, so only the text between them has to be the same (documents.require_lines).
`make test` is not run, as it runs this. The picture is of `fedquilt simulate digits`. docs/pictures/architecture.svg is
drawn by hand: the file is its own source.
"""

from __future__ import annotations

import argparse
import math
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final

from browsers import CHROMIUM, Browser
from dashes import Dashboard

import documents
from fedquilt.coordinator.storage.store import Store

PAGE: Final = "README.md"
PICTURE: Final = "docs/pictures/dashboard.png"
NOT_RUN: Final = ["make test", ". .venv-demo/bin/activate"]
DEMO, SIMULATE, EVALUATE, EXPORT, PREDICT, AGAIN, DASH, AGENT, SERVE, RUN, DEVICES, COMPARE = [
    "make demo",
    "fedquilt simulate flowers.csv --label kind",
    "fedquilt model evaluate job --data test.csv",
    "fedquilt model export job --out flowers.onnx",
    "fedquilt model run flowers.onnx new.csv --out kinds.csv",
    "fedquilt simulate job.toml --devices 20",
    "fedquilt dash --home fedquilt-runs",
    "fedquilt agent agent.toml",
    "fedquilt serve --home runs --broker mqtt://broker.site:1883",
    "fedquilt run job.toml --home runs",
    "fedquilt devices --home runs",
    "fedquilt compare job.toml --methods fedavg prox:METHOD",
]
SIZE: Final = (1085, 640)


def check_output(folder: Path) -> None:
    """Run the README's commands in an empty folder, and require the output that it shows."""
    named = [DEMO, *NOT_RUN, SIMULATE, EVALUATE, EXPORT, PREDICT, AGAIN, DASH, AGENT, SERVE, RUN, DEVICES, COMPARE]
    assert documents.commands(PAGE) == named
    demo, simulated = documents.blocks(PAGE, "text")
    with documents.Shell(folder) as shell:
        documents.require_lines(demo, shell.run("fedquilt demo"), math.inf)
        _write_flowers(folder / "flowers.csv", range(300))
        documents.require_lines(simulated, shell.run(SIMULATE), math.inf)
        _write_flowers(folder / "test.csv", range(7, 300, 10))
        assert "accuracy 100.00 % of 30 examples" in shell.run(EVALUATE)
        assert "input x: float32 (n, 2), length, width" in shell.run(EXPORT)
        _write_flowers(folder / "new.csv", range(3), labelled=False)
        assert "kinds.csv: 3 predictions" in shell.run(PREDICT)
        shell.run(AGAIN)
        with Dashboard(folder / "fedquilt-runs") as dash:
            dash.until("/api/runs", lambda told: [run.get("status") for run in told["runs"]] == ["done", "done"])
        (folder / "prox.py").write_text("".join(documents.blocks(PAGE, "python")))
        assert "prox:METHOD" in shell.run(COMPARE)
        _run_on_a_board(shell)


def _write_flowers(file: Path, numbers: range, *, labelled: bool = True) -> None:
    rows = [(row % 3 + row / 900, row % 7, ("iris", "rose", "lily")[row % 3]) for row in numbers]
    columns = 3 if labelled else 2
    lines = [",".join(map(str, row[:columns])) for row in (("length", "width", "kind"), *rows)]
    file.write_text("\n".join(lines) + "\n")


def _run_on_a_board(shell: documents.Shell) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*probe.getsockname())
    [settings] = documents.blocks(PAGE, "toml")
    (shell.folder / "agent.toml").write_text(settings.replace("broker.site:1883", address))
    shell.start(f"fedquilt broker --listen {address}")
    shell.start(SERVE, broker=f"mqtt://{address}")
    shell.start(AGENT)
    shell.until((shell.folder / "runs" / "fedquilt.db").exists, "the coordinator's store")
    assert "done" in shell.run(RUN)
    assert "orin-07" in shell.run(DEVICES)


def draw_dashboard(folder: Path, out: Path) -> None:
    """Simulate digits in an empty folder, and write a picture of the run on the dashboard."""
    with documents.Shell(folder) as shell:
        shell.run("fedquilt simulate digits")
    home = folder / "fedquilt-runs"
    with Store(home) as store:
        [job] = store.readable_jobs()
    with Dashboard(home) as dash, Browser(folder) as browser:
        tab = browser.open(f"{dash.url}/runs/{job.id}", *SIZE)
        tab.until("Number(document.body?.dataset.shown ?? 0) > 0 && document.querySelectorAll('svg').length > 3")
        tab.value("document.documentElement.style.overflow = 'hidden'")  # no scrollbar
        tab.picture(out)


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--write", action="store_true", help=f"draw {PICTURE} again")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as place:
        try:
            check_output(Path(place))
        except AssertionError as error:
            print(f"{PAGE}: not printed: {error}", file=sys.stderr)
            return 1
    if given.write:
        if CHROMIUM is None:
            print("Chromium is not installed: apt install chromium", file=sys.stderr)
            return 1
        with tempfile.TemporaryDirectory() as place:
            draw_dashboard(Path(place), documents.ROOT / PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
