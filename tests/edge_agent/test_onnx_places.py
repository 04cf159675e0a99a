"""TensorRT and CUDA for scoring, and falling back from them. Stand-ins play their sessions: no GPU is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedquilt.core import ModelError

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from product_graphs import MB, product  # noqa: E402

from fedquilt.edge_agent.engines import execution_providers  # noqa: E402
from fedquilt.edge_agent.engines import onnx_engine as onnx_engine  # noqa: E402
from fedquilt.edge_agent.engines.execution_providers import CUDA, TENSORRT, ExecutionProviders  # noqa: E402
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine  # noqa: E402

PROCESSOR = execution_providers.CPU[0]
EYE = np.eye(3, dtype=np.float32)
WEIGHTS = np.arange(12, dtype=np.float32).reshape(3, 4)


class Runtime:
    """ONNX Runtime with providers of a name: sessions are real ones of the processor, which say that they have those.

    Args:
        fails: provider -> error of a session that is made with it.
        runs: provider -> error of a run that begins with it.
        lacks: providers that a session is made without, though it was asked for them.
    """

    def __init__(
        self,
        fails: Mapping[str, Exception] = MappingProxyType({}),
        runs: Mapping[str, Exception] = MappingProxyType({}),
        lacks: Sequence[str] = (),
    ) -> None:
        self.fails, self.runs, self.lacks = fails, runs, lacks
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
                if names[0] in outer.runs:
                    raise outer.runs[names[0]]
                super().run_with_iobinding(bound)  # its options name a GPU

        return Session(str(graph), providers=[PROCESSOR])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Make an engine on a runtime with TensorRT and CUDA, which may use TensorRT."""
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)

    def made(runtime: Runtime, most_bytes: int = 10**6) -> OnnxEngine:
        monkeypatch.setattr(onnx_engine.ort, "get_available_providers", lambda: [TENSORRT, CUDA, PROCESSOR])
        monkeypatch.setattr(onnx_engine.execution_providers, "create_session", runtime.session)
        found = OnnxEngine(500 * MB, base_bytes=100 * MB)
        found.use_tensorrt(tmp_path / "cache", most_bytes)
        return found

    yield made
    os.environ.pop("NVIDIA_TF32_OVERRIDE", None)


def test_tensorrt_comes_first_within_the_room_in_32_bits_and_keeps_engines_beside_the_job(
    engine: Any, tmp_path: Path
) -> None:
    runtime = Runtime()
    made = engine(runtime)
    np.testing.assert_array_equal(made.run(product(tmp_path, WEIGHTS), EYE), WEIGHTS)
    ((first, options), (second, limits), last) = runtime.asked[0]
    assert (first, second, last) == (TENSORRT, CUDA, PROCESSOR)
    assert int(options["trt_max_workspace_size"]) == 200 * MB
    assert (options["trt_fp16_enable"], options["trt_int8_enable"]) == ("0", "0")
    assert options["trt_engine_cache_path"] == str(tmp_path / "cache" / "tensorrt")
    assert limits["gpu_mem_limit"] == str(400 * MB)
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    assert (made.note, made.runs_on) == ("", "TensorRT")


def test_without_room_for_its_engines_tensorrt_is_not_asked_for(engine: Any, tmp_path: Path) -> None:
    runtime = Runtime()
    made = engine(runtime, 0)
    made.run(product(tmp_path, WEIGHTS), EYE)
    assert [each if isinstance(each, str) else each[0] for each in runtime.asked[0]] == [CUDA, PROCESSOR]
    assert made.runs_on == "CUDA"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("runtime", "note", "where"),
    [
        (
            Runtime(fails={TENSORRT: RuntimeError("no libnvinfer.so")}),
            "ONNX Runtime cannot use TensorRT on this device (no libnvinfer.so): graphs run on CUDA",
            "CUDA",
        ),
        (
            Runtime(runs={TENSORRT: RuntimeError("TensorRT EP failed to create engine")}),
            "ONNX Runtime cannot use TensorRT on this device (TensorRT EP failed to create engine): graphs run on CUDA",
            "CUDA",
        ),
        (
            Runtime(lacks=[TENSORRT, CUDA]),
            "ONNX Runtime cannot use TensorRT on this device: graphs run on CUDA; "
            "ONNX Runtime cannot use CUDA on this device: graphs run on the processor",
            "processor",
        ),
        (
            Runtime(fails={TENSORRT: RuntimeError("no driver"), CUDA: RuntimeError("no driver")}),
            "ONNX Runtime cannot use TensorRT on this device (no driver): graphs run on CUDA; "
            "ONNX Runtime cannot use CUDA on this device (no driver): graphs run on the processor",
            "processor",
        ),
    ],
)
def test_what_fails_is_left_out_said_once_and_the_next_one_answers(
    engine: Any, tmp_path: Path, runtime: Runtime, note: str, where: str
) -> None:
    made = engine(runtime)
    np.testing.assert_array_equal(made.run(product(tmp_path, WEIGHTS), EYE), WEIGHTS)
    assert (made.note, made.runs_on) == (note, where)
    made.note = ""
    np.testing.assert_array_equal(made.run(product(tmp_path, WEIGHTS + 1), EYE), WEIGHTS + 1)
    assert made.note == ""
    assert TENSORRT not in str(runtime.asked[-1])


def test_a_graph_that_nothing_can_run_costs_no_provider(engine: Any, tmp_path: Path) -> None:
    broken = Runtime(fails=dict.fromkeys((TENSORRT, CUDA, PROCESSOR), RuntimeError("node 3 has no input")))
    made = engine(broken)
    with pytest.raises(ModelError, match="node 3 has no input"):
        made.run(product(tmp_path, WEIGHTS), EYE)
    broken.fails = {}
    made.run(product(tmp_path, WEIGHTS), EYE)
    assert (made.note, made.runs_on) == ("", "TensorRT")


@pytest.mark.parametrize("said", ["CUDA failure 700: an illegal memory access", "Failed to allocate memory for buffer"])
def test_memory_that_runs_out_and_a_gpu_that_is_gone_are_no_failure_of_a_provider(said: str) -> None:
    places, asked = ExecutionProviders([TENSORRT, CUDA, PROCESSOR], 100), []

    def make(providers: Sequence[Any]) -> Any:
        asked.append(providers)
        raise RuntimeError(said)

    with pytest.raises(RuntimeError, match=said):
        places.create_session(make)
    assert (len(asked), places.note, places.provider_name) == (1, "", "CUDA")


def test_engines_of_tensorrt_are_bounded_the_oldest_goes_first(tmp_path: Path) -> None:
    """Three of 40 bytes where 100 are allowed, when a session has been made and when the next task begins."""
    places = ExecutionProviders([TENSORRT, PROCESSOR], 100)
    places.use_tensorrt(tmp_path, 100)

    def engines() -> list[str]:
        return sorted(file.name for file in (tmp_path / "tensorrt").iterdir())

    def make(providers: Sequence[Any]) -> Any:
        for age, name in enumerate(("old", "middle", "new")):
            (tmp_path / "tensorrt" / name).write_bytes(b"x" * 40)
            os.utime(tmp_path / "tensorrt" / name, (1000 + age, 1000 + age))
        return SimpleNamespace(get_providers=lambda: [TENSORRT, PROCESSOR])

    places.create_session(make)
    assert engines() == ["middle", "new"]
    places.use_tensorrt(tmp_path, 40)
    assert engines() == ["new"]


def test_a_runtime_for_processors_alone_says_nothing_of_places() -> None:
    assert ExecutionProviders([PROCESSOR], 100).provider_name == ""
