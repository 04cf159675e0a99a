"""Awkward networks under every method: the trajectory of the method's rule in plain torch, or a refusal by tensor."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fedquilt import methods
from fedquilt.coordinator import settings
from fedquilt.core import ModelError
from fedquilt.tools.artefacts import prepare

torch = pytest.importorskip("torch")

import difficult_networks  # noqa: E402
import plain_parts as parts  # noqa: E402
import plain_rules as rules  # noqa: E402
import plain_widths as widths  # noqa: E402
from plain_training import PUBLIC, Rule, bundle_of, own_of, played, require_equal, table_of  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A method's rule in plain torch, and how the method is run.

    Args:
        quick: networks in `make test`; the others are for the night.
        refused: networks that the method refuses with these parameters.
        table: further arguments of `played`.
        close: largest difference, relative and absolute.
    """

    name: str
    rule: Rule
    params: Mapping[str, Any] = field(default_factory=dict)
    quick: Collection[str] = ()
    refused: Collection[str] = ()
    rounds: int = 2
    table: Mapping[str, Any] = field(default_factory=dict)
    close: float = 2e-5


ALL, ONE = tuple(difficult_networks.NETWORKS), (1,) * 5
TRACED = {  # refusals of methods that follow single units
    "shared": "'2.0'",
    "moving_average": "'1'",
    "tokens": "'len' is not supported",
    "typed_buffers": "'first'",
    "weight_normalisation": "'first'",
}
ADAPTED = {
    "tokens": "'attention'",
    "maps": "'head'",
    "weight_normalisation": "'second.parametrizations.weight.original1'",
}
REFUSED: dict[str, Mapping[str, str]] = {
    **dict.fromkeys(("heterofl", "fjord", "fedlps", "fedpews", "fedpews_fixed"), TRACED),
    **dict.fromkeys(("fedlora", "fedsdg"), ADAPTED),
    **{name: {"tied": "'second.weight'", "shared": "'2.0.weight'"} for name in ("depthfl", "fedepth")},
    "fedsq": {
        "tied": "'second.weight'",
        "shared": "'2.0.weight'",
        "moving_average": "'2.mean_ema'",
        "tokens": "'len' is not supported",
        "typed_buffers": "'level'",
    },
}
"""Method -> network that it refuses by default -> what the refusal says: a tensor, a module, or what torch.fx says."""

LORA = {"clip": 0.5, "rank": parts.RANK, "alpha": parts.ALPHA}
SDG = {"lr": 0.003, "lr_own": 0.002, "lr_gates": 0.02, "sparsity": 0.01, "own_decay": 0.001}
PEWS = {"warmup": 2, "server_lr": 0.5, "mu": 0.1}
TGP = {"penalty": 0.5, "server_epochs": 4, "server_batch": 3, "server_lr": 0.05, "margin": 0.5}
BY_WIDTH = {"refused": TRACED, "table": {"budgets": widths.BUDGETS}}
CASES = (
    Case("fedavg", rules.fedavg, quick=ALL),
    Case("ft_full", rules.fedavg),
    Case("fedavg_ft", rules.fedavg),
    Case("ditto", rules.ditto, {"pull": 0.5}),
    Case("moon", rules.moon, {"mu": 0.0}),
    Case("fedlp", rules.fedavg, {"keep": 1.0}),
    Case("fedpews", rules.fedavg, {"warmup": 0}),
    Case("fedpews_fixed", rules.fedavg, {"warmup": 0}),
    Case("depthfl", rules.fedavg, {"exits": 1, "depths": ONE}),
    Case("fedepth", rules.fedavg, {"stages": 1, "groups": ONE}),
    Case("fedprox", rules.fedprox, {"mu": 0.5}),
    Case("fedopt", rules.fedopt, {"server": "sgd", "server_lr": 1.0, "beta1": 0.9}, quick=("maps",)),
    Case("fednova", rules.fednova),
    Case("scaffold", rules.scaffold, quick=("tied", "moving_average")),
    Case("feddyn", rules.feddyn, {"alpha": 0.5}, quick=("tied", "moving_average"), close=1e-6),
    Case("apfl", rules.apfl, {"alpha": 0.3}, quick=("tied", "typed_buffers"), close=1e-6),
    Case("pfedme", rules.pfedme, {"pull": 5.0, "inner": 2, "outer_lr": 0.02}, quick=("tied", "tokens")),
    Case("perfedavg", rules.perfedavg, {"alpha": 0.02}),
    Case("robust", rules.median, {"rule": "median", "attackers": 0.0}),
    Case("fedbn", parts.apart(rules.norms), quick=("moving_average", "maps")),
    Case("fedrep", rules.fedrep, {"head_epochs": 1}, quick=("tied", "tokens")),
    Case("local", parts.alone, quick=("tied",)),
    Case("ft_part", parts.ft_part, {"layers": 2}, quick=("tied", "moving_average")),
    Case("parfed", parts.apart(parts.parfed), {"layers": 1}, quick=("tied",)),
    Case("fedfina", parts.apart(parts.fedfina), {"layers": 2}, quick=("maps",)),
    Case("fedper", parts.apart(parts.last_layers), {"layers": 2}, quick=("maps",), close=1e-6),
    Case("fedper", parts.apart(parts.first_layers), {"layers": 2, "stays": "first"}, quick=("tied",), close=1e-6),
    Case(
        "fedala",
        parts.fedala,
        {"layers": 2, "eta": 0.5, "sample": 0.5, "first_passes": 2},
        quick=("tied", "maps"),
        rounds=3,
        close=1e-6,
    ),
    Case("fedproto", rules.fedproto, {"penalty": 0.5}, quick=("tied", "typed_buffers"), close=1e-6),
    Case("fedtgp", rules.fedtgp, TGP, quick=("shared",), close=1e-6),
    Case("fedbabu", parts.fedbabu, quick=("tied", "maps"), close=1e-6),
    Case("fedmd", rules.fedmd, quick=("tied", "moving_average"), close=1e-6),
    Case("fedlg", parts.fedlg, {"layers": 1, "probe": 1}, ("tied",), rounds=3),
    Case("fedlora", parts.fedlora, {**LORA, "optimizer": "sgd", "mu": 0.1}, ("shared",), ADAPTED),
    Case("fedsdg", parts.fedsdg, {**LORA, **SDG}, ("tied",), ADAPTED, rounds=3, table={"cohort": {"size": 2}}),
    Case("fedsq", parts.fedsq, {"weight_decay": 0.01}, ("maps",), REFUSED["fedsq"]),
    Case("genefl", parts.genefl, {"clusters": 2, "directions": 2, "first_layers": 1}, ("tied",), rounds=4),
    Case("heterofl", widths.heterofl, {"rates": widths.BY_TIER, "clip": 0.5}, ("maps",), **BY_WIDTH),
    Case("fjord", widths.fjord, {"rates": widths.BY_TIER}, ("tied",), **BY_WIDTH),
    Case(
        "fedlps",
        widths.fedlps,
        {"ratios": [1 - rate for rate in widths.BY_TIER], "encoder": 0.5},
        quick=("maps",),
        refused=TRACED,
        table={"budgets": widths.BUDGETS, "meta": {"pretrained": True}},
    ),
    Case("fedpews", widths.fedpews, {**PEWS, "first_score": 0.3}, ("tied",), TRACED, rounds=3),
    Case("fedpews_fixed", widths.fedpews_fixed, {**PEWS, "devices": widths.DEVICES}, ("maps",), TRACED, rounds=3),
)

PLAYED = [
    pytest.param(
        case,
        network,
        marks=() if network in case.quick else pytest.mark.nightly,
        id=f"{case.name}-{case.rule.__name__}-{network}",
    )
    for case in CASES
    for network in difficult_networks.NETWORKS
    if network not in case.refused
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention's gradients, example by example
@pytest.mark.parametrize(("case", "network"), PLAYED)
def test_a_method_does_to_an_awkward_network_what_its_rule_does_in_plain_torch(case, network):
    begun = dict(bundle_of(network).load("model"))
    run = played(case.name, network, case.params, case.rounds, **case.table)
    last, wanted = run.states[-1], case.rule(network, begun, run)
    found = methods.load(case.name).result(last).tensors
    found = {key: array for key, array in found.items() if key in begun or "/" in key} | own_of(run.kept)
    found |= {f"{rate}/{key}": each for rate, held in getattr(last, "widths", {}).items() for key, each in held.items()}
    require_equal(found, wanted, case.close)
    old = {key: begun.get(key.rpartition("/")[2], array) for key, array in found.items()}
    assert max(float(np.abs(found[key] - old[key]).max()) for key in found if found[key].shape == old[key].shape) > 1e-3


def test_a_device_that_comes_later_is_among_those_of_fedsdg_s_trajectory():
    case = next(case for case in CASES if case.name == "fedsdg")
    devices = played(case.name, "tied", case.params, case.rounds, **case.table).devices
    assert {*devices[1], *devices[2]} - {*devices[0]}


def test_ft_part_trains_a_batch_norm_without_parameters_with_the_layer_before_it():
    method = methods.load("ft_part")
    state = method.init(bundle_of("weight_normalisation"), method.params(layers=4), 0)
    assert {"norm.running_mean", "norm.running_var"} <= state.model.keys()


QUICK = (("heterofl", "tokens"), ("fedlora", "maps"), ("fedsq", "tied"), ("depthfl", "shared"), ("genefl", "tied"))
PREPARED = [
    pytest.param(
        name,
        network,
        marks=() if (name, network) in QUICK else pytest.mark.nightly,
        id=f"{name}-{network}",
    )
    for name in methods.builtin_names()
    if "torch" in methods.load(name).engines
    for network in difficult_networks.NETWORKS
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention's gradients, example by example
@pytest.mark.parametrize(("name", "network"), PREPARED)
def test_a_method_trains_an_awkward_network_or_refuses_it_as_the_job_is_prepared(name, network, tmp_path):
    more = {"encoder": 0.0} if name == "fedlps" else {}
    np.savez(tmp_path / "public.npz", x_train=PUBLIC, y_train=np.zeros(len(PUBLIC), np.int64))
    table = {"name": "awkward", "method": name, "model": table_of(network), "params": more}
    job = settings.parse_job({**table, "public": {"path": str(tmp_path / "public.npz")}})
    if reason := REFUSED.get(name, {}).get(network):
        with pytest.raises(ModelError, match=re.escape(reason)):
            prepare.prepare_and_check(job, tmp_path)
    else:
        prepare.prepare_and_check(job, tmp_path)
