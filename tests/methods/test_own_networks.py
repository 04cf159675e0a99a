"""Networks of memory tiers, and the prototypes that they share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_tasks import deliver_task

from fedquilt import methods
from fedquilt.coordinator import settings
from fedquilt.core import (
    Bundle,
    ClientContext,
    ClientResult,
    DeviceUpdate,
    DeviceView,
    JobError,
    ModelError,
    Task,
    Tensors,
    UpdateError,
)
from fedquilt.methods import _tier_networks, fedmd, fedproto, fedtgp
from fedquilt.testing import toy_networks
from fedquilt.testing.toy_networks import device_profile, make_torch_engine, point_devices, run_method
from fedquilt.tools.artefacts import prepare

pytest.importorskip("torch")

MODEL = {"name": "mlp", "inputs": 6, "hidden": [4], "classes": 3}
TIERS = {"2GB": {"hidden": [8, 4]}, "8GB": {"name": "rezero", "inputs": 6, "width": 4}}
FLEET = {"budgets": ["1GB", "4GB", "16GB"]}
SMALL = {"epochs": 1, "batch": 8, "lr": 0.1}


def tiered(folder: Path, tiers: dict[str, Any] = TIERS) -> Bundle:
    bundle = prepare.prepare_bundle({"model": {**MODEL, "tier": tiers}}, folder)
    return toy_networks.add_public_examples(bundle, toy_networks.PUBLIC_POINTS)


@pytest.mark.parametrize("name", ["fedmd", "fedproto", "fedtgp"])
def test_a_device_trains_the_network_of_the_largest_tier_within_its_budget(name: str, tmp_path: Path) -> None:
    method, kept = methods.load(name), dict[str, dict[str, tuple[int, ...]]]()

    def work(task: Task, site: ClientContext) -> ClientResult:
        result = method.work(task, site)
        kept[site.device] = {key: array.shape for key, array in result.private_state.items()}
        return result

    bundle = tiered(tmp_path)
    states = run_method(
        name,
        bundle,
        point_devices(),
        SMALL,
        engine=make_torch_engine(),
        method=replace(method, work=work),
        rounds=3,
        fleet=FLEET,
    )
    wanted = [bundle.load(file) for file in ("model", "2GB/model", "8GB/model")]
    assert [kept[f"dev-{i}"] for i in range(3)] == [{key: a.shape for key, a in each.items()} for each in wanted]
    shared = [state.scores if name == "fedmd" else state.prototypes for state in states]
    assert not shared[0].any()
    assert len({array.tobytes() for array in shared}) == 4


@pytest.mark.parametrize(
    ("tier", "budget", "found"), [("2GB", "1GB", ""), ("2GB", "2GB", "2GB"), ("2GB", "16GB", "8GB"), ("4GB", "2GB", "")]
)
def test_a_task_has_the_cost_of_its_tier(tier: str, budget: str, found: str, tmp_path: Path) -> None:
    state = fedproto.METHOD.init(tiered(tmp_path, {tier: TIERS["2GB"], "8GB": TIERS["8GB"]}), fedproto.Params(), 0)
    profile = device_profile(int(budget.removesuffix("GB")) * 10**9)
    task_spec = fedproto.METHOD.send(state, DeviceView("a", profile))
    assert task_spec is not None
    assert task_spec.bundles["own"] is state.networks[found].model
    unknown = fedproto.METHOD.send(state, DeviceView("a", None))
    assert unknown is not None
    assert unknown.bundles["own"] is state.networks[""].model


def test_a_device_whose_budget_moves_to_another_tier_starts_with_its_network(tmp_path: Path) -> None:
    method, member = fedproto.METHOD, point_devices()[0]
    state = method.init(tiered(tmp_path), fedproto.Params(batch=8), 0)

    def deliver(budget_gb: int, private_state: Tensors) -> tuple[Task, ClientContext]:
        task_spec = method.send(state, DeviceView("a", device_profile(budget_gb * 10**9)))
        task, site = deliver_task(method, task_spec, member, make_torch_engine())
        return task, replace(site, private_state=private_state)

    trained = method.work(*deliver(1, {})).private_state
    kept = _tier_networks.load_own_network(deliver(1, trained)[1])
    moved = _tier_networks.load_own_network(deliver(4, trained)[1])
    assert kept is trained
    assert {name: array.tolist() for name, array in moved.items()} == {
        name: array.tolist() for name, array in state.networks["2GB"].model.items()
    }


@pytest.mark.parametrize(
    ("method", "tiers", "message"),
    [
        ("fedavg", TIERS, r"\[model.tier\]: fedavg has one network for all devices"),
        ("fedproto", {"3GB": {"hidden": [8, 4]}}, r"\[model.tier\] 3GB: there are 1GB, 2GB, 4GB, 8GB"),
        ("fedproto", {"2GB": 3}, r"write \[model.tier.4GB\]"),
    ],
)
def test_a_job_with_impossible_tiers_is_refused(method: str, tiers: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        settings.parse_job({"name": "j", "method": method, "model": {**MODEL, "tier": tiers}})


def test_networks_with_unequal_features_are_refused(tmp_path: Path) -> None:
    bundle = tiered(tmp_path, {"2GB": {"hidden": [8]}})
    with pytest.raises(ModelError, match=r"unequal inputs or classes \(\[model\]: 4, 2GB: 8\)"):
        fedproto.METHOD.init(bundle, fedproto.Params(), 0)


def test_a_bundle_of_other_tiers_is_noticed(tmp_path: Path) -> None:
    bundle = tiered(tmp_path)
    table = {"name": "j", "method": "fedproto", "model": {**MODEL, "tier": TIERS}}
    settings.require_matching_bundle(settings.parse_job(table), bundle)
    table["model"] = {**MODEL, "tier": {"2GB": TIERS["2GB"]}}
    with pytest.raises(JobError, match=r"\[model\] differ"):
        settings.require_matching_bundle(settings.parse_job(table), bundle)


def test_the_consensus_is_the_plain_mean_of_the_scores(tmp_path: Path) -> None:
    """Scores of 1 and 4 for nine examples, whatever the devices' own examples: 2.5. Without updates it stays."""
    method, total = fedmd.METHOD, None
    state = method.init(tiered(tmp_path), fedmd.Params(), 0)
    for device, score in (("a", 1.0), ("b", 4.0)):
        sent = {"scores": {"scores": np.full((9, 3), score, np.float32)}}
        total = fedmd.fold(state, total, DeviceUpdate(device, 0, 1.0, {}, sent))
    found = fedmd.step(state, total)
    assert (found.scores.shape, found.scores.min(), found.scores.max()) == ((9, 3), 2.5, 2.5)
    assert fedmd.step(found, None) is found
    with pytest.raises(UpdateError, match="c has weight 16: this method requires 1"):
        fedmd.fold(state, total, DeviceUpdate("c", 0, 16.0, {}, sent))


def test_a_task_costs_the_training_on_public_examples_once_there_is_a_consensus(tmp_path: Path) -> None:
    first = fedmd.METHOD.init(tiered(tmp_path), fedmd.Params(digest_epochs=2), 0)
    later, view = replace(first, has_scores=True), DeviceView("a", None)
    work = [fedmd.METHOD.send(state, view).work for state in (first, later)]  # type: ignore[union-attr]
    assert work[1].flops_per_example == work[0].flops_per_example
    forward = first.networks[""].flops
    assert work[0].flops == 9 * forward
    assert work[1].flops > 9 * forward * (1 + 2 * 2)


def test_public_examples_are_required(tmp_path: Path) -> None:
    bundle = prepare.prepare_bundle({"model": MODEL}, tmp_path)
    with pytest.raises(ModelError, match=r"no public examples: add a \[public\] table"):
        fedmd.METHOD.init(bundle, fedmd.Params(), 0)


def update(device: str, prototypes: Any, examples: Any) -> DeviceUpdate:
    sent = {"prototypes": np.array(prototypes, np.float32), "examples": np.array(examples, np.int64)}
    return DeviceUpdate(device, 0, float(sum(examples)), {}, {"prototypes": sent})


def test_prototypes_are_weighted_by_the_examples_of_their_class(tmp_path: Path) -> None:
    """Class 0: (1 * 1 + 3 * 5) / 4 = 4; class 1: the one device's; class 2: nobody's, so none is known."""
    state = fedproto.METHOD.init(tiered(tmp_path), fedproto.Params(), 0)
    total = None
    for each in (
        update("a", [[1] * 4, [0] * 4, [0] * 4], [1, 0, 0]),
        update("b", [[5] * 4, [7] * 4, [0] * 4], [3, 2, 0]),
    ):
        total = fedproto.fold(state, total, each)
    found = fedproto.step(state, total)
    assert found.prototypes[:, 0].tolist() == [4, 7, 0]
    assert found.has_prototype.tolist() == [1, 1, 0]


@pytest.mark.parametrize("method", [fedproto, fedtgp])
@pytest.mark.parametrize(
    ("examples", "weight"),
    [([-9, 12, 0], 3.0), ([0, 0, 0], 0.0), ([2, 2, 0], 3.0), ([2**62, 2**62, 2**63 - 1], 2.0**63 - 1)],
)
def test_counts_that_no_device_can_have_are_refused(
    tmp_path: Path, method: Any, examples: list[int], weight: float
) -> None:
    """Negative counts would move a prototype away from the honest ones, and without a count nothing can be trained."""
    state = method.METHOD.init(tiered(tmp_path), method.Params(), 0)
    lie = replace(update("liar", [[1] * 4] * 3, examples), weight=weight)
    with pytest.raises(UpdateError, match=r"do not add up to weight|permitted for int64"):
        method.fold(state, None, lie)


def test_the_gradient_of_fedtgp_is_that_of_its_loss() -> None:
    rng = np.random.default_rng(0)
    shapes = {"v": (3, 4), "w1": (4, 4), "b1": (4,), "w2": (4, 4), "b2": (4,)}
    generator = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    points, classes = rng.normal(size=(5, 4)), np.array([0, 1, 2, 2, 0])

    def loss(changed: dict[str, np.ndarray]) -> float:
        centers = fedtgp.generate_prototypes(changed)[1]
        scores = -np.linalg.norm(points[:, None] - centers[None], axis=2) - 0.7 * np.eye(3)[classes]
        return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(5), classes]))

    found = fedtgp.contrastive_gradients(generator, points, classes, 0.7)
    for name, array in generator.items():
        step = np.zeros_like(array)
        step.flat[0] = 1e-6
        slope = (loss({**generator, name: array + step}) - loss({**generator, name: array - step})) / 2e-6
        assert found[name].flat[0] == pytest.approx(slope, abs=1e-7)
