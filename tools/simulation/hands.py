"""Carrying out the orders of simulated devices in this process: alone, or several trained in one graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt import core, methods, tensors, wire
from fedquilt.blobs.chunks import reference
from fedquilt.coordinator.tasks import make_task
from fedquilt.core import Action, BlobRef, DataError, Examples, Method, Site, Task, Tensors, derive_seed
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.task import main
from fedquilt.edge_agent.task.protocol import Order, Outcome
from fedquilt.tools.simulation import Member, adversaries, batching

ENGINES = 8  # budgets that an engine is kept for


def make_engine(name: str, budget_bytes: int) -> Any:
    """An engine; torch's and numpy's are ones that can train several devices in one pass."""
    if name == "torch":
        from fedquilt.edge_agent.engines.torch_batched import BatchedTorchEngine

        return BatchedTorchEngine(budget_bytes)
    if name == "numpy":
        from fedquilt.edge_agent.engines.numpy_batched import BatchedNumpyEngine

        return BatchedNumpyEngine(budget_bytes)
    return engines.make(name, budget_bytes)


class Bench(main.Bench):
    """The engines, methods and examples of many devices.

    Args:
        shares: the examples of a device, to train on and held out, by its name.
        load: finds a method by its name.
        make: an engine by its name and budget in bytes.
    """

    def __init__(
        self,
        shares: Callable[[str], tuple[Examples, Examples]],
        load: Callable[[str], Method] = methods.load,
        make: Callable[[str, int], Any] = engines.make,
    ) -> None:
        super().__init__()
        self._shares, self._methods, self._make = shares, load, make
        self._engines: dict[tuple[str, int], Any] = {}

    def method(self, order: Order) -> Method:
        """Find the method of an order, as its device carries it out."""
        return adversaries.corrupted(self._methods(order.task.method), order.data)

    def engine(self, name: str, budget_bytes: int) -> Any:
        """Engine for a budget; the oldest of more than ENGINES is closed."""
        key = (name, budget_bytes)
        if key not in self._engines:
            while len(self._engines) >= ENGINES:
                self._engines.pop(next(iter(self._engines))).close()
            self._engines[key] = self._make(name, budget_bytes)
        return self._engines[key]

    def examples(self, spec: Mapping[str, Any], run: str) -> tuple[Examples, Examples]:
        """Examples of a simulated device, by its share."""
        try:
            return self._shares(spec["share"])
        except KeyError:
            raise DataError(f"simulated device {spec.get('share')!r} has no examples") from None


class OneEngine(Bench):
    """Likewise with one engine for all devices, whatever their budgets. It is somebody else's, who closes it."""

    def __init__(
        self, shares: Callable[[str], tuple[Examples, Examples]], load: Callable[[str], Method], engine: Any
    ) -> None:
        super().__init__(shares, load)
        self._one = engine

    def engine(self, name: str, budget_bytes: int) -> Any:
        """The one engine of all devices."""
        return self._one


class SharedFiles:
    """Tensors of files that many devices read, each read once. Nobody may write to them."""

    def __init__(self, most: int = 8) -> None:
        self._most = most  # files: those of a round, mostly one to three
        self._held: dict[str, dict[str, np.ndarray]] = {}

    def __call__(self, path: str, read: Callable[[Path], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Read a file once; later calls get the same read-only arrays."""
        if path not in self._held:
            while len(self._held) >= self._most:
                del self._held[next(iter(self._held))]
            found = read(Path(path))
            for array in found.values():
                array.flags.writeable = False
            self._held[path] = found
        return dict(self._held[path])


def carry_out(asked: Sequence[tuple[main.Bench, Order]], together: bool = False) -> list[tuple[Outcome, bool]]:
    """Outcome of each order, and whether it was or could have been trained with others; raises nothing.

    Args:
        asked: orders, each with the bench of its device.
        together: train those in one graph that the engine can (`edge_agent.engines.torch_batched`).
    """
    if not together:
        return [(main.run_order(order, bench), False) for bench, order in asked]
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for index, (_, order) in enumerate(asked):
        kinds.setdefault((order.task.engine, order.plan_bytes), []).append(index)
    found: dict[int, tuple[Outcome, bool]] = {}
    for indices in kinds.values():
        found.update(zip(indices, _jointly([asked[index] for index in indices]), strict=True))
    return [found[index] for index in range(len(asked))]


def _jointly(asked: Sequence[tuple[main.Bench, Order]]) -> list[tuple[Outcome, bool]]:
    """Orders for one engine with one budget; what they took is shared out evenly."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    bench, first = asked[0]
    try:
        engine = bench.engine(first.task.engine, main.plannable(first))
    except Exception as error:
        return [(main.failure_outcome(error), False)] * len(asked)
    given = batching.together([_half(*each) for each in asked], engine)
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


def _half(bench: main.Bench, order: Order) -> batching.Half[Outcome]:
    return batching.Half(
        lambda engine: main.site_of(order, bench, engine=engine),
        lambda site: main.run_method(order, bench.method(order), site),
    )


def delivered(
    method: Method,
    order: core.Order,
    member: Member,
    folder: Path,
    *,
    engine: Any = None,
    actions: tuple[Action, ...] = ("work",),
    number: int = 0,
    seed: int = 0,
    local: Tensors | None = None,
    cache: Path | None = None,
    path: Callable[[BlobRef], Path] | None = None,
) -> tuple[Task, Site]:
    """Task and site of a method's order for one device, beside any rounds.

    Args:
        method: of the order.
        order: as the server half made it.
        member: device with its examples.
        folder: receives the order's tensors, by content; made if missing.
        engine: of the site.
        actions: "work", "check" or both.
        cache: the folder that `Site.cache` makes when it is asked for; None: `folder`.
        number: of the round.
        seed: of the task.
        local: private state; None: none.
        cache: folder of the job's cache; None: within `folder`.
        path: finds blobs that the order names; None: in `folder`.
    """

    def blob(value: Tensors | BlobRef) -> BlobRef:
        if isinstance(value, BlobRef):
            return value
        payload = tensors.encode(value)
        ref = reference(payload)
        (folder / ref.sha256).write_bytes(payload)
        return ref

    folder.mkdir(parents=True, exist_ok=True)
    made = make_task(
        order,
        blob=blob,
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

    site = Site(
        device=member.device,
        budget_bytes=1 << 40,
        engine=engine,
        rng=tensors.rng(task.seed),
        train=member.train,
        held=member.held,
        local={} if local is None else local,
        load=lambda name: tensors.read(find(name)),
        path=find,
        cache_at=folder if cache is None else cache,
    )
    return task, site
