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

POLL_S = 0.02


class TaskProcess:
    """Task process of an agent with one engine and one budget, started and stopped by `with`.

    Private state is passed from task to task. `kernel_peak_bytes` is the peak memory that the kernel reports after the
    last task, or 0 if the kernel reports none.
    """

    def __init__(
        self,
        method: str,
        engine: str,
        budget_bytes: int,
        data: Mapping[str, Any],
        blob_path: Callable[[str], Path],
        folder: Path,
        *,
        command: Sequence[str] = COMMAND,
        plugins: tuple[str, ...] | None = None,
        timeout_s: float = math.inf,
        limit_bytes: int = sys.maxsize,
    ) -> None:
        self._command, self._plugins, self._timeout_s, self._limit_bytes = command, plugins, timeout_s, limit_bytes
        self._method, self._engine, self._budget_bytes = method, engine, budget_bytes
        self._data, self._blob_path, self._folder = dict(data), blob_path, folder
        self._private: str | None = None
        self._child: ChildProcess | None = None
        self.kernel_peak_bytes = 0

    def __enter__(self) -> TaskProcess:
        self._child = ChildProcess(self._command, self._engine)
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._child.kill()

    def run_task(self, task_spec: TaskSpec, number: int) -> tuple[protocol.WorkResult, dict[str, Tensors]]:
        """Run a task as round `number`. Return its result and its bundles, or raise ModelError if it failed."""
        output_folder = self._folder / sandbox.OUT / str(number)
        output_folder.mkdir(parents=True)

        def blob(value: Tensors | BlobRef) -> BlobRef:
            if isinstance(value, BlobRef):
                return value
            payload = tensors.encode_tensors(value)
            ref = ref_from_bytes(payload)
            (output_folder / f"{ref.sha256}.in").write_bytes(payload)
            return ref

        task = Task(
            actions=("work",),
            params=dict(task_spec.params),
            bundles={name: blob(value) for name, value in task_spec.bundles.items()},
            work=task_spec.work,
            job="alone",
            round=number,
            attempt=0,
            method=self._method,
            engine=self._engine,
            seed=derive_seed("alone", number),
            deadline_s=0.0,
        )
        files = {
            name: str(
                self._blob_path(name)
                if isinstance(value, BlobRef)
                else output_folder / f"{task.bundles[name].sha256}.in"
            )
            for name, value in task_spec.bundles.items()
        }
        request = protocol.WorkRequest(
            task=wire.decode(wire.encode(task), Task),
            device="alone",
            budget_bytes=self._budget_bytes,
            data={},
            bundles=files,
            private_state=self._private,
            cache_folder=str(self._folder / sandbox.CACHE),
            output_folder=str(output_folder),
            allowed_plugins=self._plugins,
        )
        outcome = self.run_request(request)
        if outcome.code != "ok":
            raise ModelError(f"a task of {self._method} failed in {self._budget_bytes / 1e6:.0f} MB: {outcome.reason}")
        if (output_folder / protocol.PRIVATE_FILE).exists():
            self._private = str(output_folder / protocol.PRIVATE_FILE)
        return outcome, {
            name: tensors.read_tensors(output_folder / ref.sha256) for name, ref in outcome.bundles.items()
        }

    def run_request(self, request: protocol.WorkRequest) -> protocol.WorkResult:
        """Run a request on the data of this process. Failures, timeout and limit are results with a code."""
        child = self._child
        assert child is not None
        child.send_line(msgspec.json.encode(msgspec.structs.replace(request, data=self._data)) + b"\n")
        end_s = time.monotonic() + self._timeout_s
        while True:
            for event in child.receive_events():
                if isinstance(event, protocol.WorkResult):
                    self.kernel_peak_bytes = memory_budget.read_peak_bytes(child.pid) or 0
                    return event
            if child.has_ended or child.is_garbled:
                return child.explain_end(self._limit_bytes)
            if time.monotonic() >= end_s:
                return protocol.WorkResult(code="failed", reason=f"the task has not ended within {self._timeout_s:g} s")
            if (resident_bytes := child.measure_resident_bytes() or 0) > self._limit_bytes:
                used, limit = map(memory_budget.format_megabytes, (resident_bytes, self._limit_bytes))
                return protocol.WorkResult(code="memory", reason=f"the task process uses {used}, more than {limit}")
            time.sleep(POLL_S)
