"""Messages and files between the daemon and a process of tasks or model checks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from fedquilt.core import BlobRef, Digest, EvaluationSums, Task, Usage
from fedquilt.host.disk import REAL, disk_errors
from fedquilt.wire import RefusalCode

if TYPE_CHECKING:
    from fedquilt.core import Tensors


class WorkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    task: Task
    device: str
    budget_bytes: int
    data: dict[str, Any]  # fedquilt.data.spec.DataSpec
    bundles: dict[str, str]  # bundle name -> file
    private_state: str | None  # file of the job's private state, or None without usable private state
    cache_folder: str  # folder of the job for files shared by its tasks, created if missing
    output_folder: str  # folder: bundles go into files named by their sha256, private state into private.safetensors
    private_sha256: str = ""  # sha256 of the file `private_state`, or "" if unknown
    lost_reason: str = ""  # why the private state of earlier rounds is unusable
    unknown_reason: str = ""  # why the device cannot know whether private state existed
    plan_bytes: int | None = None  # part of the budget that the engine may plan with, or None for all of it
    file_prefix: str = ""  # prefix of the output files' names, if devices share the folder
    max_inline_bytes: int = 0  # largest bundle that comes with the outcome instead of in a file
    verify_bundles: bool = False  # whether to verify bundles with the task's hashes, unless the daemon has done so
    allowed_plugins: tuple[str, ...] | None = (
        None  # plug-in packages permitted on this board: `fedquilt.plugins.restrict_plugins`
    )

    @property
    def engine(self) -> str:
        return self.task.engine


class EngineLoaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="engine"):
    base_bytes: int  # resident size of the process before the work


class DataLoaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="loaded"):
    examples: int  # number of training examples


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
    blobs: dict[Digest, bytes] = {}  # sha256 -> content of bundles without a file
    private: BlobRef | None = None  # private state left by the task, or None
    note: str = ""  # message for the device's owner, such as lost private state
    layouts: dict[str, dict[str, str]] = {}  # layout of the bundles: `fedquilt.arrays.tensors.layout_from_tensors`
    examples: int = 0  # number of the device's training examples
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int | None = None
    base_bytes: int | None = None
    planned_bytes: int | None = None  # peak predicted by the engine, without `base_bytes`
    runs_on: str = ""  # processor used last by an engine that may use a GPU
    ran_out_of_memory: bool = False  # whether memory ran out during the work
    site_usage: Usage | None = None  # only of a site, as in its update
    killed_externally: bool = False  # whether the process was killed from outside, so that a repeated task may succeed


Event = DataLoaded | ProgressReport | WorkResult
ProcessEvent = EngineLoaded | Event


TIMING_STARTED: Final = 0.5  # progress of a check at which the timed runs of the model begin
TIMING_ENDED: Final = 0.75  # progress at which the timed runs have ended; `WorkResult.examples` is their number


class SplitModelFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files from which a network is assembled on this device, see `fedquilt.formats.personal_models`."""

    shared: str  # file from the coordinator
    device: str
    private_state: str | None = None  # file of the run's private state, or None without usable private state
    private_sha256: str = ""  # sha256 of the file `private_state`
    lost_reason: str = ""  # reason why the private state of earlier rounds is unusable


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # model file, which the check first writes if it is assembled from parts
    current_model: str | None  # file of the model in use, or None
    budget_bytes: int
    data: dict[str, Any]  # fedquilt.data.spec.DataSpec, or {} if this device has no data
    allowed_plugins: tuple[str, ...] | None = (
        None  # plug-in packages permitted on this board: `fedquilt.plugins.restrict_plugins`
    )
    timing_s: float = 1.0  # duration of consecutive runs, of which the median is the latency
    split_model: SplitModelFiles | None = (
        None  # files from which the model is assembled first, or None for a complete model
    )
    engine: str = "onnx"
    input_shape: tuple[int, ...] | None = None  # shape of one example, or None for the shape that the graph declares


ProcessRequest = WorkRequest | CheckRequest


PRIVATE_FILE: Final = "private.safetensors"  # name of the file with a round's private state
SMALL_BYTES: Final = 1 << 20  # bytes of tensors encoded at once


def write_tensors(path: Path | str, tensors: Tensors) -> BlobRef:
    """Write a safetensors file and return its reference, or raise StoreError. Imports numpy.

    Large files are written in pieces, because a whole encoding would be a second copy in memory.
    """
    from fedquilt.arrays.disk_arrays import write_safetensors
    from fedquilt.arrays.tensors import encode_tensors, total_bytes

    if total_bytes([tensors]) <= SMALL_BYTES:
        payload = encode_tensors(tensors)
        with disk_errors(f"write {path}"):
            REAL.write(path, payload)
        return BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
    with disk_errors(f"write {path}"):
        write_safetensors(Path(path), tensors)
        return BlobRef(sha256=REAL.hash_file(path), size=os.stat(path).st_size)
