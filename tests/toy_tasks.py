"""Tasks and images for tests of methods."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.core import ClientContext, Method, Task, TaskSpec
from fedquilt.testing.toy_networks import with_loaded_tensors
from fedquilt.tools.simulation import DeviceData, local_backend


def deliver_task(
    method: Method, task_spec: TaskSpec | None, member: DeviceData, engine: Any, **options: Any
) -> tuple[Task, ClientContext]:
    """Return the task and client context of a task spec. Tensors are loaded, and ONNX graphs left out."""
    assert task_spec is not None
    with tempfile.TemporaryDirectory() as folder:
        default_options = {"path_of_blob": lambda ref: Path(ref.sha256), **options}
        task, site = local_backend.make_task_and_context(
            method, task_spec, member, Path(folder), engine=engine, **default_options
        )
        return task, with_loaded_tensors(task, site)


def write_images(path: Path, size: int) -> Path:
    """Write an .npz file of noisy images of ten templates, 80 for training and 80 for tests."""
    draws = np.random.default_rng(0)
    templates = draws.uniform(0, 255, size=(10, size, size))
    arrays: dict[str, Any] = {}
    for split in ("train", "test"):
        y = draws.integers(0, 10, 80)
        noisy = templates[y] + draws.normal(0, 40, size=(80, size, size))
        arrays |= {f"x_{split}": np.clip(noisy, 0, 255).astype(np.uint8), f"y_{split}": y}
    np.savez(path, **arrays)
    return path
