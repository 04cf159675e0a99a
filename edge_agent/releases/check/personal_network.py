"""Assembly of a device's own network from shared parts and the device's private state.

The client half of the method combines the tensors, as for an evaluation, and the result is written into the graph that
was sent. This happens in the process of a check, and nothing leaves the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from fedquilt import compression, methods
from fedquilt.arrays import tensors
from fedquilt.core import ClientContext, Examples, JobError, ModelError, Task, Tensors
from fedquilt.edge_agent.releases.check.protocol import SplitModelFiles
from fedquilt.edge_agent.task import main as task_process
from fedquilt.formats import personal_models
from fedquilt.host.disk import disk_errors
from fedquilt.onnx import weights

NONE: Final = Examples(np.empty((0,), np.float32), np.empty((0,), np.int64))


def assemble_network(
    order: SplitModelFiles, model: Path, budget_bytes: int, class_priors: np.ndarray | None = None
) -> str:
    """Write the device's ONNX file from shared and private parts. Return a note on the network, or "".

    Args:
        order: Files to assemble.
        model: File to write.
        budget_bytes: Memory budget of the device.
        class_priors: Numbers that the network adds to its scores, if it has room for them. None: zeros.

    Raises:
        ModelError: If the tensors form no network, or the method requires that the device has taken part.
        JobError: If the method is not installed or does not support assembly.
        StoreError: If private state is lost and the method requires it, or the file cannot be written.
    """
    task = personal_models.read_task(Path(order.shared))
    if task is None:
        raise ModelError("what was sent does not say of which run it is: roll out the run again")
    parts = personal_models.read_personal(Path(order.shared))
    lacking = weights.missing_tensors(parts.graph.data)
    found, note = dict[str, np.ndarray](), ""
    if (priors := lacking.pop(personal_models.CLASS_PRIORS, None)) is not None:
        added = np.zeros(priors.shape) if class_priors is None else class_priors
        found[personal_models.CLASS_PRIORS] = added.astype(priors.dtype)
    if lacking:
        own, note = _compute_own_tensors(order, task, parts, model, budget_bytes)
        found |= own
    tensors.require_finite(found)
    with disk_errors(f"write {model}", "free some space"), model.open("wb") as file:
        file.writelines(weights.fill_graph(parts.graph.data, found))
    return note


def _compute_own_tensors(
    order: SplitModelFiles, task: Task, parts: personal_models.PersonalParts, model: Path, budget_bytes: int
) -> tuple[Tensors, str]:
    """Return the tensors of the device's own network, and a note on them, or ""."""
    method = methods.load(task.method)
    if method.personal is None:
        raise JobError(f"method {task.method!r} does not say how a board puts its network together")
    local, lost = task_process.load_private_state(order.private, order.private_sha256, order.lost, task.job)
    task_process.require_fresh_state_allowed(method, task.method, lost)
    site = ClientContext(
        device=order.device,
        budget_bytes=budget_bytes,
        engine=None,
        rng=tensors.seeded_rng(task.seed),
        train=NONE,
        held=NONE,
        local=compression.method_state(local),
        lost=lost,
        cache_at=model.parent,
        load=lambda name: _require_bundle(parts, name),
        path=lambda name: Path(name),
    )
    found = method.personal(task, site)
    if lost:
        return found, f"{lost}: the network is that of a board which has not taken part"
    return found, "" if site.local else f"nothing of {task.job} is kept here: the network is that of a newcomer to it"


def _require_bundle(parts: personal_models.PersonalParts, name: str) -> Tensors:
    if name not in parts.bundles:
        raise ModelError(f"what was sent has no bundle {name!r}; it has: {', '.join(sorted(parts.bundles)) or 'none'}")
    return parts.bundles[name]
