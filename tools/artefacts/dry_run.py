"""Dry run of a job: a few rounds of its method on synthetic examples, without devices.

The rounds are the coordinator's own, run in this process. Errors of the method's functions are raised here with their
reason, which a run on devices would report only after three attempts.
"""

from __future__ import annotations

import contextlib
import tempfile
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
from fedquilt.core import Aggregation, Bundle, Examples, FedquiltError, Method, ModelError, Tensors
from fedquilt.data import inputs
from fedquilt.formats import job_bundle
from fedquilt.metrics import task_from_network
from fedquilt.models.networks import registry
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import cka
from fedquilt.models.stitching.search import ranking
from fedquilt.models.stitching.search.state import PAPER, Candidate, SearchState
from fedquilt.models.stitching.stitched_network import DonorPool, StitchedNetwork
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation import run as simulated

AMPLE: Final = 1 << 40
# upper limits of parameters: passes, examples, and a learning rate at which no loss explodes
SHORT: Final[Mapping[str, Any]] = {
    "epochs": 1,
    "head_epochs": 1,
    "adapt_epochs": 1,
    "batch": 2,
    "fisher_samples": 2,
    "fingerprint_samples": 8,
    "lr": 1e-3,
}
# the same for a search over donors' blocks
SHORT_SEARCH: Final[Mapping[str, Any]] = {
    "subrounds": 1,
    "expansions": 1,
    "finished": 2,
    "k": 2,
    "samples": cka.MIN_IMAGES,
    "screen": 2,
    "positions": 16,
    "fit_samples": 4,
    "finalists": 2,
    "head_samples": 4,
    "head_rounds": 1,
    "stop_below": 0.0,
}
PHASES: Final = ("warmup", "probe", "gather")  # rounds before a method's regular rounds, one of which is enough
BUDGETS: Final = ("512MB", "2GB", "64GB")  # for methods that send parts: a small, a middling and a large device
EXAMPLES: Final = 3  # of a device: with mini-batches of two the last has one
SCORED: Final = 2 * cka.MIN_IMAGES  # examples of a device that scores blocks: junctions are fitted on half of them
PROJECTED: Final = 32  # features of each tap: a head on all features of large donors takes minutes to solve
DONORS_BYTES: Final = 1 << 32  # budget of the engine that runs donors: half of it holds loaded blocks


def dry_run_job(job: JobSettings, made: Bundle, folder: Path) -> None:
    """Run a few rounds of a job that trains a network on synthetic examples, and evaluate the result.

    Args:
        job: Job whose method and parameters are tried. Passes over examples and phases are shortened.
        made: Bundle of the job.
        folder: Folder of the bundle.

    Raises:
        ModelError: If the method cannot train the network or stitch the donors. Gives the reason.
    """
    method = methods.load(job.method)
    engine = _make_engine(job, method)
    if engine is None:
        return
    if engine.name == "onnx":
        with contextlib.closing(engine):
            _dry_run_donors(job, method, made, folder, engine)
    elif made.meta.get("network"):
        _dry_run_network(job, method, made, folder, engine)


def _dry_run_network(job: JobSettings, method: Method, made: Bundle, folder: Path, engine: Any) -> None:
    given, network = parse_params(job), dict(made.meta["network"])
    phases = {name: min(1, getattr(given, name)) for name in PHASES if hasattr(given, name)}
    by_memory = any(isinstance(value, tuple) and len(value) == 5 for value in vars(given).values())
    budgets = BUDGETS if by_memory else BUDGETS[-1:]
    count = max(3 if by_memory else 2, method.minimum_updates(given))
    held = draw_examples(network, int(made.meta.get("outputs") or network.get("classes", 2)))
    table = {
        "params": {**job.params, **_shorten_params(given, SHORT), **phases},
        "rounds": min(job.rounds, 4 if phases else 3),
        "wire": msgspec.to_builtins(job.wire),
        "check": {"every": 0 if method.check is None else 1},
        "fleet": {"devices": count, "budgets": list(budgets)},
    }
    what = f"{job.method} cannot train the network {network.get('name')!r}"
    with _limit_torch_to_one_thread(engine), _convert_to_model_error(what, "change the network") as seen:
        members = [DeviceData(f"dry-{number}", held, held) for number in range(count)]
        last = _run_to_last_state(job, table, folder, members, _wrap_to_record_errors(method, seen), engine)
        _require_exportable(method, last, network, held, engine)


def _dry_run_donors(job: JobSettings, method: Method, made: Bundle, folder: Path, engine: Any) -> None:
    stock, given = stitched_network.load_donor_pool(made.meta), parse_params(job)
    if getattr(given, "mode", "") == "paper":
        given = replace(given, **PAPER, mode="default")  # its values replace all others, also shorter ones
    shorter = _shorten_params(given, SHORT_SEARCH)
    shorter |= {n: v for n, v in {"completion": True, "random_features": PROJECTED}.items() if hasattr(given, n)}
    shape = stock.blocks[next(iter(stock.donors.values())).blocks[0]].in_shape
    held = draw_examples({"input": stock.input}, len(stock.labels), SCORED, shape)
    table = {"params": {**vars(given), **shorter}, "rounds": 8, "fleet": {"devices": 2, "budgets": ["64GB"]}}
    graphs = {name: job_bundle.verify_file(folder, ref) for name, ref in made.files.items()}
    with _convert_to_model_error(f"{job.method} cannot stitch these donors", "change the donors") as seen:
        _require_donors_run(stock, held.x[:EXAMPLES], lambda name, x: engine.run(graphs[name], x))
        members = [DeviceData(f"dry-{number}", held, Examples(held.x[:1], held.y[:1])) for number in range(2)]
        last = _run_to_last_state(job, table, folder, members, _wrap_to_record_errors(method, seen), engine)
        found = method.result(last)
        _export_and_run_stitched(found.meta, found.tensors, stock, graphs, held)
        if isinstance(last, SearchState):  # AFL searches no candidates
            _export_and_run_stitched(
                *stitched_network.to_artefact(_build_joint_network(last), stock), stock, graphs, held
            )


def _shorten_params(given: Any, most: Mapping[str, Any]) -> dict[str, Any]:
    return {name: min(value, getattr(given, name)) for name, value in most.items() if hasattr(given, name)}


def _run_to_last_state(
    job: JobSettings, table: Mapping[str, Any], folder: Path, members: Sequence[DeviceData], method: Method, engine: Any
) -> Any:
    common = {"name": "dry-run", "method": job.method, "seed": job.seed, "cohort": {"attempts": 1}}
    short = settings.parse_job({**common, **table})
    *_, last = simulated.iterate_states(short, folder, members, load=lambda name: method, engine=engine)
    return last


@contextlib.contextmanager
def _limit_torch_to_one_thread(engine: Any) -> Iterator[None]:
    # on a busy machine, threads that wait for each other take ten times as long
    if engine.name != "torch":
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _convert_to_model_error(what: str, fix: str) -> Iterator[list[BaseException]]:
    seen: list[BaseException] = []
    try:
        yield seen
    except Exception as error:  # code of methods and networks from outside may raise anything
        raise ModelError(
            f"{what}: {_error_text(seen[0] if seen else error)} (found in a dry run on synthetic examples): {fix} or "
            "the method's [params], or take another method"
        ) from error


def _make_engine(job: JobSettings, method: Method) -> Any:
    """Return an engine of the method that this machine has, with room for everything, or None."""
    with contextlib.suppress(ImportError):
        if "onnx" in method.engines:
            from fedquilt.edge_agent.engines.onnx.engine import OnnxEngine

            return OnnxEngine(DONORS_BYTES, base_bytes=0, threads=1)
        if "torch" in method.engines and job.engine != "numpy":
            from fedquilt.edge_agent.engines.torch.engine import TorchEngine

            return TorchEngine(AMPLE, base_bytes=0)
    from fedquilt.edge_agent.engines.numpy.engine import NumpyEngine

    return NumpyEngine(AMPLE, base_bytes=0) if "numpy" in method.engines else None


def draw_examples(
    network: Mapping[str, Any], outputs: int, count: int = EXAMPLES, shape: tuple[int, ...] | None = None
) -> Examples:
    """Return random examples of the shape and kind that a network takes.

    Args:
        network: Table of the network.
        outputs: Number of labels, or of predicted values.
        count: Number of examples.
        shape: Shape of one example as the network takes it, or None to read it from the table.
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
        scale = table if isinstance(table, Mapping) else {}  # other examples would be large once they are standardised
        x = rng.normal(scale.get("mean", 0.0), scale.get("std", 1.0), (count, *shape)).astype(np.float32)
    task = task_from_network(network)
    if task == "regression":
        return Examples(x, rng.normal(size=(count, outputs)).astype(np.float32))
    if task == "labels":
        return Examples(x, rng.integers(0, 2, (count, outputs)).astype(np.uint8))
    return Examples(x, np.arange(count, dtype=np.int64) % outputs)


def _wrap_to_record_errors(method: Method, seen: list[BaseException]) -> Method:
    """Return the method with parts that also append to `seen` what they raise."""

    def add_recording(part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            try:
                return part(*given)
            except Exception as error:
                seen.append(error)
                raise

        return call

    def record_fold(of: Aggregation) -> Aggregation:
        return replace(of, fold=add_recording(of.fold))

    check = None if method.check is None else add_recording(method.check)
    settle = method.settle and replace(method.settle, aggregation=record_fold(method.settle.aggregation))
    aggregation = record_fold(method.aggregation)
    return replace(method, work=add_recording(method.work), aggregation=aggregation, check=check, settle=settle)


def _require_exportable(method: Method, state: Any, network: Mapping[str, Any], held: Examples, engine: Any) -> None:
    """Encode and decode a method's result as an export does, and evaluate it.

    Raises:
        UpdateError: If a tensor of the result is not finite.
        ModelError: If the result does not fit its network.
    """
    found = method.result(state)
    given = tensors.decode_tensors(tensors.encode_tensors(found.tensors))
    tensors.require_finite(given)
    if found.kind == "weights":
        engine.evaluate(dict(found.meta["network"]), given, held)


def _require_donors_run(stock: DonorPool, x: np.ndarray, run: Callable[[str, np.ndarray], np.ndarray]) -> None:
    for name, donor in stock.donors.items():
        maps = inputs.prepare_inputs(x, stock.input)
        for block in (stock.blocks[id] for id in donor.blocks):
            what = f"donor {name!r}: block {block.id}"
            if maps.shape[1:] != block.in_shape:
                raise ModelError(f"{what} takes inputs of shape {block.in_shape} and would get {maps.shape[1:]}")
            for each in dict.fromkeys((block.scoring_variant, block)):  # the full-precision output goes on
                try:
                    found = stitched_network.run_block(each, run, maps)
                except ModelError as error:
                    raise ModelError(f"{what} does not run on {len(x)} examples: {error}") from None
                if found.shape != (len(x), *block.out_shape):
                    raise ModelError(f"{what} returns shape {found.shape[1:]} and should return {block.out_shape}")
                if not np.isfinite(found).all():
                    raise ModelError(f"{what} returns numbers that are not finite: check the donor's weights")
            maps = found


def _build_joint_network(state: SearchState) -> StitchedNetwork:
    """Return the best network with several taps, or else a network that joins the taps of all heads."""
    heads = [each for each in state.candidates if each.head]
    joint = [each for each in heads if len(each.paths) > 1]
    if joint or not heads:
        best = ranking.best_candidate(state, joint or state.candidates)
        assert best is not None, "the result is a candidate"
        return ranking.to_network(state, best)
    weights, bias = (np.concatenate([each.head[part] for each in heads], axis=-1) for part in ("weights", "bias"))
    head = {"weights": weights, "bias": bias.reshape(len(heads), -1).mean(axis=0)}
    return ranking.to_network(state, Candidate("joined", tuple(path for each in heads for path in each.paths), head))


def _export_and_run_stitched(
    meta: Mapping[str, Any], arrays: Tensors, stock: DonorPool, graphs: Mapping[str, Path], held: Examples
) -> None:
    from fedquilt.models.stitching.onnx import export
    from fedquilt.tools.artefacts.classifier import Classifier

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "network.onnx"
        file.write_bytes(export.export_stitched(meta, arrays, stock.blocks, graphs))
        network = Classifier(file)
        network.compute_scores(network.prepare_inputs(held.x[:EXAMPLES]))


def _error_text(error: BaseException) -> str:
    """Return an error's text, with type, file and line if it is not fedquilt's own."""
    if isinstance(error, FedquiltError):
        return str(error)
    frame, (said, *_) = traceback.extract_tb(error.__traceback__)[-1], [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {said} ({Path(frame.filename).name}, line {frame.lineno})"
