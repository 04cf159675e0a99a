"""Main program of a task's process, which runs tasks within a memory budget.

    python -m fedquilt.edge_agent.task.main PARENT

The process reads requests as JSON lines from stdin and writes events to stdout. All other output goes to stderr. The
process ends with the daemon. Nothing in it is lost when it is killed: output counts only after the daemon accepts it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import compression, core, methods
from fedquilt.arrays import disk_arrays, tensors
from fedquilt.core import (
    ClientContext,
    ClientResult,
    DataError,
    DivergedError,
    Examples,
    MemoryBudgetError,
    Method,
    ModelError,
    StoreError,
    shorten_error,
)
from fedquilt.data import examples
from fedquilt.data.inputs import describe_unequal_scales
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.engines import failures
from fedquilt.edge_agent.task import memory_budget, protocol
from fedquilt.edge_agent.task.process import serve_requests
from fedquilt.edge_agent.task.protocol import (
    DataLoaded,
    EngineLoaded,
    ProcessEvent,
    ProgressReport,
    WorkRequest,
    WorkResult,
)
from fedquilt.host.disk import REAL, disk_errors

PROGRESS_S: Final = 1.0


class EngineError(core.FedquiltError): ...


class TaskExecutor:
    def __init__(self, load: Callable[[DataSpec], tuple[Examples, Examples]] | None = None) -> None:
        self._load = load or examples.load_share
        self._engine: tuple[tuple[str, int], Any] | None = None
        self._base_bytes: dict[str, int] = {}  # engine -> resident size before the first work of this process
        self._data: tuple[tuple[str, dict[str, Any]], tuple[Examples, Examples]] | None = None

    def load_method(self, request: WorkRequest) -> Method:
        return methods.load(request.task.method)

    def load_engine(self, name: str, budget_bytes: int) -> Any:
        """Return the engine, or raise EngineError. Close the previous one if name or budget differ."""
        key = (name, budget_bytes)
        if self._engine is None or self._engine[0] != key:
            if self._engine is not None:
                self._engine[1].close()
            self._engine = None
            try:
                self._engine = (key, engines.create_engine(name, budget_bytes))
            except (core.JobError, ImportError) as error:
                raise EngineError(str(error)) from None
        return self._engine[1]

    def record_base_bytes(self, engine: str, size: int) -> int:
        """Return the size of an engine without work: the first size recorded, because later ones include old work."""
        return self._base_bytes.setdefault(engine, size)

    def plan_limit_bytes(self, request: WorkRequest) -> int:
        """Return the planning limit for engines, which assume `ASSUMED_BASE_BYTES` for themselves."""
        limit_bytes = request.budget_bytes if request.plan_bytes is None else request.plan_bytes
        engine = request.task.engine
        return limit_bytes - memory_budget.extra_base_bytes(engine, self._base_bytes.get(engine, 0))

    def load_examples(self, spec: dict[str, Any], run: str) -> tuple[Examples, Examples]:
        """Return training and held-out examples. Data is read again for each new job."""
        if self._data is None or self._data[0] != (run, spec):
            if not spec:
                raise DataError("this device has no data: add a [data] table to agent.toml")
            self._data = ((run, spec), self._load(msgspec.convert(spec, DataSpec)))
        return self._data[1]

    def read_tensors(self, path: str, sha256: str) -> dict[str, np.ndarray]:
        """Return a copy of the tensors in a file. An empty `sha256` skips the check of the hash."""
        return tensors.read_tensors(Path(path), sha256)


def run_task(
    request: WorkRequest,
    executor: TaskExecutor,
    progress: Callable[[float], None] = lambda fraction: None,
    own_process: bool = False,
    report_examples: Callable[[int], None] = lambda examples: None,
    report_base: Callable[[int], None] = lambda size: None,
) -> WorkResult:
    """Run a task and write its output. Return a result with an error code after any exception.

    Args:
        request: Task with the paths of its files.
        executor: Engine and examples kept between tasks.
        progress: Callback for the fraction done, from 0 to 1.
        own_process: Whether this process does nothing else, so that its resident peak is the task's.
        report_examples: Callback for the number of the device's examples, called before the work begins.
        report_base: Callback for the resident size of this process before the work.
    """
    started_s, cpu_s, base, gpu, context = time.perf_counter(), time.process_time(), None, None, None
    try:
        engine = executor.load_engine(request.task.engine, executor.plan_limit_bytes(request))
        if hasattr(engine, "planned_bytes"):
            engine.planned_bytes = None  # files of an earlier task
        if own_process and memory_budget.reset_peak(os.getpid()):
            base = memory_budget.resident_bytes(os.getpid())
            gpu = getattr(engine, "gpu", None)
        if base is not None and gpu is None:  # an engine on a GPU plans with its libraries
            engine = _fit_installed_engine(request, executor, executor.record_base_bytes(request.task.engine, base))
        if base is not None:
            report_base(base)
        if gpu is not None and base is not None:
            base += gpu.begin(request.budget_bytes - base)
            if base > request.budget_bytes:
                base_size, budget = (memory_budget.format_megabytes(size) for size in (base, request.budget_bytes))
                raise MemoryBudgetError(
                    f"torch with its GPU libraries takes {base_size} without work, more than the budget of {budget}: "
                    f"raise budget, or hide the GPU from the agent (CUDA_VISIBLE_DEVICES=-1)"
                )
        context = build_client_context(request, executor, progress, report_examples, engine=engine)
        outcome = run_method(request, executor.load_method(request), context)
    except DivergedError as error:
        network = request.task.params.get("network")
        is_scaled = context is None or (isinstance(network, Mapping) and network.get("input"))
        scales = "" if is_scaled or context is None else describe_unequal_scales(context.train.x)
        outcome = failure_outcome(DivergedError(f"{error}; {scales}") if scales else error)
    except Exception as error:
        outcome = failure_outcome(error)
    return msgspec.structs.replace(
        outcome,
        wall_s=time.perf_counter() - started_s,
        cpu_s=time.process_time() - cpu_s,
        base_bytes=base,
        peak_bytes=None if base is None else _peak_bytes(gpu),
    )


def _fit_installed_engine(request: WorkRequest, executor: TaskExecutor, base_bytes: int) -> Any:
    """Return the engine with a plan for its measured size. Raise MemoryBudgetError if the work does not fit."""
    name = request.task.engine
    if memory_budget.extra_base_bytes(name, base_bytes):
        measured = {name: base_bytes}
        if shortage := memory_budget.memory_shortage(name, request.task.work, request.budget_bytes, None, measured):
            raise MemoryBudgetError(shortage[1])
    return executor.load_engine(name, executor.plan_limit_bytes(request))


def _peak_bytes(gpu: Any) -> int | None:
    resident = memory_budget.read_peak_bytes(os.getpid())
    return resident if resident is None or gpu is None else resident + gpu.peak_bytes()


def build_client_context(
    request: WorkRequest,
    executor: TaskExecutor,
    progress: Callable[[float], None] = lambda fraction: None,
    report_examples: Callable[[int], None] = lambda examples: None,
    *,
    engine: Any = None,
) -> ClientContext:
    train, held_out = executor.load_examples(request.data, request.task.job)
    report_examples(len(train))
    local, lost_reason = load_private_state(
        request.private_state, request.private_sha256, request.lost_reason, request.task.job
    )
    return ClientContext(
        device=request.device,
        budget_bytes=executor.plan_limit_bytes(request),
        engine=engine,
        rng=tensors.seeded_rng(request.task.seed),
        train=train,
        held_out=held_out,
        private_state=compression.remove_residuals(local),
        lost_state_reason=lost_reason,
        cache_folder=request.cache_folder,
        load=lambda name: executor.read_tensors(_bundle_file(request, name), _expected_hash(request, name)),
        path=lambda name: _verified_bundle_file(request, name),
        progress=progress,
    )


def load_private_state(path: str | None, sha256: str, lost_reason: str, job: str) -> tuple[core.Tensors, str]:
    """Return the private state of a job, and the reason why stored state is unusable, or ""."""
    if path is None:
        return {}, lost_reason
    payload = Path(path).read_bytes()
    if sha256 and hashlib.sha256(payload).hexdigest() != sha256:
        return {}, f"the private state of {job} is damaged on this device's disk"
    return tensors.decode_tensors(payload), ""


def require_fresh_state_allowed(method: Method, name: str, lost_reason: str) -> None:
    """Raise StoreError if private state is lost and the method cannot replace it by new state."""
    if lost_reason and not method.traits.replaces_private_state:
        raise StoreError(
            f"{lost_reason}, and {name} does not allow a device to start with new private state: run the job "
            "again, or exclude this device"
        )


def _bundle_file(request: WorkRequest, name: str) -> str:
    if name not in request.bundles:
        raise ModelError(f"task has no bundle {name!r}: choose one of {', '.join(sorted(request.bundles)) or 'none'}")
    return request.bundles[name]


def _verified_bundle_file(request: WorkRequest, name: str) -> Path:
    file = _bundle_file(request, name)
    _require_undamaged(file, _expected_hash(request, name))
    return Path(file)


def _require_undamaged(file: str, sha256: str) -> None:
    with disk_errors(f"read {file}"):
        if sha256 and REAL.hash_file(file) != sha256:
            raise StoreError(f"{file} is damaged: its sha256 is not {sha256[:12]}…")


def _expected_hash(request: WorkRequest, name: str) -> str:
    """Return the sha256 of a bundle to verify, or "" if the daemon has verified the bundle."""
    ref = request.task.bundles.get(name) if request.verify_bundles else None
    return "" if ref is None else ref.sha256


def run_method(request: WorkRequest, method: Method, context: ClientContext) -> WorkResult:
    task = request.task
    verified_files: dict[str, str] = {}  # files that are read tensor by tensor, with their sha256

    def open_private_state() -> core.Tensors:
        if not request.private_state or context.lost_state_reason:
            return {}
        verified_files[request.private_state] = request.private_sha256
        return disk_arrays.Float32Reader(Path(request.private_state))

    def open_base_bundle(name: str) -> core.Tensors | None:
        if name not in request.bundles:
            return None
        verified_files[request.bundles[name]] = _expected_hash(request, name)
        return disk_arrays.Float32Reader(Path(request.bundles[name]))

    metrics: dict[str, float] = {}
    evaluation: core.EvaluationSums | None = None
    weight = 0.0
    bundles: dict[str, core.BlobRef] = {}
    layouts: dict[str, dict[str, str]] = {}
    blobs: dict[str, bytes] = {}
    private_state: core.BlobRef | None = None
    note = context.lost_state_reason
    require_fresh_state_allowed(method, task.method, context.lost_state_reason)
    if "check" in task.actions:
        evaluation = _evaluate_model(task, method, context)
        weight = float(evaluation.examples)
    if "work" in task.actions:
        client_result = _train_model(task, method, context)
        encoded = compression.encode_update(task.wire, client_result, open_base_bundle, open_private_state)
        metrics = {name: float(value) for name, value in encoded.metrics.items()}
        weight = float(encoded.weight)
        if encoded.private_state and request.unknown_reason:
            note = note or request.unknown_reason
            require_fresh_state_allowed(method, task.method, note)
        bundles, blobs, private_state = _write_result(encoded, request)
        for file, sha256 in verified_files.items():  # after reading, because a flipped bit on the disk stays flipped
            _require_undamaged(file, sha256)
        layouts = {name: tensors.layout_from_tensors(bundle) for name, bundle in encoded.bundles.items()}
    for name, value in {**metrics, "weight": weight}.items():
        if not math.isfinite(value) or (name == "weight" and value < 0):
            raise DivergedError(f"{name} is {value}: lower the learning rate")
    planned_bytes = getattr(context.engine, "planned_bytes", None)
    notes = [f"{note}: starting with new private state"] if note else []
    if engine_note := getattr(context.engine, "note", ""):
        notes.append(engine_note)
        context.engine.note = ""
    return WorkResult(
        weight=weight,
        metrics=metrics,
        evaluation=evaluation,
        bundles=bundles,
        layouts=layouts,
        blobs=blobs,
        private=private_state,
        note=shorten_error("; ".join(notes)),
        examples=len(context.train),
        planned_bytes=planned_bytes,
        runs_on=getattr(context.engine, "runs_on", ""),
    )


def _evaluate_model(task: core.Task, method: Method, context: ClientContext) -> core.EvaluationSums:
    if method.check is None:
        raise core.JobError(f"method {task.method!r} has no `check` function, so devices cannot evaluate its model")
    prior = None if task.class_shares is None else core.ClassPrior(context.train.y, task.class_shares)
    held_out = dataclasses.replace(context.held_out, prior=prior)
    rng = tensors.seeded_rng(task.seed, "check")
    evaluation = method.check(task, dataclasses.replace(context, rng=rng, held_out=held_out))
    if not isinstance(evaluation, core.EvaluationSums):
        raise core.JobError(
            f"`check` of method {task.method!r} returned {type(evaluation).__name__}: return the sums of "
            "`client.engine.evaluate`"
        )
    return evaluation


def _train_model(task: core.Task, method: Method, context: ClientContext) -> ClientResult:
    client_result = method.work(task, context)
    if not isinstance(client_result, ClientResult):
        raise core.JobError(
            f"`work` of method {task.method!r} returned {type(client_result).__name__}: "
            "return a fedquilt.core.ClientResult"
        )
    return client_result


def failure_outcome(error: Exception) -> WorkResult:
    if isinstance(error, EngineError):
        return WorkResult(code="engine", reason=shorten_error(str(error)))
    code = failures.claim_code_from_error(error)
    overrun = code == "memory" and failures.is_out_of_memory_error(error)
    return WorkResult(code=code, reason=failures.describe_error(error), ran_out_of_memory=overrun)


def _write_result(
    encoded: ClientResult, request: WorkRequest
) -> tuple[dict[str, core.BlobRef], dict[str, bytes], core.BlobRef | None]:
    """Write the output files. Return bundle references, small bundles by sha256, and the private state."""
    refs, blobs, file_prefix = {}, {}, f"{request.output_folder}/{request.file_prefix}"
    for name, bundle in encoded.bundles.items():
        tensors.require_finite(bundle)
        if tensors.total_bytes([bundle]) < request.max_inline_bytes:
            payload = tensors.encode_tensors(bundle)
            refs[name] = core.BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
            blobs[refs[name].sha256] = payload
        else:
            os.makedirs(request.output_folder, exist_ok=True)
            refs[name] = ref = protocol.write_tensors(f"{file_prefix}bundle", bundle)
            os.replace(f"{file_prefix}bundle", f"{file_prefix}{ref.sha256}")
    private_state = None
    if encoded.private_state or request.private_state is not None:
        tensors.require_finite(encoded.private_state)
        os.makedirs(request.output_folder, exist_ok=True)
        private_state = protocol.write_tensors(f"{file_prefix}{protocol.PRIVATE_FILE}", encoded.private_state)
    return refs, blobs, private_state


# -- the process ----------------------------------------------------------------------------------


def main() -> None:
    executor, last_report_s = TaskExecutor(), -math.inf

    def run(request: WorkRequest, send_event: Callable[[ProcessEvent], None]) -> WorkResult:
        def report_progress(fraction: float) -> None:
            nonlocal last_report_s
            now_s = time.monotonic()
            if now_s >= last_report_s + PROGRESS_S:
                last_report_s = now_s
                send_event(ProgressReport(min(max(float(fraction), 0.0), 1.0)))

        return run_task(
            request,
            executor,
            report_progress,
            own_process=True,
            report_examples=lambda examples: send_event(DataLoaded(examples)),
            report_base=lambda size: send_event(EngineLoaded(size)),
        )

    serve_requests(WorkRequest, run)


if __name__ == "__main__":
    main()
