"""Short tasks that show the rates and overheads of the engines on this machine.

A workload is an engine and a kind of network. The probes of a workload differ in arithmetic, traffic, launches and
size of a mini-batch, so that the four rates of `fedquilt.costs.cost_model` can be fitted to their times. The probes use
the engine's own training loop or sessions, so the times include the constant costs of a task.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import Examples, Fit, Rates, WorkEstimate
from fedquilt.costs import cost_model
from fedquilt.models.networks import numpy_init, registry
from fedquilt.profiles import fit

CLASSES: Final = 10
DENSE: Final = (  # (inputs, hidden, examples, batch)
    (64, (16,), 32, 16),
    (64, (16,), 512, 16),
    (256, (64,), 512, 32),
    (784, (256,), 512, 64),
    (512, (512, 512), 512, 128),
    (784, (512,), 128, 8),
)
CONV: Final = (  # (name, settings, pixels, examples, batch)
    ("residual", {"channels": 3}, 16, 16, 16),
    ("residual", {"channels": 3}, 32, 96, 32),
    ("residual", {"channels": 3}, 16, 64, 4),
    ("cnn", {"channels": 1, "size": 20}, 20, 96, 8),
    ("plain", {"channels": 3, "width": 32}, 32, 48, 16),
    ("separable", {"channels": 3}, 32, 64, 16),
)
SCORED_BLOCKS: Final = ((16, 4, 16), (16, 32, 16), (32, 16, 48), (96, 4, 64), (32, 24, 32), (160, 2, 64), (96, 8, 16))
"""(channels, pixels, images) of inverted residual blocks."""
EXPANSION: Final = 6  # expansion factor of the inverted residual blocks
SEED: Final = 0


class TaskProbe(NamedTuple):
    work: WorkEstimate
    run: Callable[[], Any]


def build_probes_by_workload() -> dict[str, list[TaskProbe]]:
    probes = {"numpy-dense": build_dense_probes("numpy")}
    if importlib.util.find_spec("torch"):
        probes |= {"torch-dense": build_dense_probes("torch"), "torch-conv": build_convolution_probes()}
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        probes["onnx-score"] = build_scoring_probes()
    return probes


def fit_rates(probes: Sequence[TaskProbe], seconds: Sequence[float]) -> Rates:
    """Return the FLOPs and bytes per second, and seconds per launch and task, that fit the times best.

    No value is negative. A value is None if it does not affect the times.
    """
    counts = [(probe.work.task_share, probe.work.launches, probe.work.flops, probe.work.read_bytes) for probe in probes]
    task, launch, flop, byte = fit.fit_unit_costs(counts, seconds)
    return Rates(
        flops_per_s=1 / flop if flop else None,
        bytes_per_s=1 / byte if byte else None,
        launch_s=launch or None,
        task_s=task or None,
    )


def build_dense_probes(engine_name: str) -> list[TaskProbe]:
    engine = make_engine(engine_name)
    probes = []
    for inputs, hidden, count, batch in DENSE:
        network = {"name": "mlp", "inputs": inputs, "hidden": list(hidden), "classes": CLASSES}
        x = np.random.default_rng(SEED).standard_normal((count, inputs), np.float32)
        start = numpy_init.initial_mlp_weights(network, SEED)
        probes.append(build_training_probe(engine, network, start, numpy_init.mlp_costs_by_layer(network), x, batch))
    return probes


def build_convolution_probes() -> list[TaskProbe]:
    from fedquilt.models.networks import traces as traced

    engine = make_engine("torch")
    probes = []
    for name, settings, pixels, count, batch in CONV:
        channels = settings["channels"]
        input_table = {"channels": channels, "size": pixels, "mean": [0.5], "std": [0.25]}
        network = {"name": name, **settings, "classes": CLASSES, "input": input_table}
        model = registry.load_network(network, seed=SEED)
        start = {key: value.numpy() for key, value in model.state_dict().items()}
        shape = (count, pixels, pixels, channels) if channels > 1 else (count, pixels, pixels)
        x = np.random.default_rng(SEED).integers(0, 256, shape, np.uint8)
        probes.append(
            build_training_probe(
                engine, network, start, traced.trace_layer_costs(model, (channels, pixels, pixels)), x, batch
            )
        )
    return probes


def build_training_probe(
    engine: Any,
    network: Mapping[str, Any],
    start: Mapping[str, np.ndarray],
    layers: Sequence[cost_model.Layer],
    x: np.ndarray,
    batch: int,
) -> TaskProbe:
    examples = Examples(x, np.random.default_rng(SEED).integers(0, CLASSES, len(x)))
    cost = cost_model.training_cost(layers, start)
    transferred_bytes = cost_model.trained_tensor_bytes(start, start.keys())
    work = cost_model.training_work(
        cost, {"batch": batch}, transferred_bytes, tensors.total_bytes([start])
    ).total_for_examples(len(x))
    settings = Fit(batch=batch, lr=1e-3)
    return TaskProbe(work, lambda: engine.train(network, start, examples, settings, np.random.default_rng(SEED)))


def build_scoring_probes() -> list[TaskProbe]:
    """Return the probes of block scoring, after one run each, because sessions are kept between tasks.

    Their graphs are in a temporary folder until the process ends.
    """
    from fedquilt.models.stitching.device import block_runner, scoring
    from fedquilt.models.stitching.device.activations import MemoryStack
    from fedquilt.models.stitching.search import task_specs

    folder = Path(tempfile.mkdtemp(prefix="fedquilt-probes-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    context = _BlockContext(make_engine("onnx"), folder)
    probes = []
    for channels, pixels, count in SCORED_BLOCKS:
        block = write_probe_block(channels, pixels, folder)
        x = MemoryStack.from_array(
            np.random.default_rng(SEED).standard_normal((count, channels, pixels, pixels), np.float32)
        )

        def run(block: Any = block, x: Any = x, count: int = count) -> None:
            flow: Any = block_runner.BlockRunner(context, [block], block.flops)  # type: ignore[arg-type]
            scoring.stack_gram(flow.run_block(block, x), count)

        probes.append(TaskProbe(task_specs.blocks_work([(block, 1.0)], 0).total_for_examples(count), run))
        run()
    return probes


class _BlockContext(NamedTuple):
    # the part of `fedquilt.core.ClientContext` that running blocks needs
    engine: Any
    cache: Path
    budget_bytes: int = 1 << 40

    def path(self, name: str) -> Path:
        return self.cache / name

    def progress(self, fraction: float) -> None: ...


def make_engine(name: str) -> Any:
    from fedquilt.edge_agent import engines

    return engines.create_engine(name, 1 << 40)


def write_probe_block(channels: int, pixels: int, folder: Path) -> Any:
    """Write the ONNX graph of an inverted residual block into a folder, and return its `Block`."""
    from onnx import TensorProto, helper, numpy_helper

    from fedquilt.models.stitching.stitched_network import Block

    inner, rng = EXPANSION * channels, np.random.default_rng(SEED)
    shapes = {"expand": (inner, channels, 1, 1), "depth": (inner, 1, 3, 3), "project": (channels, inner, 1, 1)}
    weights = {name: (rng.standard_normal(shape) / 10).astype(np.float32) for name, shape in shapes.items()}
    limits = {"low": np.float32(0), "high": np.float32(6)}
    nodes = [
        helper.make_node("Conv", ["x", "expand"], ["a"]),
        helper.make_node("Clip", ["a", "low", "high"], ["b"]),
        helper.make_node("Conv", ["b", "depth"], ["c"], group=inner, pads=[1] * 4),
        helper.make_node("Clip", ["c", "low", "high"], ["d"]),
        helper.make_node("Conv", ["d", "project"], ["e"]),
        helper.make_node("Add", ["e", "x"], ["y"]),
    ]
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", channels, pixels, pixels]) for name in "xy"]
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in {**weights, **limits}.items()]
    graph = helper.make_graph(nodes, "block", value[:1], value[1:], constants)
    path = folder / f"{channels}-{pixels}.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    shape = (channels, pixels, pixels)
    size = sum(array.nbytes for array in weights.values())
    return Block(
        donor="probe",
        index=0,
        kind="middle",
        stages=((path.name,),),
        data=(),
        in_shape=shape,
        out_shape=shape,
        flops=2.0 * pixels**2 * (2 * inner * channels + 9 * inner),
        weight_bytes=size,
        resident_bytes=size,
        activation_bytes=4 * pixels**2 * 2 * inner,
    )


IMAGES, CHANNELS, SIZE, KERNEL = 4, 64, 56, 3  # one convolution in the middle of a residual network
LAYERS: Final = 2
CONV_FLOPS: Final = LAYERS * 2 * IMAGES * CHANNELS * CHANNELS * KERNEL**2 * SIZE**2  # one multiply-add is 2
SIDE: Final = 1024  # size of the matrices without ONNX Runtime
COPIED_BYTES: Final = 64 << 20  # larger than any cache of these boards


@dataclass(frozen=True)
class TimedWorkload:
    name: str  # description
    flops: float  # of one `compute`
    compute: Callable[[], Any]
    read_bytes: float  # of one `traffic`: read and written
    traffic: Callable[[], Any]
    versions: dict[str, str] = field(default_factory=dict)


def build_workload() -> TimedWorkload:
    """Return the work to time: convolutions on ONNX Runtime, or else numpy's products, and memory copies."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.ones(COPIED_BYTES, np.uint8)

    def copy_memory() -> None:
        np.copyto(target, source)

    versions = {"numpy": np.__version__}
    try:
        name, compute = _build_convolutions()
    except ImportError:
        rng = np.random.default_rng(SEED)
        a, b = (rng.standard_normal((SIDE, SIDE), np.float32) for _ in range(2))
        return TimedWorkload(
            "float32 matrix products of numpy", 2.0 * SIDE**3, lambda: a @ b, 2 * COPIED_BYTES, copy_memory, versions
        )
    versions["onnxruntime"] = importlib.metadata.version("onnxruntime") if _is_installed("onnxruntime") else "gpu build"
    return TimedWorkload(name, CONV_FLOPS, compute, 2 * COPIED_BYTES, copy_memory, versions)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _build_convolutions() -> tuple[str, Callable[[], Any]]:
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    from fedquilt.edge_agent.engines import execution_providers as onnx_session

    rng = np.random.default_rng(SEED)
    shape = [IMAGES, CHANNELS, SIZE, SIZE]
    weights = [rng.standard_normal((CHANNELS, CHANNELS, KERNEL, KERNEL), np.float32) / 24 for _ in range(LAYERS)]
    values = ["x", *(f"y{i}" for i in range(LAYERS))]
    graph = helper.make_graph(
        [
            helper.make_node("Conv", [values[i], f"w{i}"], [values[i + 1]], pads=[KERNEL // 2] * 4)
            for i in range(LAYERS)
        ],
        "work",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(values[-1], TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as the engine does
    available = ort.get_available_providers()
    providers = [p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in available]
    session = onnx_session.create_session(model.SerializeToString(), options, providers)
    x = rng.standard_normal(shape, np.float32)
    provider = session.get_providers()[0].removesuffix("ExecutionProvider")
    return f"float32 convolutions on ONNX Runtime, {provider}", lambda: session.run(None, {"x": x})
