"""Dry run of a job that stitches donors, which finds donors that cannot be run, stitched or exported."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt import methods
from fedquilt.coordinator.settings import JobSettings, parse_params
from fedquilt.core import Bundle, Examples, ModelError, Tensors
from fedquilt.data import inputs
from fedquilt.formats import job_bundle
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import cka
from fedquilt.models.stitching.search import ranking
from fedquilt.models.stitching.search.state import SearchParams, SearchState, resolve_settings
from fedquilt.models.stitching.stitched_network import DonorPool
from fedquilt.tools.artefacts import dry_run
from fedquilt.tools.simulation import DeviceData

# upper limits of parameters of a search over donors' blocks
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
    "features": 1,  # only the last tap of each donor: a head on all of large donors takes minutes to solve
}
SCORED_EXAMPLES: Final = 2 * cka.MIN_IMAGES  # half of the examples is for fitting junctions
ENGINE_BYTES: Final = 1 << 32  # budget of the engine that runs donors: half of it holds loaded blocks


def dry_run_job(job: JobSettings, bundle: Bundle, folder: Path) -> None:
    """Run a few rounds of a job that stitches donors on synthetic examples, and export the result.

    Raises:
        ModelError: If the method cannot stitch the donors.
    """
    try:
        from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
    except ImportError:
        return
    with contextlib.closing(OnnxEngine(ENGINE_BYTES, base_bytes=0, threads=1)) as engine:
        _dry_run_donors(job, bundle, folder, engine)


def _dry_run_donors(job: JobSettings, prepared: Bundle, folder: Path, engine: Any) -> None:
    original = methods.load(job.method)
    pool, search_params = stitched_network.load_donor_pool(prepared.meta), parse_params(job)
    if isinstance(search_params, SearchParams):
        search_params = resolve_settings(search_params)
    short_params = dry_run.shorten_params(search_params, SHORT_SEARCH)
    short_params |= {"completion": True} if hasattr(search_params, "completion") else {}
    method = replace(
        original, init=lambda bundle, params, seed: original.init(bundle, replace(search_params, **short_params), seed)
    )
    shape = pool.blocks[next(iter(pool.donors.values())).blocks[0]].in_shape
    examples = dry_run.draw_examples({"input": pool.input}, len(pool.labels), SCORED_EXAMPLES, shape)
    table = {"params": job.params, "rounds": 8, "fleet": {"devices": 2, "budgets": ["64GB"]}}
    graphs = {name: job_bundle.verify_file(folder, ref) for name, ref in prepared.files.items()}
    with dry_run.convert_to_model_error(f"{job.method} cannot stitch these donors", "change the donors") as errors:
        _require_donors_run(pool, examples.x[: dry_run.EXAMPLES], lambda name, x: engine.run(graphs[name], x))
        devices = [DeviceData(f"dry-{i}", examples, Examples(examples.x[:1], examples.y[:1])) for i in range(2)]
        last_state = dry_run.run_to_last_state(
            job, table, folder, devices, dry_run.wrap_to_record_errors(method, errors), engine
        )
        artefact = method.result(last_state)
        _export_and_run_stitched(artefact.meta, artefact.tensors, pool, graphs, examples)
        if isinstance(last_state, SearchState):  # AFL searches no candidates
            widest = ranking.to_network(last_state, max(last_state.candidates, key=lambda c: len(c.paths)))
            _export_and_run_stitched(*stitched_network.to_artefact(widest, pool), pool, graphs, examples)


def _require_donors_run(pool: DonorPool, x: np.ndarray, run: Callable[[str, np.ndarray], np.ndarray]) -> None:
    for name, donor in pool.donors.items():
        maps = inputs.prepare_inputs(x, pool.input)
        for block in (pool.blocks[id] for id in donor.blocks):
            description = f"donor {name!r}: block {block.id}"
            if maps.shape[1:] != block.in_shape:
                raise ModelError(f"{description} reads the shape {block.in_shape}, but would get {maps.shape[1:]}")
            try:
                output = stitched_network.run_block(block, run, maps)
            except ModelError as error:
                raise ModelError(f"{description} does not run on {len(x)} examples: {error}") from None
            if output.shape != (len(x), *block.out_shape):
                raise ModelError(f"{description} outputs the shape {output.shape[1:]}, not {block.out_shape}")
            if not np.isfinite(output).all():
                raise ModelError(f"{description} outputs numbers that are not finite: check the donor's weights")
            maps = output


def _export_and_run_stitched(
    meta: Mapping[str, Any], arrays: Tensors, pool: DonorPool, graphs: Mapping[str, Path], examples: Examples
) -> None:
    from fedquilt.models.stitching.onnx import export
    from fedquilt.tools.artefacts.predictor import Predictor

    with tempfile.TemporaryDirectory() as temporary_folder:
        file = Path(temporary_folder) / "network.onnx"
        file.write_bytes(export.export_stitched(meta, arrays, pool.blocks, graphs))
        network = Predictor(file)
        network.compute_scores(network.prepare_inputs(examples.x[: dry_run.EXAMPLES]))
