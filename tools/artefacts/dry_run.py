"""Dry run of a job: a few rounds of its method on synthetic examples, without devices.

The rounds are the coordinator's own, run in this process. Errors of the method's functions are raised here with their
reason, which a run on devices would report only after three attempts.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import JobSettings, parse_params
from fedquilt.core import Aggregation, Bundle, Examples, FedquiltError, Method, ModelError
from fedquilt.metrics import task_from_network
from fedquilt.models.networks import registry
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation import run as simulated

UNLIMITED_BYTES: Final = 1 << 40
# upper limits of parameters: passes, examples, and a learning rate at which no loss explodes
SHORT_PARAMS: Final[Mapping[str, Any]] = {
    "epochs": 1,
    "head_epochs": 1,
    "adapt_epochs": 1,
    "digest_epochs": 1,
    "batch": 2,
    "fisher_samples": 2,
    "fingerprint_samples": 8,
    "lr": 1e-3,
}
PHASES: Final = ("warmup", "probe", "gather")  # rounds before a method's regular rounds, one of which is enough
BUDGETS: Final = ("512MB", "2GB", "64GB")  # for methods that send parts: a small, a medium and a large device
EXAMPLES: Final = 3  # of a device: with mini-batches of two the last has one


def dry_run_job(job: JobSettings, bundle: Bundle, folder: Path, stored: np.ndarray | None = None) -> None:
    """Run a few rounds of a job that trains a network on synthetic examples, and evaluate the result."""
    method = methods.load(job.method)
    engine = _make_engine(job, method)
    if engine is None or not bundle.meta.get("network"):
        return
    params, network = parse_params(job), dict(bundle.meta["network"])
    phases = {name: min(1, getattr(params, name)) for name in PHASES if hasattr(params, name)}
    sends_parts = any(isinstance(value, tuple) and len(value) == 5 for value in vars(params).values())
    budgets = BUDGETS if sends_parts else (BUDGETS[0], *tiers) if (tiers := bundle.meta.get("tiers")) else BUDGETS[-1:]
    count = max(len(budgets), 2, method.minimum_updates(params))
    examples = draw_examples(network, int(bundle.meta.get("outputs") or network.get("classes", 2)))
    if stored is not None:
        examples = replace(examples, x=np.resize(stored, (len(examples), *stored.shape[1:])))
    schedule = {"schedule": params.schedule} if hasattr(params, "schedule") else {}  # of all rounds of the job
    table = {
        "params": {**job.params, **schedule, **shorten_params(params, SHORT_PARAMS), **phases},
        "rounds": min(job.rounds, 4 if phases else 3),
        "wire": msgspec.to_builtins(job.wire),
        "check": {"every": 0 if method.check is None else 1},
        "fleet": {"devices": count, "budgets": list(budgets)},
    }
    sentence = f"{job.method} cannot train the network {network.get('name')!r}"
    with _limit_torch_to_one_thread(engine), convert_to_model_error(sentence, "change the network") as errors:
        devices = [DeviceData(f"dry-{number}", examples, examples) for number in range(count)]
        last_state = run_to_last_state(job, table, folder, devices, wrap_to_record_errors(method, errors), engine)
        _require_exportable(method, last_state, network, examples, engine)


def shorten_params(params: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters in `limits` that the method has, each reduced to its limit."""
    return {name: min(value, getattr(params, name)) for name, value in limits.items() if hasattr(params, name)}


def run_to_last_state(
    job: JobSettings,
    table: Mapping[str, Any],
    bundle_folder: Path,
    devices: Sequence[DeviceData],
    method: Method,
    engine: Any,
) -> Any:
    """Run a bundle with the settings `table` instead of the job's, and return the last method state."""
    common_settings = {"name": "dry-run", "method": job.method, "seed": job.seed, "cohort": {"attempts": 1}}
    short_job = settings.parse_job({**common_settings, **table})
    *_, last_state = simulated.iterate_states(
        short_job, bundle_folder, devices, load_method=lambda name: method, engine=engine
    )
    return last_state


@contextlib.contextmanager
def _limit_torch_to_one_thread(engine: Any) -> Iterator[None]:
    # on a busy machine, threads that wait for each other take ten times as long
    if engine.name != "torch":
        yield
        return
    import torch

    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)


@contextlib.contextmanager
def convert_to_model_error(sentence: str, fix: str) -> Iterator[list[BaseException]]:
    """Raise ModelError for any exception in the context.

    The reason in the message is the first error that the caller adds to the yielded list, or else the exception.
    """
    errors: list[BaseException] = []
    try:
        yield errors
    except Exception as error:  # code of methods and networks from outside may raise anything
        raise ModelError(
            f"{sentence}: {_error_text(errors[0] if errors else error)} (found in a dry run on synthetic examples): "
            f"{fix} or the method's [params], or use another method"
        ) from error


def _make_engine(job: JobSettings, method: Method) -> Any:
    with contextlib.suppress(ImportError):
        if "torch" in method.engines and job.engine != "numpy":
            from fedquilt.edge_agent.engines.torch.engine import TorchEngine

            return TorchEngine(UNLIMITED_BYTES, base_bytes=0)
    from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine

    if "numpy" not in settings.list_engines(job, method):
        return None
    return NumpyEngine(UNLIMITED_BYTES, base_bytes=0)


def draw_examples(
    network: Mapping[str, Any], outputs: int, count: int = EXAMPLES, shape: tuple[int, ...] | None = None
) -> Examples:
    """Return random unprepared examples for a network: images as uint8 (n, h, w, c), tokens as int32.

    Inputs are random, and so are targets of regression and labels in {0, 1}. Classes take turns.
    """
    rng, shape = np.random.default_rng(0), shape or registry.input_shape(network)
    table = network.get("input")
    x: np.ndarray
    if isinstance(table, Mapping) and "channels" in table and "size" in table:
        channels = shape[:1] if shape[0] > 1 else ()
        x = rng.integers(0, 256, (count, *shape[1:], *channels)).astype(np.uint8)
    elif network.get("name") == "transformer":
        x = rng.integers(0, int(network["vocabulary"]), (count, *shape)).astype(np.int32)
    else:
        scale = table if isinstance(table, Mapping) else {}  # otherwise standardised examples would be large
        x = rng.normal(scale.get("mean", 0.0), scale.get("std", 1.0), (count, *shape)).astype(np.float32)
    task = task_from_network(network)
    if task == "regression":
        return Examples(x, rng.normal(size=(count, outputs)).astype(np.float32))
    if task == "labels":
        return Examples(x, rng.integers(0, 2, (count, outputs)).astype(np.uint8))
    return Examples(x, np.arange(count, dtype=np.int64) % outputs)


def wrap_to_record_errors(method: Method, errors: list[BaseException]) -> Method:
    """Return the method with functions that also append their exceptions to `errors`."""

    def add_recording(part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return part(*arguments)
            except Exception as error:
                errors.append(error)
                raise

        return call

    def record_fold(aggregation: Aggregation) -> Aggregation:
        return replace(aggregation, fold=add_recording(aggregation.fold))

    check = None if method.check is None else add_recording(method.check)
    settle = method.evaluation_round and replace(
        method.evaluation_round, aggregation=record_fold(method.evaluation_round.aggregation)
    )
    aggregation = record_fold(method.aggregation)
    return replace(
        method, work=add_recording(method.work), aggregation=aggregation, check=check, evaluation_round=settle
    )


def _require_exportable(
    method: Method, state: Any, network: Mapping[str, Any], examples: Examples, engine: Any
) -> None:
    artefact = method.result(state)
    arrays = tensors.decode_tensors(tensors.encode_tensors(artefact.tensors))
    tensors.require_finite(arrays)
    if artefact.kind == "weights":
        engine.evaluate(dict(artefact.meta["network"]), arrays, examples)


def _error_text(error: BaseException) -> str:
    if isinstance(error, FedquiltError):
        return str(error)
    frame, (message, *_) = traceback.extract_tb(error.__traceback__)[-1], [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}, line {frame.lineno})"
