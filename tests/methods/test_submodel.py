"""Methods whose devices train as much of the network as their memory allows: identities, and who gets what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fedquilt import methods, tensors
from fedquilt.core import (
    Answer,
    Bundle,
    Contribution,
    DeviceView,
    Examples,
    JobError,
    Method,
    ModelError,
    Profile,
    UpdateError,
)
from fedquilt.layers import STATISTICS
from fedquilt.methods import depthfl, fedavg, fedepth, fedlps, fjord, ft_full, ft_part, heterofl
from fedquilt.models import partial
from fedquilt.models.partial import depth, masks
from fedquilt.testing.toys import MLP_MASKS, files, given, play, to_train
from fedquilt.tools.simulation import Member

torch = pytest.importorskip("torch")

NETWORK = {"name": "residual", "channels": 1, "classes": 3, "width": 4, "input": {"channels": 1, "size": 8}}
PLAIN = {"name": "cnn", "channels": 1, "size": 8, "classes": 3, "width": 4, "input": {"channels": 1, "size": 8}}
SMALL = {"epochs": 1, "batch": 4, "lr": 0.05}
ONES = (1.0,) * 5
MIXED = ("512MB", "2GB", "8GB")
BUDGETS = (512 * 10**6, 2 * 10**9, 8 * 10**9)
SUBMODELS = ("heterofl", "fjord", "fedlps", "depthfl", "fedepth")


@cache
def engine() -> Any:
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine

    return TorchEngine(1 << 40, base_bytes=0)


def bundle(network: dict[str, Any] | None = None) -> Bundle:
    """A network with its plan of masks, as `fedquilt prepare` writes it."""
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import trace

    table = network or NETWORK
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = registry.build(table)
    parts: dict[str, dict[str, np.ndarray]] = {
        "model": {key: value.numpy().copy() for key, value in module.state_dict().items()},
        "masks": {"json": masks.to_array(trace.plan(module))},
    }
    meta = {"network": table, "flops": 1e6, "example_bytes": 10**6}
    return Bundle(meta, files(parts), lambda name: parts[name])


def pictures(count: int = 3) -> list[Member]:
    found = []
    for i in range(count):
        draws = np.random.default_rng(i)
        x, y = draws.integers(0, 255, (12, 8, 8)).astype(np.uint8), draws.integers(0, 3, 12)
        found.append(Member(f"dev-{i}", Examples(x[4:], y[4:]), Examples(x[:4], y[:4])))
    return found


def profile(budget_bytes: int) -> Profile:
    return Profile(
        device="a", board="b", memory_bytes=2 * budget_bytes, budget_bytes=budget_bytes, engines=("torch",), versions={}
    )


def view(budget_bytes: int) -> DeviceView:
    return DeviceView("a", profile(budget_bytes))


def run(
    name: str,
    made: Bundle,
    rounds: int = 2,
    *,
    method: Method | None = None,
    budgets: Sequence[str] = ("512MB",),
    **params: Any,
) -> list[Any]:
    """The states of a run; devices have these budgets in turn."""
    return play(
        name,
        made,
        pictures(),
        {**SMALL, **params},
        engine=engine(),
        method=method,
        seed=5,
        rounds=rounds,
        fleet={"budgets": list(budgets)},
    )


@cache
def averaged() -> Any:
    return fedavg.METHOD.result(run("fedavg", bundle())[-1]).tensors


# -- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("heterofl", {"rates": ONES, "clip": 0.0}),
        ("heterofl", {"rates": ONES, "clip": 0.0, "masked": False}),
        ("fjord", {"rates": ONES}),
        ("fedlps", {"ratios": (0.0,) * 5, "encoder": 0.0}),
        ("depthfl", {"exits": 1}),
        ("fedepth", {"groups": (1,) * 5}),
        ("ft_full", {}),
    ],
)
def test_with_nothing_left_out_it_is_fedavg_bit_for_bit(name: str, params: dict[str, Any]) -> None:
    """Width 1, one exit, one group, nothing pruned, room for all: of a network with batch norm, in every tensor.

    Every device has examples of every class. Methods that gather batch normalisation's statistics at the end have
    others than FedAvg's means.
    """
    made, plain, method = bundle(), averaged(), methods.load(name)
    mine = method.result(run(name, made, **params)[-1]).tensors
    assert mine.keys() == plain.keys()
    for key, array in plain.items():
        if method.settle is None or not key.endswith(("running_mean", "running_var")):
            assert array.tobytes() == mine[key].tobytes(), key


@pytest.mark.parametrize("exits", [2, 3])
def test_depthfl_with_all_depths_equal_is_the_mean_of_everything(exits: int) -> None:
    """Every entry, the classifiers' too, counts every device's examples."""
    method, totals = methods.load("depthfl"), []

    def step(state: Any, total: Any) -> Any:
        totals.append(total)
        return method.step(state, total)

    double = replace(method, step=step)
    end = run("depthfl", bundle(), rounds=1, method=double, exits=exits, depths=(exits,) * 5)[-1]
    assert totals[0].weight.keys() == end.model.keys()
    assert all((weight == 24).all() for weight in totals[0].weight.values())
    assert sum(name.startswith("exit.") for name in end.model) == 2 * (exits - 1)


# -- who gets what --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUBMODELS)
def test_a_device_gets_and_sends_no_more_than_its_memory_tiers_part(name: str) -> None:
    """From 512 MB to 8 GB the part, its FLOPs and its memory grow; whoever has not told gets the smallest one."""
    method = methods.load(name)
    state = method.init(bundle(), method.params(**SMALL), 0)
    orders = [method.send(state, view(budget)) for budget in BUDGETS]
    assert all(order is not None for order in orders)
    peaks = [order.work.peak_bytes for order in orders if order]
    assert peaks == sorted(peaks)
    unknown = method.send(state, DeviceView("a", None))
    assert unknown is not None
    assert tensors.encode(unknown.bundles["model"]) == tensors.encode(orders[0].bundles["model"])  # type: ignore[union-attr,arg-type]
    sizes = [tensors.total_bytes([order.bundles["model"]]) for order in orders if order]  # type: ignore[list-item]
    if name == "fedepth":
        assert min(sizes) > 0  # all get all of the network, and their links
        assert peaks[0] < peaks[-1]
    else:
        assert sizes[0] < sizes[-1]
        assert orders[0].work.flops_per_example < orders[-1].work.flops_per_example  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SUBMODELS)
def test_a_mixed_fleet_goes_on_and_every_tensor_stays_finite(name: str) -> None:
    """Three tiers at once, three rounds; something is learned in each, and the result has the network's own tensors."""
    method, made = methods.load(name), bundle()
    found = run(name, made, rounds=3, budgets=MIXED)
    result = method.result(found[-1]).tensors
    assert {key for key in result if not key.startswith("exit.")} == made.load("model").keys()
    assert all(np.isfinite(array).all() for array in result.values())
    before = method.result(found[-2]).tensors
    assert any(not np.array_equal(result[key], before[key]) for key in result)


@pytest.mark.parametrize("name", ["heterofl", "fjord", "depthfl"])
def test_entries_that_nobody_sent_stay_as_they_were(name: str) -> None:
    """A fleet of the smallest tier alone leaves the rest of the network untouched, and moves its own part."""
    first, last = run(name, bundle(), rounds=2)[::2]
    at = depthfl.part(first, 1) if name == "depthfl" else heterofl.part(first, first.params["rates"][0])
    sent = partial.width.add(first.model, None, partial.width.cut(first.model, at), at, 1.0)
    for key, array in first.model.items():
        apart = name != "depthfl" and key.rpartition(".")[2] in STATISTICS  # a narrow part's are its own
        counted = (sent.weight.get(key, np.zeros(array.shape)) > 0) & (not apart)
        assert np.array_equal(array[~counted], last.model[key][~counted]), key
    moved = [key for key in at if not np.array_equal(first.model[key], last.model[key])]
    assert len(moved) > 3


@pytest.mark.parametrize("name", SUBMODELS)
def test_a_device_evaluates_its_own_part(name: str) -> None:
    """Each tier's part tells an accuracy over the held-out examples."""
    method = methods.load(name)
    state = method.init(bundle(), method.params(**SMALL), 0)
    for budget in BUDGETS:
        order, member = method.send(state, view(budget)), pictures(1)[0]
        assert order is not None
        assert method.check is not None
        task, site = given(method, order, member, engine())
        told = method.check(task, site)
        assert told["examples"] == 4
        assert 0 <= told["accuracy"] <= 1


@pytest.mark.parametrize("name", ["heterofl", "fjord", "fedlps"])
def test_without_a_plan_of_units_the_job_says_what_to_do(name: str) -> None:
    """A bundle that holds no masks."""
    whole = bundle()
    made = replace(whole, files={"model": whole.files["model"]})
    with pytest.raises(ModelError, match="fedquilt prepare"):
        methods.load(name).init(made, methods.load(name).params(), 0)


# -- HeteroFL, FjORD, FedLPS ----------------------------------------------------------------------


def folded(method: Method, state: Any, *sent: tuple[int, float, float, list[int]]) -> Any:
    """The state after devices of so many bytes have sent, by so much weight, their part full of a value, and have
    examples of these classes."""
    total = None
    for budget, weight, value, classes in sent:
        order = method.send(state, view(budget))
        model = {key: np.full_like(array, value) for key, array in order.bundles["model"].items()}  # type: ignore[union-attr]
        held = {"held": np.isin(np.arange(3), classes).astype(np.uint8)}
        total = method.fold(state, total, Contribution("a", 0, weight, {}, {"model": model, "classes": held}))
    return method.step(state, total)


@pytest.mark.parametrize("name", ["heterofl", "fjord"])
def test_each_width_has_statistics_of_its_own(name: str) -> None:
    """Rates 0.5 and 1, full of ones and of fives: each width is sent its own mean and variance again, while the
    leading channels' weights are the mean of both; a width that nobody has had has the first ones."""
    method = methods.load(name)
    state = method.init(bundle(), method.params(rates=(0.25, 0.25, 0.5, 0.5, 1.0)), 0)
    everything = [0, 1, 2]
    after = folded(method, state, (2 * 10**9, 1.0, 1.0, everything), (8 * 10**9, 1.0, 5.0, everything))
    parts = {size: method.send(after, view(size * 10**9)).bundles["model"] for size in (1, 2, 8)}  # type: ignore[union-attr]
    assert parts[2]["0.1.running_var"].tolist() == [1, 1]
    assert parts[8]["0.1.running_var"].tolist() == [5, 5, 5, 5]
    assert parts[1]["0.1.running_mean"].tolist() == [0]
    assert parts[2]["0.1.weight"].tolist() == [3, 3]
    assert parts[8]["0.1.weight"].tolist() == [3, 3, 5, 5]
    assert method.result(after).tensors["0.1.running_mean"].tolist() == [5, 5, 5, 5]


def test_the_fewer_steps_at_the_largest_width_count_the_more_in_its_statistics() -> None:
    """Two widths by turns: a step at the larger moves the mean by 1 - 0.9^2 of the way, where all would by 0.1 each."""
    from fedquilt.models.networks import registry

    plan = masks.from_array(bundle().load("masks")["json"])
    ordered = fjord.Ordered(plan, 1.0, (0.5, 1.0), np.random.default_rng(0))
    module, momenta = ordered.gate(registry.build(NETWORK)), []
    for width in (1.0, 0.5):
        ordered.width = width
        module(torch.rand(2, 1, 8, 8))
        momenta.append({each.momentum for each in module.modules() if hasattr(each, "running_mean")})
    assert momenta == [{1 - 0.9**2}, {0.0}]


def test_rates_that_cut_as_much_share_their_statistics() -> None:
    """Of four, eight and sixteen channels 0.0625 and 0.05 leave one each, and 0.99 all: it is the whole network."""
    rates = [0.05, 0.0625, 0.5, 0.99]
    assert [heterofl.width([4, 8, 16], rates, rate) for rate in rates] == [0.0625, 0.0625, 0.5, 1.0]


def test_rows_of_a_class_are_averaged_over_devices_that_have_it() -> None:
    """Class 0 at both devices, class 1 at the second, class 2 at none, by weights 3 and 1; all else is of both."""
    method = methods.load("heterofl")
    state = method.init(to_train(), method.params(), 0)
    first, second = (8 * 10**9, 3.0, 1.0, [0]), (8 * 10**9, 1.0, 5.0, [0, 1])
    after = folded(method, state, first, second)
    assert after.model["3.bias"].tolist() == [2, 5, state.model["3.bias"][2]]
    assert np.array_equal(after.model["3.weight"][2], state.model["3.weight"][2])
    assert after.model["1.bias"].tolist() == [2] * 5
    plain = method.init(to_train(), method.params(masked=False), 0)
    assert folded(method, plain, first, second).model["3.bias"].tolist() == [2, 2, 2]


def test_a_class_that_a_device_has_not_is_out_of_its_loss() -> None:
    """Examples of classes 0 and 2: the row of class 1 does not move, in a task that does not mask it does."""
    method, x = methods.load("heterofl"), np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    member = Member("a", Examples(x, np.array([0, 2] * 4)), Examples(x, np.array([0, 2] * 4)))
    moved = []
    for masked in (True, False):
        state = method.init(to_train(), method.params(masked=masked, batch=4), 0)
        order = method.send(state, view(8 * 10**9))
        assert order is not None
        task, site = given(method, order, member, engine())
        answer = method.work(task, site)
        assert ("classes" in answer.bundles) == masked
        assert not masked or answer.bundles["classes"]["held"].tolist() == [1, 0, 1]
        moved.append(not np.array_equal(answer.bundles["model"]["3.weight"][1], state.model["3.weight"][1]))
    assert moved == [False, True]


def test_a_device_that_does_not_say_its_classes_is_refused_and_so_is_a_network_without_any() -> None:
    """No bundle, another number of them; a network that ends in a convolution has no rows to average."""
    method = methods.load("heterofl")
    state = method.init(to_train(), method.params(), 0)
    for bundles in ({}, {"classes": {"held": np.ones(2, np.uint8)}}):
        with pytest.raises(UpdateError):
            method.fold(state, None, Contribution("a", 0, 1.0, {}, {"model": state.model, **bundles}))
    plan = masks.Plan({"0": 2}, {}, {"0.weight": masks.Follow((2, 1, 3, 3), ("0",))})
    parts = {"model": {"0.weight": np.zeros((2, 1, 3, 3), np.float32)}, "masks": {"json": masks.to_array(plan)}}
    made = Bundle({"network": {}}, files(parts), lambda name: parts[name])
    assert method.init(made, method.params(masked=False), 0).widths.keys() == {"0.0625", "0.125", "0.25", "0.5"}
    with pytest.raises(ModelError, match="masked = false"):
        method.init(made, method.params(), 0)


def test_a_step_at_a_smaller_width_leaves_the_statistics_alone() -> None:
    """FjORD's draws at 0.5 alone: batch norm's mean and variance are as received; at 1 they move."""
    from fedquilt.core import Fit, Hooks, Step

    made, examples = bundle(), pictures(1)[0].train
    plan, model, moved = masks.from_array(made.load("masks")["json"]), made.load("model"), []
    for width in (0.5, 1.0):
        ordered = fjord.Ordered(plan, 1.0, (width,), np.random.default_rng(0))
        hooks = Hooks(prepare=ordered.gate, steps=(Step(begin=ordered.begin),))
        after, _ = engine().train(NETWORK, model, examples, Fit(batch=4), np.random.default_rng(0), hooks=hooks)
        names = [key for key in model if key.rpartition(".")[2] in ("running_mean", "running_var")]
        moved.append(sum(not np.array_equal(after[key], model[key]) for key in names) / len(names))
    assert moved == [0, 1]


def test_heterofl_counts_an_entry_by_who_has_it() -> None:
    """Toy network of five neurons, rates 0.2 and 1 with 3 and 1 examples: the first neuron's mean is of both."""
    method = methods.load("heterofl")
    state = method.init(to_train(), method.params(rates=(0.2, 0.2, 1.0, 1.0, 1.0)), 0)
    after = folded(method, state, (10**9, 3.0, 1.0, [0, 1, 2]), (8 * 10**9, 1.0, 5.0, [0, 1, 2]))
    assert after.model["1.bias"].tolist() == [2, 5, 5, 5, 5]


def test_ordered_dropout_hides_what_is_beyond_the_width_and_moves_none_of_it() -> None:
    """A step at width 0.4 of five neurons: rows and columns of the last three stay, those of the first two move."""
    from fedquilt.core import Fit, Hooks, Step

    model = to_train().load("model")
    ordered = fjord.Ordered(MLP_MASKS, 1.0, (0.4,), np.random.default_rng(0))
    assert ordered.marks(("1",), 1).tolist() == [1, 1, 1, 1, 1]
    draws = np.random.default_rng(0)
    examples = Examples(draws.normal(size=(8, 6)).astype(np.float32), draws.integers(0, 3, 8))
    network = {"name": "mlp", "inputs": 6, "hidden": [5], "classes": 3}
    hooks = Hooks(prepare=ordered.gate, steps=(Step(begin=ordered.begin),))
    after, _ = engine().train(network, model, examples, Fit(batch=8), draws, hooks=hooks)
    assert ordered.marks(("1",), 2).tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    for key, (rows, columns) in {"1.weight": (2, 6), "1.bias": (2, 0), "3.weight": (3, 2)}.items():
        still = np.ones(model[key].shape, bool)
        still[(slice(rows), slice(columns)) if columns else slice(rows)] = False
        assert np.array_equal(after[key][still], model[key][still]), key
    assert not np.array_equal(after["3.weight"][:, :2], model["3.weight"][:, :2])


def test_fjord_draws_every_width_up_to_the_devices_own() -> None:
    """Of five widths the third is the most: three are drawn, about as often each."""
    ordered = fjord.Ordered(MLP_MASKS, 0.6, (0.2, 0.4, 0.6), np.random.default_rng(0))
    drawn = []
    for _ in range(300):
        ordered.begin(None)
        drawn.append(ordered.width)
    assert sorted(set(drawn)) == [0.2, 0.4, 0.6]
    assert min(drawn.count(width) for width in set(drawn)) > 70


def test_fedlps_holds_its_encoder_still_and_sends_only_the_predictor() -> None:
    """Encoder and its statistics stay in every bit over three rounds; the sent names are all others."""
    method, answers = methods.load("fedlps"), []

    def work(task: Any, site: Any) -> Answer:
        answers.append(method.work(task, site))
        return answers[-1]

    found = run("fedlps", bundle(), rounds=3, method=replace(method, work=work), budgets=MIXED)
    held = fedlps.still(found[0])
    assert any(name.endswith("running_mean") for name in held)
    for name in held:
        assert np.array_equal(found[0].model[name], found[-1].model[name])
    trained = [answer.bundles["model"] for answer in answers if "model" in answer.bundles]  # else it told statistics
    assert trained
    assert all(model.keys() == found[0].model.keys() - held for model in trained)


def test_fedlps_prunes_the_predictor_alone_and_the_same_channels_in_every_round() -> None:
    """What makes the encoder's channels stays whole in the narrowest part, and so do the choices after training."""
    method = methods.load("fedlps")
    found = run("fedlps", bundle(), rounds=2, budgets=MIXED)
    first, last = found[0], found[-1]
    held = fedlps.still(first)
    narrow = method.send(last, view(512 * 10**6)).bundles["model"]  # type: ignore[union-attr]
    assert all(narrow[name].shape == first.model[name].shape for name in held)  # type: ignore[index,union-attr]
    smaller = [name for name in first.model if narrow[name].shape != first.model[name].shape]  # type: ignore[index,union-attr]
    assert len(smaller) > 3
    for left, groups in first.kept.items():
        assert all(np.array_equal(units, last.kept[left][group]) for group, units in groups.items())


def test_fedlps_refuses_an_encoder_of_random_weights() -> None:
    """The bundle says that they are; with encoder = 0 nothing is held still."""
    method, made = methods.load("fedlps"), bundle()
    random = replace(made, meta={**made.meta, "pretrained": False})
    with pytest.raises(JobError, match="encoder = 0"):
        method.init(random, method.params(), 0)
    assert method.init(random, method.params(encoder=0.0), 0).encoder == ()


# -- DepthFL and FeDepth --------------------------------------------------------------------------


def test_depthfls_loss_is_every_exits_cross_entropy_and_what_they_are_apart() -> None:
    """The engine's cross entropy of the training scores plus the penalty, in value and in gradients.

    An exit learns from each other exit's distribution, which is held still: KL(p_j || p_i), as the public
    implementation has it. The divergence is not symmetric, so the other direction gives other figures.
    """
    F = torch.nn.functional
    drawn = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    y = torch.tensor([0, 2, 1, 1])

    def losses(scores: list[Any]) -> tuple[Any, Any]:
        exits = depthfl.Exits((), 3, True, strength=0.5)
        exits.scores = scores
        said = torch.stack([F.log_softmax(each, 1) for each in scores]).sum(0)
        wanted = sum(F.cross_entropy(each, y) for each in scores)
        for i in range(3):
            for j in range(3):
                if i != j:
                    still = F.softmax(scores[j].detach(), 1)
                    wanted = wanted + 0.5 / 2 * F.kl_div(F.log_softmax(scores[i], 1), still, reduction="batchmean")
        return F.cross_entropy(said, y) + exits.penalty(None, None, said, {}), wanted

    gradients = []
    for which in (0, 1):
        scores = [each.clone().requires_grad_() for each in drawn]
        both = losses(scores)
        assert torch.allclose(*both, atol=1e-5)
        both[which].backward()
        gradients.append(torch.stack([each.grad for each in scores]))
    assert torch.allclose(*gradients, atol=1e-6)


def test_depthfls_result_says_the_mean_of_all_exits() -> None:
    """The network "exits", built from its table and the tensors alone, scores as a device with every stage does."""
    from fedquilt.models.networks import registry

    method, member = methods.load("depthfl"), pictures(1)[0]
    state = run("depthfl", bundle(), budgets=MIXED)[-1]
    found, order = method.result(state), method.send(state, view(8 * 10**9))
    assert order is not None
    assert method.check is not None
    task, site = given(method, order, member, engine())
    network = found.meta["network"]
    assert engine().evaluate(network, found.tensors, member.held) == method.check(task, site)
    assert registry.input_shape(network) == (1, 8, 8)
    module = registry.build(network).eval()
    module.load_state_dict({key: torch.tensor(value) for key, value in found.tensors.items()})
    x, said = torch.rand(2, 1, 8, 8), []
    for layer in [*module.exit, module.get_submodule(depth.body(depthfl.network(state), 4).head)]:
        layer.register_forward_hook(lambda layer, inputs, output: said.append(output))
    assert torch.allclose(module(x), torch.stack(said).mean(dim=0))
    assert len(said) == 4


def test_depthfls_mutual_term_grows_to_one() -> None:
    """c(0) = exp(-5), c(ramp) = 1 and stays."""
    method = methods.load("depthfl")
    order = method.send(method.init(bundle(), method.params(ramp=10), 0), DeviceView("a", None))
    assert order is not None
    found = []
    for number in (0, 10, 99):
        task, _ = given(method, order, pictures(1)[0], engine(), number=number)
        found.append(depthfl.exits_of(task).strength)
    assert found == pytest.approx([np.exp(-5), 1, 1])


def test_fedepths_groups_are_every_stage_once_and_only_its_own_moves() -> None:
    """Three groups: a device trains the whole network, each group once; the largest group's memory counts."""
    method, trained = methods.load("fedepth"), []
    state = method.init(bundle(), method.params(**SMALL), 0)
    body = depth.body(fedepth.network(state), 6)
    found = fedepth.groups(body, 3)
    assert sorted(name for group in found for name in group.names) == sorted(
        name for stage in body.stages for name in stage.names
    )

    class Watch:
        def train(self, network: Any, start: Any, *rest: Any, **options: Any) -> Any:
            after, told = engine().train(network, start, *rest, **options)
            trained.append({name for name in start if not np.array_equal(start[name], after[name])})
            return after, told

    order, member = method.send(state, view(2 * 10**9)), pictures(1)[0]
    assert order is not None
    assert len(order.params["groups"]) == 3
    task, site = given(method, order, member, Watch())
    answer = method.work(task, site)
    assert len(trained) == 3
    for group, moved in zip(found, trained, strict=True):
        own = {name for name in moved if not name.startswith(("link.", body.head))}
        assert own <= set(group.names)
        assert f"{body.head}.weight" in moved
    assert answer.metrics["steps"] == 6  # two mini-batches of four, in three groups
    assert answer.bundles["model"].keys() == order.bundles["model"].keys()


# -- FT-Full and FT-Part --------------------------------------------------------------------------


def test_ft_full_leaves_out_who_has_no_room_and_ft_part_less() -> None:
    """At 0.4 GB a mini-batch for the whole network does not fit, one for the head does; nothing said: asked.

    With `at_once = 1` neither holds more than one example, but for batch norm that is trained: it takes all of them.
    """
    made = bundle()
    made = replace(made, meta={**made.meta, "example_bytes": 10**7})
    asked = {}
    for name in ("ft_full", "ft_part"):
        method = methods.load(name)
        state = method.init(made, method.params(batch=20), 0)
        asked[name] = [method.send(state, view(budget)) is not None for budget in (10**8, 4 * 10**8, 10**9)]
        assert method.send(state, DeviceView("a", None)) is not None
        alone = method.init(made, method.params(batch=20, at_once=1), 0)
        assert (method.send(alone, view(4 * 10**8)) is not None) == (name == "ft_part")
    assert asked == {"ft_full": [False, False, True], "ft_part": [False, True, True]}


def test_ft_part_moves_the_last_layers_alone() -> None:
    """One layer, then two: all else stays in every bit, statistics of frozen normalisations too."""
    for count in (1, 2):
        found = run("ft_part", bundle(), layers=count)
        first, last = found[0], found[-1]
        result = ft_part.METHOD.result(last).tensors
        assert sorted({name.rpartition(".")[0] for name in first.model})[-1] == depth.body(result, 1).head
        assert all(np.array_equal(first.own[name], result[name]) for name in first.own)
        assert all(
            not np.array_equal(first.model[name], last.model[name]) for name in first.model if "num_" not in name
        )
        assert len(first.model) == (
            2 if count == 1 else 8
        )  # the head's; with a convolution's and its normalisation's five


def test_a_params_table_of_the_wrong_length_is_refused_at_the_job() -> None:
    """Five tiers want five values."""
    import msgspec

    bad: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (heterofl.Params, {"rates": [1.0]}),
        (fedepth.Params, {"groups": [1, 2, 3, 4, 0]}),
        (ft_full.Params, {"at_once": 0}),
    ]
    for kind, table in bad:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(table, kind)  # type: ignore[arg-type]
