"""Rounds that gather batch normalisation's statistics: what devices are asked, what comes of it, and that it is so in a
federation on virtual time."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from plain import budgeted
from toy_tasks import write_images

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.rounds.events import RoundCommitted, UpdateAccepted
from fedquilt.coordinator.storage.store import Store
from fedquilt.coordinator.views import run_summary
from fedquilt.core import Bundle, DeviceUpdate, DeviceView, Examples, Hooks, UpdateError
from fedquilt.methods import _subnetworks
from fedquilt.models import local_training
from fedquilt.models.partial import width
from fedquilt.testing.toy_networks import toy_bundle
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.simulation import agents

torch = pytest.importorskip("torch")

TABLE = {"name": "residual", "channels": 1, "classes": 3, "width": 4}
NETWORK = {**TABLE, "input": {"channels": 1, "size": 8}}

METHODS = ("heterofl", "fjord", "fedlps")
SMALL, LARGE = 512 * 10**6, 8 * 10**9


@cache
def engine() -> Any:
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    return TorchEngine(1 << 40, base_bytes=0)


@cache
def bundle() -> Bundle:
    """A network with its plan of masks, as `fedquilt prepare` writes it."""
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = registry.build_network(NETWORK)
    model = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    found = toy_bundle(NETWORK, model, dependency_trace.trace_mask_plan(module))
    return replace(found, meta={**found.meta, "flops": 1e6, "example_bytes": 10**6})


def begun(name: str) -> Any:
    method = methods.load(name)
    return method, method.init(bundle(), method.params(), 0)


def view(name: str, budget: int) -> DeviceView:
    return DeviceView(name, budgeted(budget))


@pytest.mark.parametrize("name", METHODS)
def test_a_small_device_measures_every_width_whose_forward_pass_it_has_room_for(name):
    method, state = begun(name)
    order = method.evaluation_round.send(state, view("a", SMALL))
    unknown = method.evaluation_round.send(state, DeviceView("a", None))
    assert len(order.params["asked"]) > 1
    assert order.params["asked"][-1] == 1
    assert order.params["asked"][0] == unknown.params["asked"][-1]
    assert len(unknown.params["asked"]) == 1
    assert 0 < order.work.flops_per_example < len(order.params["asked"]) * state.flops  # forward passes alone


def test_statistics_are_those_of_all_devices_examples_together():
    method, state = begun("heterofl")
    names = [name for name in state.model if name.endswith(("running_mean", "running_var"))]
    total = None
    for device, weight, mean, var in (("a", 1.0, 0.0, 1.0), ("b", 3.0, 4.0, 2.0)):
        sent = {name: np.full_like(state.model[name], mean if name.endswith("mean") else var) for name in names}
        update = DeviceUpdate(device, 0, weight, {}, {"statistics.1": sent})
        total = method.evaluation_round.aggregation.fold(state, total, update)
    after = method.evaluation_round.step(state, total)
    for name in names:
        wanted = 3.0 if name.endswith("mean") else (1 + 3 * (2 + 16)) / 4 - 9
        np.testing.assert_allclose(after.model[name], wanted, rtol=1e-6)
    still = [name for name in state.model if name not in names]
    assert all(np.array_equal(after.model[name], state.model[name]) for name in still)
    assert after.widths.keys() == state.widths.keys()
    assert after.settled == 1


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda sent: {}, "a sent nothing"),
        (lambda sent: {"model": sent}, "a sent model"),
        (lambda sent: {"statistics.1": {name: -np.ones_like(array) for name, array in sent.items()}}, "a variance"),
        (lambda sent: {"statistics.1": {name: array.astype(float) for name, array in sent.items()}}, "float64"),
        (lambda sent: {"statistics.1": dict(list(sent.items())[1:])}, "tensor names differ"),
    ],
)
def test_what_is_no_statistics_of_a_width_is_refused(spoil, said):
    method, state = begun("heterofl")
    sent = {name: array for name, array in state.model.items() if name.endswith(("running_mean", "running_var"))}
    with pytest.raises(UpdateError, match=said):
        method.evaluation_round.aggregation.fold(state, None, DeviceUpdate("a", 0, 1.0, {}, spoil(sent)))


def test_measured_statistics_are_exact_however_examples_are_cut_into_mini_batches(monkeypatch):
    draws, model = np.random.default_rng(0), bundle().load("model")
    x = draws.integers(0, 255, (50, 8, 8)).astype(np.uint8)
    first = torch.nn.functional.conv2d(
        torch.from_numpy(x[:, None].astype(np.float32) / 255), torch.from_numpy(model["0.0.weight"]), padding=1
    ).double()
    from fedquilt.edge_agent.engines.torch import engine as torch_engine

    for size in (7, 64):
        monkeypatch.setitem(torch_engine.EVALUATION_BATCH, "cpu", size)
        seen = width.BatchNormMoments()
        hooks = Hooks(prepare=seen.add_recording_hooks)
        engine().evaluate(NETWORK, model, Examples(x, draws.integers(0, 3, 50)), hooks=hooks)
        found = seen.statistics()
        np.testing.assert_allclose(found["0.1.running_mean"], first.mean(dim=(0, 2, 3)), atol=1e-5)
        np.testing.assert_allclose(found["0.1.running_var"], first.var(dim=(0, 2, 3), correction=0), rtol=1e-4)


def test_what_is_held_still_keeps_its_statistics():
    method, state = begun("fedlps")
    from fedquilt.methods import fedlps

    held = fedlps.encoder_names(state)
    assert set(method.evaluation_round.send(state, view("a", LARGE)).params["still"]) == held
    seen = width.BatchNormMoments(held)
    examples = Examples(np.zeros((8, 8, 8), np.uint8), np.zeros(8, np.int64))
    engine().evaluate(NETWORK, state.model, examples, hooks=Hooks(prepare=seen.add_recording_hooks))
    assert seen.statistics().keys().isdisjoint(held)
    assert seen.statistics()


def test_a_network_without_batch_normalisation_needs_no_such_round():
    method = methods.load("heterofl")
    assert not method.evaluation_round.is_needed(method.init(toy_bundle(), method.params(), 0))
    assert method.evaluation_round.is_needed(begun("heterofl")[1])


def test_the_learning_rate_does_not_fall_with_rounds_that_do_not_count():
    method = methods.load("heterofl")
    state = replace(
        method.init(bundle(), method.params(lr=0.1, schedule={"name": "step", "factor": 0.5}), 0), settled=2
    )
    assert local_training.learning_rate(method.send(state, view("a", LARGE)).params, 5) == pytest.approx(0.1 * 0.5**3)


def test_in_a_federation_the_whole_networks_statistics_are_those_of_all_devices(tmp_path):
    data = write_images(tmp_path / "data.npz", 8)
    prepare.prepare_bundle(
        {"model": {**TABLE, "classes": 10, "seed": 0}, "input": NETWORK["input"]}, tmp_path / "bundle"
    )
    table = {
        "name": "j",
        "method": "heterofl",
        "rounds": 3,
        "params": {"batch": 8, "masked": False},
        "cohort": {"size": 2},
        "check": {"every": 2},
        "fleet": {"devices": 6, "budgets": ["1GB"] * 5 + ["8GB"]},
        "data": {"path": str(data), "held": 0.2},
    }
    plan = agents.FleetPlan(settings.parse_job(table), tmp_path / "bundle", tmp_path / "runs")
    run, ended = agents.run_fleet_virtually(plan)
    assert ended == "done"
    with Store(plan.home) as store:
        summary = run_summary.summarise_events(plan.job, store.read_events(run))
        facts = [fact for _, _, fact in store.read_events(run)]
        committed = [fact for fact in facts if isinstance(fact, RoundCommitted)]
        path = store.blob_store.blob_path(committed[-1].state.sha256)
        state = tensors.unpack_state(path.read_bytes(), _subnetworks.State)
    assert [fact.is_evaluation_round for fact in committed] == [False, False, True, False, True, False]
    assert [fact.round for fact in committed if fact.evaluation is not None] == [0, 3, 5]
    asked = [sum(isinstance(fact, UpdateAccepted) and fact.round == each.round for fact in facts) for each in committed]
    assert asked == [2, 2, 6, 2, 6, 2]
    assert summary.completed_rounds == 3
    from fedquilt.data import examples as shares
    from fedquilt.data.spec import DataSpec

    x = np.concatenate(
        [
            share[0].x for share in shares.load_all_shares(DataSpec.parse(plan.make_agent_tables(run)[0]["data"]))
        ]  # of all devices
    )
    first = torch.nn.functional.conv2d(
        torch.from_numpy(x[:, None].astype(np.float32) / 255), torch.from_numpy(state.model["0.0.weight"]), padding=1
    ).double()
    np.testing.assert_allclose(state.model["0.1.running_mean"], first.mean(dim=(0, 2, 3)), atol=1e-4)
    np.testing.assert_allclose(state.model["0.1.running_var"], first.var(dim=(0, 2, 3), correction=0), rtol=1e-3)
