"""The example that stitches networks of time series: made, prepared, played, and its result as a file."""

import runpy
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedquilt.coordinator import settings
from fedquilt.core import evaluation as core_evaluation
from fedquilt.data import inputs
from fedquilt.methods import fedstitch
from fedquilt.models.stitching import stitched_network
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.experiments import evaluation, single_run
from fedquilt.tools.experiments.baselines import run_search

EXAMPLE = Path(__file__).parents[2] / "examples" / "series_stitching"


def test_donors_of_time_series_are_stitched_and_exported(tmp_path):
    pytest.importorskip("torch", reason="donors are trained and cut by torch")
    onnx_engine = pytest.importorskip("fedquilt.edge_agent.engines.onnx_engine")
    from fedquilt.models.stitching.onnx import export
    from fedquilt.tools.artefacts.predictions import predict_examples

    for name in ("timeseries", EXAMPLE.name):
        shutil.copytree(EXAMPLE.parent / name, tmp_path / name, ignore=shutil.ignore_patterns("data", "donors"))
    folder = tmp_path / EXAMPLE.name
    make = folder / "make.py"
    make.write_text(make.read_text().replace("EPOCHS = 30", "EPOCHS = 8"))
    runpy.run_path(str(make), run_name="__main__")
    job = settings.load_job(folder / "job.toml")
    job = msgspec.structs.replace(job, params={**job.params, "expansions": 1})
    made = prepare.prepare_bundle(msgspec.to_builtins(job), tmp_path / "bundle")
    test = evaluation.load_test_set(job)
    engine = onnx_engine.OnnxEngine(1 << 30)
    members, _ = single_run.load_devices(job, tmp_path / "bundle")
    last = run_search(job, tmp_path / "bundle", members, fedstitch.METHOD, engine)
    stock, found = stitched_network.load_donor_pool(made.meta), fedstitch.METHOD.result(last)
    assert {len(block.out_shape) for block in stock.blocks.values() if block.kind != "end"} == {2}
    files = {name: tmp_path / "bundle" / "blobs" / ref.sha256 for name, ref in made.files.items()}
    (tmp_path / "net.onnx").write_bytes(export.export_stitched(found.meta, found.tensors, stock.blocks, files))
    np.savez(tmp_path / "test.npz", x=test.x, y=test.y)
    predicted = predict_examples(tmp_path / "net.onnx", tmp_path / "test.npz")
    assert core_evaluation.main_metric_value(predicted.evaluate()[""]) > 0.9
    x = inputs.prepare_inputs(test.x, found.meta["input"])

    def run(block, maps):
        return stitched_network.run_block(block, lambda name, value: engine.run(files[name], value), maps)

    own = stitched_network.compute_label_scores(
        stitched_network.from_artefact(found.meta, found.tensors), stock.blocks, run, x
    )
    given = engine.run(tmp_path / "net.onnx", test.x)
    np.testing.assert_allclose(given, own, rtol=0, atol=1e-4 * np.abs(own).max())
