"""Job tables made into bundles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.settings import require_matching_bundle
from fedquilt.core import DataError, FedquiltError, JobError, ModelError
from fedquilt.formats import job_bundle

pytest.importorskip("torch", reason="preparing cuts torch networks")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.models.networks import registry
from fedquilt.models.partial import masks
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.onnx import blocks
from fedquilt.tools.artefacts.prepare import align_labels, prepare_and_check, prepare_bundle
from fedquilt.tools.experiments import comparison

PLAIN = {"name": "plain", "channels": 1, "classes": 3}
SERIES = {"name": "conv1d", "channels": 3, "steps": 20, "classes": 3}
RESIDUAL = {"name": "residual", "channels": 1, "classes": 3}


def job(*donors: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"input": {"channels": 1, "size": 28}, "labels": ["a", "b", "c"], "donors": list(donors), **more}


def test_a_model_table_becomes_first_weights_and_facts(tmp_path: Path) -> None:
    """4 x 3 and 3 x 2 weights: 36 FLOPs; inputs of 4 and 3 floats kept for the backward pass, and 10 times the wider
    at work. The network's table goes to the agents without weights and seed."""
    made = prepare_bundle({"model": {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2, "seed": 7}}, tmp_path)
    network = {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}
    size = 4 * (4 + 3) + 10 * 4 * 4
    rows = [
        [f"{path}.{leaf}", "parameter", path, path, "Linear", False, True, []]
        for path in ("1", "3")
        for leaf in ("weight", "bias")
    ]
    register = {"tensors": rows, "calls": ["", "0", "1", "2", "3"]}
    facts = {"flops": 36.0, "example_bytes": size, "register": register, "pretrained": False}
    facts["layers"] = [["1", 24.0, 0.0, 28.0, 1], ["2", 0.0, 0.0, 24.0, 1], ["3", 12.0, 0.0, 20.0, 1]]
    assert made.meta == {"network": network, **facts}
    wanted = {name: value.numpy() for name, value in registry.load_network(network, seed=7).state_dict().items()}
    assert tensors.encode_tensors(made.load("model")) == tensors.encode_tensors(wanted)
    assert masks.plan_from_array(made.load("masks")["json"]).widths == {"1": 3}  # the hidden neurons


def test_public_examples_are_the_stored_inputs_without_labels(tmp_path: Path) -> None:
    x = np.arange(40, dtype=np.float32).reshape(10, 4)
    np.savez(tmp_path / "some.npz", x_train=x, y_train=np.arange(10) % 2)
    table = {"name": "j", "method": "fedmd", "model": {"name": "mlp", "inputs": 4, "hidden": [3], "classes": 2}}
    (tmp_path / "job.toml").write_text('name = "j"\nmethod = "fedmd"\npublic = { path = "some.npz", limit = 6 }')
    public = settings.load_job(tmp_path / "job.toml").public
    assert public["path"] == str(tmp_path / "some.npz")
    made = prepare_and_check(settings.parse_job({**table, "public": public}), tmp_path / "bundle").load("public")
    assert list(made) == ["x"]
    assert sorted(made["x"][:, 0]) == sorted(set(made["x"][:, 0]) & set(x[:, 0]))
    assert made["x"].shape == (6, 4)
    wide = {**public, "path": str(tmp_path / "wide.npz")}
    np.savez(tmp_path / "wide.npz", x_train=np.zeros((10, 5), np.float32), y_train=np.zeros(10, int))
    with pytest.raises(FedquiltError, match="5"):
        prepare_and_check(settings.parse_job({**table, "public": wide}), tmp_path / "wide")


def test_a_misspelt_network_is_named_where_torch_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for torch first would bring 2 GB, and the same mistake."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelError, match=r"'mpl'.*did you mean 'mlp'"):
        prepare_bundle({"model": {"name": "mpl", "inputs": 4, "hidden": [3], "classes": 2}}, tmp_path)


@pytest.mark.parametrize(
    ("tables", "edited"),
    [
        ({"model": {**RESIDUAL, "input": {"channels": 1, "size": 8}}}, {"input": {"channels": 1, "size": 9}}),
        ({"model": RESIDUAL, "input": {"channels": 1, "size": 8, "mean": [0.5]}}, {"channels": 1, "classes": 4}),
        ({"model": {**RESIDUAL, "seed": 3}, "input": {"channels": 1, "size": 8}}, {"name": "plain"}),
    ],
)
def test_what_prepare_makes_of_a_job_is_that_jobs_bundle_and_no_others(
    tmp_path: Path, tables: dict[str, Any], edited: dict[str, Any]
) -> None:
    made = prepare_bundle(tables, tmp_path)
    np.savez(tmp_path / "own.npz", x=np.zeros((6, 8, 8), np.uint8), y=np.arange(6) % 3)
    data = {"path": str(tmp_path / "own.npz")}
    own = settings.parse_job({"name": "a", "method": "fedavg", "data": data, **tables})
    require_matching_bundle(own, made)
    assert len(comparison.make_cases(own, tmp_path, seeds=[0])) == 1
    other = msgspec.structs.replace(own, model={**own.model, **edited})
    with pytest.raises(JobError, match="prepared for another job"):
        require_matching_bundle(other, made)
    with pytest.raises(JobError, match="prepared for another job"):
        comparison.make_cases(other, tmp_path, seeds=[0])


def test_another_input_table_than_the_bundles_is_refused(tmp_path: Path) -> None:
    made = prepare_bundle({"model": RESIDUAL, "input": {"channels": 1, "size": 8, "mean": [0.5], "std": [1]}}, tmp_path)
    own = settings.parse_job({"name": "a", "method": "fedavg", "model": RESIDUAL, "input": {"channels": 1, "size": 8}})
    require_matching_bundle(own, made)
    with pytest.raises(JobError, match=r"another job \(\[input\] differ"):
        require_matching_bundle(msgspec.structs.replace(own, input={"channels": 1, "size": 8, "mean": [0.4]}), made)


@pytest.mark.parametrize("leaves_out", [(), ("donors",), ("donors", "input")])
def test_labels_other_than_the_bundles_are_refused_by_name(tmp_path: Path, leaves_out: tuple[str, ...]) -> None:
    table = job({"name": "p", "network": PLAIN})
    made = prepare_bundle(table, tmp_path)
    kept = {key: value for key, value in table.items() if key not in leaves_out}

    def require(*labels: str) -> None:
        require_matching_bundle(
            settings.parse_job({"name": "a", "method": "fedstitch", **kept, "labels": labels}), made
        )

    require("a", "b", "c")
    with pytest.raises(JobError, match=r"labels \(label 1 is 'c' in the job and 'b' in the bundle\) differ.*prepare"):
        require("a", "c", "b")
    with pytest.raises(JobError, match=r"label 2 is none in the job and 'c' in the bundle"):
        require("a", "b")
    with pytest.raises(JobError, match=r"label 3 is 'd' in the job and none in the bundle"):
        require("a", "b", "c", "d")


@pytest.mark.parametrize("tile_bytes", [blocks.TILE_BYTES, 300])
def test_a_bundle_of_donors_is_a_stock_whose_blocks_run_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tile_bytes: int
) -> None:
    monkeypatch.setattr(blocks, "TILE_BYTES", tile_bytes)
    prepare_bundle(
        job({"name": "p", "network": PLAIN, "seed": 1}, {"name": "r", "network": RESIDUAL, "seed": 2}), tmp_path
    )
    opened = job_bundle.load_bundle(tmp_path)
    stock = stitched_network.load_donor_pool(opened.meta)
    assert {name: len(donor.blocks) for name, donor in stock.donors.items()} == {"p": 5, "r": 5}
    x = np.random.default_rng(0).normal(size=(3, 1, 28, 28)).astype(np.float32)
    engine = OnnxEngine(2**30)
    for name, network, seed in (("p", PLAIN, 1), ("r", RESIDUAL, 2)):
        path = [stock.blocks[block] for block in stock.donors[name].blocks]
        y = stitched_network.run_path(
            path,
            [None] * len(path),
            lambda block, maps: stitched_network.run_block(
                block, lambda file, value: engine.run(tmp_path / "blobs" / opened.files[file].sha256, value), maps
            ),
            x,
        )
        wanted = registry.load_network(network, seed=seed)(_torch(x)).detach().numpy()
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


def test_a_block_in_tiles_names_its_graphs_by_stage_and_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool and flatten, then 64 -> 3 in tiles of a row, whose bytes (and a bias each) are what has to be resident."""
    monkeypatch.setattr(blocks, "TILE_BYTES", 300)
    made = prepare_bundle(job({"name": "r", "network": RESIDUAL}), tmp_path)
    table = made.meta["blocks"]
    assert table["r.4"]["stages"] == [["r.4.0.onnx"], ["r.4.1.0.onnx", "r.4.1.1.onnx", "r.4.1.2.onnx"]]
    assert (table["r.4"]["weight_bytes"], table["r.4"]["resident_bytes"]) == (3 * 260, 260)
    assert (table["r.3"]["stages"], table["r.3"]["data"]) == ([["r.3.onnx"]], ["r.3.data"])
    assert table["r.3"]["weight_bytes"] == table["r.3"]["resident_bytes"]
    used = [name for block in stitched_network.load_donor_pool(made.meta).blocks.values() for name in block.files]
    assert sorted(used) == sorted(made.files)


def test_preparing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """The same bundle.json, which names every file by its sha256."""
    table = job({"name": "r", "network": RESIDUAL, "seed": 2, "align": [[1], [], [0, 2]]}, model=PLAIN)
    said: list[str] = []
    for folder in ("one", "two"):
        prepare_bundle(table, tmp_path / folder, said.append)
    one, two = (tmp_path / folder / "bundle.json" for folder in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert said[:2] == ["model plain: 135 kB", "donor r: 5 blocks, 307 kB"]


def test_donor_classes_are_aligned_with_labels_by_list_or_by_name(tmp_path: Path) -> None:
    for align, wanted in (("identity", [[0], [1], [2]]), ([[2], [0, 1], []], [[2], [0, 1], []])):
        assert align_labels(align, None, 3, ["a", "b", "c"]) == wanted
    assert "align" not in prepare_bundle(job({"name": "p", "network": PLAIN}), tmp_path).meta["donors"]["p"]


def test_imagenet_is_aligned_with_cifar10_by_its_own_ids() -> None:
    """Ten labels; 118 dogs, one horse; no class counts twice."""
    groups = align_labels("imagenet-cifar10", None, 1000, [str(i) for i in range(10)])
    assert [len(group) for group in groups] == [2, 9, 59, 5, 3, 118, 3, 1, 11, 6]
    assert groups[7] == [339]


NAMES = "tabby, tabby cat\nhot-dog\nTiger_Cat\ncatamaran\nfire truck\nTrucks\ncrane, bird\ncrane\n"


@pytest.mark.parametrize(
    ("align", "wanted"),
    [
        ("names", [[0, 2], [1], [4, 5]]),
        ({"cat": [0, "tiger cat"], "dog": [], "truck": ["truck", 4]}, [[0, 2], [], [5, 4]]),
        ({"cat": [3], "dog": [1], "truck": [7]}, [[3], [1], [7]]),
    ],
)
def test_classes_are_aligned_by_their_names_or_by_a_table(tmp_path: Path, align: Any, wanted: Any) -> None:
    (tmp_path / "names.txt").write_text(NAMES)
    told: list[str] = []
    assert align_labels(align, str(tmp_path / "names.txt"), 8, ["cat", "dog", "truck"], told.append) == wanted
    assert ("cat: 0 tabby, tabby cat; 2 Tiger_Cat" in told) == (align == "names")


@pytest.mark.parametrize(
    ("donor", "message"),
    [
        ({"align": "names"}, "align needs class names: set `classes`"),
        ({"align": "names", "classes": "none.txt"}, "classes = .*none.txt.* cannot be read"),
        ({"align": "names", "classes": "imagenet"}, "'imagenet' has 1000 names for 8 classes of the donor"),
        ({"align": "names", "classes": "FILE"}, "no class has the name 'deer': write `align` as a table"),
        ({"align": {"cat": [0], "dog": [1]}}, "align lacks 'deer': write one key for each label of the job"),
        ({"align": {"cat": [0], "dog": [1], "deer": [], "ox": []}}, "align has 'ox': write one key for each label"),
        ({"align": {"cat": ["crane"], "dog": [], "deer": []}, "classes": "FILE"}, "is the name of classes 6 and 7"),
        ({"align": {"cat": ["puma"], "dog": [], "deer": []}, "classes": "FILE"}, "'puma' names no class: write the"),
        ({"align": {"cat": ["tabby"], "dog": [], "deer": []}}, "set `classes` to a file"),
        ({"align": {"cat": [0], "dog": [0], "deer": []}}, "align has class 0 twice, for 'cat' and 'dog'"),
    ],
)  # fmt: skip
def test_an_alignment_that_cannot_be_is_refused_by_name(tmp_path: Path, donor: dict[str, Any], message: str) -> None:
    (tmp_path / "names.txt").write_text(NAMES)
    classes = donor.get("classes")
    names = str(tmp_path / "names.txt") if classes == "FILE" else classes
    with pytest.raises(FedquiltError, match=message):
        align_labels(donor["align"], names, 8, ["cat", "dog", "deer"])


def test_a_users_own_network_is_a_donor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_donor_net.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    two = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3)\n"
        "    return nn.Sequential(*two, nn.Flatten(), nn.Linear(1152, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    donor = {"name": "own", "network": {"name": "own_donor_net:net"}, "cuts": ["1", "2"]}
    assert prepare_bundle(job(donor), tmp_path / "out").meta["donors"]["own"]["blocks"] == ["own.0", "own.1", "own.2"]


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ({}, JobError, r"neither \[model\] nor \[\[donors\]\]"),
        ({"donors": [{"name": "p", "network": PLAIN}]}, JobError, r"but no \[input\] or labels"),
        (job({"name": "p", "netwrok": PLAIN}), JobError, r"\[\[donors\]\] 1: .*netwrok.*you mean .network."),
        (job({"name": "p", "network": PLAIN}, {"name": "p", "network": PLAIN}), JobError, "two donors are called 'p'"),
        (job({"name": "P!", "network": PLAIN}), JobError, r"\[\[donors\]\] 1"),
        (job(input={"channels": 3, "size": 28, "mean": [0, 0]}, model=PLAIN), JobError, "mean has 2 values"),
        (job({"name": "p", "network": PLAIN, "align": "by-name"}), JobError, "align 'by-name' is unknown: use"),
        (job({"name": "p", "network": PLAIN, "align": [[0]]}), JobError, "align has 1 entries for 3 labels"),
        (job({"name": "p", "network": PLAIN, "align": [[0], [1], [3]]}), ModelError, "class 3, but .* 3 classes"),
        (job({"name": "p", "network": PLAIN, "align": [[0], [1], [1]]}), ModelError, "align has class 1 twice"),
        (job({"name": "p", "network": PLAIN, "weights": "no.pt"}), ModelError, "no.pt: no such file"),
        (job({"name": "p", "network": PLAIN, "cuts": ["9"]}), ModelError, "donor 'p' runs no module '9'"),
        (
            job(*({"name": f"p{n}", "network": {**SERIES, "steps": n}} for n in (20, 24)), input={"std": [2.0]}),
            JobError, r"donor 'p24' reads examples of shape \(24, 3\), but 'p20' of \(20, 3\)",
        ),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_prepared_is_refused_before_anything_is_written(
    tmp_path: Path, table: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare_bundle(table, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("layers", "said"), [("01", "all parameters"), ("1", "2 of 4 parameters")])
def test_a_network_that_comes_frozen_is_refused(
    layers: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"frozen{layers}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    made = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))\n"
        f"    for each in {layers!r}: made[int(each)].requires_grad_(False)\n"
        "    return made\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    table = {"model": {"name": f"{name}:net", "input": {"mean": [0.0] * 4}}}
    with pytest.raises(ModelError, match=rf"network '{name}:net': {said} are frozen \(requires_grad = False\)"):
        prepare_bundle(table, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_network_of_another_type_than_float32_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halved.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(4, 3).half()\n")
    monkeypatch.syspath_prepend(tmp_path)
    table = {"model": {"name": "halved:net", "input": {"mean": [0.0] * 4}}}
    with pytest.raises(ModelError, match=r"network 'halved:net': parameter 'weight' is float16.*\.float\(\)"):
        prepare_bundle(table, tmp_path / "bundle")


def _torch(x: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(x)


def test_an_engine_that_cannot_train_the_network_is_refused_before_any_board_is_asked(tmp_path: Path) -> None:
    job = settings.JobSettings(name="j", method="fedavg", engine="numpy", model=SERIES)
    with pytest.raises(JobError, match=r"trains only 'mlp' networks, and .* 'conv1d': remove the line"):
        prepare_and_check(job, tmp_path / "j.bundle")
    prepare_and_check(settings.JobSettings(name="j", method="fedavg", model=SERIES), tmp_path / "j.bundle")


@pytest.mark.parametrize(("method", "kept"), [("ft_part", "all but the last layers"), ("fedavg", "")])
def test_random_weights_that_a_method_never_trains_are_named(tmp_path: Path, method: str, kept: str) -> None:
    job, said = settings.JobSettings(name="j", method=method, model=SERIES), []
    made = prepare_and_check(job, tmp_path / "j.bundle", said.append)
    told = [line for line in said if "which are random" in line]
    assert [kept in line for line in told] == [True] * bool(kept)

    given = tmp_path / "given.safetensors"
    given.write_bytes(tensors.encode_tensors(made.load("model")))
    said.clear()
    prepare_and_check(
        msgspec.structs.replace(job, model={**SERIES, "weights": str(given)}), tmp_path / "g.bundle", said.append
    )
    assert not [line for line in said if "which are random" in line]


def test_a_test_set_that_cannot_be_read_is_refused_with_its_table(tmp_path: Path) -> None:
    path, job = tmp_path / "own.npz", settings.JobSettings(name="j", method="fedavg", model=SERIES)
    np.savez(path, x=np.zeros((4, 2), np.float32), y=np.arange(4) % 2)
    with pytest.raises(DataError, match=r"own.npz has no array x_test: set \[test\] x") as refused:
        prepare_and_check(msgspec.structs.replace(job, test={"path": str(path)}), tmp_path / "j.bundle")
    assert "[data]" not in str(refused.value)
    named = msgspec.structs.replace(job, test={"path": str(path), "x": "x", "y": "y"})
    prepare_and_check(named, tmp_path / "j.bundle")
    elsewhere = msgspec.structs.replace(job, test={"path": str(tmp_path / "elsewhere.npz")})
    prepare_and_check(elsewhere, tmp_path / "j.bundle")
