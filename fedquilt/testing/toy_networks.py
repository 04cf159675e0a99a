"""Toy donors, toy networks, devices with examples, and scenarios of conformance checks.

In a scenario, a method that trains gets a small network and devices with points. A method that runs blocks gets toy
donors. A method that depends on a device's memory is run a second time, on a network of three stages and devices of
three tiers.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings
from fedquilt.core import (
    Aggregation,
    BlobRef,
    Bundle,
    ClientContext,
    ClientResult,
    DeviceUpdate,
    Examples,
    Method,
    Profile,
    Task,
)
from fedquilt.data import inputs
from fedquilt.edge_agent.engines import numpy_engine
from fedquilt.formats import job_bundle
from fedquilt.formats.tensor_register import Kind, register_from_kinds
from fedquilt.models.partial import masks
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation import run as simulated
from fedquilt.tools.simulation.run import WorkBackend
from fedquilt.tools.simulation.simulated_job import Simulation

SMALL_SEARCH = {"subrounds": 1, "expansions": 8, "samples": 16, "fit_samples": 24, "k": 2, "depth": 5}


# -- runs -----------------------------------------------------------------------------------------


def blob_ref(payload: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))


def bundle_files(parts: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, BlobRef]:
    """Return the reference to each file of a bundle, by the file's name."""
    return {name: blob_ref(tensors.encode_tensors(part)) for name, part in parts.items()}


def write_bundle(folder: Path, bundle: Bundle) -> Path:
    """Write a bundle to a folder as `fedquilt prepare` does, and return the folder.

    The file of a toy graph contains the graph's name, any other file its tensors.
    """
    contents = {
        name: name.encode() if name.endswith(".onnx") else tensors.encode_tensors(bundle.load(name))
        for name in bundle.files
    }
    job_bundle.write_bundle(folder, bundle.meta, contents)
    return folder


def make_job(method: str, params: Mapping[str, Any] = {}, **table: Any) -> JobSettings:
    """Return a job named "local". All seeds of the job depend on this name."""
    return settings.parse_job({"name": "local", "method": method, "params": dict(params), **table})


def run_method(
    name: str,
    bundle: Bundle,
    devices: Iterable[DeviceData],
    params: Mapping[str, Any] = {},
    *,
    engine: Any,
    method: Method | None = None,
    observe: Callable[[Simulation, WorkBackend], None] = lambda simulation, hands: None,
    **table: Any,
) -> list[Any]:
    """Run a method in this process, and return its states before the first round and after each round.

    Args:
        name: The name of the method.
        bundle: The bundle.
        devices: The devices with their examples.
        params: The parameters of the method.
        engine: The engine shared by all devices.
        method: A replacement of the method, or None to use the method of this name.
        observe: A function that is called at each new state.
        table: Further keys of the job.

    Raises:
        JobError: If the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        return list(
            simulated.iterate_states(
                make_job(name, params, **table),
                write_bundle(Path(folder), bundle),
                devices,
                load_method=methods.load if method is None else lambda name: method,
                engine=engine,
                observe=observe,
            )
        )


def with_loaded_tensors(task: Task, site: ClientContext) -> ClientContext:
    """Return a copy of a context with all tensors in memory, so that their files may be deleted."""
    loaded = {name: site.load(name) for name in task.bundles if not name.endswith(".onnx")}
    return replace(site, load=lambda name: dict(loaded[name]))


# -- donors ---------------------------------------------------------------------------------------


class FakeRunner:
    """Runner with numpy functions as graphs, which counts the runs of each graph.

    The file of a graph contains only the graph's name. A graph is found by its name or by the digest of its content.
    """

    name = "onnx"
    available_bytes = 1 << 20

    def __init__(self, graphs: dict[str, Callable[[np.ndarray], np.ndarray]]) -> None:
        self.graphs, self.runs = graphs, dict.fromkeys(graphs, 0)
        self._names = {blob_ref(name.encode()).sha256: name for name in graphs}

    def batch(self, graph: Path, caller_bytes: int = 0, caller_bytes_per_example: int = 0) -> int:
        return 64

    def make_room(self, size_bytes: int) -> None: ...

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        name = self._names.get(graph.name, graph.name)
        self.runs[name] += 1
        return self.graphs[name](x).astype(np.float32)

    def close(self) -> None: ...


def make_convolution(seed: int, in_channels: int, out_channels: int, pool: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Return a random 3x3 convolution with ReLU, which halves the image size with `pool`."""
    kernel = np.random.default_rng(seed).normal(size=(out_channels, in_channels, 3, 3)) / np.sqrt(9 * in_channels)

    def run(x: np.ndarray) -> np.ndarray:
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        maps = np.maximum(np.einsum("nchwij,kcij->nkhw", windows, kernel, optimize=True), 0)
        return inputs.resize_maps(maps, maps.shape[2] // 2, maps.shape[3] // 2) if pool else maps

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


def image_devices(count: int = 4, examples: int = 60) -> list[DeviceData]:
    """Return devices with noisy images of three templates, in different proportions on each device."""
    draws = np.random.default_rng(7)
    templates = draws.uniform(0, 255, size=(3, 8, 8))
    devices = []
    for i in range(count):
        y = draws.choice(3, size=examples, p=np.roll([0.6, 0.3, 0.1], i))
        x = np.clip(templates[y] + draws.normal(0, 60, size=(examples, 8, 8)), 0, 255).astype(np.uint8)
        cut = 3 * examples // 4
        devices.append(DeviceData(f"dev-{i}", Examples(x[:cut], y[:cut]), Examples(x[cut:], y[cut:])))
    return devices


# -- networks -------------------------------------------------------------------------------------

MLP = {"name": "mlp", "inputs": 6, "hidden": [5], "classes": 3}
PUBLIC_POINTS = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)  # examples that all devices get
MLP_MASKS = masks.MaskPlan(  # as returned by fedquilt.models.partial.dependency_trace.trace_mask_plan
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
    start = numpy_engine.init_tensors(MLP, 0) if model is None else model
    plan = plan if network else MLP_MASKS
    parts = {
        "model": start,
        "public": {"x": PUBLIC_POINTS},
        **({"masks": {"json": masks.plan_to_array(plan)}} if plan else {}),
    }
    meta: dict[str, Any] = {"network": network or MLP, "flops": 100.0}
    meta |= register_entry(network or MLP) if kinds is None else {"register": register_from_kinds(start, kinds)}
    return Bundle(meta, bundle_files(parts), lambda name: parts[name])


def register_entry(network: Mapping[str, Any]) -> dict[str, Any]:
    """Return a network's register as bundle metadata, or {} for an `mlp`, whose table implies it."""
    if network.get("name") == "mlp":
        return {}
    from fedquilt.models.networks import traces

    return {"register": traces.register_from_table(network)}


def point_devices(count: int = 3, examples: int = 16) -> list[DeviceData]:
    """Return devices with points of three classes, in different proportions on each device."""
    devices = []
    for i in range(count):
        draws = np.random.default_rng(i)
        x = draws.normal(size=(examples + 8, 6)).astype(np.float32)
        y = draws.choice(3, size=examples + 8, p=np.roll([0.8, 0.1, 0.1], i))
        x[np.arange(len(y)), y] += 2
        devices.append(DeviceData(f"dev-{i}", Examples(x[8:], y[8:]), Examples(x[:8], y[:8])))
    return devices


# -- scenarios ------------------------------------------------------------------------------------

ROUNDS = 4
TRAINING = {"epochs": 2, "batch": 8, "lr": 0.1}
AMPLE_BYTES = 1 << 40
MIXED_SUFFIX = "-mixed"  # suffix of a method's name: run on a fleet of several tiers
BUDGETS = ("512MB", "2GB", "8GB")
IMAGES = {"channels": 1, "size": 8}
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 3},
    "batch norm": {"name": "residual", "channels": 1, "classes": 3, "width": 4, "input": IMAGES},  # int64 counters ()
    "no axes": {"name": "rezero", "inputs": 64, "classes": 3, "width": 6, "blocks": 2},  # parameters of shape ()
    "gru": {"name": "gru", "channels": 8, "steps": 8, "classes": 3, "width": 4},  # several tensors for each layer
    "numbers": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 2, "task": "regression"},
    "labels": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 3, "task": "labels"},
}


class CheckSkipped(Exception):
    """Exception raised by a check that does not apply to a method or lacks a package."""


def depends_on_memory(name: str) -> bool:
    """Return whether a method has a parameter with a value for each of the five memory tiers."""
    defaults = [field.default for field in fields(methods.load(name).params)]
    return any(isinstance(default, tuple) and len(default) == 5 for default in defaults)


def make_torch_engine() -> Any:
    """Return a torch engine with an unlimited memory budget.

    Raises:
        CheckSkipped: If torch is not installed.
    """
    try:
        from fedquilt.edge_agent.engines.torch.engine import TorchEngine
    except ImportError as error:
        raise CheckSkipped(f"this needs torch: {error}") from None
    return TorchEngine(AMPLE_BYTES, base_bytes=0)


def training_params(params: type) -> dict[str, Any]:
    """Return the entries of TRAINING that are parameters of a method."""
    names = {field.name for field in fields(params)}
    return {key: value for key, value in TRAINING.items() if key in names}


@dataclass(frozen=True)
class Scenario:
    """Toy data, devices and parameters for a run of a method."""

    name: str
    method: Method
    bundle: Bundle
    engine: Any
    devices: list[DeviceData]
    params_table: Mapping[str, Any]
    rounds: int
    budgets: tuple[str, ...] = BUDGETS[:1]  # of the devices, in turn

    @property
    def params(self) -> Any:
        return self.method.params(**self.params_table)

    def run_rounds(
        self, *, method: Method | None = None, devices: list[DeviceData] | None = None, rounds: int = 0, **table: Any
    ) -> list[Any]:
        """Run the method, and return its states before the first round and after each round."""
        return run_method(
            self.name,
            self.bundle,
            self.devices if devices is None else devices,
            self.params_table,
            engine=self.engine,
            method=method or self.method,
            seed=3,
            rounds=rounds or self.rounds,
            fleet={"budgets": list(self.budgets)},
            **table,
        )


def make_scenario(name: str) -> Scenario:
    """Return the smallest scenario for a method. A name with MIXED_SUFFIX gets several memory tiers.

    Raises:
        JobError: If there is no such method.
        CheckSkipped: If the method requires torch and torch is not installed.
    """
    plain = name.removesuffix(MIXED_SUFFIX)
    method = methods.load(plain)
    if "onnx" in method.engines:
        bundle, runner = build_donors()
        names = {field.name for field in fields(method.params)}
        search_params = {key: value for key, value in SMALL_SEARCH.items() if key in names}
        return Scenario(plain, method, bundle, runner, image_devices(), search_params, rounds=1000)  # ends by itself
    engine = numpy_engine.NumpyEngine(AMPLE_BYTES, base_bytes=0) if "numpy" in method.engines else make_torch_engine()
    params = training_params(method.params)
    if name.endswith(MIXED_SUFFIX):
        return Scenario(plain, method, deep_bundle(), engine, point_devices(), params, ROUNDS, BUDGETS)
    return Scenario(plain, method, toy_bundle(), engine, point_devices(), params, ROUNDS)


def device_profile(budget_bytes: int) -> Profile:
    """Return the profile of a device with a memory budget."""
    return Profile(
        device="a", board="b", memory_bytes=budget_bytes, budget_bytes=budget_bytes, engines=("torch",), versions={}
    )


def deep_bundle() -> Bundle:
    """Return the bundle of a network with three hidden layers before the classifier."""
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    network = {"name": "mlp", "inputs": 6, "hidden": [5, 4, 4], "classes": 3}
    module = registry.load_network(network)
    model = {key: value.numpy() for key, value in module.state_dict().items()}
    return toy_bundle(network, model, dependency_trace.trace_mask_plan(module))


# (round, device) -> state and update of the last fold. An update is folded alone on arrival, which validates it,
# and again when its round is committed.
FoldInputs = dict[tuple[int, str], tuple[Any, DeviceUpdate]]


@cache
def record_run(
    name: str,
) -> tuple[Scenario, list[Any], list[tuple[Any, DeviceUpdate]], list[tuple[ClientContext, ClientResult]]]:
    """Run the scenario of a method, and return all values of the run. Runs are cached by `name`.

    Returns:
        The scenario, the states, each update after the state into which it was folded, and the context and the result
        of each task.
    """
    fold_inputs: FoldInputs = {}
    task_runs: list[tuple[ClientContext, ClientResult]] = []
    scenario = make_scenario(name)

    def fold(state: Any, accumulator: Any, update: DeviceUpdate) -> Any:
        fold_inputs[update.round, update.device] = (state, update)
        return scenario.method.aggregation.fold(state, accumulator, update)

    def work(task: Any, site: ClientContext) -> ClientResult:
        client_result = scenario.method.work(task, site)
        task_runs.append((with_loaded_tensors(task, site), client_result))
        return client_result

    states = scenario.run_rounds(method=replace(scenario.method, aggregation=Aggregation(fold), work=work))
    return scenario, states, [fold_inputs[key] for key in sorted(fold_inputs)], task_runs


def packed_states(run: list[Any]) -> list[bytes]:
    """Return each state as bytes, for comparisons of runs bit by bit."""
    return [tensors.pack_state(state) for state in run]


def prepare_bundle(network: dict[str, Any], folder: Path) -> Bundle:
    """Write the bundle of a network below a folder as `fedquilt prepare` does, and return it."""
    job = {"model": {key: value for key, value in network.items() if key != "input"}, "input": network.get("input")}
    from fedquilt.tools.artefacts import prepare

    bundle = prepare.prepare_bundle({key: value for key, value in job.items() if value}, folder / "bundle")
    bundle = add_public_examples(bundle, as_images(Examples(PUBLIC_POINTS, np.zeros(len(PUBLIC_POINTS)))).x)
    return replace(bundle, meta={**bundle.meta, "pretrained": True})  # some methods freeze pre-trained weights only


def add_public_examples(bundle: Bundle, x: np.ndarray) -> Bundle:
    """Return the bundle with inputs of examples that all devices get."""
    public = {"x": x}
    files = {**bundle.files, **bundle_files({"public": public})}
    return replace(bundle, files=files, load=lambda name: public if name == "public" else bundle.load(name))


def with_targets(examples: Examples, task: str) -> Examples:
    """Return the examples with targets for a task kind, derived from their classes."""
    if task == "regression":
        return Examples(examples.x, np.stack([examples.y, -examples.y], axis=1).astype(np.float32))
    if task == "labels":
        return Examples(examples.x, (examples.y[:, None] >= np.arange(3)).astype(np.uint8))
    return examples


def as_images(examples: Examples) -> Examples:
    """Return points of six values as images of 8 x 8 pixels."""
    pixels = np.zeros((len(examples), 64), np.float32)
    pixels[:, : examples.x.shape[1]] = examples.x
    return Examples(pixels.reshape(-1, 8, 8), examples.y)
