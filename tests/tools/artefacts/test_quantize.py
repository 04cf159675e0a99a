"""Blocks in 8 bits: which are accepted, and where they run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.arrays import tensors
from fedquilt.core import Bundle, DataError, DeviceView, Examples, FedquiltError, JobError
from fedquilt.formats import job_bundle

pytest.importorskip("torch", reason="preparing cuts torch networks")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from fedquilt.coordinator.settings import JobSettings
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.methods.fedstitch import METHOD
from fedquilt.models.networks import registry
from fedquilt.models.stitching.onnx import blocks
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import SearchSettings
from fedquilt.tools.artefacts.prepare import prepare_bundle
from fedquilt.tools.artefacts.quantization import INT8_DELTA, QuantizationChoice, find_rejected
from fedquilt.tools.simulation import DeviceData
from fedquilt.tools.simulation.local_backend import make_task_and_context
from fedquilt.tools.simulation.run import iterate_states
from fedquilt.tools.simulation.simulated_job import UNLIMITED_FLEET

PLAIN = {"name": "plain", "channels": 1, "classes": 3}
RESIDUAL = {"name": "residual", "channels": 1, "classes": 3}
CANDIDATES = {"p": 4, "r": 4}  # of each donor: all but its starting block
PATH = "the images"


def pictures(count: int, seed: int) -> Examples:
    """Blobs of one of three widths in 28 x 28 pixels."""
    draw = np.random.default_rng(seed)
    y = draw.integers(3, size=count)
    across = np.arange(28)
    centre = draw.uniform(8, 20, size=(count, 2, 1))
    rows, columns = (np.exp(-(((across - centre[:, i]) / (2 + 2 * y[:, None])) ** 2)) for i in (0, 1))
    x = 200 * rows[:, :, None] * columns[:, None, :] + draw.uniform(0, 55, size=(count, 28, 28))
    return Examples(x[..., None].astype(np.uint8), y)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("images") / "images.npz"
    found = pictures(60, 0)
    np.savez(path, x=found.x, y=found.y)
    return str(path)


def job(images: str | None, *, weights: str | None = None, **more: Any) -> dict[str, Any]:
    donors = [
        {"name": "p", "network": PLAIN, "seed": 1},
        {"name": "r", "network": RESIDUAL, "seed": 2, **({} if weights is None else {"weights": weights})},
    ]
    table = {"input": {"channels": 1, "size": 28}, "labels": ["a", "b", "c"], "donors": donors}
    table |= {"params": {"expansions": 6}, **more}
    return table if images is None else {**table, "int8": {"path": images}}


@pytest.fixture(scope="module")
def both(images: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The job's bundle without `[int8]`, and with it."""
    folder = tmp_path_factory.mktemp("both")
    prepare_bundle(job(None), folder / "plain")
    prepare_bundle(job(images), folder / "quick")
    return folder / "plain", folder / "quick"


def in_int8(made: Bundle) -> set[str]:
    return {name for name, block in made.meta["blocks"].items() if "int8" in block}


class Watched(OnnxEngine):
    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.ran: set[str] = set()

    def run(self, graph: Path, x: np.ndarray) -> np.ndarray:
        self.ran.add(graph.name)
        return super().run(graph, x)


def scored(folder: Path, engine: OnnxEngine, length: int, cache: Path) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
    made = job_bundle.load_bundle(folder)
    state = METHOD.init(made, SearchSettings(expansions=1, score_at="output", early=0, samples=20), 0)
    net = replace(steps.starting_networks(state.stock)[0], path=state.stock.donors["p"].blocks[:length])
    pool = steps.eligible_blocks(net, state.stock, state.params)
    order = METHOD.send(replace(state, current=net, pool=pool), DeviceView("d", None, ()))
    assert order is not None
    member = DeviceData("d", pictures(40, 7), pictures(4, 8))
    blobs, sent = folder / "blobs", cache / "sent"
    task, site = make_task_and_context(
        METHOD, order, member, sent, engine=engine, cache=cache, path_of_blob=lambda ref: blobs / ref.sha256
    )
    return METHOD.work(task, site), dict(order.bundles), pool


def test_nothing_else_changes_in_the_bundle(both: tuple[Path, Path]) -> None:
    """Without the accepted graphs and their names it is the bundle of the same job without `[int8]`, and no more."""
    plain, quick = (json.loads((folder / "bundle.json").read_text()) for folder in both)
    assert not any("int8" in name for name in plain["files"])
    taken = [name for name, block in quick["meta"]["blocks"].items() if block.pop("int8", None) == f"{name}.int8.onnx"]
    assert taken
    for name in taken:
        del quick["files"][f"{name}.int8.onnx"]
    assert quick.pop("sum") != plain.pop("sum")  # of all the rest
    assert quick == plain
    assert {path.name for path in both[1].iterdir()} == {"bundle.json", "blobs"}


def test_preparing_twice_gives_the_same_bytes(both: tuple[Path, Path], images: str, tmp_path: Path) -> None:
    said: list[str] = []
    prepare_bundle(job(images), tmp_path, said.append)
    assert (tmp_path / "bundle.json").read_bytes() == (both[1] / "bundle.json").read_bytes()
    taken = in_int8(job_bundle.load_bundle(tmp_path))
    for line, (donor, count) in zip(said[2:], CANDIDATES.items(), strict=True):
        accepted = sum(name.startswith(donor) for name in taken)
        assert line.startswith(f"donor {donor}: {accepted} of {count} candidates in 8 bits")
        assert "CKA changes by 0.00" in line
        assert "of the float32 time here" in line


@pytest.mark.parametrize("length", [1, 2])
def test_accepted_blocks_score_and_are_chosen_as_in_float32(
    both: tuple[Path, Path], tmp_path: Path, length: int
) -> None:
    plain, quick = ((*scored(folder, Watched(), length, tmp_path / folder.name),) for folder in both)
    pool = quick[2]
    taken = np.array([name in in_int8(job_bundle.load_bundle(both[1])) for name in pool])
    one, other = (answer.bundles["scores"] for answer in (plain[0], quick[0]))
    change = np.abs(one["score"] - other["score"])
    assert taken.any()
    assert 0 < change[taken].max() < INT8_DELTA
    assert not change[~taken].any()
    assert set(one["picks"]) == set(other["picks"])
    for name, known in plain[0].private_state.items():
        np.testing.assert_array_equal(known, quick[0].private_state[name])


@pytest.mark.parametrize("depth", [10, 2])
def test_a_block_that_8_bits_destroy_stays_in_float32(images: str, tmp_path: Path, depth: int) -> None:
    """A channel inside is 10000 times the others' size, and the block's output does not even depend on it.

    In paths of two blocks it is never a candidate, so that its output on its own donor's maps decides.
    """
    state = {name: value.numpy().copy() for name, value in registry.load_network(RESIDUAL, seed=2).state_dict().items()}
    state["2.conv1.weight"][0] = 1e4 * np.abs(state["2.conv1.weight"][0])
    state["2.conv2.weight"][:, 0] = 0
    state["2.shortcut.0.weight"][:] = 0
    (tmp_path / "r.safetensors").write_bytes(tensors.encode_tensors(state))
    said: list[str] = []
    table = job(images, weights=str(tmp_path / "r.safetensors"), params={"expansions": 6, "depth": depth})
    made = prepare_bundle(table, tmp_path / "out", said.append)
    assert not {"r.2", "r.2.int8.onnx"} & {*in_int8(made), *made.files}
    assert {"r.1", "r.3"} & in_int8(made)
    assert "too far off" in said[3]


def test_tiles_stay_in_float32(images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "TILE_BYTES", 300)
    said: list[str] = []
    table = job(images)
    table["donors"][0]["cuts"] = ["0", "1", "2"]
    made = prepare_bundle(table, tmp_path, said.append)
    assert [len(made.meta["blocks"][name]["stages"]) for name in ("p.3", "r.4")] == [2, 2]
    assert not {"p.3", "r.4"} & in_int8(made)
    assert ["1 float32 only" in line for line in said[2:]] == [True, True]


def test_only_tasks_that_score_outputs_get_and_run_8_bits(both: tuple[Path, Path], tmp_path: Path) -> None:
    made = job_bundle.load_bundle(both[1])
    quick = {made.files[f"{name}.int8.onnx"].sha256 for name in in_int8(made)}
    phases: dict[str, set[str]] = {}
    sent: dict[str, set[str]] = {}
    engine = Watched()

    def work(task: Any, site: Any) -> Any:
        engine.ran.clear()
        answer = METHOD.work(task, site)
        phases.setdefault(task.params["phase"], set()).update(engine.ran)
        sent.setdefault(task.params["phase"], set()).update(ref.sha256 for ref in task.bundles.values())
        return answer

    members = [DeviceData(f"d{i}", pictures(30, i), pictures(10, 50 + i)) for i in range(2)]
    params = {"subrounds": 1, "expansions": 6, "samples": 12, "fit_samples": 12, "head_samples": 12, "depth": 5}
    double = replace(METHOD, work=work)

    def search(**changes: Any) -> None:
        wanted = JobSettings(
            name="toy", method="fedstitch", rounds=1000, params={**params, **changes}, fleet=UNLIMITED_FLEET
        )
        list(iterate_states(wanted, both[1], members, load_method=lambda name: double, engine=engine))

    search()
    assert phases["score"] & quick
    assert set(phases) == {"score", "fit", "gather", "validate"}
    for phase, ran in phases.items():
        assert ran <= sent[phase]
        assert phase == "score" or not sent[phase] & quick
    phases.clear()
    sent.clear()
    search(score_at="input")
    assert phases["score"]
    assert not sent["score"] & quick


def test_the_bundle_without_an_accepted_graph_is_refused(both: tuple[Path, Path]) -> None:
    made = job_bundle.load_bundle(both[1])
    name = f"{min(in_int8(made))}.int8.onnx"
    left = {file: ref for file, ref in made.files.items() if file != name}
    with pytest.raises(FedquiltError, match=f"has no {name}"):
        METHOD.init(replace(made, files=left), SearchSettings(), 0)


def choice(plain: list[float], quick: list[float]) -> QuantizationChoice:
    return QuantizationChoice(("a", "b", "c"), np.array(plain), np.array(quick))


def test_scores_that_change_too_much_or_not() -> None:
    """0.009 may be, 0.01 may not; b is not asked about."""
    found = choice([0.9, 0.5, 0.3], [0.909, 0.2, 0.32])
    assert find_rejected([found], ["a", "c"], 1) == ({"c"}, set())


def test_blocks_that_change_places_across_the_limit_are_taken_back() -> None:
    found = choice([0.9, 0.505, 0.5], [0.895, 0.5, 0.505])
    assert find_rejected([found], "abc", 2) == (set(), {"b", "c"})
    assert find_rejected([found], "abc", 3) == (set(), set())


def test_what_is_taken_back_may_take_back_another() -> None:
    first = choice([0.1, 0.505, 0.5], [0.1, 0.504, 0.508])
    second = choice([0.505, 0.2, 0.503], [0.501, 0.2, 0.5])
    assert find_rejected([second], "abc", 1) == (set(), set())
    assert find_rejected([first, second], "abc", 1) == (set(), {"a", "b", "c"})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"int8": {"size": 8}}, JobError, r"\[int8\]: one of path, sources and dataset is required"),
        ({"int8": {"path": PATH, "siz": 8}}, JobError, r"no key 'siz'; did you mean 'size'\? Keys of \[int8\]: "),
        ({"int8": {"path": PATH, "share": 1}}, JobError, "share has no effect, as images are drawn from the whole"),
        ({"int8": {"path": "no.npz"}}, DataError, "no.npz"),
        ({"params": {"expansions": 6, "score_at": "input"}}, JobError, r"score_at = 'input' scores no outputs"),
        ({"params": {}}, JobError, r"expansions = 0 scores no outputs: remove \[int8\]"),
        ({"params": {"score_at": "all"}}, JobError, r"\[params\]: .*score_at"),
        ({"donors": [], "model": PLAIN}, JobError, "the job has no donors: remove"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_done_is_refused_before_donors_are_cut(
    change: dict[str, Any], error: type, message: str, images: str, tmp_path: Path
) -> None:
    table = {**job(images), **change}
    if table["int8"].get("path") == PATH:
        table["int8"] = {**table["int8"], "path": images}
    with pytest.raises(error, match=message):
        prepare_bundle(table, tmp_path / "out")
    assert not (tmp_path / "out").exists()
