"""What every method has to keep to (`fedquilt.testing.conformance`): a new file in methods/ is tested as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedquilt import methods
from fedquilt.arrays import tensors
from fedquilt.core import DeviceView
from fedquilt.edge_agent.settings import parse_size
from fedquilt.testing import conformance
from fedquilt.testing.scenarios import MIXED, NETWORKS, CheckSkipped, depends_on_memory, device_profile, make_scene

# What `Traits.per_device_data` names takes so much here for each device: FedPeWS has two bytes for each of the toy
# network's 5 neurons, and a header; GENE-FL up to four clusters; a whole model takes 212 bytes, FedSDG's adapters and
# head 424; a device's moments of 96 features 15 kB, which FedStitch keeps until all of them are larger than their sum
FOR_EACH_BYTES = {"fedstitch": 15_000, "fedpews": 160, "genefl": 250, "robust": 500, "fedsdg": 600}

CUT = ("depthfl", "fedepth", "fedlps", "fedpews", "fedpews_fixed", "fjord", "heterofl")  # need parts to leave out
UNFIT = {  # method, and which of NETWORKS it refuses: no linear layers to adapt, or nothing that can be left out
    *(("fedlora", network) for network in ("batch norm", "gru")),
    *(("fedsdg", network) for network in ("batch norm", "gru")),
    *((name, "gru") for name in CUT),
}

NAMES = [*methods.builtin_names(), *(f"{name}{MIXED}" for name in methods.builtin_names() if depends_on_memory(name))]
GROWS = conformance.accumulator_does_not_grow


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_a_method_keeps_to(check: Callable[..., None], name: str) -> None:
    """Each check on each method; what a round adds up may grow by what FOR_EACH_BYTES says."""
    try:
        check(name, **({"each_bytes": FOR_EACH_BYTES.get(name, 0)} if check is GROWS else {}))
    except CheckSkipped as reason:
        pytest.skip(str(reason))


def test_what_a_method_keeps_of_each_device_it_says_itself() -> None:
    """So that `lab conformance` does not hold it against the method; one that says nothing has to keep nothing."""
    assert {
        name for name in methods.builtin_names() if methods.load(name).traits.per_device_data
    } == FOR_EACH_BYTES.keys()
    with pytest.raises(CheckSkipped, match="by its own account a round keeps whole models"):
        GROWS("robust")


# in `make test` the common network, one more in turn, and those that the method refuses
RUNS = [
    pytest.param(name, network, marks=() if here else pytest.mark.nightly, id=f"{name}-{network}")
    for row, name in enumerate(methods.builtin_names())
    for column, network in enumerate(NETWORKS)
    for here in [network == "batch norm" or (name, network) in UNFIT or column == row % len(NETWORKS)]
]


@pytest.mark.parametrize(("name", "network"), RUNS)
def test_a_run_on_any_network_goes_on_from_the_store(name: str, network: str) -> None:
    try:
        conformance.run_works_on_network(name, network, unfit=(name, network) in UNFIT)
    except CheckSkipped as reason:
        pytest.skip(str(reason))


def test_devices_of_a_mixed_fleet_are_sent_parts_of_another_size() -> None:
    pytest.importorskip("torch")
    for name in ("heterofl", "fjord", "fedlps", "depthfl"):
        here = make_scene(f"{name}{MIXED}")
        state = here.method.init(here.bundle, here.params, 0)
        orders = [
            here.method.send(state, DeviceView("a", device_profile(parse_size(budget)))) for budget in here.budgets
        ]
        sizes = [tensors.total_bytes([order.bundles["model"]]) for order in orders if order]
        assert sizes == sorted(sizes), name
        assert sizes[0] < sizes[-1]
