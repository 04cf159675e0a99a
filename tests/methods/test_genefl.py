"""GENE-FL: its steps by hand, its identities, and a device that turns up in the middle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_tasks import deliver_task

from fedquilt import methods
from fedquilt.arrays import exact_sums
from fedquilt.core import ClientContext, ClientResult, DeviceUpdate, DeviceView, Examples, Task, UpdateError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.methods import genefl
from fedquilt.models import learngene
from fedquilt.testing.toy_networks import point_devices, toy_bundle, with_loaded_tensors
from fedquilt.testing.toy_networks import run_method as run_of
from fedquilt.tools.simulation import DeviceData

AMPLE = 1 << 40
ENGINE = NumpyEngine(AMPLE, base_bytes=0)
DEEP = {"name": "mlp", "inputs": 6, "hidden": [5, 4], "classes": 3}


def bundle() -> Any:
    from fedquilt.edge_agent.engines import numpy_engine

    return toy_bundle(DEEP, numpy_engine.init_tensors(DEEP, 0))


def play(devices: list[DeviceData] | None = None, rounds: int = 4, **params: Any) -> tuple[list[Any], list[Any]]:
    """The states, and what each task had and gave: (task, site, answer)."""
    worked = []

    def work(task: Task, site: ClientContext) -> ClientResult:
        answer = genefl.METHOD.work(task, site)
        worked.append((task, with_loaded_tensors(task, site), answer))
        return answer

    wanted = {"batch": 8, "lr": 0.1, **params}
    double = replace(genefl.METHOD, work=work)
    members = devices or point_devices(4, 24)
    run = run_of("genefl", bundle(), members, wanted, engine=ENGINE, method=double, seed=1, rounds=rounds)
    return run, worked


def trained(worked: list[Any], device: str) -> list[Any]:
    """A device's tasks but for its fingerprint."""
    return [each for each in worked if each[1].device == device and each[0].params["ask"] == "train"]


def test_the_first_round_asks_for_fingerprints_and_nothing_else():
    run, worked = play(rounds=1)
    assert all(answer.bundles.keys() == {"fingerprint"} for _, _, answer in worked)
    assert all(answer.bundles["fingerprint"]["u"].shape == (6, 5) for _, _, answer in worked)
    assert run[1].phase == "collaborate"
    assert sorted(run[1].assigned) == ["dev-0", "dev-1", "dev-2", "dev-3"]
    assert sum(run[1].members) == 4


def test_the_head_stays_and_layers_become_fewer():
    run, worked = play(rounds=4, shrink_every=1, tolerance=1.0)
    assert run[0].shared == ("1", "3")
    assert [state.size for state in run] == [2, 2, 1, 1, 1]
    for _, _, answer in trained(worked, "dev-0"):
        assert not any(name.startswith("5.") for name in answer.bundles["gene"])
    assert len(trained(worked, "dev-0")[-1][2].bundles["gene"]) == 2
    assert play(rounds=1, share_head=True)[0][0].shared == ("1", "3", "5")


def test_accuracy_that_falls_holds_the_schedule():
    state = replace(play(rounds=1)[0][1], best=0.8, waited=4, recent=(0.7, 0.7, 0.7, 0.7))
    fell = genefl._shrink_gene_if_accurate(
        state,
        genefl.GeneFLSums({}, {}, {"0": {"1": 1}}, exact_sums.ExactScalar((7.0,)), exact_sums.ExactScalar((10.0,))),
    )
    assert (fell.size, fell.best, fell.waited, fell.recent) == (2, 0.8, 0, ())
    told = genefl.GeneFLSums({}, {}, {"0": {"1": 1}}, exact_sums.ExactScalar((8.0,)), exact_sums.ExactScalar((10.0,)))
    rose = genefl._shrink_gene_if_accurate(replace(state, recent=(0.8, 0.8, 0.8, 0.8)), told)
    assert (rose.size, rose.best) == (1, pytest.approx(0.8))
    silent = genefl._shrink_gene_if_accurate(replace(state, recent=()), genefl.GeneFLSums({}, {}, {"0": {"1": 1}}))
    assert silent.size == 1, "nobody has held-out examples: time alone counts"


def test_the_least_turned_layers_are_chosen_weighed_by_their_size():
    """Three layers by hand: 1 - cos of 0, 1 and 1, of 2, 2 and 8 values."""
    parts = {"a": ("a.w",), "b": ("b.w",), "c": ("c.w",)}
    before = {"a.w": np.array([1.0, 0]), "b.w": np.array([1.0, 0]), "c.w": np.array([1.0, 0] * 4)}
    after = {"a.w": np.array([2.0, 0]), "b.w": np.array([0, 3.0]), "c.w": np.array([0, 1.0] * 4)}

    def chosen(count, order, norm):
        return learngene.choose_learngene_layers(parts, after, before, count=count, selection=order, norm=norm)

    assert chosen(2, "lowest", "mul") == ["a", "b"]
    assert chosen(2, "lowest", "div_sqrt") == ["a", "c"]
    assert chosen(1, "highest", "mul") == ["c"]
    assert chosen(1, "highest", "div_sqrt") == ["b"]
    assert chosen(2, "highest", "none") == ["b", "c"]


def test_both_penalties_are_one_pull_to_one_aim():
    """grad = 2 lambda1 a (v - Theta) + 2 lambda2 (v - el), against the two terms apart."""
    task = play(rounds=2, smooth=0.3, elastic=0.2)[1][-1][0]
    before, theta, elastic = ({"w": np.array([value], np.float32)} for value in (1.0, 5.0, 3.0))
    hooks = learngene.penalty_hooks(task.params["smooth"], task.params["elastic"], before, theta, elastic, {"w": 0.5})
    at = {key: anchor["w"] for key, anchor in hooks.anchors.items()}
    value = np.array([2.0], np.float32)
    found = hooks.correct_gradient(np.array([1.0], np.float32), value, at)
    np.testing.assert_allclose(found, 1 + 2 * 0.3 * 0.5 * (2 - 5) + 2 * 0.2 * (2 - 3), rtol=1e-6)
    free = learngene.penalty_hooks(task.params["smooth"], task.params["elastic"], before, theta, elastic, {})
    assert free.correct_gradient is None


def test_fisher_values_are_scaled_for_each_tensor():
    np.testing.assert_allclose(learngene.scale_fisher(np.array([2.0, 4.0, 3.0])), [0, 1, 0.5])
    np.testing.assert_array_equal(learngene.scale_fisher(np.full(3, 7.0)), np.zeros(3))


def test_strengths_follow_the_size_of_a_layer():
    """N_l / max N with weight and bias together."""
    model = {"a.w": np.zeros(6), "a.b": np.zeros(2), "b.w": np.zeros(4)}
    parts = {"a": ("a.b", "a.w"), "b": ("b.w",)}
    assert learngene.layer_strengths("size", parts, model) == {"a.w": 1.0, "a.b": 1.0, "b.w": 0.5}
    assert learngene.layer_strengths("sqrt", parts, model)["b.w"] == 0.5
    assert learngene.layer_strengths("one", parts, model)["b.w"] == 1.0


def one_cluster(size: int = 1) -> Any:
    """A state with two devices in cluster 0 and one in cluster 1."""
    state = play(rounds=1)[0][1]
    return replace(
        state,
        assigned={"a": 0, "b": 0, "c": 1},
        clusters=({}, {}),
        genes=((), ()),
        members=(2, 1),
        centres=(np.zeros((6, 5), np.float32), np.ones((6, 5), np.float32)),
        size=size,
    )


def gave(state: Any, device: str, layer: str, value: float) -> DeviceUpdate:
    part = {name: np.full_like(array, value) for name, array in state.initial_layers[layer].items()}
    return DeviceUpdate(device, 3, 10.0, {"held_correct": 5.0, "held_examples": 10.0}, {"gene": part})


def test_a_layer_is_the_mean_of_those_of_the_cluster_who_sent_it():
    state, total = one_cluster(), None
    for device, layer, value in (("a", "1", 1.0), ("b", "1", 3.0), ("c", "3", 7.0)):
        total = genefl.fold(state, total, gave(state, device, layer, value))
    after = genefl.step(state, total)
    assert (after.clusters[0]["1"]["1.weight"] == 2.0).all()
    assert after.clusters[0].keys() == {"1"}
    assert (after.clusters[1]["3"]["3.bias"] == 7.0).all()
    assert after.genes == (("1",), ("3",))
    again = genefl.step(after, genefl.fold(after, None, gave(after, "a", "3", 9.0)))
    assert (again.clusters[0]["1"]["1.weight"] == 2.0).all()
    assert (again.clusters[0]["3"]["3.weight"] == 9.0).all()
    assert again.genes[0] == ("3",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda state: {"gene": {**state.initial_layers["1"], **state.initial_layers["3"]}},
            "sent 2 layers instead of 1",
        ),
        (lambda state: {"gene": state.initial_layers["5"]}, "sent 0 layers"),
        (lambda state: {"gene": {"1.weight": state.initial_layers["1"]["1.weight"]}}, "names differ"),
        (lambda state: {"fingerprint": {"u": np.zeros((6, 5), np.float32)}}, "sent 0 layers"),
    ],
)
def test_what_is_no_learngene_of_the_size_wanted_is_refused(change, said):
    state = one_cluster()
    with pytest.raises(UpdateError, match=said):
        genefl.fold(state, None, DeviceUpdate("a", 3, 1.0, {}, change(state)))


@pytest.mark.parametrize(
    ("u", "said"),
    [
        (np.eye(6, 5, dtype=np.float32) * 3, "not of length 1"),
        (np.eye(6, 4, dtype=np.float32), "fingerprint of 5"),
        (np.eye(7, 5, dtype=np.float32), "of 7 values"),
        (np.full((6, 5), np.nan, np.float32), "not finite"),
    ],
)
def test_what_is_no_fingerprint_is_refused(u, said):
    """Long vectors would move a cluster's centre as far as a device likes."""
    with pytest.raises(UpdateError, match=said):
        genefl.fold(one_cluster(), None, DeviceUpdate("new", 3, 1.0, {}, {"fingerprint": {"u": u}}))


def test_accuracy_is_that_of_all_held_out_examples():
    state, total = one_cluster(), None
    for device, correct, held in (("a", 9.0, 10.0), ("b", 10.0, 90.0)):
        told = {"held_correct": correct, "held_examples": held}
        total = genefl.fold(state, total, replace(gave(state, device, "1", 1.0), metrics=told))
    silent = genefl.fold(state, total, replace(gave(state, "c", "1", 1.0), metrics={}))
    assert genefl.step(state, silent).recent == (0.19,)


@pytest.mark.parametrize(("correct", "held"), [(7.0, 1.0), (-1.0, 5.0), (1.0, float("inf")), (float("nan"), 5.0)])
def test_an_accuracy_that_is_none_is_refused(correct, held):
    state, told = one_cluster(), {"held_correct": correct, "held_examples": held}
    with pytest.raises(UpdateError, match=f"{correct:g} of {held:g} held-out examples"):
        genefl.fold(state, None, replace(gave(state, "a", "1", 1.0), metrics=told))


def ask(
    state: Any, member: DeviceData, rounds: tuple[int, ...], local: Any = None
) -> tuple[Task, ClientContext, ClientResult]:
    """One device's task, as it gets it, and what it answers."""
    order = genefl.METHOD.send(state, DeviceView(member.device, None, rounds))
    task, site = deliver_task(genefl.METHOD, order, member, ENGINE, number=len(rounds), seed=1, local=local)
    return task, site, genefl.METHOD.work(task, site)


def take(state: Any, member: DeviceData, number: int, answer: ClientResult) -> Any:
    """The state after a round of this device alone."""
    update = DeviceUpdate(member.device, number, answer.weight, answer.metrics, answer.bundles)
    return genefl.METHOD.step(state, genefl.METHOD.aggregation.fold(state, None, update))


def test_a_device_that_turns_up_in_the_middle_inherits_the_nearest_cluster_s_learngene():
    run, _ = play(rounds=4, clusters=2, first_layers=1)
    newcomer = DeviceData("late", *(vars(point_devices(4, 24)[2])[key] for key in ("train", "held_out")))
    state = run[-1]
    _, _, answer = ask(state, newcomer, ())
    assert answer.bundles.keys() == {"fingerprint"}
    state = take(state, newcomer, 4, answer)
    cluster = state.assigned["late"]
    assert cluster == state.assigned["dev-2"], "it has the same examples as dev-2"
    assert sum(state.members) == 5
    task, site, answer = ask(state, newcomer, (4,))
    (gene,) = state.genes[cluster]
    assert task.params["bound"] == [], "it is held by nothing in its first round"
    for layer in state.initial_layers:
        wanted = state.clusters[cluster][layer] if layer == gene else state.initial_layers[layer]
        for name, array in site.load(f"layer.{layer}").items():
            np.testing.assert_array_equal(array, wanted[name])
    state = take(state, newcomer, 5, answer)
    task, _, _ = ask(state, newcomer, (4, 5), answer.private_state)
    assert gene in task.params["bound"], "from now on it is one of them"


def test_fingerprints_can_be_gathered_for_several_rounds():
    cohort, params = {"size": 2}, {"gather": 3}
    run = run_of("genefl", bundle(), point_devices(4), params, engine=ENGINE, seed=1, rounds=3, cohort=cohort)
    assert [state.phase for state in run[:3]] == ["fingerprint"] * 3
    known = run[2].fingerprints
    assert genefl.METHOD.send(run[2], DeviceView(next(iter(known)), None, (0,))) is None


def test_a_device_evaluates_its_own_model_and_nothing_before_it_has_one():
    run, worked = play(rounds=3)
    site = worked[0][1]
    assert genefl.check(worked[0][0], site).examples == 0
    task, site, answer = trained(worked, "dev-1")[-1]
    found = compute_metrics(genefl.check(task, replace(site, private_state=answer.private_state)))
    assert found["accuracy"] == answer.metrics["held_correct"] / answer.metrics["held_examples"]
    assert answer.metrics["held_examples"] == len(site.held_out)
    assert genefl.explain(run[-1])[0].endswith("2 of 2 layers are sent")


def test_private_state_of_another_network_is_refused():
    run, _ = play(rounds=1)
    with pytest.raises(UpdateError, match="names differ"):
        ask(run[-1], point_devices(4, 24)[0], (0,), {"x": np.zeros(2)})


def test_without_held_out_examples_nobody_tells_an_accuracy():
    alone = [DeviceData(m.device, m.train, Examples(m.held_out.x[:0], m.held_out.y[:0])) for m in point_devices(3)]
    run, worked = play(alone, rounds=3, shrink_every=1)
    assert all("held_examples" not in answer.metrics for _, _, answer in worked)
    assert run[-1].size == 1


def test_the_result_holds_every_cluster_s_layers():
    state = play(rounds=4, clusters=2)[0][-1]
    found = genefl.result(state)
    assert found.kind == "genes"
    assert {name.partition("/")[0] for name in found.tensors} == set(found.meta["genes"])
    assert methods.load("genefl").result is genefl.result
