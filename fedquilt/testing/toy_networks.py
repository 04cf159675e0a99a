"""Toy donors with numpy functions as blocks, toy networks, and devices with examples for both."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import BlobRef, Bundle, ClientContext, Examples, Method, Task, TaskSpec
from fedquilt.data import images
from fedquilt.edge_agent.engines.numpy import engine
from fedquilt.formats import job_bundle
from fedquilt.formats.tensor_register import Kind, register_from_kinds
from fedquilt.models.partial import masks
from fedquilt.tools.simulation import DeviceData, local_backend
from fedquilt.tools.simulation import run as simulated
from fedquilt.tools.simulation.run import WorkBackend
from fedquilt.tools.simulation.simulated_job import Simulation

SMALL = {"subrounds": 1, "expansions": 8, "samples": 16, "fit_samples": 24, "k": 2, "depth": 5}


# -- runs -----------------------------------------------------------------------------------------


def blob_ref(payload: bytes) -> BlobRef:
    """Return the reference of a content."""
    return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))


def bundle_files(parts: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, BlobRef]:
    """Return the files of a bundle, as references to the encoded tensors."""
    return {name: blob_ref(tensors.encode_tensors(part)) for name, part in parts.items()}


def write_bundle(place: Path, made: Bundle) -> Path:
    """Write a bundle to a folder as `fedquilt prepare` does, and return the folder.

    The file of a toy graph contains the graph's name, any other file its tensors.
    """
    contents = {
        name: name.encode() if name.endswith(".onnx") else tensors.encode_tensors(made.load(name))
        for name in made.files
    }
    job_bundle.write_bundle(place, made.meta, contents)
    return place


def make_job(method: str, params: Mapping[str, Any] = {}, **table: Any) -> JobSettings:
    """Return a job with the name "local", which is part of every seed drawn."""
    return settings.parse_job({"name": "local", "method": method, "params": dict(params), **table})


def run_method(
    name: str,
    made: Bundle,
    members: Iterable[DeviceData],
    params: Mapping[str, Any] = {},
    *,
    engine: Any,
    method: Method | None = None,
    observe: Callable[[Simulation, WorkBackend], None] = lambda simulation, hands: None,
    **table: Any,
) -> list[Any]:
    """Run a method in this process and return its states before the first round and after each.

    Args:
        name: The name of the method.
        made: The bundle.
        members: The devices with their examples.
        params: The parameters of the method.
        engine: The engine shared by all devices.
        method: A replacement of the method, or None to use the method of this name.
        observe: A function that is called at each new state.
        table: Further keys of the job.

    Raises:
        JobError: If the run fails.
    """
    with tempfile.TemporaryDirectory() as place:
        return list(
            simulated.iterate_states(
                make_job(name, params, **table),
                write_bundle(Path(place), made),
                members,
                load=methods.load if method is None else lambda name: method,
                engine=engine,
                observe=observe,
            )
        )


def deliver_task(
    method: Method, order: TaskSpec | None, member: DeviceData, engine: Any, **options: Any
) -> tuple[Task, ClientContext]:
    """Return task and site of a task on a device, with tensors in memory and without graphs."""
    assert order is not None
    with tempfile.TemporaryDirectory() as place:
        told = {"path": lambda ref: Path(ref.sha256), **options}
        task, site = local_backend.make_task_and_context(method, order, member, Path(place), engine=engine, **told)
        return task, with_loaded_tensors(task, site)


def with_loaded_tensors(task: Task, site: ClientContext) -> ClientContext:
    """Return a copy of a site with all tensors in memory, which outlive their files."""
    held = {name: site.load(name) for name in task.bundles if not name.endswith(".onnx")}
    return replace(site, load=lambda name: dict(held[name]))


# -- donors ---------------------------------------------------------------------------------------


class FakeRunner:
    """Runner with numpy functions as graphs, which counts the runs of each graph.

    The file of a graph contains only the graph's name. A graph is found by its name or by the digest of its content.
    """

    name = "onnx"
    room_bytes = 1 << 20

    def __init__(self, graphs: dict[str, Callable[[np.ndarray], np.ndarray]]) -> None:
        self.graphs, self.runs = graphs, dict.fromkeys(graphs, 0)
        self._names = {blob_ref(name.encode()).sha256: name for name in graphs}

    def batch(self, graph: Path, around_bytes: int = 0, example_bytes: int = 0) -> int:
        return 64

    def make_room(self, size: int) -> None: ...

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        name = self._names.get(graph.name, graph.name)
        self.runs[name] += 1
        return self.graphs[name](x).astype(np.float32)

    def close(self) -> None: ...


def make_convolution(seed: int, before: int, after: int, pool: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Return a random 3x3 convolution with ReLU, which halves the image size with `pool`."""
    kernel = np.random.default_rng(seed).normal(size=(after, before, 3, 3)) / np.sqrt(9 * before)

    def run(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        maps = np.maximum(np.einsum("nchwij,kcij->nkhw", windows, kernel, optimize=True), 0)
        return images.resize_maps(maps, maps.shape[2] // 2, maps.shape[3] // 2) if pool else maps

    return run


def make_classifier(seed: int, width: int, classes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a random linear classifier on the channel means, (n, width, h, w) -> (n, classes)."""
    weights = np.random.default_rng(seed).normal(size=(width, classes))
    return lambda x: x.mean(axis=(2, 3)) @ weights


DONORS = {"ash": ((4, False), (6, True), (6, False)), "elm": ((5, True), (5, False)), "fir": ((4, True), (8, False))}


def build_donors() -> tuple[Bundle, FakeRunner]:
    """Return a bundle of three small donors for 8x8 images, and a runner of their graphs."""
    meta: dict[str, Any] = {
        "input": {"channels": 1, "size": 8, "mean": [0.5], "std": [0.5]},
        "labels": ["a", "b", "c"],
        "donors": {},
        "blocks": {},
    }
    graphs: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
    for number, (donor, layers) in enumerate(DONORS.items()):
        shape: tuple[int, ...] = (1, 8, 8)
        for index in range(len(layers) + 1):
            name, seed = f"{donor}.{index}", 10 * number + index
            if index < len(layers):
                width, pool = layers[index]
                size = shape[1] // 2 if pool else shape[1]
                out: tuple[int, ...] = (width, size, size)
                graphs[f"{name}.onnx"] = make_convolution(seed, shape[0], width, pool)
            else:
                out = (3,)
                graphs[f"{name}.onnx"] = make_classifier(seed, shape[0], 3)
            meta["blocks"][name] = {
                "donor": donor,
                "index": index,
                "kind": "start" if index == 0 else "end" if index == len(layers) else "middle",
                "stages": [[f"{name}.onnx"]],
                "data": [],
                "in_shape": list(shape),
                "out_shape": list(out),
                "flops": 1000.0,
                "weight_bytes": 100,
                "resident_bytes": 100,
                "activation_bytes": 400,
            }
            shape = out
        meta["donors"][donor] = {
            "blocks": [f"{donor}.{i}" for i in range(len(layers) + 1)],
            "classes": 3,
            **({"align": [[0], [1], [2]]} if donor != "fir" else {}),
        }
    return Bundle(meta, {name: blob_ref(name.encode()) for name in graphs}, lambda name: {}), FakeRunner(graphs)


def image_members(count: int = 4, examples: int = 60) -> list[DeviceData]:
    """Return devices with noisy images of three templates, in a different mixture on each."""
    draws = np.random.default_rng(7)
    templates = draws.uniform(0, 255, size=(3, 8, 8))
    found = []
    for i in range(count):
        y = draws.choice(3, size=examples, p=np.roll([0.6, 0.3, 0.1], i))
        x = np.clip(templates[y] + draws.normal(0, 60, size=(examples, 8, 8)), 0, 255).astype(np.uint8)
        cut = 3 * examples // 4
        found.append(DeviceData(f"dev-{i}", Examples(x[:cut], y[:cut]), Examples(x[cut:], y[cut:])))
    return found


# -- networks -------------------------------------------------------------------------------------

MLP = {"name": "mlp", "inputs": 6, "hidden": [5], "classes": 3}
MLP_MASKS = masks.MaskPlan(  # fedquilt.models.partial.dependency_trace.trace_mask_plan of it
    {"1": 5},
    {},
    {
        "1.weight": masks.TensorGroups((5, 6), ("1",)),
        "1.bias": masks.TensorGroups((5,), ("1",)),
        "3.weight": masks.TensorGroups((3, 5), (), ("1",)),
    },
)


def toy_bundle(
    network: dict[str, Any] | None = None,
    model: dict[str, np.ndarray] | None = None,
    plan: masks.MaskPlan | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Bundle:
    """Return a bundle of a network to train, by default a small one for the numpy engine.

    With `kinds` the network need not exist. Tensors that are not in `kinds` are parameters.
    """
    start = engine.init_tensors(MLP, 0) if model is None else model
    plan = plan if network else MLP_MASKS
    parts = {"model": start, **({"masks": {"json": masks.plan_to_array(plan)}} if plan else {})}
    meta: dict[str, Any] = {"network": network or MLP, "flops": 100.0}
    meta |= register_entry(network or MLP) if kinds is None else {"register": register_from_kinds(start, kinds)}
    return Bundle(meta, bundle_files(parts), lambda name: parts[name])


def register_entry(network: Mapping[str, Any]) -> dict[str, Any]:
    """Return a network's register as bundle metadata, or {} for an `mlp`, whose table implies it."""
    if network.get("name") == "mlp":
        return {}
    from fedquilt.models.networks import register_trace

    return {"register": register_trace.register_from_table(network)}


def point_members(count: int = 3, examples: int = 16) -> list[DeviceData]:
    """Return devices with points of three classes, in a different mixture on each."""
    found = []
    for i in range(count):
        draws = np.random.default_rng(i)
        x = draws.normal(size=(examples + 8, 6)).astype(np.float32)
        y = draws.choice(3, size=examples + 8, p=np.roll([0.8, 0.1, 0.1], i))
        x[np.arange(len(y)), y] += 2
        found.append(DeviceData(f"dev-{i}", Examples(x[8:], y[8:]), Examples(x[:8], y[:8])))
    return found


def write_images(path: Path, size: int) -> Path:
    """Write an .npz of noisy images of ten templates, 80 for training and 80 for tests."""
    draws = np.random.default_rng(0)
    templates = draws.uniform(0, 255, size=(10, size, size))
    found: dict[str, Any] = {}
    for split in ("train", "test"):
        y = draws.integers(0, 10, 80)
        noisy = templates[y] + draws.normal(0, 40, size=(80, size, size))
        found |= {f"x_{split}": np.clip(noisy, 0, 255).astype(np.uint8), f"y_{split}": y}
    np.savez(path, **found)
    return path
