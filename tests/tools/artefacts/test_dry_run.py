"""Dry runs of jobs over donors: what would fail on devices fails as the job is prepared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedquilt.coordinator import settings
from fedquilt.core import Bundle, ModelError
from fedquilt.formats import job_bundle

pytest.importorskip("torch", reason="preparing cuts torch networks")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch

from fedquilt.models.networks import registry
from fedquilt.models.stitching.onnx import export as onnx_export
from fedquilt.tools.artefacts import dry_run, dry_run_donors
from fedquilt.tools.artefacts.prepare import prepare_and_check, prepare_bundle

PLAIN = {"name": "plain", "channels": 1, "classes": 3}
RESIDUAL = {"name": "residual", "channels": 1, "classes": 3}
SERIES = {"name": "conv1d", "channels": 3, "steps": 20, "classes": 3}
IMAGES = {"input": {"channels": 1, "size": 28}, "labels": ["a", "b", "c"]}


def job(*donors: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "s", "method": "fedstitch", **IMAGES, "donors": list(donors), **more}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    align = [[0], [1], [2]]
    donors = ({"name": "p", "network": PLAIN, "align": align}, {"name": "r", "network": RESIDUAL, "align": align})
    prepare_bundle(job(*donors), folder)
    return folder


def rehearse(folder: Path, params: dict[str, Any], made: Bundle | None = None) -> None:
    table = {"name": "s", "method": "fedstitch", "params": params}
    dry_run_donors.dry_run_job(settings.parse_job(table), made or job_bundle.load_bundle(folder), folder)


@pytest.mark.parametrize(
    ("params", "joins"),
    [
        ({}, True),
        ({"expansions": 2}, True),
        ({"mode": "paper"}, False),
    ],
    ids=["default", "searching", "paper"],
)
def test_a_stitched_network_and_a_joint_head_are_exported_and_run_before_a_device_is_asked(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], joins: bool
) -> None:
    seen: list[int] = []
    export = onnx_export.export_stitched

    def noted(meta: Any, *given: Any) -> bytes:
        seen.append(len(meta["taps"]))
        return export(meta, *given)

    monkeypatch.setattr(onnx_export, "export_stitched", noted)
    rehearse(prepared, params)
    assert len(seen) == 2
    assert (seen[1] > 1) == joins


def test_labels_that_no_example_has_do_not_fail_a_dry_run(tmp_path: Path) -> None:
    """Of 12 labels, 8 synthetic examples have 8: the other four score -inf."""
    table = job({"name": "p", "network": PLAIN}, labels=[f"label {number}" for number in range(12)])
    prepare_and_check(settings.parse_job(table), tmp_path)


def test_donors_of_time_series_are_stitched_in_a_dry_run(tmp_path: Path) -> None:
    """Two donors of 20 steps of 3 channels."""
    donors = [{"name": name, "network": SERIES, "seed": seed} for seed, name in enumerate("ab")]
    prepare_and_check(settings.parse_job(job(*donors, input={"std": [2.0]})), tmp_path)


def test_a_donor_whose_weights_are_not_finite_is_refused_by_donor_and_block(tmp_path: Path) -> None:
    state = registry.build_network(RESIDUAL).state_dict()
    names = [name for name, value in state.items() if value.ndim == 4]
    state[names[-1]][0, 0, 0, 0] = torch.nan
    torch.save(state, tmp_path / "broken.pt")
    table = job(
        {"name": "p", "network": PLAIN}, {"name": "r", "network": RESIDUAL, "weights": str(tmp_path / "broken.pt")}
    )
    with pytest.raises(ModelError, match=r"donor 'r': block r\.3 outputs numbers that are not finite"):
        prepare_and_check(settings.parse_job(table), tmp_path / "out")


def test_a_donor_for_batches_of_one_size_is_refused_by_donor_and_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward pass has the 2 examples that prepare traces with; devices run other numbers."""
    (tmp_path / "two_at_once_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.last = nn.Conv2d(1, 4, 3), nn.Linear(2704, 3)\n"
        "    def forward(self, x):\n"
        "        return self.last(self.first(x).relu().reshape(2, 2704))\n"
        "net = Net\n"
    )
    monkeypatch.chdir(tmp_path)
    table = job({"name": "two", "network": {"name": "two_at_once_net:net"}, "cuts": ["first"]})
    with pytest.raises(ModelError, match=r"donor 'two': block two\.1 does not run on one example.*batch size"):
        prepare_and_check(settings.parse_job(table), tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"r.1": {"in_shape": [5, 28, 28]}}, r"donor 'r': block r\.1 reads the shape \(5, 28, 28\)"),
        ({"p.2": {"out_shape": [7, 7, 7]}}, r"donor 'p': block p\.2 outputs the shape .* not \(7, 7, 7\)"),
    ],
    ids=["input", "output"],
)
def test_a_block_that_does_not_fit_its_donor_is_refused_by_name(
    prepared: Path, changed: dict[str, dict[str, Any]], message: str
) -> None:
    made = job_bundle.load_bundle(prepared)
    blocks = {name: {**table, **changed.get(name, {})} for name, table in made.meta["blocks"].items()}
    with pytest.raises(ModelError, match=message):
        rehearse(prepared, {}, replace(made, meta={**made.meta, "blocks": blocks}))


@pytest.mark.parametrize("method", ["heterofl", "fjord", "fedpews", "fedlps", "fedsq"])
def test_a_method_that_needs_a_trace_names_the_module_that_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The gate branches on values in line 8 of its file."""
    (tmp_path / "gated_net.py").write_text(
        "from torch import nn\n"
        "class Gate(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(6, 6)\n"
        "    def forward(self, x):\n"
        "        y = self.inner(x)\n"
        "        return y if y.sum() > 0 else x\n"
        "def net(inputs=6, classes=3):\n"
        "    return nn.Sequential(nn.Linear(6, 6), Gate(), nn.Linear(6, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    model = {"name": "gated_net:net", "inputs": 6, "classes": 3}
    table = {"name": "s", "method": method, "model": model, "params": {"encoder": 0.0} if method == "fedlps" else {}}
    with pytest.raises(ModelError, match=r"module '1' \(Gate, gated_net.py, line 8\): .*remove branches"):
        prepare_and_check(settings.parse_job(table), tmp_path / "out")


def test_a_dry_run_trains_with_one_thread_and_gives_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = torch.get_num_threads(), set()

    def noted(*given: Any) -> Any:
        seen.add(torch.get_num_threads())
        raise ModelError("far enough")

    monkeypatch.setattr(dry_run, "run_to_last_state", noted)
    torch.set_num_threads(2)
    try:
        model = {**RESIDUAL, "input": {"channels": 1, "size": 8}}
        with pytest.raises(ModelError, match="far enough"):
            prepare_and_check(settings.parse_job({"name": "s", "method": "fedavg", "model": model}), tmp_path)
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)
