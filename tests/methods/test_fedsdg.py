"""FedSDG and FedLoRA: what is shared and what stays, what they are at zero, and the weights by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from fedsdg_runs import ENGINE, LAYERS, QUICK, WEIGHTS, Played, asked, began, bundle

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import DeviceView, JobError, ModelError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.methods import fedsdg
from fedquilt.models import local_training
from fedquilt.models.local_training import NetworkState
from fedquilt.models.partial import lora
from fedquilt.testing.toy_networks import deliver_task, image_members

torch_engine = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine", reason="adapters are trained with torch")


HEAD = {"head.weight", "head.bias"}


# -- what travels ---------------------------------------------------------------------------------


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
        assert names == {f"{layer}.{leaf}" for layer in LAYERS for leaf in lora.SHARED} | HEAD
        assert len(payload) - header == 4 * (160 + 27)
        assert all(array.tobytes() not in payload for array in answer.local.values())
        assert answer.local.keys() == {f"{layer}.{leaf}" for layer in LAYERS for leaf in lora.OWN} | {
            "blocks.0.gate",
            "blocks.1.gate",
        }
        assert not [name for name in answer.metrics if name.startswith("gate")]


@pytest.mark.parametrize("name", ["fedsdg", "fedlora"])
def test_a_head_that_is_called_head_is_aggregated(name):
    """A public implementation forgets it among the aggregated keys: it would stay as it began."""
    played = Played(name, rounds=1)
    found = played.method.result(played.states[-1]).tensors
    for key in HEAD:
        assert not np.array_equal(found[key], WEIGHTS[key])
    sent = [answer.bundles.get("delta") or answer.bundles["model"] for _, answer in played.worked]
    assert all(each.keys() >= HEAD for each in sent)


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
    most = local_training.training_task_spec(everything, {}, anchors=int(name == "fedsdg")).work.peak_bytes
    assert order.work.peak_bytes == most - 3 * tensors.total_bytes([backbone])


@pytest.mark.parametrize("name", ["fedrep", "ditto"])
def test_a_personal_method_on_adapters_sends_them_alone_and_leaves_the_backbone(name):
    played = Played(name, rank=2, lr=0.1)
    adapters = {f"{layer}.{leaf}" for layer in LAYERS for leaf in lora.SHARED}
    sent, kept = (adapters, HEAD) if name == "fedrep" else (adapters | HEAD, adapters | HEAD)
    for _, answer in played.worked:
        assert answer.bundles.keys() == {"model"}
        assert answer.bundles["model"].keys() == sent
        assert answer.local.keys() == kept
    found = played.method.result(played.states[-1])
    moved = {key for key in WEIGHTS if not np.array_equal(found.tensors[key], WEIGHTS[key])}
    assert found.tensors.keys() == WEIGHTS.keys()
    assert moved == {f"{layer}.weight" for layer in LAYERS} | (set() if name == "fedrep" else HEAD)
    assert found.meta.get("private", []) == (sorted(HEAD) if name == "fedrep" else [])


@pytest.mark.parametrize("name", ["fedrep", "ditto"])
def test_a_personal_method_on_adapters_is_evaluated_with_its_own_part(name):
    """What a device has kept counts: with another head or other adapters of its own it scores otherwise."""
    method, member = methods.load(name), image_members(1, 40)[0]
    state = method.init(bundle(), method.params(**QUICK, lr=0.1), 0)
    task, site = deliver_task(method, method.send(state, DeviceView(member.device, None)), member, ENGINE)
    local = method.work(task, site).local
    assert method.check(task, replace(site, local=local)).loss != method.check(task, site).loss


def test_ditto_on_adapters_without_pull_trains_its_own_as_fedlora_does():
    settings = {"optimizer": "sgd", "lr": 0.1, "clip": 0.0}
    ((_, mine),) = Played("ditto", 1, 1, pull=0.0, **settings).worked
    ((_, plain),) = Played("fedlora", 1, 1, **settings).worked
    for key, array in plain.bundles["model"].items():
        assert array.tobytes() == mine.local[key].tobytes() == mine.bundles["model"][key].tobytes()


def test_adapters_and_a_named_head_are_refused():
    method = methods.load("fedrep")
    with pytest.raises(JobError, match="head and rank"):
        method.init(bundle(), method.params(rank=2, head=("head",)), 0)


def test_a_private_head_stays_on_the_device():
    played = Played("fedsdg", rounds=1, head="private")
    for _, answer in played.worked:
        assert answer.bundles["delta"].keys().isdisjoint(HEAD)
        assert all(not np.array_equal(answer.local[key], WEIGHTS[key]) for key in HEAD)
    found = played.method.result(played.states[-1])
    assert set(found.meta["private"]) == HEAD | {f"{layer}.weight" for layer in LAYERS}, "its own branch is in these"
    assert all(np.array_equal(found.tensors[key], WEIGHTS[key]) for key in HEAD)


def test_gates_are_told_when_the_job_asks_for_it():
    for _, answer in Played("fedsdg", rounds=1, tell_gates=True).worked:
        gates = {name: m for name, m in answer.metrics.items() if name.startswith("gate.")}
        assert gates.keys() == {"gate.00", "gate.01"}
        assert all(0.4 < m < 0.6 and round(m, 2) == m for m in gates.values())


# -- what it is with its knobs at zero ------------------------------------------------------------


def test_with_all_gates_shut_it_is_fedlora():
    """m = 0, no penalties, the plain mean, devices with as many examples: the same shared part after two rounds."""
    shut = Played("fedsdg", gate=-100.0, sparsity=0.0, own_decay=0.0, aggregation="mean").states[-1]
    plain = Played("fedlora").states[-1]
    assert shut.model.keys() == plain.model.keys()
    for name, array in plain.model.items():
        np.testing.assert_allclose(shut.model[name], array, rtol=1e-4, atol=1e-6)


def test_the_result_is_the_model_with_all_gates_shut():
    """The job's plain network with the result's tensors has the loss of the adapted one at m = 0."""
    played = Played("fedsdg", rounds=2, lr=0.02)
    state = played.states[-1]
    found = played.method.result(state)
    task, site = asked(state)
    mine = {
        name: np.full_like(array, -100) if name.endswith("gate") else array
        for name, array in played.worked[-1][1].local.items()
    }
    whole = compute_metrics(ENGINE.evaluate(found.meta["network"], found.tensors, site.held))
    shut = compute_metrics(fedsdg.check(task, replace(site, local=mine)))
    assert shut["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert shut["accuracy"] == whole["accuracy"]


@pytest.mark.parametrize("preset", ["paper", "official"])
def test_who_has_never_trained_is_evaluated_with_all_gates_shut(preset):
    played = Played("fedsdg", rounds=2, lr=0.02, preset=preset)
    state = played.states[-1]
    found = played.method.result(state)
    told = [compute_metrics(fedsdg.check(*asked(state, None, device))) for device in (0, 1)]
    for device, each in enumerate(told):
        _, site = asked(state, None, device)
        whole = compute_metrics(ENGINE.evaluate(found.meta["network"], found.tensors, site.held))
        assert each["accuracy"] == whole["accuracy"]
        assert each["loss"] == pytest.approx(whole["loss"], rel=1e-5)


# -- on the device --------------------------------------------------------------------------------


def test_a_device_goes_on_with_its_own_branch_and_is_evaluated_with_it():
    worked = Played("fedsdg", rounds=2, devices=1).worked
    assert tensors.encode_tensors(worked[1][0].local) == tensors.encode_tensors(worked[0][1].local)
    state = began()
    grown = {name: array + 1 for name, array in worked[1][1].local.items()}
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
    kept = dict(Played("fedsdg", rounds=1, devices=1).worked[0][1].local)
    with pytest.raises(ModelError, match="dev-0 keeps a branch of another network, rank or choice of gates"):
        fedsdg.work(*asked(began(rank=3), kept))
