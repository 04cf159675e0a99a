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
    private_state: str | None  # file of the job's private state; None: none yet, or none that can be used
    cache_folder: str  # folder of the job, made if missing: earlier tasks left files there for later ones
    output_folder: str  # folder: bundles go into files named by their sha256, private state into private.safetensors
    private_sha256: str = ""  # of that file; "": not known
    lost_reason: str = ""  # why the private state of earlier rounds is unusable
    unknown_reason: str = ""  # why the device cannot know whether private state existed
    plan_bytes: int | None = None  # part of the budget that the engine may plan with, or None for all of it
    file_prefix: str = ""  # prefix of these files' names, if devices share the folder
    max_inline_bytes: int = 0  # largest bundle that comes with the outcome instead of in a file
    verify_bundles: bool = False  # compare bundles with the task's hashes as they are read; else the daemon has
    allowed_plugins: tuple[str, ...] | None = (
        None  # packages that this board allows: `fedquilt.plugins.restrict_plugins`
    )
    max_tensorrt_bytes: int = 0  # of TensorRT's engines in `cache`; 0: it is not used

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
    ran_out_of_memory: bool = False  # memory ran out at work
    site_usage: Usage | None = None  # of a site: as in its update
    killed_externally: bool = False  # from outside, not for its own fault: the same order may succeed next time


Event = DataLoaded | ProgressReport | WorkResult


TIMING_STARTED: Final = 0.5  # progress at which the timed answers begin
TENSORRT_FILE: Final = "model.engine"  # file in `CheckRequest.out`
MAX_TENSORRT_BUILD_S: Final = 1200.0  # most for the building of a TensorRT engine
TIMING_ENDED: Final = 0.75  # progress at which the timed answers have ended; `WorkResult.examples` is their number


class SplitModelFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files from which a network is assembled on this device, see `fedquilt.formats.personal_models`."""

    shared: str  # file that the coordinator sent
    device: str
    private_state: str | None = None  # file of the private state of the run; None: none, or none of use
    private_sha256: str = ""  # of the file `private`
    lost_reason: str = ""  # reason why the private state that rounds have left is of no use


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # file; one that is made of parts is in `out`
    output_folder: str  # folder for what the check makes: the model of parts, and a TensorRT engine
    current_model: str | None  # file of the model in use; None: there is none
    budget_bytes: int
    data: dict[str, Any]  # fedquilt.data.spec.DataSpec; {}: this device has none
    allowed_plugins: tuple[str, ...] | None = (
        None  # packages that this board allows: `fedquilt.plugins.restrict_plugins`
    )
    timing_s: float = 1.0  # seconds of answers one after the other, of which the median is the latency
    trtexec: str | None = None  # program that builds a TensorRT engine; None: there is none
    split_model: SplitModelFiles | None = None  # files to make the model of first; None: the model was sent whole
    engine: str = "onnx"
    input_shape: tuple[int, ...] | None = None  # of one example; None: as the graph declares it


ProcessRequest = WorkRequest | CheckRequest


PRIVATE_FILE: Final = "private.safetensors"  # the private state that a round leaves
SMALL_BYTES: Final = 1 << 20  # bytes of tensors encoded as a whole before they are written


def write_tensors(path: Path | str, tensors: Tensors) -> BlobRef:
    """Write a safetensors file and return its reference.

    Large files are written in pieces, because a whole encoding would be a second copy in memory. Imports numpy.
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
