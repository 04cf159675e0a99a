"""Rates of the engines and of bare loops that do the same work, in turn in one process.

Engines and bare loops use one thread per core. The bare loops have the default settings of their libraries and batches
that a plain script would choose. The ONNX engine protects the board: its batches are smaller, its threads do not wait
by spinning, and freed memory returns to the system.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.core import Examples, Fit, Tensors
from fedquilt.edge_agent import engines
from fedquilt.tools.boards.gpu_check.report import Row
from fedquilt.tools.boards.gpu_check.tasks import AMPLE_BYTES, SEED, Workload

PAIRS: Final = 5
LEAST_S: Final = 1.0  # of one run, reached by more epochs, images or repetitions
MOST_TIMES: Final = 500
MOST_COPIES: Final = 50  # of the images of inference
BARE_BATCH: Final = {"cpu": 64, "cuda": 256}  # of inference

Work = Callable[[], object]


def measure_torch_rates(work: Workload) -> Iterator[Row]:
    """Yield the rates of torch in training at both batch sizes and in inference."""
    engine: Any = engines.create_engine("torch", AMPLE_BYTES)
    start, device = work.start(), "cpu" if engine.gpu is None else "cuda"
    for batch in work.batches:
        given = work.network, start, work.draw(4 * batch)
        fit = Fit(epochs=count_repetitions(partial(train_bare, *given, Fit(batch=batch), device)), batch=batch, lr=1e-3)
        ours = partial(engine.train, *given, fit, np.random.default_rng(SEED))
        what = f"training, {batch}", engine.runs_on, "steps/s"
        yield compare_rates(what, 4 * fit.epochs, ours, partial(train_bare, *given, fit, device))
    once = work.draw(16 * work.batches[1])
    copies = min(count_repetitions(partial(_classify_bare, work.network, start, once, device)), MOST_COPIES)
    given = work.network, start, work.draw(copies * len(once))
    bare = partial(_classify_bare, *given, device)
    yield compare_rates(
        ("inference", engine.runs_on, "images/s"), len(given[2]), partial(engine.evaluate, *given), bare
    )


def measure_onnx_rates(graph: Path, shape: tuple[int, ...], pairs: int = PAIRS, least_s: float = LEAST_S) -> Row:
    """Return the rates of inference with ONNX Runtime."""
    import onnxruntime as ort

    engine: Any = engines.create_engine("onnx", AMPLE_BYTES)
    x = np.random.default_rng(SEED).standard_normal((256, *shape), np.float32)
    engine.run(graph, x[:1])
    on_gpu = engine.runs_on not in ("", "processor")
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"] if on_gpu else ["CPUExecutionProvider"]
    session = ort.InferenceSession(str(graph), providers=providers)
    size = BARE_BATCH["cuda" if on_gpu else "cpu"]

    def run_bare() -> None:
        for first in range(0, len(x), size):
            session.run(None, {"x": x[first : first + size]})

    times = count_repetitions(run_bare, least_s)
    what = "ONNX inference", engine.runs_on, "images/s"
    ours, bare = (partial(_repeat, run, times) for run in (partial(engine.run, graph, x), run_bare))
    return compare_rates(what, times * len(x), ours, bare, pairs)


def _repeat(run: Work, times: int) -> None:
    for _ in range(times):
        run()


def count_repetitions(once: Work, least_s: float = LEAST_S) -> int:
    once()  # the first one loads libraries
    began_s = time.perf_counter()
    once()
    return min(max(math.ceil(least_s / max(time.perf_counter() - began_s, 1e-6)), 1), MOST_TIMES)


def compare_rates(what: tuple[str, str, str], items: int, ours: Work, bare: Work, pairs: int = PAIRS) -> Row:
    """Time both functions in pairs, in alternating order. The ratio is the median of the pairs.

    Args:
        what: Work, device of the engine, and unit of the rates.
        items: Number of items that one call works on.
        ours: Function that runs the engine.
        bare: Function that runs the bare loop.
        pairs: Number of pairs.
    """
    rates: dict[Work, list[float]] = {ours: [], bare: []}
    ours()
    for pair in range(pairs):
        for one in (ours, bare) if pair % 2 else (bare, ours):
            began_s = time.perf_counter()
            one()
            rates[one].append(items / (time.perf_counter() - began_s))
    ratios = [mine / other for mine, other in zip(rates[ours], rates[bare], strict=True)]
    return {
        "work": what[0],
        "on": what[1] or "processor",
        "unit": what[2],
        "engine": statistics.median(rates[ours]),
        "bare_loop": statistics.median(rates[bare]),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def _load_bare(network: Mapping[str, Any], start: Tensors, examples: Examples, device: str) -> tuple[Any, Any, Any]:
    import torch

    from fedquilt.models.networks import registry

    model = registry.load_network(network)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in start.items()})
    return model.to(device), torch.from_numpy(examples.x), torch.from_numpy(examples.y)


def train_bare(network: Mapping[str, Any], start: Tensors, examples: Examples, fit: Fit, device: str) -> Tensors:
    import torch

    from fedquilt.edge_agent.engines.torch.engine import deterministic_torch

    model, x, y = _load_bare(network, start, examples, device)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=fit.lr)
    with deterministic_torch(SEED):  # as the engine's algorithms are
        for rows in [rows for _ in range(fit.epochs) for rows in torch.randperm(len(x)).split(fit.batch)]:
            optimizer.zero_grad()
            scores = model(_normalise(x[rows].to(device)))
            torch.nn.functional.cross_entropy(scores, y[rows].to(device)).backward()
            optimizer.step()
    return {name: value.cpu().numpy() for name, value in model.state_dict().items()}


def _classify_bare(network: Mapping[str, Any], start: Tensors, examples: Examples, device: str) -> float:
    import torch

    from fedquilt.edge_agent.engines.torch.engine import deterministic_torch

    model, x, y = _load_bare(network, start, examples, device)
    loss, right = torch.zeros((), device=device), torch.zeros((), device=device)
    with deterministic_torch(SEED), torch.inference_mode():
        for rows in torch.arange(len(x)).split(BARE_BATCH[device]):
            scores, targets = model.eval()(_normalise(x[rows].to(device))), y[rows].to(device)
            loss += torch.nn.functional.cross_entropy(scores, targets, reduction="sum")
            right += (scores.argmax(dim=1) == targets).sum()
    return float(loss) + float(right)


def _normalise(x: Any) -> Any:
    return ((x.float() / 255 - 0.5) / 0.25).permute(0, 3, 1, 2)
