"""`fedquilt demo`: a federation on real handwritten digits, beside everything that its result has to beat.

Six simulated boards hold uneven shares of the UCI optical digits; three donors have seen MNIST only.
The boards are simulated (times and joules follow their profiles), everything else is real: processes,
memory budgets, broker, bytes, accuracy.
"""

from __future__ import annotations

import contextlib
import textwrap
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt import bundle, columns, disk, progress, units
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.views import costs
from fedquilt.core import Examples
from fedquilt.models.stitching import names
from fedquilt.tools.artefacts import export
from fedquilt.tools.demo.compared import Compared, Device, Network, compare, mean_alone, parts
from fedquilt.tools.demo.live import Live, bold
from fedquilt.tools.experiments import evaluate
from fedquilt.tools.report import html, page, plots
from fedquilt.tools.report.found import gather
from fedquilt.tools.simulation import Member, agents

HERE = Path(__file__).parent
COMPARING = "comparing"
STITCHED, ALONE = "stitched by all boards", "stitched by one (mean)"


def demo(out: Path, format: str = "text", wordy: bool = False, show: bool = False) -> int:
    """Run the federation, compare, and write the report, the network and the test digits into `out`.

    Args:
        out: folder, created if missing.
        format: "text", or "json" for the result as one line.
        wordy: print each round with its decisions.
        show: open the report in a browser.

    Returns:
        0, or 8 if the run has failed.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM has come before the run was done.
    """
    began_s = time.monotonic()
    # a folder for each run: what boards have cached from an earlier one would change what is measured
    plan = agents.Plan(jobs.load(HERE / "job.toml"), HERE / "bundle", out / time.strftime("%Y%m%d-%H%M%S"))
    members, test = plan.members()
    live = Live()
    text = format == "text"
    if text:
        print("\n".join(_opening(plan, members, test)), flush=True)
    run, status = agents.really(plan, None, console=None if wordy or not text else live, wordy=wordy)
    if status == "running":  # Ctrl-C ended its coordinator in good order
        raise KeyboardInterrupt
    if status != "done":
        return 8
    with Store(plan.home) as store:
        live.clear()
        far = live.parts(COMPARING, 1 + parts(members))
        with progress.ticking(live.again) if text else contextlib.nullcontext():
            far("the boards' network")
            evaluate.evaluate(store, run)
            found = gather(store, run)
            artefact = export.artefact(store, run)
            others = compare(plan, artefact, members, test, found.points[-1].rounds, far)
            written = export.export(store, run, out / "stitched.onnx")
    live.clear()
    whole = found.account.whole
    moved = whole.down_bytes + whole.up_bytes
    taps, headed = artefact.meta["taps"], artefact.meta["head"] is not None
    name = names.network(taps, headed)  # as in the log of the search
    stitched = Network(STITCHED, found.scores[-1].value, name, whole.energy_j, moved)
    networks = _networks(stitched, others)
    np.savez_compressed(out / "held-out.npz", x=test.x, y=test.y)
    report = out / "report.html"
    drawn = _plots(networks, others.devices, len(test))
    disk.write(report, html(found, "demo.html", **_page(plan, networks, others.devices, members, drawn)))
    disk.write(out / "accuracy.svg", plots.alone(*drawn))
    result = {
        "run": run,
        "accuracy": msgspec.to_builtins(networks),
        "alone": msgspec.to_builtins(others.devices),
        "devices": msgspec.to_builtins(found.account.devices),
        "report": str(report),
    }
    if not text:
        print(msgspec.json.encode(result).decode())
        return 0
    print("\n".join(_ending(networks, theirs(taps, headed), others.devices, found.account, plan)))
    print("\n".join(["", *_wrapped(written)]))
    print(f"classify with it: fedquilt run-model {out / 'stitched.onnx'} {out / 'held-out.npz'}")
    print(f"{time.monotonic() - began_s:.0f} s in all; report, with plots (--open shows it): {report}")
    if show:
        webbrowser.open(report.resolve().as_uri())
    return 0


def _opening(plan: agents.Plan, members: Sequence[Member], test: Examples) -> list[str]:
    """Introduction to the demo, for readers who do not know the paper."""
    donors = bundle.load(plan.bundle).meta["donors"]
    blocks = sum(len(donor["blocks"]) for donor in donors.values())
    sizes = [len(member.train) + len(member.held) for member in members]
    budgets = [int(table["budget"].removesuffix("MB")) for table in plan.agents()]
    rows = [
        (
            "  donors",
            f"{len(donors)} small networks ({', '.join(donors)}), trained elsewhere on MNIST, whose digits look "
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
    return [*map(bold, _wrapped(title)), *columns.table(rows, "<~"), ""]


def _wrapped(text: str) -> list[str]:
    """Lines of a sentence that fit the terminal."""
    return textwrap.wrap(text, columns.width(), break_on_hyphens=False, break_long_words=False)


def _networks(stitched: Network, others: Compared) -> list[Network]:
    """The federation's network first, then those that it has to beat."""
    return [
        stitched,
        *(Network(f"donor {row.name} + new head", row.accuracy) for row in others.heads),
        *(Network(f"donor {row.name} as it is", row.accuracy) for row in others.donors),
        others.scratch,
        Network(ALONE, mean_alone(others.devices)),
    ]


def theirs(taps: Sequence[Sequence[str]], headed: bool) -> str:
    """Sentence on the federation's network, which says so where all its blocks are of one donor.

    Args:
        taps: the network's paths, of block ids.
        headed: whether it has a new head.
    """
    donors = {block.rpartition(".")[0] for path in taps for block in path}
    of_one = f" (blocks of {donors.pop()} only)" if len(donors) == 1 else ""
    return f"Their network, as donor.block: {names.network(taps, headed)}{of_one}"


def verdict(networks: Sequence[Network]) -> str:
    """Whether the federation's network, the first, is the best; by how much, and over which."""
    first, *others = networks
    best = max(others, key=lambda network: network.accuracy)
    gap = 100 * (first.accuracy - best.accuracy)
    if gap > 0:
        return f"The boards' network is the best here, by {gap:.1f} points over the best of the others ({best.name})."
    return f"The boards' network is not the best here: {best.name} is {-gap:.1f} points better."


def _ending(
    networks: Sequence[Network], theirs: str, devices: Sequence[Device], account: costs.Account, plan: agents.Plan
) -> list[str]:
    """The result as two tables, with the sentence `theirs` on the federation's network between them."""
    lines = [bold(f"{'accuracy on the test digits':29} {'%':>6} {'energy':>8} {'sent':>8}")]
    for network in networks:
        energy, moved = _cost(network)
        lines.append(f"{network.name:29} {100 * network.accuracy:6.1f} {energy:>8} {moved:>8}")
    lines += [*_wrapped(verdict(networks)), *_wrapped(theirs)]
    lines += ["+ new head: last layer solved from all images in one place, as no board would", ""]
    lines.append(
        bold(f"{'board':20} {'memory':>7} {'images':>7} {'alone, %':>9} {'time':>8} {'energy':>8} {'sent':>8}")
    )
    budgets = {table["device"]: table["budget"] for table in plan.agents()}
    for device in devices:
        took = account.devices[device.name]
        energy = "-" if took.energy_j is None else f"{took.energy_j:.1f} J"
        lines.append(
            f"{device.name:20} {budgets[device.name]:>7} {device.examples + device.held:7} {100 * device.alone:9.1f} "
            f"{took.wall_s:6.2f} s {energy:>8} {units.size(took.down_bytes + took.up_bytes):>8}"
        )
    lines.append("alone: what the board stitches from its own images only, on the test digits")
    return [*lines, "time and energy: as the boards' profiles predict; accuracy and bytes: measured"]


def _cost(network: Network) -> tuple[str, str]:
    """Energy and bytes as text."""
    energy = "-"
    if network.energy_j is not None:
        scale, prefix = units.unit(network.energy_j)
        energy = f"{network.energy_j / scale:.3g} {prefix}J"
    return energy, "-" if network.moved_bytes is None else units.size(network.moved_bytes)


def _plots(networks: Sequence[Network], devices: Sequence[Device], tested: int) -> list[plots.Plot]:
    """Accuracy by network and by board."""
    first, grey = plots.COLOURS[2], plots.COLOURS[0]
    by_network = plots.bars(
        [plots.Bar(network.name, [100 * network.accuracy]) for network in networks],
        "Accuracy by network",
        f"% of {tested} test digits that no board has",
        most=100.0,
        colours=[first, *[grey] * (len(networks) - 1)],
    )
    by_device = plots.bars(
        [plots.Bar(each.name, [100 * each.alone]) for each in devices],
        "Accuracy by board: alone, and together (dotted)",
        f"% of {tested} test digits",
        most=100.0,
        level=100 * networks[0].accuracy,
    )
    return [by_network, by_device]


def _page(
    plan: agents.Plan,
    networks: Sequence[Network],
    devices: Sequence[Device],
    members: Sequence[Member],
    drawn: Sequence[plots.Plot],
) -> dict[str, Any]:
    """Additions of the demo's page to a run's report."""

    def percent(value: float) -> str:
        return f"{100 * value:.1f} %"

    sums = page.Table(
        ["network", "accuracy", "energy of the boards", "sent", "note"],
        [[each.name, percent(each.accuracy), *_cost(each), each.note] for each in networks],
        ["note"],
    )
    head = ["board", "images", "memory for a task", "alone, test digits", "alone, own digits", "together, own digits"]
    budgets = {table["device"]: table["budget"] for table in plan.agents()}
    rows = [
        [each.name, str(each.examples + each.held), budgets[each.name]]
        + [percent(value) for value in (each.alone, each.alone_own, each.together_own)]
        for each in devices
    ]
    donors = bundle.load(plan.bundle).meta["donors"]
    return {
        "pictures": page.drawn(*drawn),
        "verdict": verdict(networks),
        "networks": sums,
        "boards": page.Table(head, rows),
        "donors": ", ".join(f"{name} ({len(donor['blocks'])} blocks)" for name, donor in donors.items()),
        "path": networks[0].note,
        "held": sum(len(member.held) for member in members),
    }
