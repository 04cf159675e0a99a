"""FedSQ: identities with FedAvg, what travels, and a cache that changes nothing but the time it takes."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_tasks import deliver_task

from fedquilt.arrays import tensors
from fedquilt.core import (
    Bundle,
    ClientContext,
    ClientResult,
    DeviceView,
    EvaluationSums,
    Examples,
    Hooks,
    ModelError,
    Step,
    Task,
    UpdateError,
)
from fedquilt.core.evaluation import compute_metrics
from fedquilt.methods import fedavg, fedprox, fedsq
from fedquilt.models import local_training
from fedquilt.testing.toy_networks import bundle_files, register_entry, run_method
from fedquilt.tools.simulation import DeviceData

torch = pytest.importorskip("torch", reason="FedSQ's client half trains torch networks")

from fedquilt.edge_agent.engines.torch.engine import TorchEngine  # noqa: E402
from fedquilt.models.networks import registry  # noqa: E402

RESIDUAL = {"name": "residual", "channels": 1, "classes": 3, "width": 4, "input": {"channels": 1, "size": 8}}
TAIL = ("3", "6")
METHOD = fedsq.METHOD


def bundle(network: dict[str, Any] = RESIDUAL, **meta: Any) -> Bundle:
    start = {name: value.numpy() for name, value in registry.load_network(network, seed=1).state_dict().items()}
    facts = {"network": network, "flops": 100.0, **register_entry(network), **meta}
    return Bundle(facts, bundle_files({"model": start}), lambda name: dict(start))


def members(count: int = 3, examples: int = 20) -> list[DeviceData]:
    """Pictures whose brightest third tells the label; every device has its own mixture."""
    found = []
    for i in range(count):
        draws = np.random.default_rng(i)
        y = draws.choice(3, size=examples + 6, p=np.roll([0.6, 0.3, 0.1], i))
        x = draws.integers(0, 100, size=(examples + 6, 8, 8)).astype(np.uint8)
        for each, label in zip(x, y, strict=True):
            each[:, 3 * label : 3 * label + 3] += 120
        found.append(DeviceData(f"dev-{i}", Examples(x[6:], y[6:]), Examples(x[:6], y[:6])))
    return found


def params(**changes: Any) -> fedsq.Params:
    return fedsq.Params(**{"batch": 8, "lr": 0.1, "epochs": 2, "trained": TAIL, **changes})


def engine() -> TorchEngine:
    return TorchEngine(1 << 40, base_bytes=0)


def played(
    given: fedsq.Params,
    rounds: int = 3,
    job: Bundle | None = None,
    work: Callable[[Task, ClientContext], ClientResult] = fedsq.work,
) -> list[Any]:
    method = replace(METHOD, work=work)
    return run_method(
        "fedsq", job or bundle(), members(), asdict(given), engine=engine(), method=method, seed=5, rounds=rounds
    )


def one_task(
    given: fedsq.Params, cache: Path, member: DeviceData | None = None, state: Any = None
) -> tuple[Task, ClientContext]:
    state = state or METHOD.init(bundle(), given, 0)
    order = METHOD.send(state, DeviceView("dev-0", None))
    return deliver_task(METHOD, order, member or members()[0], engine(), seed=5, cache=cache)


def assert_close(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_with_the_last_linear_layer_alone_it_is_fedavg_bit_for_bit():
    """There is no gate behind it: weights after every round are those of FedAvg with all else held still."""

    def fedavg_work(task, site):
        held = Hooks(steps=(Step(rate=lambda name: float(name.startswith("6."))),))
        whole = {**site.load("frozen"), **site.load("model")}
        answer = local_training.train_from(task, site, whole, held)
        return replace(answer, bundles={"model": {name: answer.bundles["model"][name] for name in site.load("model")}})

    given = params(trained=("6",), cache="off")
    for ours, theirs in zip(played(given), played(given, work=fedavg_work), strict=True):
        assert tensors.pack_state(ours) == tensors.pack_state(theirs)


@pytest.mark.parametrize(("mu", "work"), [(0.0, fedavg.work), (0.5, fedprox.work)])
def test_with_gates_of_its_own_it_is_the_baseline_bit_for_bit(mu, work):
    every = tuple(sorted({name.split(".")[0] for name in bundle().load("model")}))
    given = params(trained=every, gates="own", bn="train", cache="off", mu=mu)
    for ours, theirs in zip(played(given), played(given, work=work), strict=True):
        assert tensors.pack_state(ours) == tensors.pack_state(theirs)


def test_at_its_start_it_tells_what_the_pre_trained_network_tells(tmp_path):
    held = members()[0].held_out
    wanted = compute_metrics(engine().evaluate(RESIDUAL, bundle().load("model"), held))
    for cache in ("float32", "off"):
        told = compute_metrics(fedsq.check(*one_task(params(cache=cache), tmp_path)))
        assert told == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("bn", "pool", "gates"),
    [("frozen_stats", "own", "own"), ("train", "sk", "frozen"), ("frozen_stats", "own", "frozen")],
)
def test_a_cache_changes_nothing(bn, pool, gates):
    given = params(bn=bn, pool=pool, gates=gates)
    cached, plain = played(given)[-1], played(replace(given, cache="off"))[-1]
    assert_close(cached.model, plain.model)


def test_a_cache_of_16_bits_is_near(tmp_path):
    whole, half = (fedsq.work(*one_task(params(cache=kind), tmp_path / kind)) for kind in ("float32", "float16"))
    for name, array in whole.bundles["model"].items():
        np.testing.assert_allclose(half.bundles["model"][name], array, atol=5e-3)
    assert half.metrics["cached_bytes"] < 0.6 * whole.metrics["cached_bytes"]


class Counting(TorchEngine):
    """Counts what is looked up."""

    looked_up = 0

    def evaluate(self, *args: Any, **options: Any) -> EvaluationSums:
        self.looked_up += 1
        return super().evaluate(*args, **options)


def test_features_are_looked_up_once_and_again_when_they_are_gone(tmp_path):
    counting = Counting(1 << 40, base_bytes=0)

    def worked(member=None, state=None):
        task, site = one_task(params(), tmp_path, member, state)
        return fedsq.work(task, replace(site, engine=counting))

    first = worked()
    assert tensors.encode_tensors(worked().bundles["model"]) == tensors.encode_tensors(first.bundles["model"])
    assert counting.looked_up == 1
    (tmp_path / "train.rows").unlink()
    assert tensors.encode_tensors(worked().bundles["model"]) == tensors.encode_tensors(first.bundles["model"])
    assert counting.looked_up == 2
    worked(member=members()[1])
    assert counting.looked_up == 3
    state = METHOD.init(bundle(), params(), 0)
    worked(
        member=members()[1],
        state=replace(state, frozen={k: v * 1 + (k == "0.0.weight") for k, v in state.frozen.items()}),
    )
    assert counting.looked_up == 4


def test_without_room_for_a_cache_it_works_without(tmp_path):
    """cache_mb = 0 keeps nothing, and says so."""
    task, site = one_task(params(cache_mb=0), tmp_path)
    answer = fedsq.work(task, site)
    assert answer.metrics["cached_bytes"] == 0
    assert list(tmp_path.glob("*")) == []
    plain = fedsq.work(*one_task(params(cache="off"), tmp_path))
    assert tensors.encode_tensors(answer.bundles["model"]) == tensors.encode_tensors(plain.bundles["model"])


def test_the_bound_is_for_both_shares_together(tmp_path, monkeypatch):
    task, site = one_task(params(), tmp_path)
    kept = fedsq.work(task, site).metrics["cached_bytes"]
    (tmp_path / "other.rows").write_bytes(bytes(10**6 - int(kept)))
    task, site = one_task(params(cache_mb=1), tmp_path)
    fedsq.check(task, site)
    assert not (tmp_path / "held.rows").exists()


def test_a_cancelled_task_leaves_no_half_a_cache(tmp_path):
    def cancel(share):
        raise InterruptedError

    task, site = one_task(params(), tmp_path)
    with pytest.raises(InterruptedError):
        fedsq.work(task, replace(site, progress=cancel))
    assert not (tmp_path / "train.json").exists()
    assert fedsq.work(task, site).metrics["cached_bytes"] > 0


def test_only_what_is_trained_is_sent_back(tmp_path):
    """Batch norm's statistics with bn = train alone; nothing of the frozen copy, and no feature, is among it."""
    for bn in ("frozen_stats", "train"):
        given = params(bn=bn)
        state = METHOD.init(bundle(), given, 0)
        answer = fedsq.work(*one_task(given, tmp_path, state=state))
        names = {name for name in state.frozen if name.startswith(("3.", "6."))}
        statistics = {
            name for name in names if name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")
        }
        assert statistics
        assert answer.bundles.keys() == {"model"}
        assert answer.bundles["model"].keys() == (names if bn == "train" else names - statistics)
        sent = tensors.encode_tensors(answer.bundles["model"])
        assert not any(
            state.frozen[k].tobytes() in sent for k in state.frozen.keys() - names if state.frozen[k].size > 2
        )
        rows = (tmp_path / "train.rows").read_bytes()
        assert rows[:64] not in sent
        assert answer.private_state == {}


def test_the_frozen_copy_stays_as_it_was_and_is_in_every_checkpoint():
    run = played(params())
    begun = bundle().load("model")
    assert all(tensors.encode_tensors(state.frozen) == tensors.encode_tensors(begun) for state in run)
    found = METHOD.result(run[-1])
    assert found.kind == "dualcopy"
    assert found.tensors.keys() == begun.keys() | {f"gates.{name}" for name in run[-1].model}
    np.testing.assert_array_equal(found.tensors["gates.6.weight"], begun["6.weight"])
    np.testing.assert_array_equal(found.tensors["6.weight"], run[-1].model["6.weight"])
    assert METHOD.result(played(params(gates="own"), rounds=1)[-1]).kind == "weights"


def test_the_schedule_of_the_bundle_is_taken_where_the_job_names_none():
    """Else all is trained."""
    with_schedule = METHOD.init(bundle(schedule={"trained": ["6"], "tried": []}), params(trained=()), 0)
    assert with_schedule.params["trained"] == ["6"]
    assert with_schedule.model.keys() == {"6.weight", "6.bias"}
    assert METHOD.init(bundle(), params(trained=()), 0).params["trained"] == ["0", "1", "2", "3", "6"]


def test_a_module_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(
        ModelError, match=r"trained = 'layer4' is not a module of the network: choose among 0, 1, 2, 3, 6"
    ):
        METHOD.init(bundle(), params(trained=("layer4",)), 0)
    with pytest.raises(ModelError, match="has no tensors to train with bn = 'frozen_stats'"):
        METHOD.init(bundle(), params(trained=("0.1.running_mean",)), 0)


def test_a_device_without_held_out_examples_tells_that(tmp_path):
    member = members()[0]
    task, site = one_task(
        params(), tmp_path, replace(member, held_out=Examples(member.held_out.x[:0], member.held_out.y[:0]))
    )
    assert fedsq.check(task, site).examples == 0


def test_a_received_tensor_of_another_shape_is_refused(tmp_path):
    state = METHOD.init(bundle(), params(), 0)
    odd = replace(state, model={**state.model, "6.bias": np.zeros(4, np.float32)})
    with pytest.raises(UpdateError, match=r"'6\.bias' has shape"):
        fedsq.work(*one_task(params(), tmp_path, state=odd))
