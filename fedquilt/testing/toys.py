"""Toy donors whose blocks are numpy functions, toy networks to train, and devices with examples for either."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt import bundle, methods, tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import Job
from fedquilt.core import BlobRef, Bundle, Examples, Method, Order, Site, Task
from fedquilt.data import images
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.models.partial import masks
from fedquilt.tensor_register import Kind, register_of_kinds
from fedquilt.tools.simulation import Member, hands
from fedquilt.tools.simulation import run as simulated
from fedquilt.tools.simulation.carriers import Hands
from fedquilt.tools.simulation.simulated_job import Simulation

SMALL = {"subrounds": 1, "expansions": 8, "samples": 16, "fit_samples": 24, "screen": 3, "k": 2, "depth": 5}


# -- runs -----------------------------------------------------------------------------------------


def blob(payload: bytes) -> BlobRef:
    """Reference of a content."""
    return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))


def files(parts: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, BlobRef]:
    """Files of a bundle, as references to the encoded tensors."""
    return {name: blob(tensors.encode(part)) for name, part in parts.items()}


def folder(place: Path, made: Bundle) -> Path:
    """Write a bundle as `fedquilt prepare` does. A toy graph's file holds its name, any other its tensors."""
    contents = {
        name: name.encode() if name.endswith(".onnx") else tensors.encode(made.load(name)) for name in made.files
    }
    bundle.write(place, made.meta, contents)
    return place


def job(method: str, params: Mapping[str, Any] = {}, **table: Any) -> Job:
    """Job called "local"; its name is part of every seed drawn."""
    return settings.parse({"name": "local", "method": method, "params": dict(params), **table})


def play(
    name: str,
    made: Bundle,
    members: Iterable[Member],
    params: Mapping[str, Any] = {},
    *,
    engine: Any,
    method: Method | None = None,
    observe: Callable[[Simulation, Hands], None] = lambda simulation, hands: None,
    **table: Any,
) -> list[Any]:
    """States of a method before the first round and after each, from the coordinator's rounds in this process.

    Args:
        name: of the method.
        made: bundle.
        members: devices with their examples.
        params: of the method.
        engine: shared by all devices.
        method: the method itself, or a test's double of it; None: looked up by name.
        observe: called whenever there is a new state.
        table: further keys of the job.

    Raises:
        JobError: the run has failed; gives the reason.
    """
    with tempfile.TemporaryDirectory() as place:
        return list(
            simulated.states(
                job(name, params, **table),
                folder(Path(place), made),
                members,
                load=methods.load if method is None else lambda name: method,
                engine=engine,
                observe=observe,
            )
        )


def given(method: Method, order: Order | None, member: Member, engine: Any, **options: Any) -> tuple[Task, Site]:
    """Task and site of an order on a device: see `hands.delivered`. Its tensors are in memory, it has no graphs."""
    assert order is not None
    with tempfile.TemporaryDirectory() as place:
        told = {"path": lambda ref: Path(ref.sha256), **options}
        task, site = hands.delivered(method, order, member, Path(place), engine=engine, **told)
        return task, remembered(task, site)


def remembered(task: Task, site: Site) -> Site:
    """Site whose tensors stay when their files are gone."""
    held = {name: site.load(name) for name in task.bundles if not name.endswith(".onnx")}
    return replace(site, load=lambda name: dict(held[name]))


# -- donors ---------------------------------------------------------------------------------------


class FakeRunner:
    """Runner whose graphs are numpy functions; counts how often each has run.

    A graph's file holds only the graph's name, and is found by that name or by its content's digest.
    """

    name = "onnx"
    room_bytes = 1 << 20

    def __init__(self, graphs: dict[str, Callable[[np.ndarray], np.ndarray]]) -> None:
        self.graphs, self.runs = graphs, dict.fromkeys(graphs, 0)
        self._names = {blob(name.encode()).sha256: name for name in graphs}

    def batch(self, graph: Path, around_bytes: int = 0, example_bytes: int = 0) -> int:
        """Always 64 examples."""
        return 64

    def make_room(self, size: int) -> None:
        """Do nothing: no graph takes memory."""

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        """Apply the graph's function to x, and count it."""
        name = self._names.get(graph.name, graph.name)
        self.runs[name] += 1
        return self.graphs[name](x).astype(np.float32)

    def close(self) -> None:
        """Do nothing."""


def convolution(seed: int, before: int, after: int, pool: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Random 3x3 convolution with ReLU, (n, before, h, w) -> (n, after, h, w), halved in size with `pool`."""
    kernel = np.random.default_rng(seed).normal(size=(after, before, 3, 3)) / np.sqrt(9 * before)

    def run(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        maps = np.maximum(np.einsum("nchwij,kcij->nkhw", windows, kernel, optimize=True), 0)
        return images.resize(maps, maps.shape[2] // 2, maps.shape[3] // 2) if pool else maps

    return run


def classifier(seed: int, width: int, classes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Random classifier on the maps' means, (n, width, h, w) -> (n, classes)."""
    weights = np.random.default_rng(seed).normal(size=(width, classes))
    return lambda x: x.mean(axis=(2, 3)) @ weights


DONORS = {"ash": ((4, False), (6, True), (6, False)), "elm": ((5, True), (5, False)), "fir": ((4, True), (8, False))}


def build() -> tuple[Bundle, FakeRunner]:
    """Bundle of three donors for 8x8 images, each of two to three convolutions and a classifier, and their runner."""
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
                graphs[f"{name}.onnx"] = convolution(seed, shape[0], width, pool)
            else:
                out = (3,)
                graphs[f"{name}.onnx"] = classifier(seed, shape[0], 3)
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
    return Bundle(meta, {name: blob(name.encode()) for name in graphs}, lambda name: {}), FakeRunner(graphs)


def members(count: int = 4, examples: int = 60) -> list[Member]:
    """Devices with noisy pictures of three templates, each in a mixture of its own."""
    draws = np.random.default_rng(7)
    templates = draws.uniform(0, 255, size=(3, 8, 8))
    found = []
    for i in range(count):
        y = draws.choice(3, size=examples, p=np.roll([0.6, 0.3, 0.1], i))
        x = np.clip(templates[y] + draws.normal(0, 60, size=(examples, 8, 8)), 0, 255).astype(np.uint8)
        cut = 3 * examples // 4
        found.append(Member(f"dev-{i}", Examples(x[:cut], y[:cut]), Examples(x[cut:], y[cut:])))
    return found


# -- networks -------------------------------------------------------------------------------------

MLP = {"name": "mlp", "inputs": 6, "hidden": [5], "classes": 3}
MLP_MASKS = masks.Plan(  # fedquilt.models.partial.trace.trace_plan of it
    {"1": 5},
    {},
    {
        "1.weight": masks.Follow((5, 6), ("1",)),
        "1.bias": masks.Follow((5,), ("1",)),
        "3.weight": masks.Follow((3, 5), (), ("1",)),
    },
)


def toy_bundle(
    network: dict[str, Any] | None = None,
    model: dict[str, np.ndarray] | None = None,
    plan: masks.Plan | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Bundle:
    """Return a bundle of a network to train, by default a small one for the numpy engine.

    With `kinds` the network need not exist: its tensors are of these kinds, and parameters where none is given.
    """
    start = numpy_engine.init(MLP, 0) if model is None else model
    plan = plan if network else MLP_MASKS
    parts = {"model": start, **({"masks": {"json": masks.to_array(plan)}} if plan else {})}
    meta: dict[str, Any] = {"network": network or MLP, "flops": 100.0}
    meta |= register_entry(network or MLP) if kinds is None else {"register": register_of_kinds(start, kinds)}
    return Bundle(meta, files(parts), lambda name: parts[name])


def register_entry(network: Mapping[str, Any]) -> dict[str, Any]:
    """Return a network's register as bundle metadata, or {} for an `mlp`, whose table implies it."""
    if network.get("name") == "mlp":
        return {}
    from fedquilt.models.networks import tensor_register

    return {"register": tensor_register.of_table(network)}


def learners(count: int = 3, examples: int = 16) -> list[Member]:
    """Devices with points labelled by the largest of three values, each in a mixture of its own."""
    found = []
    for i in range(count):
        draws = np.random.default_rng(i)
        x = draws.normal(size=(examples + 8, 6)).astype(np.float32)
        y = draws.choice(3, size=examples + 8, p=np.roll([0.8, 0.1, 0.1], i))
        x[np.arange(len(y)), y] += 2
        found.append(Member(f"dev-{i}", Examples(x[8:], y[8:]), Examples(x[:8], y[:8])))
    return found


def pictures(path: Path, size: int) -> Path:
    """Write an .npz of ten noisy templates of size x size pixels, for training and for a test."""
    draws = np.random.default_rng(0)
    templates = draws.uniform(0, 255, size=(10, size, size))
    found: dict[str, Any] = {}
    for split in ("train", "test"):
        y = draws.integers(0, 10, 80)
        noisy = templates[y] + draws.normal(0, 40, size=(80, size, size))
        found |= {f"x_{split}": np.clip(noisy, 0, 255).astype(np.uint8), f"y_{split}": y}
    np.savez(path, **found)
    return path
