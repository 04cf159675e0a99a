"""Benchmark of a device's memory while it stitches at 224 pixels under small budgets.

The process is the agent's own (`fedquilt.edge_agent.task.main`), under budgets that leave 160 MB and 100 MB
beside what it holds once ONNX Runtime is imported. Its tasks are the hungriest of a job with the five
architectures of the FedStitch paper (arXiv 2409.07202, section 5.1): every donor's references and
targets, output scores of every block behind the largest maps and behind the widest block, and sums for
junctions and a head. The peak is reported by the process itself and read from outside. Scoring and a head's moments are
held to the limit; a junction's sums of 2048 channels are matrices of 34 MB each, and are only shown.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.core import Bundle, DeviceView, ModelError
from fedquilt.edge_agent.task import memory_budget
from fedquilt.methods.fedstitch import METHOD
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.search import candidates, steps
from fedquilt.models.stitching.search.state import ScoredPath, SearchSettings, SearchState
from fedquilt.models.stitching.vote import Winner
from fedquilt.tools.lab.bench.stitch import IMAGES, draw_examples, prepare_donors
from fedquilt.tools.report.thresholds import compare_at_most, format_figures
from fedquilt.tools.simulation.task_process import TaskProcess

ROOMS_MB = {"under_160_mb": 160, "under_100_mb": 100}
HELD = {"scoring": "output scores", "moments": "moments"}  # figure -> beginning of the names of its tasks


def measure(size: int = 224) -> dict[str, Any]:
    """Measure the peak memory of stitching tasks under each budget, from inside and outside the process."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "donors"
        made = prepare_donors(folder, size)

        def find(name: str) -> Path:
            return folder / "blobs" / made.files[name].sha256

        shown = draw_examples(2 * IMAGES)
        np.savez(Path(scratch) / "images.npz", x_train=shown.x, y_train=shown.y)
        runs = {
            name: _measure_tasks(made, find, room_mb * 10**6, Path(scratch) / name)
            for name, room_mb in ROOMS_MB.items()
        }
    figures = {
        f"peak_of_{what}_{name}": compare_at_most(max(_peaks(tasks, begins)), ROOMS_MB[name], "MB")
        for what, begins in HELD.items()
        for name, tasks in runs.items()
    }
    strays = [abs(task["peak_mb"] - task["outside_mb"]) for tasks in runs.values() for task in tasks]
    return {
        "bench": "memory",
        "size": size,
        "tasks": runs,
        "figures": {**figures, "own_and_outside_accounts_differ_by": compare_at_most(max(strays), 8, "MB")},
    }


def _peaks(tasks: Sequence[Mapping[str, Any]], what: str) -> list[float]:
    return [task["peak_mb"] for task in tasks if task["task"].startswith(what)]


def _iterate_search_states(made: Bundle) -> Iterator[tuple[str, SearchState]]:
    state = METHOD.init(
        made, SearchSettings(score_at="output", completion=False, samples=IMAGES, fit_samples=IMAGES), 0
    )
    pool = steps.starting_networks(state.stock)[0].pool
    for path in (("vgg16.0",), ("vgg16.0", "densenet121.2", "resnet50.4")):
        net = ScoredPath(path, tuple(name for name in pool if name not in path), 1.0)
        here = replace(state, current=net, junctions=_draw_random_junctions(state, path))
        offered = steps.eligible_blocks(net, state.stock, state.params)
        yield f"output scores of {len(offered)} blocks after {path[-1]}", replace(here, pool=offered)
        strange = [name for name in offered if not name.startswith("vgg16")][:: len(offered) // 3][:3]
        winners = tuple(Winner(name, 1.0, 1.0, 1) for name in strange)
        yield f"sums for {len(winners)} junctions after {path[-1]}", replace(here, phase="fit", winners=winners)
    ended = replace(here, finalists=(ScoredPath((*path, "resnet50.5"), (), 1.0),))
    gathering = candidates.end_search(ended)
    yield f"moments at {len(gathering.taps)} taps of all donors", gathering


def _draw_random_junctions(state: SearchState, path: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    draws, blocks, found = np.random.default_rng(3), state.stock.blocks, {}
    for i in range(1, len(path)):
        shape = blocks[path[i]].in_shape[0], blocks[path[i - 1]].out_shape[0]
        weights = draws.normal(size=shape).astype(np.float32) / np.sqrt(shape[1], dtype=np.float32)
        found[stitched_network.junction_name(path[: i + 1])] = {
            "weights": weights,
            "bias": np.zeros(shape[0], np.float32),
        }
    return found


def _measure_tasks(made: Bundle, find: Callable[[str], Path], room_bytes: int, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    bare, found = 0, []
    budget_bytes, data = (
        memory_budget.ASSUMED_BASE_BYTES["onnx"] + room_bytes,
        {"path": str(folder.parent / "images.npz")},
    )
    with TaskProcess("fedstitch", "onnx", budget_bytes, data, find, folder) as process:
        for number, (what, state) in enumerate(_iterate_search_states(made)):
            sent = METHOD.send(state, DeviceView("bench", None))
            assert sent is not None
            outcome, _ = process.run_task(sent, number)
            if outcome.peak_bytes is None or outcome.base_bytes is None:
                raise ModelError(f"{what}: this kernel does not report memory peaks")
            bare = bare or outcome.base_bytes  # the runtime is imported, and nothing done yet
            found.append(
                {
                    "task": what,
                    "seconds": round(outcome.wall_s, 1),
                    "peak_mb": round((outcome.peak_bytes - bare) / 1e6, 1),
                    "outside_mb": round((process.outside_bytes - bare) / 1e6, 1),
                }
            )
            print(f"{room_bytes / 1e6:.0f} MB: {found[-1]}", file=sys.stderr, flush=True)
    return found


def lines(result: dict[str, Any]) -> list[str]:
    found = [f"{result['size']} pixels, {IMAGES} images, MB beside the bare process"]
    for name, tasks in result["tasks"].items():
        found.append(f"    at most {ROOMS_MB[name]} MB{'own':>55} {'outside':>8} {'seconds':>8}")
        for task in tasks:
            row = f"{task['peak_mb']:8.1f} {task['outside_mb']:8.1f} {task['seconds']:8.1f}"
            found.append(f"    {task['task']:60} {row}")
    return [*found, *format_figures(result)]
