"""Benchmark of predicted against measured memory peaks.

Each network trains, in the agent's own task process (`fedquilt.edge_agent.task.main`) under method fedavg, in
mini-batches of 1, 8 and 32, and its hungriest ONNX graph is run on as many images; every time in a fresh
process whose peak the kernel tells. Some also train in mini-batches of 32 with a budget that holds fewer; with batch
normalisation those stay whole, and the budget is for the smallest pieces of what the backward pass needs.
Last, who of the FedStitch paper's devices (30, 30, 30 and 10 % with 1, 2, 4 and 8 GB) could take part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import BlobRef, ModelError, Profile, TaskSpec, WorkEstimate
from fedquilt.costs import peak_memory, tiers
from fedquilt.edge_agent.task import memory_budget
from fedquilt.methods.fedavg import Params
from fedquilt.tools.report.thresholds import compare_at_least, compare_at_most, format_figures
from fedquilt.tools.simulation.task_process import TaskProcess

SMALL, LARGE = (3, 32, 32), (3, 64, 64)  # images
NETWORKS: Mapping[str, tuple[Mapping[str, Any], tuple[int, ...]]] = {  # table, shape of an example
    "mlp": ({"name": "mlp", "inputs": 3 * 32 * 32, "classes": 10}, SMALL),
    "cnn": ({"name": "cnn", "channels": 3, "size": 32, "classes": 10}, SMALL),
    "plain": ({"name": "plain", "channels": 3, "classes": 10}, SMALL),
    "residual": ({"name": "residual", "channels": 3, "classes": 10}, SMALL),
    "separable": ({"name": "separable", "channels": 3, "classes": 10}, SMALL),
    "resnet20": ({"name": "resnet20-cifar", "classes": 10}, SMALL),
    "vit": ({"name": "vit", "channels": 3, "size": 32, "classes": 10}, SMALL),
    "conv1d": ({"name": "conv1d", "channels": 6, "steps": 128, "classes": 10}, (128, 6)),
    "gru": ({"name": "gru", "channels": 6, "steps": 128, "classes": 10, "width": 64}, (128, 6)),
    "transformer": ({"name": "transformer", "vocabulary": 5000, "length": 128, "classes": 10, "width": 64}, (128,)),
    **{
        name: ({"name": f"torchvision/{name}", "classes": 10}, LARGE)
        for name in ("alexnet", "densenet121", "mobilenet_v2", "resnet50", "vgg16")
    },
    **{  # constants were fitted without these
        name: ({"name": f"torchvision/{name}", "classes": 10}, LARGE)
        for name in ("convnext_tiny", "efficientnet_b0", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1")
    },
}
BATCHES = (1, 8, 32)
TIGHT = {"cnn": 8, "plain": 8, "resnet20": 4, "mobilenet_v2": 2}  # trained with a budget for so many examples at once
STEPS = 3
COUNT = STEPS * max(BATCHES)  # images of a device
PLENTY_BYTES = 1 << 40
LOWEST, HIGHEST, OVER = 0.9, 1.3, 1.05
SCORE = (sys.executable, "-m", "fedquilt.tools.lab.bench.footprint")


@dataclasses.dataclass(frozen=True)
class MemorySubject:
    name: str
    table: Mapping[str, Any]
    folder: Path
    trained: peak_memory.TrainingProperties
    coupled: bool  # whether its mini-batches are trained whole
    graph: Path
    graph_bytes: tuple[int, int]  # weights, activations of one example
    graph_shape: tuple[int, ...]  # of what it takes, without batch

    @property
    def library(self) -> str:
        """Prefix of the network's name, up to a slash."""
        return str(self.table["name"]).partition("/")[0]

    def training_bytes(self, examples: int) -> int:
        above = peak_memory.training_bytes(self.trained, examples, library=self.library)
        return peak_memory.FIRST_USE_BYTES["torch"] + above

    def least_bytes(self, examples: int) -> int:
        piece_bytes = peak_memory.checkpoint_bytes(self.trained, examples, 0)
        above = peak_memory.training_bytes(self.trained, examples, library=self.library, piece_bytes=piece_bytes)
        return peak_memory.FIRST_USE_BYTES["torch"] + above

    def scoring_bytes(self, examples: int) -> int:
        """Predicted peak of scoring `examples` at once, with what onnxruntime loads at first use, in bytes."""
        return peak_memory.FIRST_USE_BYTES["onnx"] + peak_memory.inference_bytes(*self.graph_bytes, examples)


def measure(
    networks: Sequence[str] = tuple(NETWORKS),
    batches: Sequence[int] = BATCHES,
    tight: Mapping[str, int] = TIGHT,
) -> dict[str, Any]:
    """Measure predicted and true peaks, in MB above the bare process.

    Args:
        networks: names among NETWORKS.
        batches: sizes of mini-batches.
        tight: network -> examples that its budget holds at once, for mini-batches of the largest size.
    """
    rows: list[dict[str, Any]] = []
    stepped: list[dict[str, Any]] = []
    least: dict[str, dict[str, int]] = {}
    for name in networks:
        with tempfile.TemporaryDirectory() as folder:
            subject = build_subject(name, Path(folder))
            for batch in batches:
                rows.append(
                    _make_row(
                        "training", name, batch, subject.training_bytes(batch), _measure_training_peak(subject, batch)
                    )
                )
                if batch > 1 and not subject.graph_bytes[1]:
                    continue  # a graph without a known size per example runs one example at a time
                rows.append(
                    _make_row(
                        "scoring", name, batch, subject.scoring_bytes(batch), _measure_scoring_peak(subject, batch)
                    )
                )
            if name in tight:
                stepped.append(_measure_small_budget(subject, max(batches), tight[name]))
            least[name] = {"torch": subject.training_bytes(1), "onnx": subject.scoring_bytes(1)}
    figures = {}
    for kind in ("training", "scoring"):
        ratios = [row["ratio"] for row in rows if row["work"] == kind]
        figures[f"lowest_predicted_over_true_of_{kind}"] = compare_at_least(min(ratios), LOWEST, "times")
        figures[f"highest_predicted_over_true_of_{kind}"] = compare_at_most(max(ratios), HIGHEST, "times")
    for each in stepped:
        figures[f"budget_used_by_{each['network']}_stepped_down"] = compare_at_most(each["used"], OVER, "times")
    return {
        "bench": "footprint",
        "rows": rows,
        "stepped": stepped,
        "coverage": {
            name: {engine: _device_coverage(engine, peak) for engine, peak in of.items()} for name, of in least.items()
        },
        "figures": figures,
    }


def _make_row(work: str, network: str, batch: int, foreseen: int, seen: int) -> dict[str, Any]:
    row = {
        "work": work,
        "network": network,
        "batch": batch,
        "predicted_mb": round(foreseen / 1e6, 1),
        "true_mb": round(seen / 1e6, 1),
        "ratio": round(foreseen / seen, 3),
    }
    print(f"{work} {network} x {batch}: {row['predicted_mb']} / {row['true_mb']} MB", file=sys.stderr, flush=True)
    return row


def build_subject(name: str, folder: Path) -> MemorySubject:
    import torch

    from fedquilt.models.networks import register_trace, registry
    from fedquilt.models.stitching.onnx import blocks

    table, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = registry.build(table)
    (folder / "model").write_bytes(
        tensors.encode_tensors({key: value.numpy() for key, value in model.state_dict().items()})
    )
    draws = np.random.default_rng(0)
    image = {"channels": shape[0], "size": shape[1]} if len(shape) == 3 else {}
    stored = (*shape[1:], shape[0]) if image else shape
    x = draws.integers(0, 255, (COUNT, *stored), dtype=np.uint8)
    np.savez(folder / "images.npz", x_train=x, y_train=np.arange(COUNT) % 10)
    architecture = str(table["name"]).partition("torchvision/")[2]
    whole = blocks.DonorBlock(name, 0, "start", model.eval(), shape, (10,), 0.0)
    parts = blocks.split_donor(model, name, shape, architecture=architecture) if architecture else [whole]
    graphs = [graph for part in parts for stage in blocks.export_block(part) for graph in stage]
    hungriest = max(graphs, key=lambda graph: graph.weight_bytes + max(BATCHES) * graph.activation_bytes)
    (folder / "graph.onnx").write_bytes(hungriest.graph)
    if hungriest.data is not None:
        (folder / hashlib.sha256(hungriest.data).hexdigest()).write_bytes(hungriest.data)
    trained, _ = peak_memory.measure_training(model, torch.zeros(2, *shape))
    return MemorySubject(
        name,
        {**table, "input": image},
        folder,
        trained,
        register_trace.trace_register(model, shape).is_coupled(model.state_dict()),
        folder / "graph.onnx",
        (hungriest.weight_bytes, hungriest.activation_bytes),
        _input_shape(hungriest.graph),
    )


def _input_shape(graph: bytes) -> tuple[int, ...]:
    import onnx

    dims = onnx.load_from_string(graph).graph.input[0].type.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims[1:])


def _measure_training_peak(subject: MemorySubject, batch: int) -> int:
    peak, base = train(subject, batch, PLENTY_BYTES)
    return peak - base


def _measure_small_budget(subject: MemorySubject, batch: int, at_once: int) -> dict[str, Any]:
    least = subject.least_bytes(batch) if subject.coupled else subject.training_bytes(at_once)
    budget_bytes = memory_budget.ASSUMED_BASE_BYTES["torch"] + least
    peak, _ = train(subject, batch, budget_bytes)
    return {
        "network": subject.name,
        "batch": batch,
        "budget_mb": round(budget_bytes / 1e6, 1),
        "peak_mb": round(peak / 1e6, 1),
        "used": peak / budget_bytes,
    }


def train(subject: MemorySubject, batch: int, budget_bytes: int) -> tuple[int, int]:
    with task_process(subject, STEPS * batch, budget_bytes) as process:
        outcome, _ = process.run_task(training(subject, batch), 0)
    if outcome.peak_bytes is None or outcome.base_bytes is None:
        raise ModelError(f"{subject.name}: this kernel does not tell peaks")
    return outcome.peak_bytes, outcome.base_bytes


def training(subject: MemorySubject, batch: int, epochs: int = 1) -> TaskSpec:
    params = {**dataclasses.asdict(Params(batch=batch, lr=1e-4, epochs=epochs)), "network": dict(subject.table)}
    return TaskSpec(params, {"model": BlobRef(sha256="0" * 64, size=1)})


@contextmanager
def task_process(subject: MemorySubject, images: int, budget_bytes: int) -> Iterator[TaskProcess]:
    data = {"path": str(subject.folder / "images.npz"), "limit": images}
    with tempfile.TemporaryDirectory(dir=subject.folder) as scratch:
        given = ("fedavg", "torch", budget_bytes, data, lambda name: subject.folder / name, Path(scratch))
        with TaskProcess(*given) as process:
            yield process


def _measure_scoring_peak(subject: MemorySubject, batch: int) -> int:
    least = subject.scoring_bytes(1)
    command = [*SCORE, str(subject.graph), json.dumps([batch, *subject.graph_shape]), str(least)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(f"{subject.name} cannot be run on {batch} images: {done.stderr.strip()[-300:]}")
    return int(json.loads(done.stdout)["peak_bytes"])


def score(graph: Path, shape: Sequence[int], least_bytes: int) -> int:
    from fedquilt.edge_agent.engines.onnx import engine as onnx_engine

    me = os.getpid()
    memory_budget.reset_peak(me)
    base = memory_budget.resident_bytes(me) or 0
    engine = onnx_engine.OnnxEngine(least_bytes, base_bytes=peak_memory.FIRST_USE_BYTES["onnx"], micro_batch=shape[0])
    x = np.random.default_rng(0).random(shape, np.float32)
    for _ in range(2):
        engine.run(graph, x)
    return (memory_budget.read_peak_bytes(me) or 0) - base


def _device_coverage(engine: str, peak_bytes: int) -> dict[str, float]:
    able = {
        name: tiers.fits_budget(
            _of_tier(name, engine), engine, WorkEstimate(peak_bytes=peak_bytes - peak_memory.FIRST_USE_BYTES[engine])
        )
        for name in tiers.PAPER_SHARES
    }
    return {
        "least_mb": round(peak_bytes / 1e6, 1),
        "share": sum(tiers.PAPER_SHARES[name] for name in able if able[name]),
    }


def _of_tier(name: str, engine: str) -> Profile:
    size = tiers.SIZES[name]
    return Profile(device="bench", board="", memory_bytes=size, budget_bytes=size, engines=(engine,), versions={})


def lines(result: dict[str, Any]) -> list[str]:
    batches = sorted({row["batch"] for row in result["rows"]})
    told = ["predicted over true peak above the bare process (true peak in MB)"]
    told.append(f"{'':24}" + "".join(f"{f'x {batch}':>18}" for batch in batches))
    for kind in ("training", "scoring"):
        for name in dict.fromkeys(row["network"] for row in result["rows"]):
            own = {r["batch"]: r for r in result["rows"] if (r["work"], r["network"]) == (kind, name)}
            told.append(f"{kind:9} {name:14}" + "".join(_cell(own.get(batch)) for batch in batches))
    for each in result["stepped"]:
        told.append(
            f"{each['network']} x {each['batch']}, stepped down: {each['peak_mb']} MB of {each['budget_mb']} MB"
        )
    told.append("who could take part, of 30 / 30 / 30 / 10 % of devices with 1 / 2 / 4 / 8 GB for a task")
    for name, of in result["coverage"].items():
        told.append(f"    {name:14} training {of['torch']['share']:5.0%}   scoring {of['onnx']['share']:5.0%}")
    return [*told, *format_figures(result)]


def _cell(row: Mapping[str, Any] | None) -> str:
    return f"{'-':>18}" if row is None else f"{row['ratio']:9.2f} ({row['true_mb']:6.1f})"


if __name__ == "__main__":
    print(json.dumps({"peak_bytes": score(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))}))
