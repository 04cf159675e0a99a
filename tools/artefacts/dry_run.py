"""Dry run of a job: a few rounds of its method on synthetic examples, before any device is asked.

The rounds are the coordinator's own, carried out in this process. What the method's parts raise there is raised here
with the reason, which a run on devices would hide behind three attempts.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import methods, tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import Job, params
from fedquilt.core import Bundle, Examples, FedquiltError, Method, ModelError
from fedquilt.metrics import task_of
from fedquilt.models.networks import registry
from fedquilt.tools.simulation import Member
from fedquilt.tools.simulation import run as simulated

AMPLE: Final = 1 << 40
SHORT: Final[
    Mapping[str, Any]
] = {  # most that a parameter may be: passes, examples, and a rate that nothing explodes at
    "epochs": 1,
    "head_epochs": 1,
    "adapt_epochs": 1,
    "batch": 2,
    "fisher_samples": 2,
    "fingerprint_samples": 8,
    "lr": 1e-3,
}
PHASES: Final = ("warmup", "probe", "gather")  # rounds before a method's other ones: one of them is enough
BUDGETS: Final = ("512MB", "2GB", "64GB")  # for methods that send parts: a small, a middling and a large device
EXAMPLES: Final = 3  # of a device: with mini-batches of two the last has one


def rehearse(job: Job, made: Bundle, folder: Path) -> None:
    """Carry out rounds of a job that trains a network, and read what it exports.

    Args:
        job: whose method and parameters are tried; passes over examples and phases are shortened.
        made: bundle of the job.
        folder: where it is.

    Raises:
        ModelError: the method cannot train the network; gives the reason.
    """
    network, method = dict(made.meta.get("network", {})), methods.load(job.method)
    if not network or "onnx" in method.engines:
        return  # donors' blocks were run as they were made
    engine = _engine(job, method)
    if engine is None:
        return
    given = params(job)
    shorter = {name: min(most, getattr(given, name)) for name, most in SHORT.items() if hasattr(given, name)}
    phases = {name: min(1, getattr(given, name)) for name in PHASES if hasattr(given, name)}
    by_memory = any(isinstance(value, tuple) and len(value) == 5 for value in vars(given).values())
    budgets = BUDGETS if by_memory else BUDGETS[-1:]
    count = max(3 if by_memory else 2, method.least(given))
    held = synthetic(network, made)
    members = [Member(f"dry-{number}", held, held) for number in range(count)]
    short = settings.parse(
        {
            "name": "dry-run",
            "method": job.method,
            "params": {**job.params, **shorter, **phases},
            "rounds": min(job.rounds, 4 if phases else 3),
            "seed": job.seed,
            "cohort": {"attempts": 1},
            "wire": msgspec.to_builtins(job.wire),
            "check": {"every": 0 if method.check is None else 1},
            "fleet": {"devices": count, "budgets": list(budgets)},
        }
    )
    seen: list[BaseException] = []
    double = _watched(method, seen)
    try:
        *_, last = simulated.states(short, folder, members, load=lambda name: double, engine=engine)
        _reload(method, last, network, held, engine)
    except Exception as error:  # code of methods and networks from outside may raise anything
        raise ModelError(
            f"{job.method} cannot train the network {network.get('name')!r}: {_reason(seen[0] if seen else error)} "
            "(found in a dry run on synthetic examples): change the network or the method's [params], or take another "
            "method"
        ) from error


def _engine(job: Job, method: Method) -> Any:
    """Engine of the method that this machine has, with room for everything, or None."""
    if "torch" in method.engines and job.engine != "numpy":
        try:
            from fedquilt.edge_agent.engines.torch_engine import TorchEngine
        except ImportError:
            pass
        else:
            return TorchEngine(AMPLE, base_bytes=0)
    from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine

    return NumpyEngine(AMPLE, base_bytes=0) if "numpy" in method.engines else None


def synthetic(network: Mapping[str, Any], made: Bundle) -> Examples:
    """Draw examples of the shape and kind that a network takes."""
    rng, shape = np.random.default_rng(0), registry.input_shape(network)
    table = network.get("input")
    x: np.ndarray
    if isinstance(table, Mapping) and "channels" in table and "size" in table:
        channels = shape[:1] if shape[0] > 1 else ()
        x = rng.integers(0, 256, (EXAMPLES, *shape[1:], *channels)).astype(np.uint8)
    elif network.get("name") == "transformer":
        x = rng.integers(0, int(network["vocabulary"]), (EXAMPLES, *shape)).astype(np.int32)
    else:
        x = rng.normal(size=(EXAMPLES, *shape)).astype(np.float32)
    outputs = int(made.meta.get("outputs") or network.get("classes", 2))
    task = task_of(network)
    if task == "regression":
        return Examples(x, rng.normal(size=(EXAMPLES, outputs)).astype(np.float32))
    if task == "labels":
        return Examples(x, rng.integers(0, 2, (EXAMPLES, outputs)).astype(np.uint8))
    return Examples(x, np.arange(EXAMPLES, dtype=np.int64) % outputs)


def _watched(method: Method, seen: list[BaseException]) -> Method:
    """The method, which notes what its parts raise."""

    def watched(part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            try:
                return part(*given)
            except Exception as error:
                seen.append(error)
                raise

        call.__dict__.update(part.__dict__)
        return call

    check = None if method.check is None else watched(method.check)
    settle = method.settle and replace(method.settle, fold=watched(method.settle.fold))
    return replace(method, work=watched(method.work), fold=watched(method.fold), check=check, settle=settle)


def _reload(method: Method, state: Any, network: Mapping[str, Any], held: Examples, engine: Any) -> None:
    """Write the result as an export does, read it and run it.

    Raises:
        UpdateError: a tensor of the result is not finite.
        ModelError: the result is not what its network takes.
    """
    found = method.result(state)
    given = tensors.decode(tensors.encode(found.tensors))
    tensors.require_finite(given)
    if found.kind == "weights":
        engine.evaluate(dict(found.meta["network"]), given, held)


def _reason(error: BaseException) -> str:
    if isinstance(error, FedquiltError):
        return str(error)
    frame, (said, *_) = traceback.extract_tb(error.__traceback__)[-1], [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {said} ({Path(frame.filename).name}, line {frame.lineno})"
