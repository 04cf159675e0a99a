"""Tasks of one device in the agent's own task process, with their memory use."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fedquilt import wire
from fedquilt.arrays import tensors
from fedquilt.blobs.chunks import ref_from_bytes
from fedquilt.core import BlobRef, ModelError, Task, TaskSpec, Tensors, derive_seed
from fedquilt.edge_agent.task import memory_budget, protocol, sandbox
from fedquilt.edge_agent.task.process import ChildProcess
from fedquilt.edge_agent.task.worker import COMMAND

LOOK_S = 0.02


class TaskProcess:
    """Task process of an agent with one engine and one budget, started and stopped by `with`.

    Private state is passed from task to task. `outside_bytes` is the peak memory that the kernel reports after the
    last task, or 0 if the kernel reports none.
    """

    def __init__(
        self,
        method: str,
        engine: str,
        budget_bytes: int,
        data: Mapping[str, Any],
        find: Callable[[str], Path],
        folder: Path,
        *,
        command: Sequence[str] = COMMAND,
        plugins: tuple[str, ...] | None = None,
        most_s: float = math.inf,
        most_bytes: int = sys.maxsize,
    ) -> None:
        self._command, self._plugins, self._most_s, self._most_bytes = command, plugins, most_s, most_bytes
        self._method, self._engine, self._budget_bytes = method, engine, budget_bytes
        self._data, self._find, self._folder = dict(data), find, folder
        self._private: str | None = None
        self._child: ChildProcess | None = None
        self.outside_bytes = 0

    def __enter__(self) -> TaskProcess:
        self._child = ChildProcess(self._command, self._engine)
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._child.kill()

    def run_task(self, order: TaskSpec, number: int) -> tuple[protocol.WorkResult, dict[str, Tensors]]:
        out = self._folder / sandbox.OUT / str(number)
        out.mkdir(parents=True)

        def blob(value: Tensors | BlobRef) -> BlobRef:
            if isinstance(value, BlobRef):
                return value
            payload = tensors.encode_tensors(value)
            ref = ref_from_bytes(payload)
            (out / f"{ref.sha256}.in").write_bytes(payload)
            return ref

        task = Task(
            actions=("work",),
            params=dict(order.params),
            bundles={name: blob(value) for name, value in order.bundles.items()},
            work=order.work,
            job="alone",
            round=number,
            attempt=0,
            method=self._method,
            engine=self._engine,
            seed=derive_seed("alone", number),
            deadline_s=0.0,
        )
        files = {
            name: str(self._find(name) if isinstance(value, BlobRef) else out / f"{task.bundles[name].sha256}.in")
            for name, value in order.bundles.items()
        }
        asked = protocol.WorkRequest(
            task=wire.decode(wire.encode(task), Task),
            device="alone",
            budget_bytes=self._budget_bytes,
            data={},
            bundles=files,
            private_state=self._private,
            cache_folder=str(self._folder / sandbox.CACHE),
            output_folder=str(out),
            allowed_plugins=self._plugins,
        )
        outcome = self.run_request(asked)
        if outcome.code != "ok":
            raise ModelError(f"a task of {self._method} in {self._budget_bytes / 1e6:.0f} MB: {outcome.reason}")
        if (out / protocol.PRIVATE_FILE).exists():
            self._private = str(out / protocol.PRIVATE_FILE)
        return outcome, {name: tensors.read_tensors(out / ref.sha256) for name, ref in outcome.bundles.items()}

    def run_request(self, order: protocol.WorkRequest) -> protocol.WorkResult:
        child = self._child
        assert child is not None
        child.send_line(msgspec.json.encode(msgspec.structs.replace(order, data=self._data)) + b"\n")
        end_s = time.monotonic() + self._most_s
        while True:
            for event in child.receive_events():
                if isinstance(event, protocol.WorkResult):
                    self.outside_bytes = memory_budget.read_peak_bytes(child.pid) or 0
                    return event
            if child.has_ended or child.is_garbled:
                return child.explain_end()
            if time.monotonic() >= end_s:
                return protocol.WorkResult(code="failed", reason=f"it has not ended within {self._most_s:g} s")
            if (held := child.measure_resident_bytes() or 0) > self._most_bytes:
                reason = (
                    f"its process holds {memory_budget.format_megabytes(held)}, more than "
                    f"{memory_budget.format_megabytes(self._most_bytes)}"
                )
                return protocol.WorkResult(code="memory", reason=reason)
            time.sleep(LOOK_S)
