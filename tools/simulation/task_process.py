"""One device's tasks in the agent's own task process: whether they end well, and what they hold (`Usage`)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from fedquilt import tensors, wire
from fedquilt.blobs.chunks import reference
from fedquilt.coordinator.tasks import make_task
from fedquilt.core import BlobRef, ModelError, Order, Task, Tensors, derive_seed
from fedquilt.edge_agent.task import budget, confine, outputs, protocol
from fedquilt.edge_agent.task.process import Child
from fedquilt.edge_agent.task.worker import COMMAND

LOOK_S = 0.02


class TaskProcess:
    """A process for one engine under one budget, alive within `with`; the device's private state goes along.

    `outside_bytes` is the peak that the kernel told of it after its last task, 0 if it tells none.

    Args:
        data: the device's [data] table.
        find: finds a bundle's file on disk.
        folder: of the process's private folders.
        command: of the process.
        plugins: packages that its tasks may use; None: all that are installed.
        most_s: longest that a task may take.
        most_bytes: most that the process may hold resident; the budget alone is for its tasks to keep to.
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
        self._child: Child | None = None
        self.outside_bytes = 0

    def __enter__(self) -> TaskProcess:
        self._child = Child(self._command, self._engine)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.kill()

    def run_task(self, order: Order, number: int) -> tuple[protocol.Outcome, dict[str, Tensors]]:
        """Run a task in the process. Return its outcome, and the tensors that it would send.

        Raises:
            ModelError: it did not go well; says why.
        """
        out = self._folder / confine.OUT / str(number)
        out.mkdir(parents=True)

        def blob(value: Tensors | BlobRef) -> BlobRef:
            if isinstance(value, BlobRef):
                return value
            payload = tensors.encode(value)
            ref = reference(payload)
            (out / f"{ref.sha256}.in").write_bytes(payload)
            return ref

        task = make_task(
            order,
            blob=blob,
            actions=("work",),
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
        asked = protocol.Order(
            task=wire.decode(wire.encode(task), Task),
            device="alone",
            budget_bytes=self._budget_bytes,
            data={},
            bundles=files,
            private=self._private,
            cache=str(self._folder / confine.CACHE),
            out=str(out),
            plugins=self._plugins,
        )
        outcome = self.ask(asked)
        if outcome.code != "ok":
            raise ModelError(f"a task of {self._method} in {self._budget_bytes / 1e6:.0f} MB: {outcome.reason}")
        if (out / outputs.PRIVATE).exists():
            self._private = str(out / outputs.PRIVATE)
        return outcome, {name: tensors.read(out / ref.sha256) for name, ref in outcome.bundles.items()}

    def ask(self, order: protocol.Order) -> protocol.Outcome:
        """Outcome of an order with this device's data."""
        assert self._child is not None
        return self._answer(self._child, msgspec.json.encode(msgspec.structs.replace(order, data=self._data)) + b"\n")

    def _answer(self, child: Child, line: bytes) -> protocol.Outcome:
        child.send(line)
        end_s = time.monotonic() + self._most_s
        while True:
            for event in child.receive():
                if isinstance(event, protocol.Outcome):
                    self.outside_bytes = budget.peak_bytes(child.pid) or 0
                    return event
            if child.gone or child.garbled:
                return child.obituary()
            if time.monotonic() >= end_s:
                return protocol.Outcome(code="failed", reason=f"it has not ended within {self._most_s:g} s")
            if (held := child.look() or 0) > self._most_bytes:
                reason = f"its process holds {budget.megabytes(held)}, more than {budget.megabytes(self._most_bytes)}"
                return protocol.Outcome(code="memory", reason=reason)
            time.sleep(LOOK_S)
