"""What every method has to keep to (`fedquilt.testing.conformance`): a new file in methods/ is tested as it is."""

from typing import Any

import pytest

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.arrays.exact_sums import WeightedSums
from fedquilt.coordinator import settings
from fedquilt.core import DeviceView, JobError
from fedquilt.edge_agent.settings import parse_size
from fedquilt.methods import fedavg, scaffold
from fedquilt.testing import conformance
from fedquilt.testing.toy_networks import (
    MIXED_SUFFIX,
    NETWORKS,
    CheckSkipped,
    depends_on_memory,
    device_profile,
    make_scenario,
    toy_bundle,
)

# What `Traits.per_device_data` names takes so much here for each device: FedPeWS has two bytes for each of the toy
# network's 5 neurons, and a header; GENE-FL up to four clusters; a whole model takes 212 bytes, FedSDG's adapters and
# head 424; a device's moments of 96 features 15 kB, which FedStitch keeps until all of them are larger than their sum
FOR_EACH_BYTES = {"fedstitch": 15_000, "fedpews": 160, "genefl": 250, "robust": 500, "fedsdg": 600, "fedtgp": 250}

CUT = ("depthfl", "fedepth", "fedlps", "fedpews", "fedpews_fixed", "fjord", "heterofl")  # need parts to leave out
UNFIT = {  # method, and which of NETWORKS it refuses: no linear layers to adapt, or nothing that can be left out
    *(("fedlora", network) for network in ("batch norm", "gru")),
    *(("fedsdg", network) for network in ("batch norm", "gru")),
    *((name, "gru") for name in CUT),
}

ODD_OF_FEDSQ = {"gates": "soft", "bn": "no", "pool": "avg", "mu": -1.0, "cache": "int8"}
BEGIN_OTHERWISE = {"afl", "fedstitch", "depthfl", "fedepth"}  # with donors, or with stages
WEIGHTED = ("fedavg", "fedprox", "fednova", "fedopt", "fedbn", "moon", "fedrep", "ditto", "pfedme", "perfedavg")
SUMS_OF_NOTHING: dict[str, Any] = {**dict.fromkeys(WEIGHTED, WeightedSums), "scaffold": scaffold.ScaffoldSums}

NAMES = [
    *methods.builtin_names(),
    *(f"{name}{MIXED_SUFFIX}" for name in methods.builtin_names() if depends_on_memory(name)),
]
GROWS = conformance.accumulator_does_not_grow
INHERIT = {name for name in NAMES if name != "fedavg" and not name.endswith(MIXED_SUFFIX)} & {
    name for name in methods.builtin_names() if methods.load(name).aggregation is fedavg.METHOD.aggregation
}


@pytest.mark.parametrize(
    ("check", "name"),
    [
        pytest.param(check, name, id=f"{check.__name__}-{name}")
        for name in NAMES  # outside, so that one process runs most checks of a method on one federation
        for check in conformance.CHECKS
        if not (check is GROWS and name in INHERIT)  # FedAvg's sums
    ],
)
def test_a_method_keeps_to(check, name):
    """Each check on each method; what a round adds up may grow by what FOR_EACH_BYTES says."""
    try:
        check(name, **({"bytes_per_device": FOR_EACH_BYTES.get(name, 0)} if check is GROWS else {}))
    except CheckSkipped as reason:
        pytest.skip(str(reason))


def test_what_a_method_keeps_of_each_device_it_says_itself():
    """So that `lab conformance` does not hold it against the method; one that says nothing has to keep nothing."""
    assert {
        name for name in methods.builtin_names() if methods.load(name).traits.per_device_data
    } == FOR_EACH_BYTES.keys()
    with pytest.raises(CheckSkipped, match="the method declares per_device_data: whole models"):
        GROWS("robust")


# in `make test` one network for each method in turn, and those that the method refuses
RUNS = [
    pytest.param(name, network, marks=() if here else pytest.mark.nightly, id=f"{name}-{network}")
    for row, name in enumerate(methods.builtin_names())
    for column, network in enumerate(NETWORKS)
    for here in [(name, network) in UNFIT or column == row % len(NETWORKS)]
]


@pytest.mark.parametrize(("name", "network"), RUNS)
def test_a_run_on_any_network_goes_on_from_the_store(name, network):
    try:
        conformance.run_works_on_network(name, network, unfit=(name, network) in UNFIT)
    except CheckSkipped as reason:
        pytest.skip(str(reason))


def test_a_failure_with_another_prediction_names_the_trait(monkeypatch):
    def run_works_on_network(name, network):
        raise AssertionError(network)

    monkeypatch.setattr(conformance, "CHECKS", ())
    monkeypatch.setattr(conformance, "run_works_on_network", run_works_on_network)
    reasons = [reason for _, _, reason in conformance.run_checks("fedavg")]
    assert len(reasons) == len(NETWORKS)
    assert [reason.split("'")[1] for reason in reasons if "traits.prediction_tasks" in reason] == [
        "regression",
        "labels",
    ]


def test_a_task_that_the_traits_refuse_does_not_pass(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(conformance, "CHECKS", ())
    refused = [(title, reason) for title, status, reason in conformance.run_checks("fedmd") if status == "refused"]
    tasks = [reason for _, reason in refused if reason.endswith("as its traits say")]
    assert methods.load("fedmd").traits.prediction_tasks == ("classes",)
    assert tasks == ["task = 'regression', as its traits say", "task = 'labels', as its traits say"]


def test_devices_of_a_mixed_fleet_are_sent_parts_of_another_size():
    pytest.importorskip("torch")
    for name in ("heterofl", "fjord", "fedlps", "depthfl"):
        here = make_scenario(f"{name}{MIXED_SUFFIX}")
        state = here.method.init(here.bundle, here.params, 0)
        orders = [
            here.method.send(state, DeviceView("a", device_profile(parse_size(budget)))) for budget in here.budgets
        ]
        sizes = [tensors.total_bytes([order.bundles["model"]]) for order in orders if order]
        assert sizes == sorted(sizes), name
        assert sizes[0] < sizes[-1]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("fedavg", {"nesterov": True}, "requires a momentum above 0"),
        ("fedavg", {"optimizer": "rmsprop"}, r"optimizer = "),
        ("scaffold", {"momentum": 0.9}, "SCAFFOLD computes control variates from plain gradients"),
        ("scaffold", {"optimizer": "adam"}, "SCAFFOLD computes control variates from plain gradients"),
        ("fednova", {"optimizer": "adam"}, "FedNova defines a_i only for SGD"),
        ("fedopt", {"server": "lamb"}, r"server = "),
        ("fedopt", {"tau": 0.0}, r"tau = "),
        ("moon", {"temperature": 0.0}, r"temperature = "),
        ("pfedme", {"momentum": 0.9}, "and momentum = 0"),
        ("pfedme", {"lr": 0.2}, "must be below 2"),
        ("perfedavg", {"clip": 1.0}, "momentum = 0 and clip = 0"),
        ("perfedavg", {"alpha": -0.1}, r"alpha = "),
        ("ditto", {"pull": -1.0}, r"pull = "),
        ("fedrep", {"head": 3}, r"head = "),
        *(("fedsq", {key: odd}, rf"{key} = ") for key, odd in ODD_OF_FEDSQ.items()),
        ("fedpews", {"momentum": 0.9}, "FedPeWS learns mask scores by plain steps"),
        ("fedpews", {"weight_decay": 0.1}, "FedPeWS learns mask scores by plain steps"),
        ("fedpews", {"optimizer": "adam"}, "FedPeWS learns mask scores by plain steps"),
        ("fedpews", {"clip": 1.0}, "FedPeWS learns mask scores by plain steps"),
        ("fedpews", {"publish": "scores"}, r"publish = "),
        ("fedpews", {"diversity": -1.0}, r"diversity = "),
        ("fedpews", {"first_score": 1e9}, r"first_score = "),
        ("fedpews_fixed", {"parts": 0}, r"parts = "),
        ("fedpews_fixed", {"warmup": -1}, r"warmup = "),
        ("robust", {"attackers": 0.5}, r"attackers = "),
        ("robust", {"rule": "mean"}, r"rule = "),
        ("robust", {"rule": "krum", "most": 2}, r"krum requires more than 2 f \+ 2 updates, with f = 0"),
        ("robust", {"rule": "krum", "most": 10, "attackers": 0.4}, r"krum requires more than 2 f \+ 2 .*, with f = 4"),
        ("robust", {"rule": "median", "bucket": 3}, "median requires more than 2 f buckets, with f = 6"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_in_the_job(name, params, message):
    with pytest.raises(JobError, match=message):
        settings.parse_job({"name": "j", "method": name, "params": params, "cohort": {"min_devices": 32}})


@pytest.mark.parametrize("name", sorted({*methods.builtin_names()} - BEGIN_OTHERWISE))
def test_a_round_nobody_answered_changes_nothing(name):
    method = methods.load(name)
    state = method.init(toy_bundle(), method.params(), 0)
    assert method.step(state, None) is state
    if sums := SUMS_OF_NOTHING.get(name):
        assert method.step(state, sums()) is state
