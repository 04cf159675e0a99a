"""Benchmark of a client's round of FedSQ against FedAvg on the same part.

Both train the same modules behind the same frozen part, with features kept and without: four ways, taken in
turn within one run. Features are looked up before the clock starts. Processor time of this process counts, so
that others on the machine do not; a ratio is the median of those of the turns. Pictures are noise: arithmetic
takes as long.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.core import BlobRef, Bundle, DeviceView, Examples
from fedquilt.methods import fedsq
from fedquilt.tools.report.thresholds import compare_at_most, format_figures
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.workers import local_backend

EXAMPLES: Final = 128  # of the client whose rounds are timed
TURNS: Final = 7
LIMITS: Final = {"float32": ("cached", 1.15), "off": ("uncached", 1.4)}
CASES: Final = {
    "resnet20-cifar 32px": (
        {"name": "resnet20-cifar", "classes": 10, "input": {"channels": 3, "size": 32}},
        ("layer3", "linear"),
    ),
    "resnet18 64px": (
        {"name": "torchvision/resnet18", "classes": 10, "input": {"channels": 3, "size": 64}},
        ("layer4", "fc"),
    ),
    "squeezenet1_1 64px": (
        {"name": "torchvision/squeezenet1_1", "classes": 10, "input": {"channels": 3, "size": 64}},
        ("features.12", "classifier"),
    ),
}


def measure(examples: int = EXAMPLES, turns: int = TURNS) -> dict[str, Any]:
    """Seconds of every round, and the two ratios of each network."""
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    engine = TorchEngine(1 << 40)
    cases = {name: _time_rounds(engine, *case, examples, turns) for name, case in CASES.items()}
    figures = {
        f"{what}_{name}": compare_at_most(
            statistics.median(
                sq / avg for sq, avg in zip(told[f"fedsq {cache}"], told[f"fedavg {cache}"], strict=True)
            ),
            limit,
            "x FedAvg",
        )
        for name, told in cases.items()
        for cache, (what, limit) in LIMITS.items()
    }
    return {"bench": "fedsq", "examples": examples, "turns": turns, "seconds": cases, "figures": figures}


def lines(result: dict[str, Any]) -> list[str]:
    told = [f"a client's round on {result['examples']} examples, median processor seconds of {result['turns']} turns"]
    for name, ways in result["seconds"].items():
        shown = ", ".join(f"{way} {statistics.median(seconds):.2f}" for way, seconds in ways.items())
        told.append(f"  {name}: {shown}")
    return [*told, *format_figures(result)]


def _time_rounds(
    engine: Any, network: Mapping[str, Any], trained: tuple[str, ...], examples: int, turns: int
) -> dict[str, list[float]]:
    """Return the seconds of each turn's round, by method and cache."""
    from fedquilt.models.networks import register_trace, registry

    start = {name: value.numpy() for name, value in registry.load_network(network, seed=0).state_dict().items()}
    facts = {"network": dict(network), "register": register_trace.register_from_table(network)}
    bundle = Bundle(facts, {"model": BlobRef(sha256="0" * 64, size=1)}, lambda name: start)
    size = network["input"]["size"]
    draws = np.random.default_rng(0)
    own = Examples(draws.integers(0, 256, (examples, size, size, 3), np.uint8), draws.integers(0, 10, examples))
    member = DeviceData("client", own, Examples(own.x[:0], own.y[:0]))
    base = fedsq.Params(batch=32, trained=trained, lr=0.001)
    arms: dict[str, dict[str, Any]] = {"fedavg": {"gates": "own"}, "fedsq": {}}
    caches: tuple[dict[str, Any], ...] = ({"cache": "float32"}, {"cache": "off"})
    ways = {f"{arm} {each['cache']}": replace(base, **arms[arm], **each) for each in caches for arm in arms}
    times: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns + 1):
            for way, params in ways.items():
                taken_s = _measure_round_s(engine, bundle, member, params, Path(folder) / way)
                if turn:  # the first looks features up, and warms
                    times[way].append(taken_s)
    return times


def _measure_round_s(engine: Any, bundle: Bundle, member: DeviceData, params: fedsq.Params, cache: Path) -> float:
    method = fedsq.METHOD
    order = method.send(method.init(bundle, params, 0), DeviceView(member.device, None))
    assert order is not None
    task, site = local_backend.make_task_and_context(method, order, member, cache.parent, engine=engine, cache=cache)
    began_s = time.process_time()
    method.work(task, site)
    return time.process_time() - began_s
