"""Methods whose devices train as much of the network as their memory allows, by width and by depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from plain import budgeted
from toy_tasks import deliver_task

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import Bundle, DeviceUpdate, DeviceView, Examples, JobError, Method, ModelError, UpdateError
from fedquilt.core.evaluation import compute_metrics
from fedquilt.edge_agent.engines.training import network_inputs
from fedquilt.formats.tensor_register import register_from_kinds
from fedquilt.methods import depthfl, fedavg, fedepth, fedlps, fjord, ft_full, ft_part, heterofl
from fedquilt.models import partial
from fedquilt.models.networks import stages
from fedquilt.models.partial import masks
from fedquilt.testing.toy_networks import MLP_MASKS, bundle_files, register_entry, run_method, toy_bundle
from fedquilt.tools.simulation import DeviceData

torch = pytest.importorskip("torch")


NETWORK = {"name": "residual", "channels": 1, "classes": 3, "width": 4, "input": {"channels": 1, "size": 8}}
SMALL = {"epochs": 1, "batch": 4, "lr": 0.05}
MIXED = ("512MB", "2GB", "8GB")


@cache
def engine() -> Any:
    from fedquilt.edge_agent.engines.torch.engine import TorchEngine

    return TorchEngine(1 << 40, base_bytes=0)


def bundle(network: dict[str, Any] | None = None) -> Bundle:
    """A network with its plan of masks, as `fedquilt prepare` writes it."""
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import dependency_trace

    table = network or NETWORK
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = registry.build_network(table)
    parts: dict[str, dict[str, np.ndarray]] = {
        "model": {key: value.numpy().copy() for key, value in module.state_dict().items()},
        "masks": {"json": masks.plan_to_array(dependency_trace.trace_mask_plan(module))},
    }
    meta = {"network": table, "flops": 1e6, "example_bytes": 10**6, **register_entry(table)}
    return Bundle(meta, bundle_files(parts), lambda name: parts[name])


def pictures(count: int = 3) -> list[DeviceData]:
    found = []
    for i in range(count):
        draws = np.random.default_rng(i)
        x, y = draws.integers(0, 255, (12, 8, 8)).astype(np.uint8), draws.integers(0, 3, 12)
        found.append(DeviceData(f"dev-{i}", Examples(x[4:], y[4:]), Examples(x[:4], y[:4])))
    return found


def view(budget_bytes: int) -> DeviceView:
    return DeviceView("a", budgeted(budget_bytes))


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
    return run_method(
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


ONES = (1.0,) * 5
BUDGETS = (512 * 10**6, 2 * 10**9, 8 * 10**9)
SUBMODELS = ("heterofl", "fjord", "fedlps", "depthfl", "fedepth")


@cache
def averaged() -> Any:
    return fedavg.METHOD.result(run("fedavg", bundle())[-1]).tensors


# -- identities -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("heterofl", {"rates": ONES, "clip": 0.0}),
        ("fjord", {"rates": ONES}),
        ("fedlps", {"ratios": (0.0,) * 5, "encoder": 0.0}),
        ("depthfl", {"exits": 1}),
        ("fedepth", {"groups": (1,) * 5}),
        ("ft_full", {}),
    ],
)
def test_with_nothing_left_out_it_is_fedavg_bit_for_bit(name, params):
    """Width 1, one exit, one group, nothing pruned. Batch norm's statistics from a method's end are not FedAvg's."""
    made, plain, method = bundle(), averaged(), methods.load(name)
    mine = method.result(run(name, made, **params)[-1]).tensors
    assert mine.keys() == plain.keys()
    for key, array in plain.items():
        if method.evaluation_round is None or not key.endswith(("running_mean", "running_var")):
            assert array.tobytes() == mine[key].tobytes(), key


def test_depthfl_with_all_depths_equal_is_the_mean_of_everything():
    method, totals, exits = methods.load("depthfl"), [], 3

    def step(state, total):
        totals.append(total)
        return method.step(state, total)

    double = replace(method, step=step)
    end = run("depthfl", bundle(), rounds=1, method=double, exits=exits, depths=(exits,) * 5)[-1]
    assert totals[0].weight.keys() == end.model.keys()
    assert all((weight.rounded_value() == 24).all() for weight in totals[0].weight.values())
    assert sum(name.startswith("exit.") for name in end.model) == 2 * (exits - 1)


# -- who gets what --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SUBMODELS)
def test_a_device_gets_and_sends_no_more_than_its_memory_tiers_part(name):
    method = methods.load(name)
    state = method.init(bundle(), method.params(**SMALL), 0)
    orders = [method.send(state, view(budget)) for budget in BUDGETS]
    assert all(order is not None for order in orders)
    peaks = [order.work.peak_bytes for order in orders if order]
    assert peaks == sorted(peaks)
    unknown = method.send(state, DeviceView("a", None))
    assert tensors.encode_tensors(unknown.bundles["model"]) == tensors.encode_tensors(orders[0].bundles["model"])
    sizes = [tensors.total_bytes([order.bundles["model"]]) for order in orders if order]
    if name == "fedepth":
        assert min(sizes) > 0  # all get all of the network, and their links
        assert peaks[0] < peaks[-1]
    else:
        assert sizes[0] < sizes[-1]
        assert orders[0].work.flops_per_example < orders[-1].work.flops_per_example


@pytest.mark.parametrize("name", ["heterofl", "depthfl"])
def test_entries_that_nobody_sent_stay_as_they_were(name):
    first, last = run(name, bundle(), rounds=2)[::2]
    at = (
        depthfl.leading_stage_places(first, 1)
        if name == "depthfl"
        else heterofl.leading_places(first, first.params["rates"][0])
    )
    sent = partial.width.add_entries(first.model, None, partial.width.cut_tensors(first.model, at), at, 1.0)
    for key, array in first.model.items():
        apart = name != "depthfl" and key.rpartition(".")[2] in (
            "running_mean",
            "running_var",
            "num_batches_tracked",
        )  # a narrow part's are its own
        many = sent.weight[key].rounded_value() if key in sent.weight else np.zeros(array.shape)
        counted = (many > 0) & (not apart)
        assert np.array_equal(array[~counted], last.model[key][~counted]), key
    moved = [key for key in at if not np.array_equal(first.model[key], last.model[key])]
    assert len(moved) > 3


@pytest.mark.parametrize("name", SUBMODELS)
def test_a_device_evaluates_its_own_part(name):
    method = methods.load(name)
    state = method.init(bundle(), method.params(**SMALL), 0)
    task, site = deliver_task(method, method.send(state, view(BUDGETS[0])), pictures(1)[0], engine())
    told = method.check(task, site)
    assert told.examples == 4
    assert 0 <= compute_metrics(told)["accuracy"] <= 1


@pytest.mark.parametrize("name", ["heterofl", "fjord", "fedlps"])
def test_without_a_plan_of_units_the_job_says_what_to_do(name):
    whole = bundle()
    made = replace(whole, files={"model": whole.files["model"]})
    with pytest.raises(ModelError, match="fedquilt prepare"):
        methods.load(name).init(made, methods.load(name).params(), 0)


torch = pytest.importorskip("torch")


# -- DepthFL and FeDepth --------------------------------------------------------------------------
def test_depthfls_loss_is_every_exits_cross_entropy_and_what_they_are_apart():
    """One step of the engine equals a step of plain torch on the loss of the paper."""
    from fedquilt.models.networks import registry

    F = torch.nn.functional
    method, member = methods.load("depthfl"), pictures(1)[0]
    state = method.init(bundle(), method.params(exits=3, lr=0.5, batch=len(member.train), ramp=1), 0)
    order = method.send(state, view(8 * 10**9))
    assert order is not None
    task, site = deliver_task(method, order, member, engine())
    task = msgspec.structs.replace(task, round=1)  # from which on c is 1
    start = {name: np.array(value) for name, value in site.load("model").items()}
    answer = method.work(task, site)
    exits = depthfl.exits_from_task(task)
    assert exits.strength == 1.0
    module = exits.make_prepare_hook(start)(registry.build_network(task.params["network"]))
    module.load_state_dict({name: torch.tensor(value) for name, value in start.items()}, strict=False)
    module.train()
    x, y = torch.tensor(network_inputs(member.train.x, task.params["network"])), torch.tensor(member.train.y)
    module(x)
    scores = exits.scores
    wanted = sum(F.cross_entropy(each, y) for each in scores)
    for i in range(len(scores)):
        for j in range(len(scores)):
            if i != j:
                still = F.softmax(scores[j].detach(), 1)
                apart = F.kl_div(F.log_softmax(scores[i], 1), still, reduction="batchmean")
                wanted = wanted + apart / (len(scores) - 1)
    wanted.backward()
    for name, value in module.named_parameters():
        moved = value.detach() - 0.5 * value.grad
        assert np.allclose(answer.bundles["model"][name], moved.numpy(), atol=1e-6), name


def test_depthfls_result_says_the_mean_of_all_exits():
    from fedquilt.models.networks import registry

    method, member = methods.load("depthfl"), pictures(1)[0]
    state = run("depthfl", bundle(), budgets=MIXED)[-1]
    found, order = method.result(state), method.send(state, view(8 * 10**9))
    assert order is not None
    task, site = deliver_task(method, order, member, engine())
    network = found.meta["network"]
    assert engine().evaluate(network, found.tensors, member.held_out) == method.check(task, site)
    assert registry.input_shape(network) == (1, 8, 8)
    module = registry.build_network(network).eval()
    module.load_state_dict({key: torch.tensor(value) for key, value in found.tensors.items()})
    x, said = torch.rand(2, 1, 8, 8), []
    for layer in [*module.exit, module.get_submodule(depthfl.body(state).head)]:
        layer.register_forward_hook(lambda layer, inputs, output: said.append(output))
    assert torch.allclose(module(x), torch.stack(said).mean(dim=0))
    assert len(said) == 4


def test_depthfls_mutual_term_grows_to_one():
    """c(0) = exp(-5), c(ramp) = 1 and stays."""
    method = methods.load("depthfl")
    order = method.send(method.init(bundle(), method.params(ramp=10), 0), DeviceView("a", None))
    assert order is not None
    found = []
    for number in (0, 10, 99):
        task, _ = deliver_task(method, order, pictures(1)[0], engine(), number=number)
        found.append(depthfl.exits_from_task(task).strength)
    assert found == pytest.approx([np.exp(-5), 1, 1])


def test_fedepths_groups_are_every_stage_once_and_only_its_own_moves():
    method, trained = methods.load("fedepth"), []
    state = method.init(bundle(), method.params(**SMALL), 0)
    body = stages.split_stages(fedepth.plain_network(state), 6, state.register)
    found = fedepth.split_into_groups(body, 3)
    assert sorted(name for group in found for name in group.names) == sorted(
        name for stage in body.stages for name in stage.names
    )

    class Watch:
        def train(self, network, start, *rest, **options):
            after, told = engine().train(network, start, *rest, **options)
            trained.append({name for name in start if not np.array_equal(start[name], after[name])})
            return after, told

    order, member = method.send(state, view(2 * 10**9)), pictures(1)[0]
    assert len(order.params["groups"]) == 3
    task, site = deliver_task(method, order, member, Watch())
    answer = method.work(task, site)
    assert len(trained) == 3
    for group, moved in zip(found, trained, strict=True):
        own = {name for name in moved if not name.startswith(("link.", body.head))}
        assert own <= set(group.names)
        assert f"{body.head}.weight" in moved
        assert any(name.startswith("link.") for name in moved) == (group is not found[-1])
    assert answer.metrics["steps"] == 6  # two mini-batches of four, in three groups
    assert answer.bundles["model"].keys() == order.bundles["model"].keys()


# -- FT-Full and FT-Part --------------------------------------------------------------------------
def test_ft_full_leaves_out_who_has_no_room_and_ft_part_less():
    """Of boards with 0.1, 0.4 and 1 GB the middle one has room to train the head, but not the whole network.

    A board that has not said its budget is asked by both. One example at a time (`at_once = 1`) helps FT-Part alone:
    FT-Full trains batch norm, which needs the whole mini-batch.
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


def test_ft_part_moves_the_last_layers_alone():
    for count in (1, 2):
        found = run("ft_part", bundle(), layers=count)
        first, last = found[0], found[-1]
        result = ft_part.METHOD.result(last).tensors
        assert (
            sorted({name.rpartition(".")[0] for name in first.model})[-1]
            == stages.split_stages(result, 1, last.register).head
        )
        assert all(np.array_equal(first.own[name], result[name]) for name in first.own)
        assert all(
            not np.array_equal(first.model[name], last.model[name]) for name in first.model if "num_" not in name
        )
        assert len(first.model) == (
            2 if count == 1 else 8
        )  # the head's; with a convolution's and its normalisation's five


def test_a_params_table_of_the_wrong_length_is_refused_at_the_job():
    import msgspec

    bad = [
        (heterofl.Params, {"rates": [1.0]}),
        (fedepth.Params, {"groups": [1, 2, 3, 4, 0]}),
        (ft_full.Params, {"at_once": 0}),
    ]
    for kind, table in bad:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(table, kind)


torch = pytest.importorskip("torch")


def folded(method: Method, state: Any, *sent: tuple[int, float, float, list[int]]) -> Any:
    """The state after devices of so many bytes have sent, by so much weight, their part full of a value, and have
    examples of these classes."""
    total = None
    for budget, weight, value, classes in sent:
        order = method.send(state, view(budget))
        model = {key: np.full_like(array, value) for key, array in order.bundles["model"].items()}
        held = {"held": np.isin(np.arange(3), classes).astype(np.uint8)}
        total = method.aggregation.fold(
            state, total, DeviceUpdate("a", 0, weight, {}, {"model": model, "classes": held})
        )
    return method.step(state, total)


def test_the_fewer_steps_at_the_largest_width_count_the_more_in_its_statistics():
    """Two widths by turns: a step at the larger moves the mean by 1 - 0.9^2 of the way, where all would by 0.1 each."""
    from fedquilt.models.networks import registry

    plan = masks.plan_from_array(bundle().load("masks")["json"])
    ordered = fjord.OrderedDropoutHooks(plan, 1.0, (0.5, 1.0), np.random.default_rng(0))
    module, momenta = ordered.insert_gates(registry.build_network(NETWORK)), []
    for width in (1.0, 0.5):
        ordered.width = width
        module(torch.rand(2, 1, 8, 8))
        momenta.append({each.momentum for each in module.modules() if hasattr(each, "running_mean")})
    assert momenta == [{1 - 0.9**2}, {0.0}]


def test_rates_that_cut_as_much_share_their_statistics():
    rates = [0.05, 0.0625, 0.5, 0.99]
    assert [heterofl.canonical_rate([4, 8, 16], rates, rate) for rate in rates] == [0.0625, 0.0625, 0.5, 1.0]


def test_rows_of_a_class_are_averaged_over_devices_that_have_it():
    """Class 0 at both devices, class 1 at the second, class 2 at none, by weights 3 and 1; all else is of both."""
    method = methods.load("heterofl")
    state = method.init(toy_bundle(), method.params(), 0)
    first, second = (8 * 10**9, 3.0, 1.0, [0]), (8 * 10**9, 1.0, 5.0, [0, 1])
    after = folded(method, state, first, second)
    assert after.model["3.bias"].tolist() == [2, 5, state.model["3.bias"][2]]
    assert np.array_equal(after.model["3.weight"][2], state.model["3.weight"][2])
    assert after.model["1.bias"].tolist() == [2] * 5
    plain = method.init(toy_bundle(), method.params(masked=False), 0)
    assert folded(method, plain, first, second).model["3.bias"].tolist() == [2, 2, 2]


def test_a_class_that_a_device_has_not_is_out_of_its_loss():
    method, x = methods.load("heterofl"), np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    member = DeviceData("a", Examples(x, np.array([0, 2] * 4)), Examples(x, np.array([0, 2] * 4)))
    moved = []
    for masked in (True, False):
        state = method.init(toy_bundle(), method.params(masked=masked, batch=4), 0)
        order = method.send(state, view(8 * 10**9))
        assert order is not None
        task, site = deliver_task(method, order, member, engine())
        answer = method.work(task, site)
        assert ("classes" in answer.bundles) == masked
        assert not masked or answer.bundles["classes"]["held"].tolist() == [1, 0, 1]
        moved.append(not np.array_equal(answer.bundles["model"]["3.weight"][1], state.model["3.weight"][1]))
    assert moved == [False, True]


def test_a_device_that_does_not_say_its_classes_is_refused_and_so_is_a_network_without_any():
    method = methods.load("heterofl")
    state = method.init(toy_bundle(), method.params(), 0)
    for bundles in ({}, {"classes": {"held": np.ones(2, np.uint8)}}):
        with pytest.raises(UpdateError):
            method.aggregation.fold(state, None, DeviceUpdate("a", 0, 1.0, {}, {"model": state.model, **bundles}))
    plan = masks.MaskPlan({"0": 2}, {}, {"0.weight": masks.TensorGroups((2, 1, 3, 3), ("0",))})
    parts = {"model": {"0.weight": np.zeros((2, 1, 3, 3), np.float32)}, "masks": {"json": masks.plan_to_array(plan)}}
    meta = {"network": {}, "register": register_from_kinds(parts["model"], {})}
    made = Bundle(meta, bundle_files(parts), lambda name: parts[name])
    assert method.init(made, method.params(masked=False), 0).widths.keys() == {"0.0625", "0.125", "0.25", "0.5"}
    with pytest.raises(ModelError, match="masked = false"):
        method.init(made, method.params(), 0)


def test_fjord_draws_every_width_up_to_the_devices_own():
    ordered = fjord.OrderedDropoutHooks(MLP_MASKS, 0.6, (0.2, 0.4, 0.6), np.random.default_rng(0))
    drawn = []
    for _ in range(300):
        ordered.draw_width(None)
        drawn.append(ordered.width)
    assert sorted(set(drawn)) == [0.2, 0.4, 0.6]
    assert min(drawn.count(width) for width in set(drawn)) > 70


def test_fedlps_prunes_the_predictor_alone_and_the_same_channels_in_every_round():
    method = methods.load("fedlps")
    found = run("fedlps", bundle(), rounds=2, budgets=MIXED)
    first, last = found[0], found[-1]
    held = fedlps.encoder_names(first)
    narrow = method.send(last, view(512 * 10**6)).bundles["model"]
    assert all(narrow[name].shape == first.model[name].shape for name in held)
    smaller = [name for name in first.model if narrow[name].shape != first.model[name].shape]
    assert len(smaller) > 3
    for left, groups in first.units_by_share.items():
        assert all(np.array_equal(units, last.units_by_share[left][group]) for group, units in groups.items())


def test_fedlps_refuses_an_encoder_of_random_weights():
    """The bundle says that they are; with encoder = 0 nothing is held still."""
    method, made = methods.load("fedlps"), bundle()
    random = replace(made, meta={**made.meta, "pretrained": False})
    with pytest.raises(JobError, match="encoder = 0"):
        method.init(random, method.params(), 0)
    assert method.init(random, method.params(encoder=0.0), 0).encoder == ()
