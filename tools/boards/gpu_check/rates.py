"""Rates of the engines and of bare loops that do the same work, in turn in one process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.core import Examples, Fit
from fedquilt.edge_agent import engines
from fedquilt.tools.boards.gpu_check.report import Row
from fedquilt.tools.boards.gpu_check.tasks import AMPLE_BYTES, SEED, Workload

PAIRS: Final = 5
LEAST_S: Final = 1.0  # of one run, reached by more epochs or repetitions
MOST_TIMES: Final = 500
MOST_COPIES: Final = 50  # of the images of inference
BARE_BATCH: Final = {"cpu": 64, "cuda": 256}  # of inference, as a plain script would choose


def measure_torch_rates(work: Workload, pairs: int = PAIRS, least_s: float = LEAST_S) -> Iterator[Row]:
    """Yield the rates of torch in training at both batch sizes and in inference."""
    engine: Any = engines.create_engine("torch", AMPLE_BYTES)
    start, device = work.start(), "cpu" if engine.gpu is None else "cuda"
    for batch in work.batches:
        yield _compare_training(engine, work, start, Examples(*work.draw(4 * batch)), batch, device, pairs, least_s)
    given = Examples(*work.draw(16 * work.batches[1]))
    times = min(_repetitions(lambda: _bare_inference(work.network, start, given, device), least_s), MOST_COPIES)
    whole = Examples(np.concatenate([given.x] * times), np.concatenate([given.y] * times))
    yield _compare(
        ("inference", engine.runs_on, "images/s"),
        len(whole),
        lambda: engine.evaluate(work.network, start, whole),
        lambda: _bare_inference(work.network, start, whole, device),
        pairs,
    )


def _compare_training(
    engine: Any,
    work: Workload,
    start: Mapping[str, np.ndarray],
    examples: Examples,
    batch: int,
    device: str,
    pairs: int,
    least_s: float,
) -> Row:
    epochs = _repetitions(lambda: _bare_training(work.network, start, examples, Fit(batch=batch), device), least_s)
    fit = Fit(epochs=epochs, batch=batch, lr=1e-3)
    return _compare(
        (f"training, {batch}", engine.runs_on, "steps/s"),
        4 * epochs,
        lambda: engine.train(work.network, start, examples, fit, np.random.default_rng(SEED)),
        lambda: _bare_training(work.network, start, examples, fit, device),
        pairs,
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

    def bare_run(times: int) -> None:
        for _ in range(times):
            for first in range(0, len(x), size):
                session.run(None, {"x": x[first : first + size]})

    def engine_run(times: int) -> None:
        for _ in range(times):
            engine.run(graph, x)

    times = _repetitions(lambda: bare_run(1), least_s)
    what = ("ONNX inference", engine.runs_on, "images/s")
    return _compare(what, times * len(x), lambda: engine_run(times), lambda: bare_run(times), pairs)


def _repetitions(once: Callable[[], object], least_s: float) -> int:
    once()  # the first one loads libraries
    began_s = time.perf_counter()
    once()
    return min(max(math.ceil(least_s / max(time.perf_counter() - began_s, 1e-6)), 1), MOST_TIMES)


def _compare(
    what: tuple[str, str, str],  # work, where, and unit
    items: int,
    engine_run: Callable[[], object],
    bare_run: Callable[[], object],
    pairs: int,
) -> Row:
    """Time both functions in pairs, in alternating order. The ratio is the median of the pairs."""
    rates: dict[Callable[[], object], list[float]] = {engine_run: [], bare_run: []}
    engine_run()
    for pair in range(pairs):
        for one in (engine_run, bare_run) if pair % 2 else (bare_run, engine_run):
            began_s = time.perf_counter()
            one()
            rates[one].append(items / (time.perf_counter() - began_s))
    ratios = [mine / other for mine, other in zip(rates[engine_run], rates[bare_run], strict=True)]
    return {
        "work": what[0],
        "on": what[1] or "processor",
        "unit": what[2],
        "engine": statistics.median(rates[engine_run]),
        "bare_loop": statistics.median(rates[bare_run]),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def _bare_model(network: Mapping[str, Any], start: Mapping[str, np.ndarray], device: str) -> Any:
    import torch

    from fedquilt.models.networks import registry

    model = registry.build_network(network)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in start.items()})
    return model.to(device)


def _bare_training(
    network: Mapping[str, Any], start: Mapping[str, np.ndarray], examples: Examples, fit: Fit, device: str
) -> dict[str, np.ndarray]:
    import torch
    from torch.nn import functional

    from fedquilt.edge_agent.engines.torch import engine as torch_engine  # before torch

    model = _bare_model(network, start, device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=fit.lr)
    x, y = torch.from_numpy(examples.x), torch.from_numpy(examples.y)
    with torch_engine.deterministic_torch(SEED):  # as the engine's algorithms are
        for rows in [rows for _ in range(fit.epochs) for rows in torch.randperm(len(x)).split(fit.batch)]:
            optimizer.zero_grad()
            functional.cross_entropy(model(_normalise(x[rows].to(device))), y[rows].to(device)).backward()
            optimizer.step()
    return {name: value.cpu().numpy() for name, value in model.state_dict().items()}


def _bare_inference(
    network: Mapping[str, Any], start: Mapping[str, np.ndarray], examples: Examples, device: str
) -> float:
    import torch
    from torch.nn import functional

    from fedquilt.edge_agent.engines.torch import engine as torch_engine  # before torch

    model = _bare_model(network, start, device).eval()
    x, y = torch.from_numpy(examples.x), torch.from_numpy(examples.y)
    loss, right = torch.zeros((), device=device), torch.zeros((), device=device)
    with torch_engine.deterministic_torch(SEED), torch.inference_mode():
        for rows in torch.arange(len(x)).split(BARE_BATCH[device]):
            scores, targets = model(_normalise(x[rows].to(device))), y[rows].to(device)
            loss += functional.cross_entropy(scores, targets, reduction="sum")
            right += (scores.argmax(dim=1) == targets).sum()
    return float(loss) + float(right)


def _normalise(x: Any) -> Any:
    return ((x.float() / 255 - 0.5) / 0.25).permute(0, 3, 1, 2)
