"""Methods that share a part of the network: which part, how many bytes, and what becomes of the rest."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from toy_tasks import deliver_task

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import ClientContext, ClientResult, DeviceUpdate, DeviceView, Examples, ModelError, Task, UpdateError
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.methods import fedavg, fedfina, fedlg, fedlp, fedrep, parfed
from fedquilt.testing.toy_networks import point_devices, toy_bundle
from fedquilt.testing.toy_networks import run_method as run_of
from fedquilt.tools.simulation import DeviceData

SMALL = {"epochs": 1, "batch": 4, "lr": 0.1}
MIB = 1 << 20
RESNET18 = {"name": "torchvision/resnet18", "classes": 10, "input": {"channels": 3, "size": 32}}
BN = {"name": "residual", "channels": 1, "classes": 3, "width": 2, "input": {"channels": 1, "size": 8}}


@cache
def tensors_of(name: str = "residual") -> dict[str, np.ndarray]:
    """A network's first tensors: a small one with batch norm, or torchvision's of ten classes."""
    pytest.importorskip("torch")
    from fedquilt.models.networks import registry

    table = BN if name == "residual" else {"name": name, "classes": 10}
    return {key: value.numpy() for key, value in registry.build_network(table).state_dict().items()}


def resnet18() -> dict[str, np.ndarray]:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    return tensors_of("torchvision/resnet18")


def pictures(count: int = 2) -> list[DeviceData]:
    found = []
    for i in range(count):
        draws = np.random.default_rng(i)
        x, y = draws.integers(0, 255, (12, 8, 8)).astype(np.uint8), draws.integers(0, 3, 12)
        found.append(DeviceData(f"dev-{i}", Examples(x[4:], y[4:]), Examples(x[:4], y[:4])))
    return found


def mib(model: Mapping[str, np.ndarray]) -> float:
    return sum(array.nbytes for array in model.values()) / MIB


def play(name: str, rounds: int = 3, *, engine: Any = None, **params: Any) -> tuple[list[Any], list[ClientResult]]:
    """States and answers of a run; with an engine of torch, of a small network with batch norm."""
    method, answers = methods.load(name), []

    def work(task: Task, site: ClientContext) -> ClientResult:
        answers.append(method.work(task, site))
        return answers[-1]

    bundle, members = (toy_bundle(BN, tensors_of()), pictures()) if engine else (toy_bundle(), point_devices(3))
    engine = engine or NumpyEngine(1 << 40, base_bytes=0)
    double = replace(method, work=work)
    return run_of(name, bundle, members, {**SMALL, **params}, engine=engine, method=double, rounds=rounds), answers


def torch_one() -> Any:
    module = pytest.importorskip("fedquilt.edge_agent.engines.torch.engine")
    return module.TorchEngine(1 << 40, base_bytes=0)


def test_of_a_resnet18_the_papers_bytes_travel():
    bundle = toy_bundle(RESNET18, resnet18())
    fina, par = fedfina.init(bundle, fedfina.Params(), 0), parfed.init(bundle, parfed.Params(), 0)
    learned = fedavg.init(bundle, fedavg.Params(), 0).trained_names()
    assert mib(fina.model) == 31.5
    assert mib(par.model) == pytest.approx(mib({name: resnet18()[name] for name in learned}) - 31.5)
    assert f"{mib(par.model):.2f}" == "11.15"
    four = {f"layer4.{block}.conv{i}.weight" for block in (0, 1) for i in (1, 2)}
    assert fina.model.keys() == four == par.own.keys() & set(learned)


def test_fedlgs_three_of_a_resnet18_are_18_28_mib_where_gradients_say_what_the_papers_did():
    bundle = toy_bundle(RESNET18, resnet18())
    state = fedlg.init(bundle, fedlg.Params(), 0)
    small = {"layer4.0.conv2.weight", "layer4.1.conv2.weight", "layer2.0.conv1.weight"}
    sizes = {name: np.array([0.1 if name in small else 1.0]) for name in state.candidates}
    total = fedlg.fold(state, None, DeviceUpdate("a", 0, 3.0, {}, {"sizes": sizes}))
    after = fedlg.step(state, total)
    assert set(after.shared) == small
    assert f"{mib({name: resnet18()[name] for name in after.shared}):.2f}" == "18.28"
    assert fedlg.METHOD.explain(after) == [f"the learnGene is {', '.join(sorted(small))}"]
    assert not any("downsample" in name or "fc" in name for name in state.candidates)


@pytest.mark.parametrize("name", ["fedrep", "parfed", "fedfina", "fedlg", "local"])
def test_what_is_not_shared_never_travels_up_and_down_once_only(name):
    taken = []

    def observe(simulation, hands):
        taken[:] = [(round.down_bytes, round.up_bytes) for round in simulation.rounds]

    engine = NumpyEngine(1 << 40, base_bytes=0)
    *_, state = run_of(name, toy_bundle(), point_devices(1), SMALL, engine=engine, observe=observe, rounds=4)
    shared = len(tensors.encode_tensors(state.model)) if name != "local" else 0
    assert taken[3] == (shared, shared)
    assert taken[0][0] > shared
    assert shared < len(tensors.encode_tensors(toy_bundle().load("model")))


def test_statistics_of_batch_norm_and_the_rest_stay_on_the_device():
    for method in (parfed, fedfina):
        state = method.init(toy_bundle(BN, tensors_of()), method.Params(layers=2), 0)
        assert state.model
        assert not any("running" in key or "num_batches" in key for key in state.model)
        assert state.own.keys() == tensors_of().keys() - state.model.keys()
        assert method.METHOD.result(state).tensors.keys() == tensors_of().keys()


def test_parfed_that_keeps_nothing_is_fedavg():
    ours, theirs = play("parfed", layers=0)[0], play("fedavg")[0]
    assert [tensors.encode_tensors(state.model) for state in ours] == [
        tensors.encode_tensors(state.model) for state in theirs
    ]


def test_parfed_and_fedfina_share_what_the_other_keeps():
    bundle = toy_bundle(BN, tensors_of())
    par = parfed.init(bundle, parfed.Params(layers=2), 0).model.keys()
    fina = fedfina.init(bundle, fedfina.Params(layers=2), 0).model.keys()
    assert par.isdisjoint(fina)
    assert par | fina == set(fedavg.init(bundle, fedavg.Params(), 0).trained_names())


def test_a_network_that_cannot_be_parted_is_refused():
    table = {"name": "mlp", "inputs": 3, "hidden": [], "classes": 2}
    bundle = toy_bundle(table, {"1.weight": np.zeros((2, 3), np.float32), "1.bias": np.zeros(2, np.float32)})
    for method in (parfed, fedfina, fedlg):
        with pytest.raises(ModelError, match="only one linear layer: choose another method"):
            method.init(bundle, method.Params(), 0)


def test_fedlg_measures_for_so_many_rounds_and_sends_no_weights_in_them():
    run, answers = play("fedlg", rounds=4, engine=torch_one(), probe=2, layers=1)
    assert [state.phase for state in run] == ["probe", "probe", "share", "share", "share"]
    candidates = set(run[0].candidates)
    for answer in answers[:4]:
        assert answer.bundles.keys() == {"sizes"}
        assert answer.bundles["sizes"].keys() == candidates
        assert all(size.shape == (1,) and size[0] > 0 for size in answer.bundles["sizes"].values())
        assert answer.private_state.keys() == tensors_of().keys()
    mean = {name: sum(float(answer.bundles["sizes"][name][0]) for answer in answers[:4]) for name in candidates}
    assert run[2].shared == (min(mean, key=lambda name: mean[name]),)
    assert run[2].model == {}  # nobody has sent any
    assert run[3].model.keys() == set(run[2].shared)


def test_a_gradients_size_is_its_root_mean_square():
    state = fedlg.init(toy_bundle(), fedlg.Params(**SMALL), 0)
    engine = NumpyEngine(1 << 40, base_bytes=0)
    order = fedlg.send(state, DeviceView("dev-0", None))
    task, site = deliver_task(fedlg.METHOD, order, point_devices(1)[0], engine)
    answer = fedlg.work(task, site)
    squares = engine.fisher(task.params["network"], answer.private_state, site.train, examples_per_gradient=4)
    assert answer.bundles["sizes"]["1.weight"][0] == pytest.approx(np.sqrt(squares["1.weight"].mean()), rel=1e-6)


def test_what_a_device_has_trained_is_not_lost_when_sharing_begins():
    run, answers = play("fedlg", rounds=2)
    own = answers[0].private_state
    order = fedlg.send(run[1], DeviceView("dev-0", None, (0,)))
    engine = NumpyEngine(1 << 40, base_bytes=0)
    _, site = deliver_task(fedlg.METHOD, order, point_devices(1)[0], engine, number=1, local=own)
    assert tensors.encode_tensors(fedrep.load_device_network(site)) == tensors.encode_tensors(own)
    late = replace(site, private_state={})
    assert tensors.encode_tensors(fedrep.load_device_network(late)) == tensors.encode_tensors(
        toy_bundle().load("model")
    )


def test_a_size_below_nothing_is_refused():
    """It would make its layer everybody's first."""
    state = fedlg.init(toy_bundle(), fedlg.Params(), 0)
    sizes = {name: np.array([-1.0]) for name in state.candidates}
    with pytest.raises(UpdateError, match="reports a negative gradient size"):
        fedlg.fold(state, None, DeviceUpdate("a", 0, 1.0, {}, {"sizes": sizes}))


def test_fedlp_averages_each_layer_over_those_who_sent_it():
    """Two devices send layer 1 (3 and 7 with weights 1 and 3: 6), one sends layer 3 (5); else it is as it was."""
    start = {f"{layer}.{kind}": np.zeros((1, 1), np.float32) for layer in (1, 3, 5) for kind in ("weight",)}
    state = fedavg.init(toy_bundle({"name": "x"}, start, kinds={}), fedlp.Params(), 0)
    total = None
    for device, weight, sent in (("a", 1.0, {"1": 3.0}), ("b", 3.0, {"1": 7.0, "3": 5.0}), ("c", 2.0, {})):
        model = {f"{layer}.weight": np.full((1, 1), value, np.float32) for layer, value in sent.items()}
        total = fedlp.fold(state, total, DeviceUpdate(device, 0, weight, {}, {"model": model}))
    after = fedlp.step(state, total).model
    assert [float(after[f"{layer}.weight"][0, 0]) for layer in (1, 3, 5)] == [6.0, 5.0, 0.0]
    assert fedlp.step(state, None) is state


def test_fedlp_leaves_layers_out_before_they_are_sent():
    _, answers = play("fedlp", rounds=20)
    kept = [len(answer.bundles["model"]) for answer in answers]
    assert set(kept) == {0, 2, 4}  # weight and bias go together
    assert 0.35 < sum(kept) / (len(kept) * 4) < 0.65


def test_half_a_layer_is_refused():
    """It would be told from a layer that was left out by nobody."""
    state = fedavg.init(toy_bundle(), fedlp.Params(), 0)
    half = {"1.weight": state.model["1.weight"]}
    with pytest.raises(UpdateError, match=r"tensor names differ: 1\.bias"):
        fedlp.fold(state, None, DeviceUpdate("a", 0, 1.0, {}, {"model": half}))
    with pytest.raises(UpdateError, match="required even without layers"):
        fedlp.fold(state, None, DeviceUpdate("a", 0, 1.0, {}, {}))


def test_fedlps_layers_are_all_of_the_network():
    model = tensors_of()
    found = fedlp.layer_units(fedavg.init(toy_bundle(BN, model), fedlp.Params(), 0))
    assert sorted(name for names in found for name in names) == sorted(model)
    for names in found:
        assert any(model[name].ndim > 1 for name in names)
