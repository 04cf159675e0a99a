"""A board's own network: what the coordinator has sent, and what the board alone has kept of the run.

The method's client half puts the tensors together, as it does for an evaluation; they are written into the graph that
was sent. All of it happens in the process of a check, and nothing of it leaves the board.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from fedquilt import compression, methods, onnx_fill, personal, tensors
from fedquilt.core import Examples, JobError, ModelError, Site, Tensors
from fedquilt.disk import doing
from fedquilt.edge_agent.releases.protocol import Parted
from fedquilt.edge_agent.task import main as task_process

NONE: Final = Examples(np.empty((0,), np.float32), np.empty((0,), np.int64))


def assemble_network(order: Parted, model: Path, budget_bytes: int) -> str:
    """Write the device's ONNX file from shared and private parts. Return a note on the network, or "".

    Args:
        order: what was sent, and where the private state is.
        model: file to write.
        budget_bytes: memory budget of the process.

    Raises:
        ModelError: the tensors make no network, or the method gives a board one only once it has taken part.
        JobError: the method is not installed, or does not say how a board puts its network together.
        StoreError: the private state is lost, and the method does not allow a device to begin it anew; or the file
            cannot be written.
    """
    task = personal.task(Path(order.shared))
    if task is None:
        raise ModelError("what was sent does not say of which run it is: deploy it anew")
    method = methods.load(task.method)
    if method.personal is None:
        raise JobError(f"method {task.method!r} does not say how a board puts its network together")
    parts = personal.read(Path(order.shared))
    local, lost = task_process.private_of(order.private, order.private_sha256, order.lost, task.job)
    task_process.require_allowed(method, task.method, lost)
    site = Site(
        device=order.device,
        budget_bytes=budget_bytes,
        engine=None,
        rng=tensors.rng(task.seed),
        train=NONE,
        held=NONE,
        local=compression.own(local),
        lost=lost,
        cache_at=model.parent,
        load=lambda name: _bundle(parts, name),
        path=lambda name: Path(name),
    )
    found = method.personal(task, site)
    tensors.require_finite(found)
    with doing(f"write {model}", "free some space"), model.open("wb") as file:
        file.writelines(onnx_fill.filled(parts.graph.data, found))
    if lost:
        return f"{lost}: the network is that of a board which has not taken part"
    return "" if site.local else f"nothing of {task.job} is kept here: the network is that of a newcomer to it"


def _bundle(parts: personal.Parts, name: str) -> Tensors:
    if name not in parts.bundles:
        raise ModelError(f"what was sent has no bundle {name!r}; it has: {', '.join(sorted(parts.bundles)) or 'none'}")
    return parts.bundles[name]
