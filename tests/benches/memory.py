"""Benchmark of a device's memory while it stitches at 224 pixels under small budgets.

The process is the agent's task process (`fedquilt.edge_agent.task.main`). Its budgets leave 160 MB and 100 MB in
addition to the process with ONNX Runtime imported. The tasks are those with the highest memory use in a job with the
five architectures of the FedStitch paper (arXiv 2409.07202, section 5.1): references and targets of each donor, output
scores of each block after the largest maps and after the widest block, and sums for junctions and a head. The process
and the kernel report the peak. Only scoring and the moments of a head have a limit, because the sums of a junction with
2048 channels are matrices of 34 MB each.
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
from fedquilt.tools.simulation.task_process import TaskProcess
from tests.benches.figures import compare_at_most
from tests.benches.stitch import IMAGES, draw_examples, prepare_donors

LIMITS_MB = {"under_160_mb": 160, "under_100_mb": 100}
TASK_PREFIXES = {"scoring": "output scores", "moments": "moments"}  # by figure, of the descriptions of its tasks


def measure(size: int = 224) -> dict[str, Any]:
    """Measure stitching tasks under each budget, and return their peaks in MB and judged figures.

    Raise ModelError if the kernel reports no peaks.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "donors"
        bundle = prepare_donors(folder, size)

        def blob_path(name: str) -> Path:
            return folder / "blobs" / bundle.files[name].sha256

        examples = draw_examples(2 * IMAGES)
        np.savez(Path(scratch) / "images.npz", x_train=examples.x, y_train=examples.y)
        runs = {
            name: _measure_tasks(bundle, blob_path, room_mb * 10**6, Path(scratch) / name)
            for name, room_mb in LIMITS_MB.items()
        }
    figures = {
        f"peak_of_{figure}_{name}": compare_at_most(max(_peaks(tasks, prefix)), LIMITS_MB[name], "MB")
        for figure, prefix in TASK_PREFIXES.items()
        for name, tasks in runs.items()
    }
    differences = [abs(task["peak_mb"] - task["outside_mb"]) for tasks in runs.values() for task in tasks]
    return {
        "lines": _format_tasks(size, runs),
        "figures": {**figures, "own_and_outside_accounts_differ_by": compare_at_most(max(differences), 8, "MB")},
    }


def _peaks(tasks: Sequence[Mapping[str, Any]], prefix: str) -> list[float]:
    return [task["peak_mb"] for task in tasks if task["task"].startswith(prefix)]


def _iterate_search_states(bundle: Bundle) -> Iterator[tuple[str, SearchState]]:
    state = METHOD.init(
        bundle, SearchSettings(score_at="output", completion=False, samples=IMAGES, fit_samples=IMAGES), 0
    )
    pool = steps.starting_networks(state.stock)[0].pool
    for path in (("vgg16.0",), ("vgg16.0", "densenet121.2", "resnet50.4")):
        net = ScoredPath(path, tuple(name for name in pool if name not in path), 1.0)
        path_state = replace(state, current=net, junctions=_draw_random_junctions(state, path))
        eligible = steps.eligible_blocks(net, state.stock, state.params)
        yield f"output scores of {len(eligible)} blocks after {path[-1]}", replace(path_state, pool=eligible)
        foreign_blocks = [name for name in eligible if not name.startswith("vgg16")][:: len(eligible) // 3][:3]
        winners = tuple(Winner(name, 1.0, 1.0, 1) for name in foreign_blocks)
        yield f"sums for {len(winners)} junctions after {path[-1]}", replace(path_state, phase="fit", winners=winners)
    search_end = replace(path_state, finalists=(ScoredPath((*path, "resnet50.5"), (), 1.0),))
    moments_state = candidates.end_search(search_end)
    yield f"moments at {len(moments_state.taps)} taps of all donors", moments_state


def _draw_random_junctions(state: SearchState, path: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    rng, blocks, junctions = np.random.default_rng(3), state.stock.blocks, {}
    for i in range(1, len(path)):
        shape = blocks[path[i]].in_shape[0], blocks[path[i - 1]].out_shape[0]
        weights = rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[1], dtype=np.float32)
        junction = {"weights": weights, "bias": np.zeros(shape[0], np.float32)}
        junctions[stitched_network.junction_name(path[: i + 1])] = junction
    return junctions


def _measure_tasks(
    bundle: Bundle, blob_path: Callable[[str], Path], room_bytes: int, folder: Path
) -> list[dict[str, Any]]:
    folder.mkdir()
    base_bytes, tasks = 0, []
    budget_bytes = memory_budget.ASSUMED_BASE_BYTES["onnx"] + room_bytes
    data = {"path": str(folder.parent / "images.npz")}
    with TaskProcess("fedstitch", "onnx", budget_bytes, data, blob_path, folder) as process:
        for number, (description, state) in enumerate(_iterate_search_states(bundle)):
            task_spec = METHOD.send(state, DeviceView("bench", None))
            assert task_spec is not None
            result, _ = process.run_task(task_spec, number)
            if result.peak_bytes is None or result.base_bytes is None:
                raise ModelError(f"{description}: this kernel does not report memory peaks")
            base_bytes = base_bytes or result.base_bytes  # before the first task, with the runtime imported
            tasks.append(
                {
                    "task": description,
                    "seconds": round(result.wall_s, 1),
                    "peak_mb": round((result.peak_bytes - base_bytes) / 1e6, 1),
                    "outside_mb": round((process.kernel_peak_bytes - base_bytes) / 1e6, 1),
                }
            )
            print(f"{room_bytes / 1e6:.0f} MB: {tasks[-1]}", file=sys.stderr, flush=True)
    return tasks


def _format_tasks(size: int, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    text = [f"{size} pixels, {IMAGES} images, MB above the bare process"]
    for name, tasks in runs.items():
        text.append(f"    at most {LIMITS_MB[name]} MB{'own':>55} {'outside':>8} {'seconds':>8}")
        for task in tasks:
            row = f"{task['peak_mb']:8.1f} {task['outside_mb']:8.1f} {task['seconds']:8.1f}"
            text.append(f"    {task['task']:60} {row}")
    return text
