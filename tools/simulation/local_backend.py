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
Given = tuple[Any, Any]  # what a call gave, or raises, and where its generator was after it
ENGINES = 8  # budgets that an engine is kept for
FILES = 8  # those of a round, mostly one to three


class RestartableClient(Generic[T]):
    """Client function that can be restarted with the same random state."""

    def __init__(self, site: Callable[[Any], ClientContext], work: Callable[[ClientContext], T]) -> None:
        self._make, self._work = site, work
        self._site: ClientContext | None = None
        self._begun: Any = None  # where its generator begins

    def __call__(self, engine: Any) -> T:
        if self._site is None:
            self._site = self._make(engine)
            self._begun = self._site.rng.bit_generator.state
        else:
            self._site.rng.bit_generator.state = self._begun
        return self._work(self._site)


class BatchWait(BaseException):
    """Signal that a client function waits for a call that is trained in a batch."""

    def __init__(self, call: Any) -> None:
        self.call = call


class ReplayEngine:
    """Engine of one client function that replays the results of earlier training calls."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.given: list[Given | None] = []  # calls of `train` so far, None for a call that must run alone
        self.next_call = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train(self, network: Any, start: Any, examples: Any, fit: Any, rng: Any, **options: Any) -> Any:
        """Return the stored result of this call, or train alone if the call cannot be batched."""
        if self.next_call == len(self.given):
            call = self._engine.batchable_call(network, start, examples, fit, rng, **options)
            if call is not None:
                raise BatchWait(call)
            self.given.append(None)
        before = self.given[self.next_call]
        self.next_call += 1
        if before is None:
            return self._engine.train(network, start, examples, fit, rng, **options)
        reply, rng.bit_generator.state = before
        if isinstance(reply, Exception):
            raise reply
        return reply


def run_together(functions: Sequence[Callable[[Any], T]], engine: Any) -> list[tuple[T | Exception, bool]]:
    """Call all functions with an engine, training in batches where possible.

    A client function calls `site.engine.train`. Where the engine can train several devices at once, the call raises
    `BatchWait`. When all functions wait or have ended, the waiting calls are trained together. Then each function is
    called again from its beginning, and its earlier calls return their stored results. This is correct because a client
    function depends on its Task and Site alone and draws from a keyed generator.

    Returns:
        For each function its result or exception, and whether its training could be batched.
    """
    found: list[Any] = [None] * len(functions)
    left = list(range(len(functions)))
    joints = [ReplayEngine(engine) for _ in functions] if hasattr(engine, "train_together") else []
    while left:
        calls: dict[int, Any] = {}
        for index in left:
            try:
                if joints:
                    joints[index].next_call = 0
                found[index] = functions[index](joints[index] if joints else engine)
            except BatchWait as wait:
                calls[index] = wait.call
            except Exception as error:
                found[index] = error
        left = list(calls)
        replies = engine.train_together(list(calls.values())) if calls else []
        for (index, call), reply in zip(calls.items(), replies, strict=True):
            joints[index].given.append((reply, call.rng.bit_generator.state))
    return [(value, bool(joints) and any(joints[index].given)) for index, value in enumerate(found)]


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
    """Engines, methods and examples of many devices."""

    def __init__(
        self,
        shares: Callable[[str], tuple[Examples, Examples]],
        load: Callable[[str], Method] = methods.load,
        make: Callable[[str, int], Any] = engines.create_engine,
    ) -> None:
        super().__init__()
        self._shares, self._methods, self._make = shares, load, make
        self._engines: dict[tuple[str, int], Any] = {}

    def load_method(self, order: WorkRequest) -> Method:
        return adversaries.corrupt_method(self._methods(order.task.method), order.data)

    def load_engine(self, name: str, budget_bytes: int) -> Any:
        # at most ENGINES engines are cached, and the oldest is closed
        key = (name, budget_bytes)
        if key not in self._engines:
            while len(self._engines) >= ENGINES:
                self._engines.pop(next(iter(self._engines))).close()
            self._engines[key] = self._make(name, budget_bytes)
        return self._engines[key]

    def load_examples(self, spec: Mapping[str, Any], run: str) -> tuple[Examples, Examples]:
        try:
            return self._shares(spec["share"])
        except KeyError:
            raise DataError(f"simulated device {spec.get('share')!r} has no examples") from None


class SingleEngineExecutor(WorkExecutor):
    """Executor with one engine for all devices and budgets. The caller closes the engine."""

    def __init__(
        self, shares: Callable[[str], tuple[Examples, Examples]], load: Callable[[str], Method], engine: Any
    ) -> None:
        super().__init__(shares, load)
        self._one = engine

    def load_engine(self, name: str, budget_bytes: int) -> Any:
        return self._one


class SharedTensors:
    """Cache of the tensors of files that many devices read. The arrays are read-only."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, np.ndarray]] = {}

    def __call__(self, path: str, read: Callable[[Path], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        if path not in self._held:
            while len(self._held) >= FILES:
                del self._held[next(iter(self._held))]
            found = read(Path(path))
            for array in found.values():
                array.flags.writeable = False
            self._held[path] = found
        return dict(self._held[path])


def run_requests(
    asked: Sequence[tuple[main.TaskExecutor, WorkRequest]], together: bool = False
) -> list[tuple[WorkResult, bool]]:
    """Run work requests.

    Returns:
        For each request its result, and whether its training could be batched. Failures are results, not exceptions.
    """
    if not together:
        return [(main.run_task(order, bench), False) for bench, order in asked]
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for index, (_, order) in enumerate(asked):
        kinds.setdefault((order.task.engine, order.plan_bytes), []).append(index)
    found: dict[int, tuple[WorkResult, bool]] = {}
    for indices in kinds.values():
        found.update(zip(indices, _run_in_batch([asked[index] for index in indices]), strict=True))
    return [found[index] for index in range(len(asked))]


def _run_in_batch(asked: Sequence[tuple[main.TaskExecutor, WorkRequest]]) -> list[tuple[WorkResult, bool]]:
    # measured time is divided evenly between the requests
    began_s, cpu_s = time.perf_counter(), time.process_time()
    bench, first = asked[0]
    try:
        engine = bench.load_engine(first.task.engine, main.plan_limit_bytes(first))
    except Exception as error:
        return [(main.failure_outcome(error), False)] * len(asked)

    def make_client(bench: main.TaskExecutor, order: WorkRequest) -> RestartableClient[WorkResult]:
        return RestartableClient(
            lambda engine: main.build_site(order, bench, engine=engine),
            lambda site: main.run_method(order, bench.load_method(order), site),
        )

    given = run_together([make_client(*each) for each in asked], engine)
    wall_s = (time.perf_counter() - began_s) / len(asked)
    cpu_s = (time.process_time() - cpu_s) / len(asked)
    return [
        (
            msgspec.structs.replace(
                main.failure_outcome(value) if isinstance(value, Exception) else value, wall_s=wall_s, cpu_s=cpu_s
            ),
            joint,
        )
        for value, joint in given
    ]


def make_task_and_context(
    method: Method,
    order: core.TaskSpec,
    member: DeviceData,
    folder: Path,
    *,
    engine: Any = None,
    actions: tuple[Action, ...] = ("work",),
    number: int = 0,
    seed: int = 0,
    local: Tensors | None = None,
    cache: Path | None = None,
    path: Callable[[BlobRef], Path] | None = None,
) -> tuple[Task, ClientContext]:
    """Return the task and the client context of a method's task spec for one device, without rounds.

    Tensors are stored in `folder` by their content. `path` finds blobs of the task spec that are elsewhere.
    """

    def blob(value: Tensors | BlobRef) -> BlobRef:
        if isinstance(value, BlobRef):
            return value
        payload = tensors.encode_tensors(value)
        ref = ref_from_bytes(payload)
        (folder / ref.sha256).write_bytes(payload)
        return ref

    folder.mkdir(parents=True, exist_ok=True)
    made = make_task(
        order,
        store_bundle=blob,
        actions=actions,
        job="alone",
        round=number,
        attempt=0,
        method="alone",
        engine=method.engines[0],
        seed=derive_seed(seed, "alone", number, member.device),
        deadline_s=0.0,
    )
    task = wire.decode(wire.encode(made), Task)
    named = {value for value in order.bundles.values() if isinstance(value, BlobRef)}

    def find(name: str) -> Path:
        ref = task.bundles[name]
        return path(ref) if path is not None and ref in named else folder / ref.sha256

    site = ClientContext(
        device=member.device,
        budget_bytes=1 << 40,
        engine=engine,
        rng=tensors.seeded_rng(task.seed),
        train=member.train,
        held=member.held,
        local={} if local is None else local,
        load=lambda name: tensors.read_tensors(find(name)),
        path=find,
        cache_at=folder if cache is None else cache,
    )
    return task, site
