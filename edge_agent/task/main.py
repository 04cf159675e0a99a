"""Process of a task: carries out orders within its memory. The heavy imports happen here.

    python -m fedquilt.edge_agent.task.main PARENT

takes orders as JSON lines on stdin and answers on stdout; all other output goes to
stderr. It ends when the daemon does, however that ends. Everything about it can be lost at any
moment: its output goes into the order's folder and counts only once the daemon has accepted it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import compression, core, methods, plugins, tensor_files, tensors
from fedquilt.core import (
    Answer,
    DataError,
    DivergedError,
    Examples,
    Method,
    ModelError,
    Site,
    StoreError,
    shorten_error,
)
from fedquilt.data import examples
from fedquilt.data.inputs import describe_unequal_scales
from fedquilt.data.spec import DataSpec
from fedquilt.disk import REAL, doing
from fedquilt.edge_agent import engines, exhausted
from fedquilt.edge_agent.task import budget, failures, outputs
from fedquilt.edge_agent.task.process import die_with
from fedquilt.edge_agent.task.protocol import Event, Loaded, Order, Outcome, Progressed

PROGRESS_S: Final = 1.0


class EngineError(core.FedquiltError):
    """An engine that is unknown here, or whose library does not load."""


class Bench:
    """Things kept from one task to the next: the engine, and the device's examples.

    `load` returns a device's examples by its spec; by default they are read from the spec's path.
    """

    def __init__(self, load: Callable[[DataSpec], tuple[Examples, Examples]] | None = None) -> None:
        self._load = load or examples.load
        self._engine: tuple[tuple[str, int], Any] | None = None
        self._data: tuple[tuple[str, dict[str, Any]], tuple[Examples, Examples]] | None = None

    def method(self, order: Order) -> Method:
        """Find the method of an order.

        Raises:
            JobError: there is none.
        """
        return methods.load(order.task.method)

    def engine(self, name: str, budget_bytes: int) -> Any:
        """Engine by name, made with the first task that needs it.

        Raises:
            EngineError: it cannot run here.
        """
        key = (name, budget_bytes)
        if self._engine is None or self._engine[0] != key:
            if self._engine is not None:
                self._engine[1].close()
            self._engine = None
            try:
                self._engine = (key, engines.make(name, budget_bytes))
            except (core.JobError, ImportError) as error:
                raise EngineError(str(error)) from None
        return self._engine[1]

    def examples(self, spec: dict[str, Any], run: str) -> tuple[Examples, Examples]:
        """Examples of the device: for training, and held out. Another run finds what has come to them meanwhile.

        Raises:
            DataError: there are none, or they cannot be read.
        """
        if self._data is None or self._data[0] != (run, spec):
            if not spec:
                raise DataError("this device has no data: give its agent.toml a [data] table")
            self._data = ((run, spec), self._load(msgspec.convert(spec, DataSpec)))
        return self._data[1]

    def tensors(self, path: str, sha256: str) -> dict[str, np.ndarray]:
        """Tensors of a file with this sha256 ("": not known), as the caller's own copy."""
        return tensors.read(Path(path), sha256)


def run_order(
    order: Order,
    bench: Bench,
    progress: Callable[[float], None] = lambda fraction: None,
    own_process: bool = False,
    loaded: Callable[[int], None] = lambda examples: None,
) -> Outcome:
    """Carry out an order and write the result into its folder. Return an outcome also for any error.

    Args:
        order: task with its files.
        bench: engine and examples kept between orders.
        progress: called with the share done, 0..1.
        own_process: this process does nothing else, so its resident peak is the task's.
        loaded: called with the number of the device's examples, before the work begins.
    """
    began_s, cpu_s, base, gpu, site = time.perf_counter(), time.process_time(), None, None, None
    try:
        engine = bench.engine(order.task.engine, plannable(order))
        if hasattr(engine, "planned_bytes"):
            engine.planned_bytes = None  # left by an earlier task
        if hasattr(engine, "use_tensorrt"):
            engine.use_tensorrt(Path(order.cache), order.tensorrt_bytes)
        if own_process and budget.reset_peak(os.getpid()):
            base = budget.resident_bytes(os.getpid())
            gpu = getattr(engine, "gpu", None)
        if gpu is not None and base is not None:
            base += gpu.begin(order.budget_bytes - base)
        site = site_of(order, bench, progress, loaded, engine=engine)
        outcome = run_method(order, bench.method(order), site)
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
    """Most that this process has held, resident and on the GPU if it uses one; None: the kernel does not tell."""
    resident = budget.peak_bytes(os.getpid())
    return resident if resident is None or gpu is None else resident + gpu.peak_bytes()


def site_of(
    order: Order,
    bench: Bench,
    progress: Callable[[float], None] = lambda fraction: None,
    loaded: Callable[[int], None] = lambda examples: None,
    *,
    engine: Any = None,
) -> Site:
    """Everything that the order's client half may use.

    Raises:
        DataError: the device has no examples, or none that can be read.
    """
    train, held = bench.examples(order.data, order.task.job)
    loaded(len(train))
    local, lost = private_of(order.private, order.private_sha256, order.lost, order.task.job)
    return Site(
        device=order.device,
        budget_bytes=plannable(order),
        engine=engine,
        rng=tensors.rng(order.task.seed),
        train=train,
        held=held,
        local=compression.own(local),
        lost=lost,
        cache_at=order.cache,
        load=lambda name: bench.tensors(_file(order, name), _hash(order, name)),
        path=lambda name: _sound(order, name),
        progress=progress,
    )


def private_of(path: str | None, sha256: str, lost: str, job: str) -> tuple[core.Tensors, str]:
    """Private state of a job, and why there is none that can be used although there should be.

    Args:
        path: its file; None: there is none.
        sha256: of its bytes; "": not known.
        lost: why there is no file.
        job: whose it is, for that sentence.
    """
    if path is None:
        return {}, lost
    payload = Path(path).read_bytes()
    if sha256 and hashlib.sha256(payload).hexdigest() != sha256:
        return {}, f"the private state of {job} is damaged on this device's disk"
    return tensors.decode(payload), ""


def require_allowed(method: Method, name: str, lost: str) -> None:
    """Raise StoreError unless a device may begin the private state of a method anew."""
    if lost and not method.anew:
        raise StoreError(
            f"{lost}, and {name} does not allow a device to begin it anew: run the job anew, or leave this device out"
        )


def _file(order: Order, name: str) -> str:
    """File of a bundle of the order."""
    if name not in order.bundles:
        raise ModelError(f"the task has no bundle {name!r}; it has: {', '.join(sorted(order.bundles)) or 'none'}")
    return order.bundles[name]


def _sound(order: Order, name: str) -> Path:
    """File of a bundle of the order, which is about to be opened by its path.

    Raises:
        StoreError: it is damaged, or cannot be read.
    """
    file = _file(order, name)
    _require_sound(file, _hash(order, name))
    return Path(file)


def _require_sound(file: str, sha256: str) -> None:
    with doing(f"read {file}"):
        if sha256 and REAL.digest(file) != sha256:
            raise StoreError(f"{file} is damaged: its bytes are not those it was stored with")


def _hash(order: Order, name: str) -> str:
    """The sha256 that a bundle's file is compared with; "": it is not."""
    ref = order.task.bundles.get(name) if order.checked else None
    return "" if ref is None else ref.sha256


def run_method(order: Order, method: Method, site: Site) -> Outcome:
    """Check the received state and train on it, as the task asks. Write bundles into `order.out`.

    Raises:
        StoreError: a file is not what it was, or cannot be read or written.
        UpdateError: a metric or the weight is not finite.
        FedquiltError: an error of the method's client half.
    """
    task = order.task

    parts: dict[str, str] = {}  # files that are read tensor by tensor, with their sha256

    def private() -> core.Tensors:
        if not order.private or site.lost:
            return {}
        parts[order.private] = order.private_sha256
        return tensor_files.Floats(Path(order.private))

    def base(name: str) -> core.Tensors | None:
        if name not in order.bundles:
            return None
        parts[order.bundles[name]] = _hash(order, name)
        return tensor_files.Floats(Path(order.bundles[name]))

    metrics: dict[str, float] = {}
    evaluation: core.EvaluationSums | None = None
    weight = 0.0
    bundles: dict[str, core.BlobRef] = {}
    layouts: dict[str, dict[str, str]] = {}
    blobs: dict[str, bytes] = {}
    private_left: core.BlobRef | None = None
    note = site.lost
    require_allowed(method, task.method, site.lost)
    if "check" in task.actions:
        if method.check is None:
            raise core.JobError(f"method {task.method!r} has no evaluation of its own")
        evaluation = method.check(task, dataclasses.replace(site, rng=tensors.rng(task.seed, "check")))
        if not isinstance(evaluation, core.EvaluationSums):
            raise core.JobError(
                f"`check` of method {task.method!r} returned {type(evaluation).__name__}, and the sums of "
                "`site.engine.evaluate` are wanted"
            )
        weight = float(evaluation.examples)
    if "work" in task.actions:
        done = method.work(task, site)
        if not isinstance(done, core.Answer):
            raise core.JobError(
                f"`work` of method {task.method!r} returned {type(done).__name__}, and a fedquilt.core.Answer is wanted"
            )
        answer = compression.encoded(task.wire, done, base, private)
        metrics = {name: float(value) for name, value in answer.metrics.items()}
        weight = float(answer.weight)
        if answer.local and order.forgotten:
            note = note or order.forgotten
            require_allowed(method, task.method, note)
        bundles, blobs, private_left = _written(answer, order)
        for file, sha256 in parts.items():  # after they were read: a bit that flips stays flipped
            _require_sound(file, sha256)
        layouts = {name: tensors.layout(bundle) for name, bundle in answer.bundles.items()}
    for name, value in {**metrics, "weight": weight}.items():
        if not math.isfinite(value) or (name == "weight" and value < 0):
            raise DivergedError(f"{name} came out as {value}")
    planned = getattr(site.engine, "planned_bytes", None)
    notes = [f"{note}: it has begun anew"] if note else []
    if told := getattr(site.engine, "note", ""):
        notes.append(told)
        site.engine.note = ""
    return Outcome(
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


def failure_outcome(error: Exception) -> Outcome:
    """Return the outcome of an order whose work raised this error."""
    if isinstance(error, EngineError):
        return Outcome(code="engine", reason=shorten_error(str(error)))
    code = failures.code_of_error(error)
    overrun = code == "memory" and exhausted.is_of_memory(error)
    return Outcome(code=code, reason=failures.describe_error(error), overrun=overrun)


def plannable(order: Order) -> int:
    """Bytes that the order's engine may plan with."""
    return order.budget_bytes if order.plan_bytes is None else order.plan_bytes


def _written(answer: Answer, order: Order) -> tuple[dict[str, core.BlobRef], dict[str, bytes], core.BlobRef | None]:
    """Write bundles into files named by content, and the private state if there is or was one.

    Returns:
        References of the bundles, the bytes of those that go with the outcome instead, by sha256, and the reference of
        the private state.
    """
    refs, blobs, out = {}, {}, f"{order.out}/{order.prefix}"
    for name, bundle in answer.bundles.items():
        tensors.require_finite(bundle)
        if tensors.total_bytes([bundle]) < order.whole_bytes:
            payload = tensors.encode(bundle)
            refs[name] = core.BlobRef(sha256=hashlib.sha256(payload).hexdigest(), size=len(payload))
            blobs[refs[name].sha256] = payload
        else:
            os.makedirs(order.out, exist_ok=True)
            refs[name] = ref = outputs.write_tensors(f"{out}bundle", bundle)
            os.replace(f"{out}bundle", f"{out}{ref.sha256}")
    private = None
    if answer.local or order.private is not None:
        tensors.require_finite(answer.local)
        os.makedirs(order.out, exist_ok=True)
        private = outputs.write_tensors(f"{out}{outputs.PRIVATE}", answer.local)
    return refs, blobs, private


# -- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Take orders until stdin ends."""
    die_with(int(sys.argv[-1]))
    with contextlib.suppress(OSError):  # short of memory, the kernel should take this process and not another
        Path("/proc/self/oom_score_adj").write_text("500")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    bench = Bench()

    def say(event: Event) -> None:
        answers.write(msgspec.json.encode(event) + b"\n")
        answers.flush()

    last_s = -math.inf

    def progress(fraction: float) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s >= last_s + PROGRESS_S:
            last_s = now_s
            say(Progressed(min(max(float(fraction), 0.0), 1.0)))

    with contextlib.suppress(BrokenPipeError):  # the daemon is gone
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Order)
            plugins.restrict(order.plugins)
            say(run_order(order, bench, progress, own_process=True, loaded=lambda examples: say(Loaded(examples))))


if __name__ == "__main__":
    main()
