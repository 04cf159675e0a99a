"""Standardised inputs: by numbers given, or by those that `prepare` finds; and data that do not fit a network."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import require_matching_bundle
from fedquilt.core import DataError, JobError
from fedquilt.data import compatibility, inputs
from fedquilt.data.spec import DataSpec
from fedquilt.tools.artefacts import prepare


def test_features_are_brought_to_mean_0_and_deviation_1():
    x = np.array([[[1, 5], [3, 5]], [[5, 5], [7, 5]]], np.int16)  # (n, steps, features)
    found = inputs.measure_scales(x)
    assert found.mean == (4.0, 5.0)
    assert found.std == (pytest.approx(np.sqrt(5)), 1.0)
    ready = inputs.prepare_inputs(x, {"mean": found.mean, "std": found.std})
    assert ready.dtype == np.float32
    np.testing.assert_allclose(ready[..., 0].std(), 1, rtol=1e-6)
    assert not ready[..., 1].any()
    with pytest.raises(DataError, match=r"shape \(3,\): the job's \[input\] standardises 2 features"):
        inputs.prepare_inputs(np.zeros((4, 3)), {"mean": found.mean, "std": found.std})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"mean": [1, 2], "std": [1, 2, 3]}, r"\[input\] mean has 2 values: give 1 or 3"),
        ({"std": [0]}, r"\[input\] std = 0: each standard deviation has to be above 0"),
        ({"standardise": True, "mean": [1]}, "standardise computes mean and std: leave these two out"),
        ({"channels": 1, "size": 8, "mean": [0.5, 0.5, 0.5]}, r"\[input\] mean has 3 values: give 1 or 1"),
        ({"standardize": True}, "there is no key 'standardize'"),
    ],
)
def test_a_bad_table_of_inputs_says_what_is_wanted(table, said):
    with pytest.raises(JobError, match=said):
        inputs.parse_input_table(table)


def made(folder: Path, **tables: Any) -> tuple[settings.JobSettings, Any]:
    pytest.importorskip("torch")
    job = settings.parse_job({"name": "j", "method": "fedavg", **tables})
    import msgspec

    return job, prepare.prepare_bundle(msgspec.to_builtins(job), folder / "bundle")


def test_prepare_keeps_the_samples_statistics_in_the_bundle(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,y\n1,10,0\n3,30,1\n")
    (tmp_path / "test.csv").write_text("a,b,y\n100,100,0\n")
    model = {"name": "mlp", "inputs": 2, "classes": 2}
    job, bundle = made(tmp_path, model=model, input={"standardise": True}, data={"path": str(tmp_path)})
    assert bundle.meta["network"]["input"] == {"mean": [2.0, 20.0], "std": [1.0, 10.0], "standardise": True}
    require_matching_bundle(job, bundle)
    _, inside = made(tmp_path, model={**model, "input": {"standardise": True}}, data={"path": str(tmp_path)})
    assert inside.meta["network"] == bundle.meta["network"]
    with pytest.raises(JobError, match=r"standardise = true needs \[data\]"):
        made(tmp_path, model=model, input={"standardise": True})


TABLE = "a,b,y\n1,10,0\n3,30,1\n"


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ({"name": "mlp", "inputs": 3, "classes": 2}, {}, r"hold 2 values each \(a, b\), network 'mlp' takes 3"),
        ({"name": "mlp", "inputs": 2, "classes": 1}, {}, r"labels run from 0 to 1, network 'mlp' predicts 1 classes"),
        (
            {"name": "mlp", "inputs": 2, "outputs": 2},
            {"task": "regression"},
            r"has 1 numbers, network 'mlp' predicts 2",
        ),
        (
            {"name": "mlp", "inputs": 2, "outputs": 1},
            {"task": "labels", "y": ["y", "a"]},
            r"has 2 labels, .* predicts 1",
        ),
        (
            {"name": "gru", "channels": 3, "steps": 2, "classes": 2},
            {"windows": {"steps": 2}},
            "takes 2 steps of 3 channels",
        ),
        ({"name": "conv1d", "channels": 2, "steps": 1, "classes": 2}, {"windows": {"steps": 2}}, "takes 1 steps of 2"),
    ],
)
def test_data_that_do_not_fit_a_network_are_told_with_both_sides(model, data, said, tmp_path):
    text = TABLE.replace("3,30,1", "1,30,1") if data.get("task") == "labels" else TABLE
    (tmp_path / "a.csv").write_text(text)
    job, bundle = made(tmp_path, model=model, data={"path": str(tmp_path / "a.csv"), **data})
    with pytest.raises(DataError, match=said):
        compatibility.open_compatible_data(bundle.meta, DataSpec.parse(job.data))


def test_a_vocabulary_that_is_larger_than_the_networks_is_told(tmp_path):
    (tmp_path / "v.txt").write_text("[PAD]\n[UNK]\na\nb\n")
    (tmp_path / "a.csv").write_text("note,y\na,0\nb,1\n")
    text = {"vocabulary": str(tmp_path / "v.txt"), "length": 4}
    model = {"name": "transformer", "vocabulary": 3, "length": 4, "classes": 2, "width": 4}
    job, bundle = made(tmp_path, model=model, data={"path": str(tmp_path / "a.csv"), "text": text})
    with pytest.raises(DataError, match="the vocabulary has 4 tokens, network 'transformer' knows 3"):
        compatibility.open_compatible_data(bundle.meta, DataSpec.parse(job.data))
    longer = {**job.data, "text": {**text, "length": 5}}
    with pytest.raises(DataError, match=r"examples of shape \(5,\), network 'transformer' takes 4 tokens"):
        compatibility.open_compatible_data(bundle.meta, DataSpec.parse(longer))
    with pytest.raises(DataError, match="task is 'labels', and network 'transformer' was prepared for 'classes'"):
        compatibility.open_compatible_data(
            bundle.meta, DataSpec.parse({**job.data, "task": "labels", "labels": ["0", "1"]})
        )
