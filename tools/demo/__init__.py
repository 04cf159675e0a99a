"""`fedquilt demo`: a federation on real handwritten digits, with all that belongs beside its result.

Six simulated boards hold uneven shares of the UCI optical digits; three donors have seen MNIST only.
The boards are simulated (times and joules follow their profiles), everything else is real: processes,
memory budgets, broker, bytes, accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt import bundle, units
from fedquilt.coordinator import settings as jobs
from fedquilt.coordinator.store import Store
from fedquilt.coordinator.views import costs
from fedquilt.core import Examples
from fedquilt.edge_agent import engines
from fedquilt.tools.artefacts import export
from fedquilt.tools.experiments.baselines import Bench, Result, pooled
from fedquilt.tools.simulation import Member, agents

HERE = Path(__file__).parent
BUDGET_BYTES = 1 << 30  # of the evaluation, which runs here


def demo(out: Path, format: str = "text") -> int:
    """Run the federation, compare, and write `out`/stitched.onnx and `out`/held-out.npz; 0 when it came through."""
    # a folder for each run: what boards have cached from an earlier one would change what is measured
    plan = agents.Plan(jobs.load(HERE / "job.toml"), HERE / "bundle", out / time.strftime("%Y%m%d-%H%M%S"))
    members, test = plan.members()
    if format == "text":
        print("\n".join(_opening(plan, members)), flush=True)
    run, status = agents.really(plan, None)
    if status != "done":
        return 8
    with Store(plan.home) as store:
        if format == "text":
            print("comparing with the donors, and with each device alone ...", flush=True)
        result = {
            "run": run,
            "accuracy": [msgspec.to_builtins(row) for row in _accuracies(plan, store, run, members, test)],
            "devices": msgspec.to_builtins(costs.account(fact for _, _, fact in store.facts(run)).devices),
        }
        written = export.export(store, run, out / "stitched.onnx")
    np.savez_compressed(out / "held-out.npz", x=test.x, y=test.y)
    if format == "json":
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(_table(result, plan)))
        print(f"\n{written}\ntry it: fedquilt run-model {out / 'stitched.onnx'} {out / 'held-out.npz'}")
    return 0


def _opening(plan: agents.Plan, members: list[Member]) -> list[str]:
    donors = bundle.load(plan.bundle).meta["donors"]
    blocks = ", ".join(f"{name} ({len(donor['blocks'])} blocks)" for name, donor in donors.items())
    lines = [f"donors, trained on MNIST only: {blocks}", "boards, simulated, with their shares of real digits:"]
    for table, member in zip(plan.agents(), members, strict=True):
        counts = " ".join(f"{count:3}" for count in np.bincount(member.train.y, minlength=10))
        lines.append(f"  {table['device']:20} {table['budget']:>6} for a task   images of 0 to 9: {counts}")
    return [*lines, "each round the boards score blocks on their own images; nothing is trained", ""]


def _accuracies(plan: agents.Plan, store: Store, run: str, members: list[Member], test: Examples) -> list[Result]:
    """The stitched network first, then everything it has to beat."""
    opened = bundle.load(plan.bundle)
    engine: Any = engines.make("onnx", BUDGET_BYTES)
    folder = plan.bundle / "blobs"
    bench = Bench(opened, lambda name: folder / opened.files[name].sha256, engine, pooled(members), test)
    params = jobs.params(plan.job)
    found = export.artefact(store, run)
    alone = bench.alone(plan.job, plan.bundle, members)
    mean = Result("one device alone, mean of all", float(np.mean([row.accuracy for row in alone])))
    return [
        Result("stitched by the federation", bench.accuracy_of(found), _path(found.meta)),
        *(Result(f"donor {row.name}, unmodified", row.accuracy) for row in bench.unmodified()),
        *(Result(f"donor {row.name}, new closed-form head", row.accuracy) for row in bench.heads(params.head_ridge)),
        mean,
        Result("one device alone, the best", max(row.accuracy for row in alone)),
    ]


def _path(meta: Mapping[str, Any]) -> str:
    """The blocks of a stitched network, named as in the story of its search."""
    return " > ".join([*meta["path"], *(["new head"] if meta["head"] else [])])


def _table(result: dict[str, Any], plan: agents.Plan) -> list[str]:
    first, *others = result["accuracy"]
    lines = [f"\n{'accuracy on digits that no board has':48} {'%':>6}"]
    for row in result["accuracy"]:
        lines.append(f"{row['name']:48} {100 * row['accuracy']:6.1f}  {row['note']}".rstrip())
    best = max(others, key=lambda row: row["accuracy"])
    gap = 100 * (first["accuracy"] - best["accuracy"])
    lines.append(
        f"Stitching wins here, by {gap:.1f} points over the best of the others ({best['name']})."
        if gap > 0
        else f"Stitching does not win here: {best['name']} is {-gap:.1f} points better."
    )
    columns = f"{'budget':>7} {'tasks':>5} {'time s':>8} {'energy J':>9} {'down':>8} {'up':>8} {'peak':>8}"
    lines.append(f"\n{'device':22} {columns}")
    budgets = {table["device"]: table["budget"] for table in plan.agents()}
    for device, took in sorted(result["devices"].items()):
        joules = "-" if took["energy_j"] is None else f"{took['energy_j']:.2f}"
        peak = "-" if took["peak_bytes"] is None else units.size(took["peak_bytes"])
        lines.append(
            f"{device:22} {budgets[device]:>7} {took['tasks']:5} {took['wall_s']:8.2f} {joules:>9} "
            f"{units.size(took['down_bytes']):>8} {units.size(took['up_bytes']):>8} {peak:>8}"
        )
    sources = sorted({took["energy_source"] for took in result["devices"].values() if took["energy_source"]})
    told = (
        sources[0] + (f", and {len(sources) - 1} more like it" if len(sources) > 1 else "") if sources else "measured"
    )
    lines.append(f"time and energy: {told}; peak: resident, of the task's process")
    return lines
