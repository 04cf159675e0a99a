"""Execution of the work requests of simulated devices in this process, one by one or in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from fedquilt import core, methods, wire
from fedquilt.arrays import tensors
from fedquilt.blobs.chunks import ref_from_bytes
from fedquilt.coordinator.updates.tasks import make_task
from fedquilt.core import Action, BlobRef, ClientContext, DataError, Examples, Method, Task, Tensors, derive_seed
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.task import main
from fedquilt.edge_agent.task.protocol import WorkRequest, WorkResult
from fedquilt.tools.simulation import DeviceData, adversaries

T = TypeVar("T")
TrainingReply = tuple[Any, Any]  # result or exception of a call, and the generator's state after the call
MAX_ENGINES = 8  # cached engines
MAX_FILES = 8  # number of cached files, of which a round needs one to three


class RestartableClient(Generic[T]):
    """Client function that can be restarted with the same random state."""

    def __init__(self, make_context: Callable[[Any], ClientContext], work: Callable[[ClientContext], T]) -> None:
        self._make_context, self._work = make_context, work
        self._context: ClientContext | None = None
        self._initial_rng_state: Any = None

    def __call__(self, engine: Any) -> T:
        if self._context is None:
            self._context = self._make_context(engine)
            self._initial_rng_state = self._context.rng.bit_generator.state
        else:
            self._context.rng.bit_generator.state = self._initial_rng_state
        return self._work(self._context)


class BatchWait(BaseException):
    """Signal that a client function waits for a call that is trained in a batch."""

    def __init__(self, call: Any) -> None:
        self.call = call


class ReplayEngine:
    """Engine of one client function that replays the results of earlier training calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.replies: list[TrainingReply | None] = []  # by call of `train`, None for a call that must run alone
        self.next_call = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train(self, network: Any, start: Any, examples: Any, fit: Any, rng: Any, **options: Any) -> Any:
        """Return the stored result of this call, or train alone if the call cannot be batched."""
        if self.next_call == len(self.replies):
            call = self._engine.batchable_call(network, start, examples, fit, rng, **options)
            if call is not None:
                raise BatchWait(call)
            self.replies.append(None)
        earlier_reply = self.replies[self.next_call]
        self.next_call += 1
        if earlier_reply is None:
            return self._engine.train(network, start, examples, fit, rng, **options)
        reply, rng.bit_generator.state = earlier_reply
        if isinstance(reply, Exception):
            raise reply
        return reply


def run_together(functions: Sequence[Callable[[Any], T]], engine: Any) -> list[tuple[T | Exception, bool]]:
    """Call all functions with an engine, training in batches where possible.

    A client function calls `context.engine.train`. Where the engine can train several devices at once, the call raises
    `BatchWait`. When all functions wait or have ended, the waiting calls are trained together. Then each function is
    called again from its beginning, and its earlier calls return their stored results. This is correct because a client
    function depends only on its Task and ClientContext and draws from a keyed generator.

    Returns:
        For each function its result or exception, and whether its training could be batched.
    """
    results: list[Any] = [None] * len(functions)
    pending = list(range(len(functions)))
    replay_engines = [ReplayEngine(engine) for _ in functions] if hasattr(engine, "train_together") else []
    while pending:
        calls: dict[int, Any] = {}
        for index in pending:
            try:
                if replay_engines:
                    replay_engines[index].next_call = 0
                results[index] = functions[index](replay_engines[index] if replay_engines else engine)
            except BatchWait as wait:
                calls[index] = wait.call
            except Exception as error:
                results[index] = error
        pending = list(calls)
        replies = engine.train_together(list(calls.values())) if calls else []
        for (index, call), reply in zip(calls.items(), replies, strict=True):
            replay_engines[index].replies.append((reply, call.rng.bit_generator.state))
    return [(value, bool(replay_engines) and any(replay_engines[index].replies)) for index, value in enumerate(results)]


def make_engine(name: str, budget_bytes: int) -> Any:
    # the torch and numpy engines can train several devices in one pass
    if name == "torch":
        from fedquilt.edge_agent.engines.torch.batch_engine import BatchedTorchEngine

        return BatchedTorchEngine(budget_bytes)
    if name == "numpy":
        from fedquilt.edge_agent.engines.batch_training import BatchedNumpyEngine

        return BatchedNumpyEngine(budget_bytes)
    return engines.create_engine(name, budget_bytes)


class WorkExecutor(main.TaskExecutor):
    """Executor of work requests of many devices, with their engines, methods and examples."""

    def __init__(
        self,
        load_shard: Callable[[str], tuple[Examples, Examples]],
        load_method: Callable[[str], Method] = methods.load,
        create_engine: Callable[[str, int], Any] = engines.create_engine,
    ) -> None:
        super().__init__()
        self._load_shard, self._load_method, self._create_engine = load_shard, load_method, create_engine
        self._engines: dict[tuple[str, int], Any] = {}

    def load_method(self, request: WorkRequest) -> Method:
        return adversaries.corrupt_method(self._load_method(request.task.method), request.data)

    def load_engine(self, name: str, budget_bytes: int) -> Any:
        # at most MAX_ENGINES engines are cached, and the oldest is closed
        key = (name, budget_bytes)
        if key not in self._engines:
            while len(self._engines) >= MAX_ENGINES:
                self._engines.pop(next(iter(self._engines))).close()
            self._engines[key] = self._create_engine(name, budget_bytes)
        return self._engines[key]

    def load_examples(self, spec: Mapping[str, Any], run: str) -> tuple[Examples, Examples]:
        try:
            return self._load_shard(spec["share"])
        except KeyError:
            raise DataError(f"simulated device {spec.get('share')!r} has no examples") from None


class SingleEngineExecutor(WorkExecutor):
    """Executor with one engine for all devices and budgets. The caller closes the engine."""

    def __init__(
        self, load_shard: Callable[[str], tuple[Examples, Examples]], load_method: Callable[[str], Method], engine: Any
    ) -> None:
        super().__init__(load_shard, load_method)
        self._shared_engine = engine

    def load_engine(self, name: str, budget_bytes: int) -> Any:
        return self._shared_engine


class SharedTensors:
    """Cache of the tensors of files that many devices read. The arrays are read-only."""

    def __init__(self) -> None:
        self._tensors_by_path: dict[str, dict[str, np.ndarray]] = {}

    def __call__(self, path: str, read: Callable[[Path], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        if path not in self._tensors_by_path:
            while len(self._tensors_by_path) >= MAX_FILES:
                del self._tensors_by_path[next(iter(self._tensors_by_path))]
            arrays = read(Path(path))
            for array in arrays.values():
                array.flags.writeable = False
            self._tensors_by_path[path] = arrays
        return dict(self._tensors_by_path[path])


def run_requests(
    executor_requests: Sequence[tuple[main.TaskExecutor, WorkRequest]], batched: bool = False
) -> list[tuple[WorkResult, bool]]:
    """Run work requests.

    Returns:
        For each request its result, and whether its training could be batched. Failures are results, not exceptions.
    """
    if not batched:
        return [(main.run_task(request, executor), False) for executor, request in executor_requests]
    batches: dict[tuple[str, int | None], list[int]] = {}
    for index, (_, request) in enumerate(executor_requests):
        batches.setdefault((request.task.engine, request.plan_bytes), []).append(index)
    results: dict[int, tuple[WorkResult, bool]] = {}
    for indices in batches.values():
        results.update(zip(indices, _run_in_batch([executor_requests[index] for index in indices]), strict=True))
    return [results[index] for index in range(len(executor_requests))]


def _run_in_batch(executor_requests: Sequence[tuple[main.TaskExecutor, WorkRequest]]) -> list[tuple[WorkResult, bool]]:
    # measured time is divided evenly between the requests
    started_s, cpu_s = time.perf_counter(), time.process_time()
    first_executor, first_request = executor_requests[0]
    try:
        engine = first_executor.load_engine(first_request.task.engine, first_executor.plan_limit_bytes(first_request))
    except Exception as error:
        return [(main.failure_outcome(error), False)] * len(executor_requests)

    def make_client(executor: main.TaskExecutor, request: WorkRequest) -> RestartableClient[WorkResult]:
        return RestartableClient(
            lambda engine: main.build_client_context(request, executor, engine=engine),
            lambda site: main.run_method(request, executor.load_method(request), site),
        )

    results = run_together([make_client(*pair) for pair in executor_requests], engine)
    wall_s = (time.perf_counter() - started_s) / len(executor_requests)
    cpu_s = (time.process_time() - cpu_s) / len(executor_requests)
    return [
        (
            msgspec.structs.replace(
                main.failure_outcome(value) if isinstance(value, Exception) else value, wall_s=wall_s, cpu_s=cpu_s
            ),
            batchable,
        )
        for value, batchable in results
    ]


def make_task_and_context(
    method: Method,
    task_spec: core.TaskSpec,
    device: DeviceData,
    folder: Path,
    *,
    engine: Any = None,
    actions: tuple[Action, ...] = ("work",),
    number: int = 0,
    seed: int = 0,
    local: Tensors | None = None,
    cache: Path | None = None,
    path_of_blob: Callable[[BlobRef], Path] | None = None,
) -> tuple[Task, ClientContext]:
    """Return the task and the client context of a method's task spec for one device, without rounds.

    Tensors are stored in `folder` by their content. `path_of_blob` finds blobs of the task spec that are elsewhere.
    """

    def ref_of_value(value: Tensors | BlobRef) -> BlobRef:
        if isinstance(value, BlobRef):
            return value
        payload = tensors.encode_tensors(value)
        ref = ref_from_bytes(payload)
        (folder / ref.sha256).write_bytes(payload)
        return ref

    folder.mkdir(parents=True, exist_ok=True)
    wire_task = make_task(
        task_spec,
        store_bundle=ref_of_value,
        actions=actions,
        job="alone",
        round=number,
        attempt=0,
        method="alone",
        engine=method.engines[0],
        seed=derive_seed(seed, "alone", number, device.device),
        deadline_s=0.0,
    )
    task = wire.decode(wire.encode(wire_task), Task)
    blobs_of_spec = {value for value in task_spec.bundles.values() if isinstance(value, BlobRef)}

    def path_of_bundle(name: str) -> Path:
        ref = task.bundles[name]
        return path_of_blob(ref) if path_of_blob is not None and ref in blobs_of_spec else folder / ref.sha256

    context = ClientContext(
        device=device.device,
        budget_bytes=1 << 40,
        engine=engine,
        rng=tensors.seeded_rng(task.seed),
        train=device.train,
        held_out=device.held_out,
        private_state={} if local is None else local,
        load=lambda name: tensors.read_tensors(path_of_bundle(name)),
        path=path_of_bundle,
        cache_folder=folder if cache is None else cache,
    )
    return task, context
