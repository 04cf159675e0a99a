"""Graphs of blocks, run by ONNX Runtime, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="blocks are cut from torch networks")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")


from fedquilt.models.stitching.onnx import blocks  # noqa: E402


def graphs_of(exported: Iterable[tuple[tuple[blocks.BlockGraph, ...], ...]]) -> list[blocks.BlockGraph]:
    return [graph for stages in exported for stage in stages for graph in stage]


def only(stages: tuple[tuple[blocks.BlockGraph, ...], ...]) -> blocks.BlockGraph:
    ((graph,),) = stages
    return graph


def run(stages: tuple[tuple[blocks.BlockGraph, ...], ...], x: np.ndarray, folder: Path) -> np.ndarray:
    for stage in stages:
        x = np.concatenate([run_graph(graph, x, folder) for graph in stage], axis=1)
    return x


def run_graph(made: blocks.BlockGraph, x: np.ndarray, folder: Path) -> np.ndarray:
    path = folder / hashlib.sha256(made.graph).hexdigest()
    path.write_bytes(made.graph)
    if made.data is not None:
        (folder / hashlib.sha256(made.data).hexdigest()).write_bytes(made.data)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def require_same_outputs(parts: Iterable[Any], donor: torch.nn.Module, shape: Sequence[int], folder: Path) -> None:
    """Exported parts, run in order, give what the network gives, to 1e-4 of the largest output."""
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
    with torch.no_grad():
        wanted = donor(torch.from_numpy(x)).numpy()
    for part in parts:
        x = run(part, x, folder)
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(x, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)
