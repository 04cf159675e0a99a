"""FedSDG and FedLoRA: what is shared and what stays, what they are at zero, and the weights by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_tasks import deliver_task

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import ClientContext, ClientResult, DeviceUpdate, DeviceView, Fit, JobError, ModelError, Task, Traits
from fedquilt.core.evaluation import compute_metrics
from fedquilt.methods import fedsdg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.models.networks import registry
from fedquilt.models.partial import lora
from fedquilt.testing.toy_networks import image_devices, run_method, toy_bundle, with_loaded_tensors
from fedquilt.tools.simulation.run import WorkBackend
from fedquilt.tools.simulation.simulated_job import SimulatedRound, Simulation

torch_engine = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine", reason="adapters are trained with torch")


NETWORK = {
    "name": "vit",
    "channels": 1,
    "size": 8,
    "patch": 4,
    "width": 8,
    "depth": 2,
    "heads": 2,
    "classes": 3,
    "input": {"channels": 1, "size": 8},
}
WEIGHTS = {name: value.numpy().copy() for name, value in registry.load_network(NETWORK, seed=1).state_dict().items()}
QUICK = {"epochs": 1, "batch": 16, "rank": 2, "alpha": 4.0}
ENGINE = torch_engine.TorchEngine(1 << 40, base_bytes=0)
LAYERS = [f"blocks.{block}.{leaf}" for block in (0, 1) for leaf in ("attention.out_proj", "mlp.2")]


def bundle() -> Any:
    return toy_bundle(NETWORK, WEIGHTS)


class Played:
    """A run on toy devices: the states, what each task had and gave, in order, and what its rounds took."""

    def __init__(self, name: str, rounds: int = 2, devices: int = 2, **params: Any) -> None:
        self.method, self.worked = methods.load(name), list[tuple[ClientContext, ClientResult]]()
        self.rounds: list[SimulatedRound] = []

        def work(task: Task, site: ClientContext) -> ClientResult:
            answer = self.method.work(task, site)
            self.worked.append((with_loaded_tensors(task, site), answer))
            return answer

        def observe(simulation: Simulation, hands: WorkBackend) -> None:
            self.rounds = simulation.rounds

        self.states = run_method(
            name,
            bundle(),
            image_devices(devices, 40),
            {**QUICK, **params},
            engine=ENGINE,
            method=replace(self.method, work=work),
            observe=observe,
            rounds=rounds,
        )


def asked(state: Any, local: Any = None, device: int = 0) -> tuple[Task, ClientContext]:
    """What one device gets now, with what it has kept."""
    member = image_devices(4, 40)[device]
    method = methods.load("fedsdg")
    return deliver_task(method, method.send(state, DeviceView(member.device, None)), member, ENGINE, local=local)


def began(**params: Any) -> Any:
    return fedsdg.init(bundle(), fedsdg.Params(**{**QUICK, **params}), 0)


torch_engine = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine", reason="adapters are trained with torch")


HEAD = {"head.weight", "head.bias"}


def test_only_the_change_of_the_shared_part_is_in_the_bytes_that_are_sent():
    """Adapters A (in, 2) and B (2, out) of four layers and the head: 160 + 27 values, and nothing else.

    Of the four layers two are 8 -> 8 and two 16 -> 8: 2 * 32 + 2 * 48 values. A public implementation uploads
    the whole state dict.
    """
    for _, answer in Played("fedsdg").worked:
        payload = tensors.encode_tensors(answer.bundles["delta"])
        header = 8 + int.from_bytes(payload[:8], "little")
        names = set(json.loads(payload[8:header])) - {"__metadata__"}
        assert answer.bundles.keys() == {"delta"}
        assert names == {f"{layer}.{leaf}" for layer in LAYERS for leaf in lora.SHARED_SUFFIXES} | HEAD
        assert len(payload) - header == 4 * (160 + 27)
        assert all(array.tobytes() not in payload for array in answer.private_state.values())
        assert answer.private_state.keys() == {f"{layer}.{leaf}" for layer in LAYERS for leaf in lora.OWN_SUFFIXES} | {
            "blocks.0.gate",
            "blocks.1.gate",
        }
        assert not [name for name in answer.metrics if name.startswith("gate")]


@pytest.mark.parametrize("name", ["fedsdg", "fedlora"])
def test_the_backbone_is_sent_once_and_never_changes(name):
    two = Played(name, rounds=2)
    first, again = (round.down_bytes for round in two.rounds)
    assert 0 < again < first / 2
    whole = two.method.result(two.states[-1]).tensors
    assert whole.keys() == WEIGHTS.keys()
    moved = {key for key in WEIGHTS if not np.array_equal(whole[key], WEIGHTS[key])}
    assert moved == {f"{layer}.weight" for layer in LAYERS} | HEAD  # the adapters are in the weights now


@pytest.mark.parametrize("name", ["fedlora", "fedsdg"])
def test_what_is_held_still_has_no_gradients_and_no_moments(name):
    method = methods.load(name)
    state = method.init(bundle(), method.params(**QUICK), 0)
    order = method.send(state, DeviceView("a", None))
    assert order is not None
    backbone = {key: array for key, array in state.backbone.items() if key not in state.model}
    everything = NetworkState(state.params, state.network, {**backbone, **state.model}, 0.0, 0)
    most = local_training.training_work(everything, Traits(model_copies=int(name == "fedsdg"))).peak_bytes
    assert order.work.peak_bytes == most - 3 * tensors.total_bytes([backbone])


@pytest.mark.parametrize("name", ["fedrep", "ditto"])
def test_a_personal_method_on_adapters_sends_them_alone_and_leaves_the_backbone(name):
    played = Played(name, rank=2, lr=0.1)
    adapters = {f"{layer}.{leaf}" for layer in LAYERS for leaf in lora.SHARED_SUFFIXES}
    sent, kept = (adapters, HEAD) if name == "fedrep" else (adapters | HEAD, adapters | HEAD)
    for _, answer in played.worked:
        assert answer.bundles.keys() == {"model"}
        assert answer.bundles["model"].keys() == sent
        assert answer.private_state.keys() == kept
    found = played.method.result(played.states[-1])
    moved = {key for key in WEIGHTS if not np.array_equal(found.tensors[key], WEIGHTS[key])}
    assert found.tensors.keys() == WEIGHTS.keys()
    assert moved == {f"{layer}.weight" for layer in LAYERS} | (set() if name == "fedrep" else HEAD)
    assert found.meta.get("private", []) == (sorted(HEAD) if name == "fedrep" else [])


def test_ditto_on_adapters_without_pull_trains_its_own_as_fedlora_does():
    settings = {"optimizer": "sgd", "lr": 0.1, "clip": 0.0}
    ((_, mine),) = Played("ditto", 1, 1, pull=0.0, **settings).worked
    ((_, plain),) = Played("fedlora", 1, 1, **settings).worked
    for key, array in plain.bundles["model"].items():
        assert array.tobytes() == mine.private_state[key].tobytes() == mine.bundles["model"][key].tobytes()


def test_adapters_and_a_named_head_are_refused():
    method = methods.load("fedrep")
    with pytest.raises(JobError, match="head is not possible with rank"):
        method.init(bundle(), method.params(rank=2, head=("head",)), 0)


def test_a_private_head_stays_on_the_device():
    played = Played("fedsdg", rounds=1, head="private")
    for _, answer in played.worked:
        assert answer.bundles["delta"].keys().isdisjoint(HEAD)
        assert all(not np.array_equal(answer.private_state[key], WEIGHTS[key]) for key in HEAD)
    found = played.method.result(played.states[-1])
    assert set(found.meta["private"]) == HEAD | {f"{layer}.weight" for layer in LAYERS}, "its own branch is in these"
    assert all(np.array_equal(found.tensors[key], WEIGHTS[key]) for key in HEAD)


def test_gates_are_told_when_the_job_asks_for_it():
    for _, answer in Played("fedsdg", rounds=1, tell_gates=True).worked:
        gates = {name: m for name, m in answer.metrics.items() if name.startswith("gate.")}
        assert gates.keys() == {"gate.00", "gate.01"}
        assert all(0.4 < m < 0.6 and round(m, 2) == m for m in gates.values())


def test_with_all_gates_shut_it_is_fedlora():
    """m = 0, no penalties, the plain mean, devices with as many examples: the same shared part after two rounds."""
    shut = Played("fedsdg", gate=-100.0, sparsity=0.0, own_decay=0.0, aggregation="mean").states[-1]
    plain = Played("fedlora").states[-1]
    assert shut.model.keys() == plain.model.keys()
    for name, array in plain.model.items():
        np.testing.assert_allclose(shut.model[name], array, rtol=1e-4, atol=1e-6)


def test_who_has_never_trained_is_evaluated_with_all_gates_shut():
    played = Played("fedsdg", rounds=2, lr=0.02, preset="official")
    state = played.states[-1]
    found = played.method.result(state)
    for device in (0, 1):
        _, site = asked(state, None, device)
        each = compute_metrics(fedsdg.check(*asked(state, None, device)))
        whole = compute_metrics(ENGINE.evaluate(found.meta["network"], found.tensors, site.held_out))
        assert each["accuracy"] == whole["accuracy"]
        assert each["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_a_device_goes_on_with_its_own_branch_and_is_evaluated_with_it():
    worked = Played("fedsdg", rounds=2, devices=1).worked
    assert tensors.encode_tensors(worked[1][0].private_state) == tensors.encode_tensors(worked[0][1].private_state)
    state = began()
    grown = {name: array + 1 for name, array in worked[1][1].private_state.items()}
    losses = [compute_metrics(fedsdg.check(*asked(state, local)))["loss"] for local in (None, grown)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_a_device_that_never_trained_begins_with_noise_of_its_own():
    """The same whenever it is asked, another for another device; B_p small, so that gates have a gradient."""
    state = began()
    first, again, other = (fedsdg.load_own_branch(*asked(state, None, device), WEIGHTS) for device in (0, 0, 1))
    assert tensors.encode_tensors(first) == tensors.encode_tensors(again) != tensors.encode_tensors(other)
    noise = np.concatenate([first[name].ravel() for name in first if name.endswith("own_b")])
    assert 0.005 < noise.std() < 0.02
    assert all(first[f"blocks.{block}.gate"] == 0 for block in (0, 1))


def test_a_branch_of_another_rank_is_refused():
    kept = dict(Played("fedsdg", rounds=1, devices=1).worked[0][1].private_state)
    with pytest.raises(ModelError, match="dev-0 has a stored branch of another network, rank or choice of gates"):
        fedsdg.work(*asked(began(rank=3), kept))


torch_engine = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine", reason="adapters are trained with torch")


def changes(*rows: tuple[float, float]) -> list[dict[str, np.ndarray]]:
    return [{"one.lora_a": np.array(row[:1], np.float32), "two.lora_b": np.array(row[1:], np.float32)} for row in rows]


@pytest.mark.parametrize(
    ("rows", "expected", "agreed"),
    [
        ([(1, 0), (0, 1)], [0.5, 0.5], True),  # the mean is (0.5, 0.5), both cosines 0.7071
        ([(1, 0), (1, 0), (-1, 0)], [0.5, 0.5, 0.0], True),  # cosines 1, 1, -1 with (1/3, 0)
        ([(9, 0), (0, 3)], [0.75, 0.25], True),  # cosines 3/sqrt(10) and 1/sqrt(10) with (4.5, 1.5)
        ([(1, 0), (0, 0)], [1.0, 0.0], True),  # of no length: no direction
        ([(1, 0), (-1, 0)], [0.5, 0.5], False),  # the mean is 0: nothing agrees with it
        ([(0, 0), (0, 0), (0, 0)], [1 / 3, 1 / 3, 1 / 3], False),
        ([(3, 4)], [1.0], True),
    ],
)
def test_a_change_counts_by_its_cosine_with_the_mean(rows, expected, agreed):
    """Eq. 10 by hand, and its fall-backs."""
    found, said = fedsdg.aggregation_weights(changes(*rows), "aligned")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert said is agreed


def test_the_official_rule_compares_with_the_others():
    """(1,0), (1,0), (-1,0): cosines 0, 0 and -1 with the mean of the others, softmax at 0.05: 1/2, 1/2, e^-20 / 2.

    The head does not count in it; a device alone counts fully.
    """
    rows = changes((1, 0), (1, 0), (-1, 0))
    with_heads = [{**row, "head.weight": np.full(5, 100.0 * i, np.float32)} for i, row in enumerate(rows)]
    for some in (rows, with_heads):
        np.testing.assert_allclose(
            fedsdg.aggregation_weights(some, "others")[0], [0.5, 0.5, np.exp(-20) / 2], atol=1e-9
        )
    assert fedsdg.aggregation_weights(rows[:1], "others")[0] == [1.0]


def folded(state: Any, rows: dict[str, float], examples: float = 7.0) -> Any:
    """The state after a round in which each device's change is this value everywhere."""
    total = None
    for device, value in rows.items():
        delta = {name: np.full_like(array, value) for name, array in state.model.items()}
        total = fedsdg.fold(state, total, DeviceUpdate(device, 0, examples, {}, {"delta": delta}))
        examples += 100  # Eq. 10 does not look at it
    return fedsdg.step(state, total)


def test_a_round_moves_the_shared_part_by_the_weighted_changes():
    """Changes 1, 3 and -1: the last is against the mean and left aside, (1 + 3) / 2 = 2 is added."""
    state = began()
    after = folded(state, {"a": 1.0, "b": 3.0, "c": -1.0})
    for name, array in state.model.items():
        np.testing.assert_allclose(after.model[name], array + 2, rtol=1e-5)
    assert after.log == ("excluded because their change opposes the mean change: c",)
    assert fedsdg.step(state, None) is state


def test_changes_that_cancel_fall_back_to_the_plain_mean():
    """1 and -1: nothing is added, and the round says why."""
    state = began()
    after = folded(state, {"a": 1.0, "b": -1.0})
    assert all(np.array_equal(after.model[name], array) for name, array in state.model.items())
    assert after.log == ("no change agreed with the mean change, so the plain mean was used",)


def test_no_more_changes_are_held_than_asked_for_and_in_any_order():
    """`most` = 2 of 4 devices: the same two whoever comes first."""
    state = began(most=2)
    rows = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    one, two = folded(state, rows), folded(state, dict(reversed(rows.items())))
    assert tensors.pack_state(one) == tensors.pack_state(two)
    assert one.log == ("2 changes were left out, because at most 2 are compared",)


def test_the_presets_are_the_papers_and_the_official_codes_values():
    """What is given stands; all else is the preset's."""
    paper, official = fedsdg.Params(), fedsdg.Params(preset="official", epochs=2)
    assert (paper.gate, paper.gates, paper.lr_gates, paper.sparsity, paper.own_decay) == (
        0.0,
        "block",
        0.01,
        1e-3,
        1e-4,
    )
    assert (official.gate, official.gates, official.lr_gates) == (-2.0, "layer", 0.1)
    assert (official.sparsity, official.own_decay, official.shared_decay) == (0.01, 0.001, 1e-4)
    assert (paper.aggregation, official.aggregation, official.batch) == ("aligned", "mean", 128)
    assert (paper.epochs, official.epochs) == (1, 2)


def test_the_official_preset_has_a_gate_for_every_layer():
    played = Played("fedsdg", rounds=1, preset="official", tell_gates=True)
    for _, answer in played.worked:
        gates = [name for name in answer.private_state if name.endswith(".gate")]
        assert sorted(gates) == sorted(f"{layer}.gate" for layer in LAYERS)
        assert len([name for name in answer.metrics if name.startswith("gate.")]) == 4
        assert 0.05 < answer.metrics["gate.00"] < 0.25  # sigmoid(-2) is 0.12


def test_the_trainers_settings_are_the_methods():
    task, _ = asked(began(preset="official", lr=0.004))

    assert local_training.fit_from_task(task) == Fit(epochs=1, batch=16, lr=0.004, optimizer="adam", clip=1.0)
