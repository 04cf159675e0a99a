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
SCORED: Final = 2 * cka.MIN_IMAGES  # examples of a device that scores blocks: junctions are fitted on half of them
DONORS_BYTES: Final = 1 << 32  # budget of the engine that runs donors: half of it holds loaded blocks


def dry_run_job(job: JobSettings, made: Bundle, folder: Path) -> None:
    """Run a few rounds of a job that stitches donors on synthetic examples, and export the result.

    Raises:
        ModelError: If the method cannot stitch the donors. Gives the reason.
    """
    try:
        from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
    except ImportError:
        return
    with contextlib.closing(OnnxEngine(DONORS_BYTES, base_bytes=0, threads=1)) as engine:
        _dry_run_donors(job, made, folder, engine)


def _dry_run_donors(job: JobSettings, made: Bundle, folder: Path, engine: Any) -> None:
    whole = methods.load(job.method)
    stock, given = stitched_network.load_donor_pool(made.meta), parse_params(job)
    if isinstance(given, SearchParams):
        given = resolve_settings(given)
    shorter = dry_run.shorten_params(given, SHORT_SEARCH)
    shorter |= {"completion": True} if hasattr(given, "completion") else {}
    method = replace(whole, init=lambda bundle, params, seed: whole.init(bundle, replace(given, **shorter), seed))
    shape = stock.blocks[next(iter(stock.donors.values())).blocks[0]].in_shape
    held = dry_run.draw_examples({"input": stock.input}, len(stock.labels), SCORED, shape)
    table = {"params": job.params, "rounds": 8, "fleet": {"devices": 2, "budgets": ["64GB"]}}
    graphs = {name: job_bundle.verify_file(folder, ref) for name, ref in made.files.items()}
    with dry_run.convert_to_model_error(f"{job.method} cannot stitch these donors", "change the donors") as seen:
        _require_donors_run(stock, held.x[: dry_run.EXAMPLES], lambda name, x: engine.run(graphs[name], x))
        members = [DeviceData(f"dry-{number}", held, Examples(held.x[:1], held.y[:1])) for number in range(2)]
        last = dry_run.run_to_last_state(
            job, table, folder, members, dry_run.wrap_to_record_errors(method, seen), engine
        )
        found = method.result(last)
        _export_and_run_stitched(found.meta, found.tensors, stock, graphs, held)
        if isinstance(last, SearchState):  # AFL searches no candidates
            widest = ranking.to_network(last, max(last.candidates, key=lambda each: len(each.paths)))
            _export_and_run_stitched(*stitched_network.to_artefact(widest, stock), stock, graphs, held)


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


def _export_and_run_stitched(
    meta: Mapping[str, Any], arrays: Tensors, stock: DonorPool, graphs: Mapping[str, Path], held: Examples
) -> None:
    from fedquilt.models.stitching.onnx import export
    from fedquilt.tools.artefacts.classifier import Classifier

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "network.onnx"
        file.write_bytes(export.export_stitched(meta, arrays, stock.blocks, graphs))
        network = Classifier(file)
        network.compute_scores(network.prepare_inputs(held.x[: dry_run.EXAMPLES]))
