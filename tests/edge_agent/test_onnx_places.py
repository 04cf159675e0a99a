"""CUDA for scoring, and falling back to the processor. Stand-ins play the sessions: no GPU is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from fedquilt.core import ModelError

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from product_graphs import MB, product  # noqa: E402

from fedquilt.edge_agent.engines import execution_providers  # noqa: E402
from fedquilt.edge_agent.engines import onnx_engine as onnx_engine  # noqa: E402
from fedquilt.edge_agent.engines.execution_providers import CUDA, ExecutionProviders  # noqa: E402
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine  # noqa: E402

PROCESSOR = execution_providers.CPU[0]
EYE = np.eye(3, dtype=np.float32)
WEIGHTS = np.arange(12, dtype=np.float32).reshape(3, 4)


class Runtime:
    """ONNX Runtime with providers of a name: sessions are real ones of the processor, which say that they have those.

    Args:
        fails: provider -> error of a session that is made with it.
        lacks: providers that a session is made without, though it was asked for them.
    """

    def __init__(
        self,
        fails: Mapping[str, Exception] = MappingProxyType({}),
        lacks: Sequence[str] = (),
    ) -> None:
        self.fails, self.lacks = fails, lacks
        self.asked: list[list[Any]] = []

    def session(self, graph: Path, options: Any = None, providers: Sequence[Any] = ()) -> Any:
        self.asked.append(list(providers))
        names = [name if isinstance(name, str) else name[0] for name in providers]
        for name in names:
            if name in self.fails:
                raise self.fails[name]
        outer = self

        class Session(ort.InferenceSession):
            def get_providers(self) -> list[str]:
                return [name for name in names if name not in outer.lacks]

            def run_with_iobinding(self, bound: Any, options: Any = None) -> None:
                super().run_with_iobinding(bound)  # its options name a GPU

        return Session(str(graph), providers=[PROCESSOR])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make an engine on a runtime with CUDA."""
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)

    def made(runtime: Runtime) -> OnnxEngine:
        monkeypatch.setattr(onnx_engine.ort, "get_available_providers", lambda: [CUDA, PROCESSOR])
        monkeypatch.setattr(onnx_engine.execution_providers, "create_session", runtime.session)
        return OnnxEngine(500 * MB, base_bytes=100 * MB)

    yield made
    os.environ.pop("NVIDIA_TF32_OVERRIDE", None)


def test_cuda_comes_first_within_the_room_in_32_bits(engine: Any, tmp_path: Path) -> None:
    runtime = Runtime()
    made = engine(runtime)
    np.testing.assert_array_equal(made.run(product(tmp_path, WEIGHTS), EYE), WEIGHTS)
    ((first, limits), last) = runtime.asked[0]
    assert (first, last, limits["gpu_mem_limit"]) == (CUDA, PROCESSOR, str(400 * MB))
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    assert (made.note, made.runs_on) == ("", "CUDA")


@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        (Runtime(fails={CUDA: RuntimeError("no libcudnn.so")}), " (no libcudnn.so)"),
        (Runtime(lacks=[CUDA]), ""),
    ],
)
def test_cuda_that_fails_is_left_out_and_said_once(engine: Any, tmp_path: Path, runtime: Runtime, reason: str) -> None:
    made = engine(runtime)
    np.testing.assert_array_equal(made.run(product(tmp_path, WEIGHTS), EYE), WEIGHTS)
    assert made.note == f"ONNX Runtime cannot use CUDA on this device{reason}: graphs run on the processor"
    assert made.runs_on == "processor"
    made.note = ""
    np.testing.assert_array_equal(made.run(product(tmp_path, WEIGHTS + 1), EYE), WEIGHTS + 1)
    assert made.note == ""
    assert CUDA not in str(runtime.asked[-1])


def test_a_graph_that_nothing_can_run_costs_no_provider(engine: Any, tmp_path: Path) -> None:
    broken = Runtime(fails=dict.fromkeys((CUDA, PROCESSOR), RuntimeError("node 3 has no input")))
    made = engine(broken)
    with pytest.raises(ModelError, match="node 3 has no input"):
        made.run(product(tmp_path, WEIGHTS), EYE)
    broken.fails = {}
    made.run(product(tmp_path, WEIGHTS), EYE)
    assert (made.note, made.runs_on) == ("", "CUDA")


@pytest.mark.parametrize("said", ["CUDA failure 700: an illegal memory access", "Failed to allocate memory for buffer"])
def test_memory_that_runs_out_and_a_gpu_that_is_gone_are_no_failure_of_a_provider(said: str) -> None:
    places, asked = ExecutionProviders([CUDA, PROCESSOR], 100), []

    def make(providers: Sequence[Any]) -> Any:
        asked.append(providers)
        raise RuntimeError(said)

    with pytest.raises(RuntimeError, match=said):
        places.create_session(make)
    assert (len(asked), places.note, places.provider_name) == (1, "", "CUDA")


def test_a_runtime_for_processors_alone_says_nothing_of_places() -> None:
    assert ExecutionProviders([PROCESSOR], 100).provider_name == ""
