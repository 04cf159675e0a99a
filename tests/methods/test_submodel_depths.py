"""DepthFL, FeDepth, FT-Full and FT-Part: parts of a network that have fewer of its layers."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from submodels import MIXED, SMALL, bundle, engine, pictures, run, view

from fedquilt import methods
from fedquilt.core import DeviceView
from fedquilt.edge_agent.engines.training import network_inputs
from fedquilt.methods import depthfl, fedepth, ft_full, ft_part, heterofl
from fedquilt.models.networks import stages
from fedquilt.testing.toy_networks import deliver_task

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
    assert engine().evaluate(network, found.tensors, member.held) == method.check(task, site)
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
