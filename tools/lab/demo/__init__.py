"""Demo federation on handwritten digits, compared with its baselines (`fedquilt demo`).

Six simulated boards hold uneven shares of the UCI optical digits. Each of three donors was trained on a few digits of
MNIST only, by `fedquilt.tools.artefacts.train_donors`, so that their blocks do together what none of them does alone.
The boards are simulated (times and joules follow their profiles), everything else is real: processes,
memory budgets, broker, bytes, accuracy.
"""

from __future__ import annotations

import textwrap
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from fedquilt.console import progress, table, units
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import costs
from fedquilt.core import Examples
from fedquilt.formats import job_bundle
from fedquilt.host import disk
from fedquilt.models.stitching import stitched_network
from fedquilt.tools.artefacts import export
from fedquilt.tools.experiments import evaluation
from fedquilt.tools.lab.demo.comparison import (
    DemoComparison,
    DonorContribution,
    NetworkResult,
    compare_networks,
    count_parts,
    mean_accuracy_alone,
)
from fedquilt.tools.report import render_run_page
from fedquilt.tools.report.page import HtmlTable, PageSection
from fedquilt.tools.report.run_data import load_run_data
from fedquilt.tools.simulation import DeviceData, agents

HERE = Path(__file__).parent
STITCHED, ALONE = "stitched by all boards", "stitched by one (mean)"
DEPTHS = "all depths: the donor with a new head on all its depths"
WITHOUT = "without it: the boards' network without the donor's blocks; gain: 95 % interval"


def run_demo(out: Path, format: str = "text", wordy: bool = False, show: bool = False) -> int:
    """Run the federation, compare results, and write report, network and test digits into `out`.

    Args:
        out: Output folder, created if missing.
        format: "text", or "json" for the result as one line.
        wordy: Whether to print each round with its decisions.
        show: Whether to open the report in a browser.

    Returns:
        0, or 8 if the run failed.

    Raises:
        KeyboardInterrupt: If SIGINT or SIGTERM arrives before the run is done.
    """
    began_s = time.monotonic()
    # a folder for each run: what boards have cached from an earlier one would change what is measured
    plan = agents.FleetPlan(jobs.load_job(HERE / "job.toml"), HERE / "bundle", out / time.strftime("%Y%m%d-%H%M%S"))
    members, test = plan.load_devices()
    text = format == "text"
    if text:
        print("\n".join(_format_introduction(plan, members, test)), flush=True)
    run, status = agents.run_fleet_on_broker(plan, None, wordy=wordy)
    if status == "running":  # Ctrl-C ended its coordinator in good order
        raise KeyboardInterrupt
    if status != "done":
        return 8
    with Store(plan.home) as store, progress.show_progress("comparing"):
        far = progress.count_parts(1 + count_parts(members))
        far("the boards' network")
        evaluation.evaluate_run(store, run)
        found = load_run_data(store, run)
        artefact = export.load_result(store, run)
        others = compare_networks(plan, members, test, found.points[-1].rounds, artefact, far)
        written = export.export_result(store, run, out / "stitched.onnx")
    whole = found.summary.total
    moved = whole.down_bytes + whole.up_bytes
    name = stitched_network.artefact_name(artefact.meta)  # as in the log of the search
    stitched = NetworkResult(STITCHED, found.scores[-1].value, name, whole.energy_j, moved)
    networks = _list_networks(stitched, others)
    np.savez_compressed(out / "held-out.npz", x=test.x, y=test.y)
    report = out / "report.html"
    disk.write_output(report, render_run_page(found, make_donor_section(others)))
    result = {
        "run": run,
        "accuracy": msgspec.to_builtins(networks),
        "donors": msgspec.to_builtins(others.donors),
        "lead": others.lead,
        "alone": msgspec.to_builtins(others.devices),
        "devices": {name: cost.to_table() for name, cost in found.summary.device_costs().items()},
        "report": str(report),
    }
    if not text:
        print(msgspec.json.encode(result).decode())
        return 0
    print("\n".join(_format_results(networks, others)))
    print("\n".join(["", *_wrap_text(written)]))
    print(f"classify with it: fedquilt model run {out / 'stitched.onnx'} {out / 'held-out.npz'}")
    print(f"{time.monotonic() - began_s:.0f} s in all; report of the run, with plots (--open shows it): {report}")
    if show:
        webbrowser.open(report.resolve().as_uri())
    return 0


def _format_introduction(plan: agents.FleetPlan, members: Sequence[DeviceData], test: Examples) -> list[str]:
    donors = job_bundle.load_bundle(plan.bundle).meta["donors"]
    blocks = sum(len(donor["blocks"]) for donor in donors.values())
    sizes = [len(member.train) + len(member.held) for member in members]
    budgets = [int(table["budget"].removesuffix("MB")) for table in plan.make_agent_tables()]
    rows = [
        (
            "  donors",
            f"{len(donors)} small networks ({', '.join(donors)}), each trained on a few digits of MNIST, which look "
            f"different; cut into {blocks} blocks",
        ),
        (
            "  boards",
            f"{len(sizes)}, simulated, each with {min(sizes)} to {max(sizes)} images, most of a few digits, and with "
            f"{min(budgets)} to {max(budgets)} MB of memory for a task",
        ),
        (
            "  search",
            "in rounds, boards score on their own images which block may follow which, and the coordinator solves "
            "linear layers, the stitches, that join the winners",
        ),
        ("  test", f"{len(test)} digits that no board has"),
    ]
    title = "Six boards build one network for their digits: no training, no image is sent."
    return [*(table.colour_text(line, "bold") for line in _wrap_text(title)), *table.format_table(rows, "<~"), ""]


def _wrap_text(text: str) -> list[str]:
    return textwrap.wrap(text, table.line_width(), break_on_hyphens=False, break_long_words=False)


def _list_networks(stitched: NetworkResult, others: DemoComparison) -> list[NetworkResult]:
    return [
        stitched,
        *(NetworkResult(f"donor {donor.name} + new head", donor.head) for donor in others.donors),
        others.scratch,
        NetworkResult(ALONE, mean_accuracy_alone(others.devices)),
    ]


def format_verdict(networks: Sequence[NetworkResult]) -> str:
    first, *others = networks
    best = max(others, key=lambda network: network.accuracy)
    gap = 100 * (first.accuracy - best.accuracy)
    if gap > 0:
        return f"The boards' network is the best here, by {gap:.1f} points over the best of the others ({best.name})."
    return f"The boards' network is not the best here: {best.name} is {-gap:.1f} points better."


def _format_results(networks: Sequence[NetworkResult], others: DemoComparison) -> list[str]:
    head = f"{'accuracy on the test digits':29} {'%':>6} {'energy':>8} {'sent':>8}"
    lines = [table.colour_text(head, "bold")]
    for network in networks:
        energy, moved = _format_energy_and_bytes(network)
        lines.append(f"{network.name:29} {100 * network.accuracy:6.1f} {energy:>8} {moved:>8}")
    lead = f"Over {others.best_donor.name} + new head, the 95 % interval is {_format_points(others.lead)} points."
    lines += [*_wrap_text(format_verdict(networks)), *_wrap_text(lead)]
    lines += [
        "+ new head: last layer solved from all images in one place, as no board would",
        f"FedAvg: {others.scratch.note}; the boards' network has about as many weights",
        "energy: as the boards' profiles predict; accuracy and bytes: measured",
        "",
    ]
    columns, *rows = make_donor_table(others.donors)
    first, *rest = table.format_table([columns, *rows], "<<>>>>")
    return [*lines, table.colour_text(first, "bold"), *rest, *_wrap_text(DEPTHS), *_wrap_text(WITHOUT)]


def make_donor_table(donors: Sequence[DonorContribution]) -> list[list[str]]:
    rows = [
        [
            donor.name,
            " ".join(donor.labels),
            f"{100 * donor.unmodified:.1f}",
            f"{100 * donor.depths:.1f}",
            "-" if donor.without is None else f"{100 * donor.without:.1f}",
            "-" if donor.gain is None else _format_points(donor.gain),
        ]
        for donor in donors
    ]
    return [["donor", "trained on", "as it is, %", "all depths, %", "without it, %", "gain, points"], *rows]


def make_donor_section(others: DemoComparison) -> PageSection:
    head, *rows = make_donor_table(others.donors)
    return PageSection(table=HtmlTable(head, rows), notes=[DEPTHS, WITHOUT])


def _format_points(interval: tuple[float, float]) -> str:
    return f"[{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"


def _format_energy_and_bytes(network: NetworkResult) -> tuple[str, str]:
    """Return energy and transferred bytes as text, "-" if unknown."""
    energy = "-" if network.energy_j is None else costs.format_joules(network.energy_j)
    return energy, "-" if network.moved_bytes is None else units.format_bytes(network.moved_bytes)
