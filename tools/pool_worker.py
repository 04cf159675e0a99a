"""The workers of `fedquilt.tools.pool`: `python -m fedquilt.tools.pool_worker PARENT ENGINE SOCKET...`.

The first imports all that is heavy and forks one more for each further socket.
"""

from __future__ import annotations

import importlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedquilt import codecs, methods, tensors
from fedquilt.core import Answer, Examples, FedquiltError, Site, Tensors
from fedquilt.edge_agent import engines
from fedquilt.edge_agent.leash import die_with
from fedquilt.tools import halves
from fedquilt.tools.pool import LENGTH, TEST, Ask, Done, Place, Rate, Setup, Work, receive

BUDGET_BYTES = 1 << 40  # nothing is refused here
KEPT = 8  # contents that are kept at most: those of a round, mostly one to three


class Worker:
    """Carries out what it is asked, on one engine."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._folder = setup, Path(setup.folder)
        self._caches = self._folder / "caches"
        self._method = methods.load(setup.method)
        self._engine = _engine(setup.engine)
        self._examples = os.open(self._folder / "examples", os.O_RDONLY)
        self._contents: dict[str, Tensors] = {}

    def answer(self, work: Work) -> list[Done]:
        if work.rate is not None:
            return [self._rated(work.rate)]
        began_s = time.perf_counter()
        found = halves.together([self._half(ask) for ask in work.asks], self._engine)
        each_s = (time.perf_counter() - began_s) / max(len(found), 1)
        return [
            _failed(ask.device, value)
            if isinstance(value, Exception)
            else msgspec.structs.replace(value, wall_s=each_s, joint=joint)
            for ask, (value, joint) in zip(work.asks, found, strict=True)
        ]

    def _half(self, ask: Ask) -> halves.Half[Done]:
        return halves.Half(lambda: self._site(ask), lambda site: self._done(ask, site))

    def _site(self, ask: Ask) -> Site:
        """What the device has, less its engine."""
        share = self._setup.shares[ask.device]
        return Site(
            device=ask.device,
            budget_bytes=BUDGET_BYTES,
            engine=None,
            rng=tensors.rng(ask.task.seed),
            train=self._read(share.train),
            held=self._read(share.held),
            local=codecs.own(self._kept(ask)),
            load=lambda name: self._load(ask.files[name]),
            path=lambda name: Path(ask.files[name]),
            cache=Path(f"{self._caches}/{ask.device}"),
        )

    def _done(self, ask: Ask, site: Site) -> Done:
        """Carry it out."""
        if "check" in ask.task.actions:
            assert self._method.check is not None
            checked = self._method.check(ask.task, site)
            return Done(ask.device, metrics={name: float(value) for name, value in checked.items()})

        def base(name: str) -> Tensors | None:
            return site.load(name) if name in ask.task.bundles else None

        worked = self._method.work(ask.task, site)
        answer = codecs.encoded(ask.task.wire, worked, base, lambda: self._kept(ask))
        self._keep(answer, ask)
        return Done(
            device=ask.device,
            weight=float(answer.weight),
            metrics={name: float(value) for name, value in answer.metrics.items()},
            bundles={name: tensors.encode(bundle) for name, bundle in answer.bundles.items()},
            examples=len(site.train),
            private=bool(answer.local),
        )

    def _keep(self, answer: Answer, ask: Ask) -> None:
        if answer.local:
            tensors.write(Path(self._private(ask.device)), answer.local)

    def _kept(self, ask: Ask) -> Tensors:
        return tensors.read(Path(self._private(ask.device))) if ask.private else {}

    def _private(self, device: str) -> str:
        return f"{self._folder}/{device}.private"

    def _rated(self, rate: Rate) -> Done:
        try:
            test = self._read(self._setup.shares[TEST].train)
            return Done(TEST, metrics=self._engine.evaluate(rate.network, tensors.read(Path(rate.model)), test))
        except Exception as error:
            return _failed(TEST, error)

    def _load(self, path: str) -> Tensors:
        """A content, read once. Its arrays cannot be written to: other devices get the same ones."""
        if path not in self._contents:
            while len(self._contents) >= KEPT:
                del self._contents[next(iter(self._contents))]
            held = tensors.read(Path(path))
            for array in held.values():
                array.flags.writeable = False
            self._contents[path] = held
        return dict(self._contents[path])

    def _read(self, places: tuple[Place, Place]) -> Examples:
        """Read, not mapped: pages that are mapped would count as this process's own."""
        return Examples(*(self._array(place) for place in places))

    def _array(self, place: Place) -> np.ndarray:
        dtype = np.dtype(place.dtype)
        payload = bytearray(dtype.itemsize * math.prod(place.shape))
        view, have = memoryview(payload), 0
        while have < len(payload):
            have += os.preadv(self._examples, [view[have:]], place.offset + have)
        return np.frombuffer(payload, dtype).reshape(place.shape)


def _failed(device: str, error: Exception) -> Done:
    name = type(error).__name__
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ == FedquiltError.__module__]
    return Done(device, error=(kinds[0].__name__ if kinds else name, str(error)[:1000]))


def _engine(name: str) -> Any:
    """The engine; torch's is one that trains several devices in one graph."""
    if name == "torch":
        from fedquilt.edge_agent.engines.torch_batched import BatchedTorchEngine

        return BatchedTorchEngine(BUDGET_BYTES)
    return engines.make(name, BUDGET_BYTES)


def serve(orders: socket.socket, make: Callable[[Setup], Worker] = Worker) -> None:
    """Carry out what comes, until there is no more."""
    first = receive(orders)
    if first is None:
        return
    worker = make(msgspec.msgpack.decode(first, type=Setup))
    decoder, encoder = msgspec.msgpack.Decoder(Work), msgspec.msgpack.Encoder()
    while (order := receive(orders)) is not None:
        payload = encoder.encode(worker.answer(decoder.decode(order)))
        orders.sendall(LENGTH.pack(len(payload)))
        orders.sendall(payload)


def main() -> None:
    die_with(int(sys.argv[1]))
    importlib.import_module(f"fedquilt.edge_agent.engines.{_module(sys.argv[2])}")
    numbers = [int(number) for number in sys.argv[3:]]
    mine, children = numbers[0], []
    for number in numbers[1:]:
        if pid := os.fork():
            children.append(pid)
            continue
        die_with(os.getppid())
        mine, children = number, []
        break
    for number in numbers:
        if number != mine:
            os.close(number)
    serve(socket.socket(fileno=mine))
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)  # torch takes a second to go in good order, and everything has been said


def _module(engine: str) -> str:
    return "torch_batched" if engine == "torch" else f"{engine}_engine"


if __name__ == "__main__":
    main()
