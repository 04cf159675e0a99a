"""Messages between the daemon and a task's process: requests, progress and outcomes."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from fedquilt.core import BlobRef, Digest, EvaluationSums, Task, Usage
from fedquilt.wire import RefusalCode


class ProcessRequest(Protocol):
    @property
    def engine(self) -> str: ...

    @property
    def budget_bytes(self) -> int: ...

    @property
    def plugins(self) -> tuple[str, ...] | None: ...


class WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    task: Task
    device: str
    budget_bytes: int
    data: dict[str, Any]  # fedquilt.data.spec.DataSpec
    bundles: dict[str, str]  # bundle name -> file
    private: str | None  # file of the job's private state; None: none yet, or none that can be used
    cache: str  # folder of the job, made if missing: earlier tasks left files there for later ones
    out: str  # folder: bundles go into files named by their sha256, private state into private.safetensors
    private_sha256: str = ""  # of that file; "": not known
    lost: str = ""  # why the private state of earlier rounds is unusable
    forgotten: str = ""  # why the device cannot know whether private state existed
    plan_bytes: int | None = None  # part of the budget that the engine may plan with, or None for all of it
    prefix: str = ""  # prefix of these files' names, if devices share the folder
    whole_bytes: int = 0  # largest bundle that comes with the outcome instead of in a file
    checked: bool = False  # compare bundles with the task's hashes as they are read; else the daemon has
    plugins: tuple[str, ...] | None = None  # packages that this board allows: `fedquilt.plugins.restrict_plugins`
    tensorrt_bytes: int = 0  # of TensorRT's engines in `cache`; 0: it is not used

    @property
    def engine(self) -> str:
        return self.task.engine


class DataLoaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="loaded"):
    """Report that the device's data is loaded, before the work begins."""

    examples: int  # held-out ones aside


class ProgressReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="progress"):
    fraction: float


class WorkResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="outcome"):
    """Result of a task. With a code other than "ok", only `reason` and the costs are meaningful."""

    code: Literal["ok", RefusalCode] = "ok"
    reason: str = ""
    weight: float = 0.0
    metrics: dict[str, float] = {}
    evaluation: EvaluationSums | None = None
    bundles: dict[str, BlobRef] = {}
    blobs: dict[Digest, bytes] = {}  # by sha256: bundles that are in no file
    private: BlobRef | None = None  # the private state that the task left; None: it left none
    note: str = ""  # that private state was lost, and has begun anew
    layouts: dict[str, dict[str, str]] = {}  # of the bundles: `fedquilt.arrays.tensors.layout_from_tensors`
    examples: int = 0  # the device's own, held-out ones aside
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int | None = None
    base_bytes: int | None = None
    planned_bytes: int | None = None  # peak that its engine predicted, beside `base_bytes`
    runs_on: str = ""  # of an engine that may use a GPU: what it used last
    overrun: bool = False  # memory ran out at work
    below: Usage | None = None  # of a site: as in its update
    killed: bool = False  # from outside, not for its own fault: the same order may succeed next time


Event = DataLoaded | ProgressReport | WorkResult
