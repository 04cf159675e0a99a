"""A fully connected network by numpy alone is torch's to the last bit, and a job of one is prepared without torch."""

import filecmp
import subprocess
import sys
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from fedquilt.core import ModelError
from fedquilt.costs import peak_memory
from fedquilt.models.networks import numpy_init, registry
from fedquilt.tools.artefacts import prepare

NETWORKS: list[dict[str, Any]] = [
    {"name": "mlp", "inputs": 64, "hidden": [32], "classes": 10},
    {"name": "mlp", "inputs": 5, "classes": 3},
    {"name": "mlp", "inputs": 7, "hidden": [], "classes": 2},
    {"name": "mlp", "inputs": 300, "hidden": [50, 41], "classes": 10},
    {"name": "mlp", "inputs": 2, "hidden": [30], "classes": 400},
]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31, 2**32 + 5])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: str(network.get("hidden")))
def test_first_weights_are_torchs(network, seed):
    pytest.importorskip("torch")
    theirs = {name: value.numpy() for name, value in registry.load_network(network, seed=seed).state_dict().items()}
    ours = numpy_init.initial_mlp_weights(network, seed)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, strict=True)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: str(network.get("hidden")))
def test_facts_are_what_torch_measures(network):
    torch = pytest.importorskip("torch")
    from fedquilt.models.networks import traces
    from fedquilt.models.partial import dependency_trace, masks

    model, shape = registry.load_network(network), registry.input_shape(network)
    assert numpy_init.forward_flops(network) == registry.measure_cost(model, shape).flops
    assert numpy_init.mlp_register(network) == traces.trace_register(model, shape)
    assert msgspec.json.encode(masks.plan_from_layers(numpy_init.layer_sizes(network))) == msgspec.json.encode(
        dependency_trace.trace_mask_plan(model)
    )
    assert numpy_init.mlp_training_memory(network) == peak_memory.measure_training(model, torch.zeros(2, *shape))[0]


@pytest.mark.parametrize("more", [{}, {"input": {"channels": 1, "size": 8, "mean": [0.1], "std": [0.3]}}])
def test_the_bundle_is_the_same_with_torch_and_without(tmp_path, more):
    pytest.importorskip("torch")
    job = {"name": "j", "method": "fedavg", "model": {**NETWORKS[0], "seed": 3}, **more}
    prepare.prepare_bundle(job, tmp_path / "ours")
    with mock.patch.object(numpy_init, "can_initialise", return_value=False):
        prepare.prepare_bundle(job, tmp_path / "theirs")
    ours, theirs = (
        sorted(str(path.relative_to(tmp_path / each)) for path in (tmp_path / each).rglob("*") if path.is_file())
        for each in ("ours", "theirs")
    )
    assert ours == theirs
    assert all(filecmp.cmp(tmp_path / "ours" / name, tmp_path / "theirs" / name, shallow=False) for name in ours)


def test_a_job_of_one_is_written_prepared_and_run_where_torch_cannot_be_imported(tmp_path):
    code = """
import sys
for name in ("torch", "torchvision", "onnx", "onnxruntime"):
    sys.modules[name] = None
from fedquilt.cli import main
for words in (["init", "--rounds", "2"], ["prepare", "job.toml"], ["simulate", "job.toml", "--link", "memory"]):
    assert main(words) == 0, words
try:
    import torch
except ImportError:
    print("blocked")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("blocked\n")


@pytest.mark.parametrize(
    "change",
    [{"hidden": 3}, {"hidden": ["a"]}, {"inputs": 0}, {"classes": True}, {"width": 4}, {"classes": None}],
    ids=str,
)
def test_a_setting_that_cannot_be_is_an_error_of_the_network(change):
    with pytest.raises(ModelError, match="mlp"):
        numpy_init.initial_mlp_weights({**NETWORKS[0], **change}, 0)
