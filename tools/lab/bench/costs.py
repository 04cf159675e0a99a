"""Benchmark of predicted against measured time of tasks on this machine.

The rates of `fedquilt.costs.cost_model` are measured as by `fedquilt board record`. Then rounds of whole tasks of other
networks are timed and compared with the predicted times. Probes and tasks alternate. All run on one thread, and the
least time of each counts: processor time of this process, which other programs affect little, and wall time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fedquilt.coordinator.updates import tasks
from fedquilt.core import BlobRef, Bundle, DeviceView, Examples, Method, OperatingPoint, Rates, WorkEstimate
from fedquilt.costs import cost_model
from fedquilt.formats import job_bundle
from fedquilt.methods import fedavg, fedsq, fedstitch
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import SearchParams
from fedquilt.tools.artefacts.prepare import prepare_bundle
from fedquilt.tools.boards.record import probes
from fedquilt.tools.report.thresholds import compare_at_most, format_figures
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.workers import local_backend

TURNS: Final = 9
WITHIN: Final = 1.25  # times too long or too short that a prediction may be
TRAINED: Final = ("layer3", "linear")  # of ResNet-20, by FedSQ
SCORED: Final = 32  # images of MobileNet's scoring
CLOCKS: Final[Mapping[str, Callable[[], float]]] = {"processor": time.process_time, "wall": time.perf_counter}


class CostCase(NamedTuple):
    """A task: the work that its order predicts, on this device's examples, and what carries it out."""

    work: WorkEstimate
    run: Callable[[], object]


class LeastSeconds:
    """The least seconds of a call, by clock."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CLOCKS, float("inf"))

    def time(self, call: Callable[[], object]) -> None:
        """Call once more."""
        began = {name: now() for name, now in CLOCKS.items()}
        call()
        for name, now in CLOCKS.items():
            self.seconds[name] = min(self.seconds[name], now() - began[name])


def measure(turns: int = TURNS) -> dict[str, Any]:
    """Predicted and measured seconds of each case by both clocks, and the rates."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _measure_turns(turns, Path(folder))
    finally:
        torch.set_num_threads(threads)


def _measure_turns(turns: int, folder: Path) -> dict[str, Any]:
    known, tried = probes.build_probes(), cases(folder)
    told = {workload: [LeastSeconds() for _ in some] for workload, some in known.items()}
    took = {name: LeastSeconds() for name in tried}
    for _ in range(turns):
        for workload, some in known.items():
            for probe, least in zip(some, told[workload], strict=True):
                least.time(probe.run)
        for name, case in tried.items():
            took[name].time(case.run)
    points = {clock: _make_point(clock, known, told) for clock in CLOCKS}
    found = {
        name: {
            clock: {"predicted_s": _predicted_s(case.work, point), "measured_s": took[name].seconds[clock]}
            for clock, point in points.items()
        }
        for name, case in tried.items()
    }
    figures = {name: compare_at_most(_off(each["processor"]), WITHIN, "x off") for name, each in found.items()}
    rates = {name: _table(each) for name, each in points["processor"].rates.items()}
    load = os.getloadavg()[0]
    return {"bench": "costs", "turns": turns, "load": load, "rates": rates, "seconds": found, "figures": figures}


def lines(result: dict[str, Any]) -> list[str]:
    told = [f"least of {result['turns']} turns in one thread; {result['load']:.1f} processes ran on this machine"]
    for workload, rates in result["rates"].items():
        told.append(f"  {workload:12} " + ", ".join(f"{name} {value:.3g}" for name, value in rates.items()))
    told.append(f"  {'predicted / measured':28} {'processor':>24} {'wall':>24}")
    for name, clocks in result["seconds"].items():
        shown = "".join(
            f"{1e3 * each['predicted_s']:9.1f} / {1e3 * each['measured_s']:6.1f} ms "
            f"{each['predicted_s'] / each['measured_s']:4.2f}"
            for each in clocks.values()
        )
        told.append(f"  {name:28}{shown}")
    return [*told, *format_figures(result)]


def _predicted_s(work: WorkEstimate, point: OperatingPoint) -> float:
    seconds = cost_model.work_seconds(work, point)
    assert seconds is not None, "the rates of every workload here are measured"
    return seconds


def _table(rates: Rates) -> dict[str, float]:
    found = {name: getattr(rates, name) for name in rates.__struct_fields__}
    return {name: value for name, value in found.items() if value is not None}


def _off(each: Mapping[str, float]) -> float:
    ratio = each["predicted_s"] / each["measured_s"]
    return max(ratio, 1 / ratio)


def _make_point(
    clock: str, known: Mapping[str, Sequence[probes.TaskProbe]], told: Mapping[str, Sequence[LeastSeconds]]
) -> OperatingPoint:
    rates = {
        workload: probes.fit_rates(some, [least.seconds[clock] for least in told[workload]])
        for workload, some in known.items()
    }
    return OperatingPoint(name=clock, rates=rates)


# -- tasks ----------------------------------------------------------------------------------------


def cases(folder: Path) -> dict[str, CostCase]:
    mlp = {"name": "mlp", "inputs": 784, "hidden": [200], "classes": 10}
    cnn = {"name": "cnn", "channels": 1, "size": 28, "classes": 10, "input": {"channels": 1, "size": 28}}
    resnet = {"name": "resnet20-cifar", "classes": 10, "input": {"channels": 3, "size": 32}}
    plain = fedavg.Params(batch=32, lr=0.001)
    halves = fedsq.Params(batch=32, lr=0.001, trained=TRAINED)
    return {
        "perceptron, numpy": _second_round_case(fedavg.METHOD, plain, mlp, 600, "numpy", folder),
        "perceptron": _second_round_case(fedavg.METHOD, plain, mlp, 600, "torch", folder),
        "CNN": _second_round_case(fedavg.METHOD, plain, cnn, 128, "torch", folder),
        "ResNet-20": _second_round_case(fedavg.METHOD, plain, resnet, 64, "torch", folder),
        "FedSQ, cached": _second_round_case(fedsq.METHOD, halves, resnet, 128, "torch", folder / "cached"),
        "FedSQ, not cached": _second_round_case(
            fedsq.METHOD, replace(halves, cache="off"), resnet, 64, "torch", folder / "not cached"
        ),
        "MobileNet scoring": _make_scoring_case(folder),
    }


def _second_round_case(
    method: Method, params: Any, network: dict[str, Any], count: int, engine_name: str, folder: Path
) -> CostCase:
    """Return a device's second round as predicted work and a call. FedSQ's cache is filled before."""
    from fedquilt.models.networks import layer_costs, register_trace, registry

    model, shape = registry.load_network(network, seed=0), registry.input_shape(network)
    start = {name: value.numpy() for name, value in model.state_dict().items()}
    facts = {
        "network": network,
        "layers": layer_costs.trace_layer_costs(model, shape),
        "register": register_trace.trace_register(model, shape),
    }
    made = Bundle(facts, {"model": BlobRef(sha256="0" * 64, size=1)}, lambda name: start)
    draws = np.random.default_rng(0)
    pixels = (count, *shape[1:], *((3,) if shape[0] == 3 else ()))
    x = draws.integers(0, 256, pixels, np.uint8) if len(shape) == 3 else draws.random((count, *shape), np.float32)
    own = Examples(x, draws.integers(0, 10, count))
    order = method.send(method.init(made, params, 0), DeviceView("bench", None, (0,)))
    assert order is not None
    folder.mkdir(exist_ok=True, parents=True)
    engine, member = probes.make_engine(engine_name), DeviceData("bench", own, Examples(own.x[:0], own.y[:0]))
    task, site = local_backend.make_task_and_context(
        method, order, member, folder, engine=engine, cache=folder / "cache"
    )
    if method is fedsq.METHOD:
        method.work(task, site)
    return CostCase(
        tasks.predict_work(order, ("work",), engine_name).total_for_examples(count), lambda: method.work(task, site)
    )


def _make_scoring_case(folder: Path) -> CostCase:
    from fedquilt.tools.lab.bench import stitch

    job = {
        "labels": [str(label) for label in range(10)],
        "input": {"channels": 3, "size": 64, "mean": [0.5], "std": [0.25]},
        "donors": [{"name": "mobilenet", "network": {"name": "torchvision/mobilenet_v2"}, "seed": 1}],
    }
    prepare_bundle(job, folder / "donor")
    made, find = (
        job_bundle.load_bundle(folder / "donor"),
        stitch.create_finder(folder / "donor", job_bundle.load_bundle(folder / "donor")),
    )
    params = SearchParams(samples=SCORED, fit_samples=SCORED, spread=False)
    state = fedstitch.METHOD.init(made, params, 0)
    net = steps.starting_networks(state.stock)[0]
    state = replace(state, phase="score", current=net, pool=steps.offered_blocks(net, state.stock, params))
    order = fedstitch.METHOD.send(state, DeviceView("bench", None))
    assert order is not None
    shown = stitch.draw_examples(2 * SCORED)
    engine = probes.make_engine("onnx")
    paths = {ref: find(name) for name, ref in made.files.items()}.__getitem__
    turns = iter(range(1 << 20))

    def run() -> None:
        task, site = local_backend.make_task_and_context(
            fedstitch.METHOD,
            order,
            DeviceData("bench", shown, shown),
            folder / "sent",
            engine=engine,
            cache=folder / f"scored-{next(turns)}",
            path=paths,
        )
        fedstitch.METHOD.work(task, site)

    run()  # sessions are kept
    return CostCase(tasks.predict_work(order, ("work",), "onnx").total_for_examples(len(shown)), run)
