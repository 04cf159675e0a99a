"""Demo federation on handwritten digits, compared with its baselines (`fedquilt demo`).

Six simulated boards hold uneven shares of the UCI optical digits, of which a third each is upright, turned and
negative. Each of three donors was trained on one of these views of MNIST by `tests/demo_donors.py`. The boards are
simulated: times and joules follow their profiles. Everything else is real: processes, memory budgets, broker, bytes,
accuracy.
"""

from __future__ import annotations

import tempfile
import textwrap
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt.console import progress, table, units
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.settings import CohortSettings, EvaluationSettings, JobSettings
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import run_summary
from fedquilt.core import Artefact, Examples, FedquiltError
from fedquilt.edge_agent import engines
from fedquilt.formats import job_bundle
from fedquilt.host import disk
from fedquilt.methods import fedstitch
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.stitched_network import DonorPool, StitchedNetwork
from fedquilt.tools.artefacts import export, prepare
from fedquilt.tools.experiments import evaluation, tables
from fedquilt.tools.experiments.baselines import BaselineSetup, pool_examples, run_search
from fedquilt.tools.experiments.single_run import run_seed
from fedquilt.tools.report import render_run_page
from fedquilt.tools.report.rendering import HtmlTable, PageSection
from fedquilt.tools.report.run_data import load_run_data
from fedquilt.tools.simulation import DeviceData, agents
from fedquilt.tools.simulation.agents import FleetPlan

BUDGET_BYTES = 1 << 30  # of evaluations, which run in this process
PIXELS: Final = 64  # of a digit, the inputs of FedAvg's network
SCRATCH_NAME: Final = "FedAvg from scratch"
SCRATCH_PARAMS: Final = {"lr": 0.2, "batch": 16}
HERE = Path(__file__).parent
STITCHED, ALONE = "stitched by all boards", "stitched by one (mean)"
DEPTHS = "all depths: the donor with a new head on all its depths"
WITHOUT = "without it: the boards' network without the donor's blocks; gain: 95 % interval"


class NetworkResult(msgspec.Struct, frozen=True):
    name: str
    accuracy: float  # 0..1, on the test digits
    note: str = ""
    energy_j: float | None = None  # None if nothing ran on the boards or energy was not measured
    moved_bytes: int | None = None


class DeviceAccuracy(msgspec.Struct, frozen=True):
    """Accuracy of the network that one device stitches alone."""

    name: str
    examples: int  # training and held-out
    alone: float  # on the test digits


class DonorContribution(msgspec.Struct, frozen=True):
    """Accuracies of a donor on the test digits, and its contribution to the stitched network."""

    name: str
    unmodified: float
    head: float  # with a new last layer
    depths: float  # with a new last layer on all its depths
    without: float | None  # of the network without the donor's blocks, None if no block is left
    gain: tuple[float, float] | None  # 95 % interval of the accuracy gained with the donor, paired by test digits


@dataclass(frozen=True)
class DemoComparison:
    donors: Sequence[DonorContribution]
    lead: tuple[float, float]  # 95 % interval over `best_donor`, paired by test digits
    devices: Sequence[DeviceAccuracy]
    scratch: NetworkResult

    @property
    def best_donor(self) -> DonorContribution:
        return max(self.donors, key=lambda donor: donor.head)  # selected on the test digits, which favours the donor


def compare_networks(
    plan: FleetPlan,
    devices: Sequence[DeviceData],
    test: Examples,
    rounds: int,
    artefact: Artefact,
    report_progress: Callable[[str], None],
) -> DemoComparison:
    """Return the accuracies of the stitched network's baselines. FedAvg trains for `rounds` rounds."""
    bundle = job_bundle.load_bundle(plan.bundle)
    folder = plan.bundle / "blobs"
    engine: Any = engines.create_engine("onnx", BUDGET_BYTES)

    setup = BaselineSetup(bundle, lambda name: folder / bundle.files[name].sha256, engine, pool_examples(devices), test)
    single = msgspec.structs.replace(plan.job, cohort=CohortSettings())
    accuracies = []
    for member in devices:
        report_progress(f"{member.device} alone")
        artefact_of_device = fedstitch.result(run_search(single, plan.bundle, [member], fedstitch.METHOD, engine))
        accuracies.append(
            DeviceAccuracy(
                member.device, len(member.train) + len(member.held_out), setup.compute_accuracy(artefact_of_device)
            )
        )
    report_progress("what each donor contributes")
    network = stitched_network.from_artefact(artefact.meta, artefact.tensors)
    correct = setup.mark_correct(network)
    heads = setup.evaluate_new_heads()
    donors = measure_contributions(setup, network, correct, {row.name: row.accuracy for row in heads})
    best = max(heads, key=lambda row: row.accuracy)
    report_progress(f"{rounds} rounds of FedAvg")
    scratch = train_from_scratch(plan.job, rounds, count_weights(network, setup.donor_pool))
    return DemoComparison(donors, _paired_interval(correct, best.correct), accuracies, scratch)


def measure_contributions(
    setup: BaselineSetup, network: StitchedNetwork, correct: np.ndarray, heads: Mapping[str, float]
) -> list[DonorContribution]:
    unmodified = {row.name: row.accuracy for row in setup.evaluate_unmodified()}
    contributions = []
    for name, donor in setup.donor_pool.donors.items():
        depths = tuple(donor.blocks[: index + 1] for index in range(len(donor.blocks) - 1))
        remaining_paths = tuple(path for path in network.taps if set(path).isdisjoint(donor.blocks))
        correct_without = (
            setup.mark_correct(setup.fit_new_head(replace(network, taps=remaining_paths))) if remaining_paths else None
        )
        contributions.append(
            DonorContribution(
                name,
                unmodified[name],
                heads[name],
                float(setup.mark_correct(setup.fit_new_head(StitchedNetwork(depths, {}))).mean()),
                None if correct_without is None else float(correct_without.mean()),
                None if correct_without is None else _paired_interval(correct, correct_without),
            )
        )
    return contributions


def count_weights(network: StitchedNetwork, stock: DonorPool) -> int:
    """Return the number of weights of a stitched network. Blocks that several paths share count once."""
    used_blocks = {block for path in network.taps for block in path}
    solved_layers = (*network.junctions.values(), network.head or {})
    return sum(stock.blocks[block].weight_bytes // 4 for block in used_blocks) + sum(
        array.size for arrays in solved_layers for array in arrays.values()
    )


def _paired_interval(correct: np.ndarray, baseline: np.ndarray) -> tuple[float, float]:
    return tables.confidence_interval((correct.astype(float) - baseline.astype(float)).tolist())


def train_from_scratch(job: JobSettings, rounds: int, size: int) -> NetworkResult:
    """Train a network of about `size` random weights with FedAvg, on the same devices and examples."""
    job_from_scratch = JobSettings(
        name="scratch",
        method="fedavg",
        rounds=rounds,
        engine="numpy",
        params=SCRATCH_PARAMS,
        data=job.data,
        fleet=job.fleet,
        check=EvaluationSettings(every=0),
    )
    labels = len(job.labels)
    hidden = max(1, round((size - labels) / (PIXELS + 1 + labels)))
    with tempfile.TemporaryDirectory(prefix="fedquilt-") as folder:
        model = {"name": "mlp", "inputs": PIXELS, "hidden": [hidden], "classes": labels}
        prepare.prepare_bundle({"model": model}, Path(folder))
        evaluation = run_seed(job_from_scratch, Path(folder), lambda done: None, 1).marks[-1]
    if evaluation.value is None:
        raise FedquiltError("FedAvg from scratch has no accuracy on the test digits")
    return NetworkResult(
        SCRATCH_NAME,
        evaluation.value,
        f"{hidden * (PIXELS + 1 + labels) + labels} weights, {rounds} rounds",
        evaluation.energy_j,
        evaluation.down_bytes + evaluation.up_bytes,
    )


def run_demo(out: Path, format: str = "text", verbose: bool = False, show: bool = False) -> int:
    """Run the federation, compare results, and write report, network and test digits into `out`.

    Return 0, or 8 if the run failed. Raise KeyboardInterrupt if it was interrupted.
    """
    began_s = time.monotonic()
    # a folder for each run, because caches of an earlier run would change the measurements
    plan = agents.FleetPlan(jobs.load_job(HERE / "job.toml"), HERE / "bundle", out / time.strftime("%Y%m%d-%H%M%S"))
    devices, test = plan.load_devices()
    text = format == "text"
    if text:
        print("\n".join(_format_introduction(plan, devices, test)), flush=True)
    run, status = agents.run_fleet_on_broker(plan, None, verbose=verbose)
    if status == "running":  # Ctrl-C stopped the coordinator cleanly
        raise KeyboardInterrupt
    if status != "done":
        return 8
    with Store(plan.home) as store, progress.show_progress("comparing"):
        report_progress = progress.count_parts(3 + len(devices))
        report_progress("the boards' network")
        evaluation.evaluate_run(store, run)
        run_data = load_run_data(store, run)
        artefact = export.load_result(store, run)
        comparison = compare_networks(plan, devices, test, run_data.points[-1].rounds, artefact, report_progress)
        written = export.export_result(store, run, out / "stitched.onnx")
    total = run_data.summary.total
    transferred_bytes = total.down_bytes + total.up_bytes
    name = stitched_network.artefact_name(artefact.meta)  # as in the log of the search
    stitched = NetworkResult(STITCHED, run_data.scores[-1].value, name, total.energy_j, transferred_bytes)
    networks = _list_networks(stitched, comparison)
    np.savez_compressed(out / "held-out.npz", x=test.x, y=test.y)
    report = out / "report.html"
    head, *rows = make_donor_table(comparison.donors)
    section = PageSection(table=HtmlTable(head, rows), notes=[DEPTHS, WITHOUT])
    disk.write_output(report, render_run_page(run_data, section))
    result = {
        "run": run,
        "accuracy": msgspec.to_builtins(networks),
        "donors": msgspec.to_builtins(comparison.donors),
        "lead": comparison.lead,
        "alone": msgspec.to_builtins(comparison.devices),
        "devices": {name: cost.to_table() for name, cost in run_data.summary.device_costs().items()},
        "report": str(report),
    }
    if not text:
        print(msgspec.json.encode(result).decode())
        return 0
    print("\n".join(_format_results(networks, comparison)))
    print("\n".join(["", *_wrap_text(written)]))
    print(f"classify with it:\n  fedquilt model run {out / 'stitched.onnx'} {out / 'held-out.npz'}")
    print(f"{time.monotonic() - began_s:.0f} s in all; report of the run, with plots (--open shows it):\n  {report}")
    if show:
        webbrowser.open(report.resolve().as_uri())
    return 0


def _format_introduction(plan: agents.FleetPlan, members: Sequence[DeviceData], test: Examples) -> list[str]:
    donors = job_bundle.load_bundle(plan.bundle).meta["donors"]
    blocks = sum(len(donor["blocks"]) for donor in donors.values())
    sizes = [len(member.train) + len(member.held_out) for member in members]
    budgets = [int(table["budget"].removesuffix("MB")) for table in plan.make_agent_tables()]
    rows = [
        (
            "  donors",
            f"{len(donors)} small networks, each trained on other digits (MNIST) of one kind: {', '.join(donors)}; "
            f"cut into {blocks} blocks",
        ),
        (
            "  boards",
            f"{len(sizes)}, simulated, each with {min(sizes)} to {max(sizes)} images of all kinds, most of a few "
            f"digits, and with {min(budgets)} to {max(budgets)} MB of memory for a task",
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


def _list_networks(stitched: NetworkResult, comparison: DemoComparison) -> list[NetworkResult]:
    return [
        stitched,
        *(NetworkResult(f"donor {donor.name} + new head", donor.head) for donor in comparison.donors),
        comparison.scratch,
        NetworkResult(ALONE, float(np.mean([device.alone for device in comparison.devices]))),
    ]


def format_verdict(networks: Sequence[NetworkResult]) -> str:
    stitched, *others = networks
    best = max(others, key=lambda network: network.accuracy)
    gap = 100 * (stitched.accuracy - best.accuracy)
    if gap > 0:
        return f"The boards' network is the best here, by {gap:.1f} points over the best of the others ({best.name})."
    return f"The boards' network is not the best here: {best.name} is {-gap:.1f} points better."


def _format_results(networks: Sequence[NetworkResult], comparison: DemoComparison) -> list[str]:
    head = f"{'accuracy on the test digits':29} {'%':>6} {'energy':>8} {'sent':>8}"
    lines = [table.colour_text(head, "bold")]
    for network in networks:
        energy = "-" if network.energy_j is None else run_summary.format_joules(network.energy_j)
        transferred = "-" if network.moved_bytes is None else units.format_bytes(network.moved_bytes)
        lines.append(f"{network.name:29} {100 * network.accuracy:6.1f} {energy:>8} {transferred:>8}")
    lead = (
        f"Over {comparison.best_donor.name} + new head, the 95 % interval is {_format_points(comparison.lead)} points."
    )
    lines += [*_wrap_text(format_verdict(networks)), *_wrap_text(lead)]
    lines += [
        "+ new head: last layer solved from all images in one place, as no board would",
        f"FedAvg: {comparison.scratch.note}; the boards' network has about as many weights",
        "energy: as the boards' profiles predict; accuracy and bytes: measured",
        "",
    ]
    columns, *rows = make_donor_table(comparison.donors)
    header, *donor_lines = table.format_table([columns, *rows], "<>>>>")
    return [*lines, table.colour_text(header, "bold"), *donor_lines, *_wrap_text(DEPTHS), *_wrap_text(WITHOUT)]


def make_donor_table(donors: Sequence[DonorContribution]) -> list[list[str]]:
    rows = [
        [
            donor.name,
            f"{100 * donor.unmodified:.1f}",
            f"{100 * donor.depths:.1f}",
            "-" if donor.without is None else f"{100 * donor.without:.1f}",
            "-" if donor.gain is None else _format_points(donor.gain),
        ]
        for donor in donors
    ]
    return [["donor", "as it is, %", "all depths, %", "without it, %", "gain, points"], *rows]


def _format_points(interval: tuple[float, float]) -> str:
    return f"[{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
