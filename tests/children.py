"""Child processes that carry tasks out, some of which misbehave."""

from __future__ import annotations

import select
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from waiting import LIMIT_S

from fedquilt.arrays import tensors
from fedquilt.core import Task, WorkEstimate
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.edge_agent.task.worker import COMMAND, ChildWorker, TaskWorker

NETWORK = {"name": "mlp", "inputs": 4, "hidden": [], "classes": 2}
MODEL = {"1.weight": np.zeros((2, 4), np.float32), "1.bias": np.zeros(2, np.float32)}
SGD = {"epochs": 1, "batch": 4, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
METHODS = {  # client halves that misbehave; none of their server halves is used
    "hog": """
        kept = []
        def work(task, site):
            while True:
                kept.append(np.ones(1 << 20))
        """,
    "sleepy": """
        def work(task, site):
            site.progress(0.25)
            time.sleep(600)
        """,
    "greedy": """
        def work(task, site):
            np.ones(1 << 50)
        """,
    "abort": """
        def work(task, site):
            print("something is wrong", file=sys.stderr)
            os.abort()
        """,
    "chatty": """
        def work(task, site):
            print("hello")
            os.write(1, b'{"type":"outcome"}')
            rounds = site.private_state.get("n", np.zeros(1)) + 1
            return ClientResult({"w": {"w": np.ones(1)}}, 2.0, {"loss": 1.5}, private_state={"n": rounds})
        """,
    "diverged": """
        def work(task, site):
            return ClientResult({"w": {"w": np.array([np.nan])}}, 1.0)
        """,
    "astray": """
        def work(task, site):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        """,
    "clumsy": """
        def work(task, site):
            site.load("weights")
        """,
}
HEAD = """
import os, sys, time
from dataclasses import dataclass
import numpy as np
from fedquilt.core import Aggregation, ClientResult, Method
"""
FOOT = """
@dataclass
class Nothing: pass
no = lambda *given: None
METHOD = Method(paper="", params=Nothing, state=Nothing, engines=("numpy",), init=no, send=no, work=work, check=None,
                aggregation=Aggregation(no), step=no, result=no)
"""


class Place:
    """A device's disk: data, a model, and orders on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = np.random.default_rng(0)
        np.savez(folder / "data.npz", x=data.random((10, 4), np.float32), y=np.arange(10) % 2)
        (folder / "model").write_bytes(tensors.encode_tensors(MODEL))
        self._orders = 0

    def order(self, method: str = "fedavg", budget_bytes: int = 1 << 30, **changes: Any) -> WorkRequest:
        self._orders += 1
        out = self.folder / "out" / str(self._orders)
        out.mkdir(parents=True)
        values: dict[str, Any] = {"engine": "numpy", "actions": ("check", "work") if method == "fedavg" else ("work",)}
        values = {"work": WorkEstimate(flops=1e9), **values}
        task = Task(
            job="j-1",
            round=0,
            attempt=0,
            method=method,
            params={**SGD, "network": NETWORK},
            bundles={},
            seed=7,
            deadline_s=60.0,
            **{**values, **{name: value for name, value in changes.items() if name in Task.__struct_fields__}},
        )
        return WorkRequest(
            task=task,
            device="d",
            budget_bytes=budget_bytes,
            data=changes.get("data", {"path": str(self.folder / "data.npz"), "held": 0.2}),
            bundles={"model": str(self.folder / "model")},
            private_state=changes.get("private"),
            cache_folder=str(self.folder / "cache"),
            output_folder=str(out),
        )

    def command(self) -> list[str]:
        """The child's own program, which finds the misbehaving methods too."""
        methods = self.folder / "methods"
        methods.mkdir(exist_ok=True)
        for name, work in METHODS.items():
            (methods / f"{name}.py").write_text(HEAD + textwrap.dedent(work) + FOOT)
        code = f"import fedquilt.methods as m; m.__path__.append({str(methods)!r})"
        return [sys.executable, "-c", f"{code}; from fedquilt.edge_agent.task import main; main.main()"]


@contextmanager
def child(command: Sequence[str] = COMMAND, warm_s: float = 60.0) -> Iterator[ChildWorker]:
    worker = ChildWorker(warm_s, command)
    try:
        yield worker
    finally:
        worker.close()


def until(worker: TaskWorker, kind: type) -> Any:
    """The first event of a kind; everything before it is let go."""
    limit_s = time.monotonic() + LIMIT_S
    while (now_s := time.monotonic()) < limit_s:
        for event in worker.poll_events(now_s):
            if isinstance(event, kind):
                return event
        select.select(worker.fds(), [], [], max(min(worker.next_poll_s(now_s) - now_s, 1.0), 0.0))
    raise TimeoutError(f"no {kind.__name__} within {LIMIT_S} s")


def run_request(worker: TaskWorker, request: WorkRequest, now_s: float = 0.0) -> WorkResult:
    worker.start(request, now_s)
    outcome = until(worker, WorkResult)
    assert isinstance(outcome, WorkResult)
    return outcome


def pid_of(worker: ChildWorker) -> int:
    assert worker._child is not None
    return worker._child.pid
