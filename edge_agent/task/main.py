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
from fedquilt.edge_agent.task.protocol import DataLoaded, Event, ProgressReport, WorkRequest, WorkResult
from fedquilt.host.disk import REAL, disk_errors

PROGRESS_S: Final = 1.0


class EngineError(core.FedquiltError): ...


class TaskExecutor:
    def __init__(self, load: Callable[[DataSpec], tuple[Examples, Examples]] | None = None) -> None:
        self._load = load or examples.load_share
        self._engine: tuple[tuple[str, int], Any] | None = None
        self._data: tuple[tuple[str, dict[str, Any]], tuple[Examples, Examples]] | None = None

    def load_method(self, order: WorkRequest) -> Method:
        return methods.load(order.task.method)

    def load_engine(self, name: str, budget_bytes: int) -> Any:
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

    def load_examples(self, spec: dict[str, Any], run: str) -> tuple[Examples, Examples]:
        """Return training and held-out examples. Data is read again for each new job."""
        if self._data is None or self._data[0] != (run, spec):
            if not spec:
                raise DataError("this device has no data: give its agent.toml a [data] table")
            self._data = ((run, spec), self._load(msgspec.convert(spec, DataSpec)))
        return self._data[1]

    def read_tensors(self, path: str, sha256: str) -> dict[str, np.ndarray]:
        """Return a copy of the tensors in a file. An empty `sha256` skips the check of the hash."""
        return tensors.read_tensors(Path(path), sha256)


def run_task(
    order: WorkRequest,
    bench: TaskExecutor,
    progress: Callable[[float], None] = lambda fraction: None,
    own_process: bool = False,
    loaded: Callable[[int], None] = lambda examples: None,
) -> WorkResult:
    """Run a task and write the result into its output folder. Errors become outcomes, too.

    Args:
        order: Task with the paths of its files.
        bench: Engine and examples kept between tasks.
        progress: Callback for the fraction done, from 0 to 1.
        own_process: Whether this process does nothing else, so that its resident peak is the task's.
        loaded: Callback for the number of the device's examples, called before the work begins.
    """
    began_s, cpu_s, base, gpu, site = time.perf_counter(), time.process_time(), None, None, None
    try:
        engine = bench.load_engine(order.task.engine, plan_limit_bytes(order))
        if hasattr(engine, "planned_bytes"):
            engine.planned_bytes = None  # left by an earlier task
        if hasattr(engine, "use_tensorrt"):
            engine.use_tensorrt(Path(order.cache), order.tensorrt_bytes)
        if own_process and memory_budget.reset_peak(os.getpid()):
            base = memory_budget.resident_bytes(os.getpid())
            gpu = getattr(engine, "gpu", None)
        if gpu is not None and base is not None:
            base += gpu.begin(order.budget_bytes - base)
            if base > order.budget_bytes:
                held, most = (memory_budget.format_megabytes(size) for size in (base, order.budget_bytes))
                raise MemoryBudgetError(
                    f"torch and its GPU's libraries hold {held} before any work, the budget is {most}: raise budget, "
                    "or hide the GPU from the agent (CUDA_VISIBLE_DEVICES=-1)"
                )
        site = build_site(order, bench, progress, loaded, engine=engine)
        outcome = run_method(order, bench.load_method(order), site)
    except DivergedError as error:
        network = order.task.params.get("network")
        is_scaled = site is None or (isinstance(network, Mapping) and network.get("input"))
        scales = "" if is_scaled or site is None else describe_unequal_scales(site.train.x)
        outcome = failure_outcome(DivergedError(f"{error}; {scales}") if scales else error)
    except Exception as error:
        outcome = failure_outcome(error)
    return msgspec.structs.replace(
        outcome,
        wall_s=time.perf_counter() - began_s,
        cpu_s=time.process_time() - cpu_s,
        base_bytes=base,
        peak_bytes=None if base is None else _peak_bytes(gpu),
    )


def _peak_bytes(gpu: Any) -> int | None:
    resident = memory_budget.read_peak_bytes(os.getpid())
    return resident if resident is None or gpu is None else resident + gpu.peak_bytes()


def build_site(
    order: WorkRequest,
    bench: TaskExecutor,
    progress: Callable[[float], None] = lambda fraction: None,
    loaded: Callable[[int], None] = lambda examples: None,
    *,
    engine: Any = None,
) -> ClientContext:
    train, held = bench.load_examples(order.data, order.task.job)
    loaded(len(train))
    local, lost = load_private_state(order.private, order.private_sha256, order.lost, order.task.job)
    return ClientContext(
        device=order.device,
        budget_bytes=plan_limit_bytes(order),
        engine=engine,
        rng=tensors.seeded_rng(order.task.seed),
        train=train,
        held_out=held,
        private_state=compression.method_state(local),
        lost_state_reason=lost,
        cache_folder=order.cache,
        load=lambda name: bench.read_tensors(_bundle_file(order, name), _expected_hash(order, name)),
        path=lambda name: _verified_bundle_file(order, name),
        progress=progress,
    )


def load_private_state(path: str | None, sha256: str, lost: str, job: str) -> tuple[core.Tensors, str]:
    """Return the private state of a job, and the reason if an existing state is unusable."""
    if path is None:
        return {}, lost
    payload = Path(path).read_bytes()
    if sha256 and hashlib.sha256(payload).hexdigest() != sha256:
        return {}, f"the private state of {job} is damaged on this device's disk"
    return tensors.decode_tensors(payload), ""


def require_fresh_state_allowed(method: Method, name: str, lost: str) -> None:
    if lost and not method.traits.replaces_private_state:
        raise StoreError(
            f"{lost}, and {name} does not allow a device to begin it anew: run the job anew, or leave this device out"
        )


def _bundle_file(order: WorkRequest, name: str) -> str:
    if name not in order.bundles:
        raise ModelError(f"the task has no bundle {name!r}; it has: {', '.join(sorted(order.bundles)) or 'none'}")
    return order.bundles[name]


def _verified_bundle_file(order: WorkRequest, name: str) -> Path:
    file = _bundle_file(order, name)
    _require_undamaged(file, _expected_hash(order, name))
    return Path(file)


def _require_undamaged(file: str, sha256: str) -> None:
    with disk_errors(f"read {file}"):
        if sha256 and REAL.hash_file(file) != sha256:
            raise StoreError(f"{file} is damaged: its bytes are not those it was stored with")


def _expected_hash(order: WorkRequest, name: str) -> str:
    """Return the sha256 of a bundle, or "" if the request does not ask for checks."""
    ref = order.task.bundles.get(name) if order.checked else None
    return "" if ref is None else ref.sha256


def run_method(order: WorkRequest, method: Method, site: ClientContext) -> WorkResult:
    task = order.task

    parts: dict[str, str] = {}  # files that are read tensor by tensor, with their sha256

    def open_private_state() -> core.Tensors:
        if not order.private or site.lost_state_reason:
            return {}
        parts[order.private] = order.private_sha256
        return disk_arrays.FloatReader(Path(order.private))

    def open_base_bundle(name: str) -> core.Tensors | None:
        if name not in order.bundles:
            return None
        parts[order.bundles[name]] = _expected_hash(order, name)
        return disk_arrays.FloatReader(Path(order.bundles[name]))

    metrics: dict[str, float] = {}
    evaluation: core.EvaluationSums | None = None
    weight = 0.0
    bundles: dict[str, core.BlobRef] = {}
    layouts: dict[str, dict[str, str]] = {}
    blobs: dict[str, bytes] = {}
    private_left: core.BlobRef | None = None
    note = site.lost_state_reason
    require_fresh_state_allowed(method, task.method, site.lost_state_reason)
    if "check" in task.actions:
        if method.check is None:
            raise core.JobError(f"method {task.method!r} has no evaluation of its own")
        prior = None if task.class_shares is None else core.ClassPrior(site.train.y, task.class_shares)
        held = dataclasses.replace(site.held_out, prior=prior)
        evaluation = method.check(
            task, dataclasses.replace(site, rng=tensors.seeded_rng(task.seed, "check"), held_out=held)
        )
        if not isinstance(evaluation, core.EvaluationSums):
            raise core.JobError(
                f"`check` of method {task.method!r} returned {type(evaluation).__name__}, and the sums of "
                "`site.engine.evaluate` are wanted"
            )
        weight = float(evaluation.examples)
    if "work" in task.actions:
        done = method.work(task, site)
        if not isinstance(done, core.ClientResult):
            raise core.JobError(
                f"`work` of method {task.method!r} returned {type(done).__name__}, "
                "and a fedquilt.core.ClientResult is wanted"
            )
        answer = compression.encode_update(task.wire, done, open_base_bundle, open_private_state)
        metrics = {name: float(value) for name, value in answer.metrics.items()}
        weight = float(answer.weight)
        if answer.private_state and order.forgotten:
            note = note or order.forgotten
            require_fresh_state_allowed(method, task.method, note)
        bundles, blobs, private_left = _write_result(answer, order)
        for file, sha256 in parts.items():  # after they were read: a bit that flips stays flipped
            _require_undamaged(file, sha256)
        layouts = {name: tensors.layout_from_tensors(bundle) for name, bundle in answer.bundles.items()}
    for name, value in {**metrics, "weight": weight}.items():
        if not math.isfinite(value) or (name == "weight" and value < 0):
            raise DivergedError(f"{name} came out as {value}")
    planned = getattr(site.engine, "planned_bytes", None)
    notes = [f"{note}: it has begun anew"] if note else []
    if told := getattr(site.engine, "note", ""):
        notes.append(told)
        site.engine.note = ""
    return WorkResult(
        weight=weight,
        metrics=metrics,
        evaluation=evaluation,
        bundles=bundles,
        layouts=layouts,
        blobs=blobs,
        private=private_left,
        note=shorten_error("; ".join(notes)),
        examples=len(site.train),
        planned_bytes=planned,
        runs_on=getattr(site.engine, "runs_on", ""),
    )


def failure_outcome(error: Exception) -> WorkResult:
    if isinstance(error, EngineError):
        return WorkResult(code="engine", reason=shorten_error(str(error)))
    code = failures.claim_code_from_error(error)
    overrun = code == "memory" and failures.is_out_of_memory_error(error)
    return WorkResult(code=code, reason=failures.describe_error(error), overrun=overrun)


def plan_limit_bytes(order: WorkRequest) -> int:
    return order.budget_bytes if order.plan_bytes is None else order.plan_bytes


def _write_result(
    answer: ClientResult, order: WorkRequest
) -> tuple[dict[str, core.BlobRef], dict[str, bytes], core.BlobRef | None]:
    refs, blobs, out = {}, {}, f"{order.out}/{order.prefix}"
    for name, bundle in answer.bundles.items():
        tensors.require_finite(bundle)
        if tensors.total_bytes([bundle]) < order.whole_bytes:
            payload = tensors.encode_tensors(bundle)
            refs[name] = core.BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
            blobs[refs[name].sha256] = payload
        else:
            os.makedirs(order.out, exist_ok=True)
            refs[name] = ref = protocol.write_tensors(f"{out}bundle", bundle)
            os.replace(f"{out}bundle", f"{out}{ref.sha256}")
    private = None
    if answer.private_state or order.private is not None:
        tensors.require_finite(answer.private_state)
        os.makedirs(order.out, exist_ok=True)
        private = protocol.write_tensors(f"{out}{protocol.PRIVATE}", answer.private_state)
    return refs, blobs, private


# -- the process ----------------------------------------------------------------------------------


def main() -> None:
    bench, last_s = TaskExecutor(), -math.inf

    def run(order: WorkRequest, send_event: Callable[[Event], None]) -> WorkResult:
        def report_progress(fraction: float) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            if now_s >= last_s + PROGRESS_S:
                last_s = now_s
                send_event(ProgressReport(min(max(float(fraction), 0.0), 1.0)))

        return run_task(
            order,
            bench,
            report_progress,
            own_process=True,
            loaded=lambda examples: send_event(DataLoaded(examples)),
        )

    serve_requests(WorkRequest, run)


if __name__ == "__main__":
    main()
