"""Units of work for `fedquilt board record`, on the installed engine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

IMAGES, CHANNELS, SIZE, KERNEL = 4, 64, 56, 3  # of one convolution, as in the middle of a residual network
LAYERS: Final = 2
CONV_FLOPS: Final = LAYERS * 2 * IMAGES * CHANNELS * CHANNELS * KERNEL**2 * SIZE**2  # one multiply-add is 2
SIDE: Final = 1024  # of the matrices, where there is no engine
COPIED_BYTES: Final = 64 << 20  # larger than any cache of these boards
SEED: Final = 0


@dataclass(frozen=True)
class TimedWorkload:
    """Two functions to be timed, one bound by arithmetic and one by memory traffic."""

    name: str  # what is timed, in words
    flops: float  # of one `compute`
    compute: Callable[[], Any]
    read_bytes: float  # of one `traffic`: read and written
    traffic: Callable[[], Any]
    versions: dict[str, str] = field(default_factory=dict)


def build_workload() -> TimedWorkload:
    """Build a workload of ONNX Runtime convolutions, or of numpy matrix products without the engine."""
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
    """Return a description and a function that runs float32 convolutions on ONNX Runtime once."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    from fedquilt.edge_agent.engines import execution_providers

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
    session = execution_providers.create_session(model.SerializeToString(), options, providers)
    x = rng.standard_normal(shape, np.float32)
    where = session.get_providers()[0].removesuffix("ExecutionProvider")
    return f"float32 convolutions on ONNX Runtime, {where}", lambda: session.run(None, {"x": x})
