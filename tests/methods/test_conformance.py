"""What every method has to keep to, whatever it does. A new file in methods/ is tested here without an edit.

A method that trains gets a small network and devices with points; one that runs blocks gets toy donors. One that goes
by a device's memory is played a second time, on a network of three stages and devices of three tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt import methods, metrics, tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.store import Store
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
    Site,
    UpdateError,
)
from fedquilt.edge_agent.engines.numpy_engine import NumpyEngine
from fedquilt.edge_agent.settings import size_bytes
from fedquilt.tools.artefacts import prepare
from fedquilt.tools.simulation import Member
from toys import SMALL, build, learners, members, remembered, to_train
from toys import play as run_of

ROUNDS = 4
TRAINING = {"epochs": 2, "batch": 8, "lr": 0.1}
AMPLE = 1 << 40
# FedStitch keeps every device's ballot, and apart from each other the sums of devices up to a bound of its own;
# FedPeWS what every device has published of its mask: of the toy network's 5 neurons two bytes each, and their header;
# GENE-FL every fingerprint of the first round, and the sums of each of up to four clusters;
# Krum and its like compare whole models, which take 212 bytes each here, up to a number of them (`most`)
# FedSDG compares changes of adapters and head, 424 bytes each here, up to a number of them (`most`)
FOR_EACH_BYTES = {"fedstitch": 1500, "fedpews": 160, "genefl": 250, "krum": 500, "fedsdg": 600}

CUT = ("depthfl", "fedepth", "fedlps", "fedpews", "fedpews_fixed", "fjord", "heterofl")  # need parts to leave out
UNFIT = {  # method, and which of NETWORKS it refuses: no linear layers to adapt, or nothing that can be left out
    *(("fedlora", network) for network in ("batch norm", "gru")),
    *(("fedsdg", network) for network in ("batch norm", "gru")),
    *((name, "gru") for name in CUT),
}

MIXED = "-mixed"
BUDGETS = ("512MB", "2GB", "8GB")


def by_memory(name: str) -> bool:
    """Whether a parameter has a value for each of the five tiers."""
    defaults = [field.default for field in fields(methods.load(name).params)]
    return any(isinstance(default, tuple) and len(default) == 5 for default in defaults)


every = pytest.mark.parametrize(
    "name", [*methods.names(), *(f"{name}{MIXED}" for name in methods.names() if by_memory(name))]
)


@dataclass(frozen=True)
class Scene:
    """What a method is played on."""

    name: str
    method: Method
    bundle: Bundle
    engine: Any
    devices: list[Member]
    given: Mapping[str, Any]
    rounds: int
    budgets: tuple[str, ...] = BUDGETS[:1]  # of the devices, in turn

    @property
    def params(self) -> Any:
        return self.method.params(**self.given)

    def play(
        self, *, method: Method | None = None, devices: list[Member] | None = None, rounds: int = 0, **table: Any
    ) -> list[Any]:
        """The states before the first round and after each."""
        return run_of(
            self.name,
            self.bundle,
            self.devices if devices is None else devices,
            self.given,
            engine=self.engine,
            method=method or self.method,
            seed=3,
            rounds=rounds or self.rounds,
            fleet={"budgets": list(self.budgets)},
            **table,
        )


def scene(name: str) -> Scene:
    """The method on toys that fit it: as small as they can be."""
    plain = name.removesuffix(MIXED)
    method = methods.load(plain)
    if "onnx" in method.engines:
        bundle, runner = build()
        return Scene(plain, method, bundle, runner, members(), SMALL, rounds=1000)  # it ends by itself
    if "numpy" in method.engines:
        engine: Any = NumpyEngine(AMPLE, base_bytes=0)
    else:
        module = pytest.importorskip("fedquilt.edge_agent.engines.torch_engine")
        engine = module.TorchEngine(AMPLE, base_bytes=0)
    known = {field.name for field in fields(method.params)}
    params = {key: value for key, value in TRAINING.items() if key in known}
    if name.endswith(MIXED):
        return Scene(plain, method, deep(), engine, learners(), params, ROUNDS, BUDGETS)
    return Scene(plain, method, to_train(), engine, learners(), params, ROUNDS)


def profile(budget_bytes: int) -> Profile:
    """What a device with so much memory tells."""
    return Profile(
        device="a", board="b", memory_bytes=budget_bytes, budget_bytes=budget_bytes, engines=("torch",), versions={}
    )


def deep() -> Bundle:
    """Three layers of neurons before the one that tells classes."""
    from fedquilt.models.networks import registry
    from fedquilt.models.partial import trace

    network = {"name": "mlp", "inputs": 6, "hidden": [5, 4, 4], "classes": 3}
    module = registry.load(network)
    model = {key: value.numpy() for key, value in module.state_dict().items()}
    return to_train(network, model, trace.plan(module))


# (round, device) -> the state that an update was folded into, and the update: it is folded when it arrives, by
# itself, so that it can be refused, and again when its round is committed
Folded = dict[tuple[int, str], tuple[Any, Contribution]]


@cache
def played(name: str) -> tuple[Scene, list[Any], list[tuple[Any, Contribution]], list[tuple[Site, Answer]]]:
    """One run: its states, what was folded into which, and what each task had and gave."""
    folded: Folded = {}
    worked: list[tuple[Site, Answer]] = []
    here = scene(name)

    def fold(state: Any, so_far: Any, update: Contribution) -> Any:
        folded[update.round, update.device] = (state, update)
        return here.method.fold(state, so_far, update)

    def work(task: Any, site: Site) -> Answer:
        answer = here.method.work(task, site)
        worked.append((remembered(task, site), answer))
        return answer

    states = here.play(method=replace(here.method, fold=fold, work=work))
    return here, states, [folded[key] for key in sorted(folded)], worked


def packed(run: list[Any]) -> list[bytes]:
    return [tensors.pack(state) for state in run]


def test_devices_of_a_mixed_fleet_are_sent_parts_of_another_size() -> None:
    """Of the network of three stages each tier gets another part, by width and by depth."""
    for name in ("heterofl", "fjord", "fedlps", "depthfl"):
        here = scene(f"{name}{MIXED}")
        state = here.method.init(here.bundle, here.params, 0)
        orders = [here.method.send(state, DeviceView("a", profile(size_bytes(budget)))) for budget in here.budgets]
        sizes = [tensors.total_bytes([order.bundles["model"]]) for order in orders if order]  # type: ignore[list-item]
        assert sizes == sorted(sizes), name
        assert sizes[0] < sizes[-1]


# -- the same again -------------------------------------------------------------------------------


@every
def test_the_same_seed_gives_the_same_bits_and_another_order_of_devices_too(name: str) -> None:
    """After every round, with the devices listed the other way round; and a round changes something."""
    here, run, _, _ = played(name)
    turned = replace(here, budgets=here.budgets[::-1])  # taken in turn: each device keeps its own
    assert packed(turned.play(devices=here.devices[::-1])) == packed(run)
    assert len(set(packed(run))) == len(run) > 1


@every
def test_a_run_goes_on_from_any_round_as_if_it_had_not_stopped(name: str) -> None:
    """At every round the state goes through storage, as at a restart, and every one ends in the same bits."""
    here, run, _, _ = played(name)

    def step(state: Any, total: Any) -> Any:
        return here.method.step(tensors.unpack(tensors.pack(state), here.method.state), total)

    assert packed(here.play(method=replace(here.method, step=step))) == packed(run)


@every
def test_a_checkpoint_is_the_state_in_every_bit(name: str) -> None:
    """Packed, unpacked and packed again, in each of its phases; what it yields is the same as well."""
    here, run, _, _ = played(name)
    for state in run:
        again = tensors.unpack(tensors.pack(state), here.method.state)
        assert tensors.pack(again) == tensors.pack(state)
        assert here.method.done(again) == here.method.done(state)
        assert here.method.story(again) == here.method.story(state)


@every
def test_folding_and_stepping_change_no_state(name: str) -> None:
    """A state is a value: what was folded into and stepped from is as it was."""
    here, run, folded, _ = played(name)
    before = packed(run)
    for state, update in folded[:4]:
        here.method.step(state, here.method.fold(state, None, update))
    assert packed(run) == before


# -- on other networks ----------------------------------------------------------------------------

PICTURES = {"channels": 1, "size": 8}
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 3},
    "batch norm": {
        "name": "residual",
        "channels": 1,
        "classes": 3,
        "width": 4,
        "input": PICTURES,
    },  # counters: int64 ()
    "no axes": {"name": "rezero", "inputs": 64, "classes": 3, "width": 6, "blocks": 2},  # parameters of shape ()
    "gru": {"name": "gru", "channels": 8, "steps": 8, "classes": 3, "width": 4},  # tensors of a layer beside each other
    "numbers": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 2, "task": "regression"},
    "labels": {"name": "mlp", "inputs": 64, "hidden": [5, 4], "classes": 3, "task": "labels"},
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", methods.names())
def test_a_run_on_any_network_goes_on_from_the_store_in_type_and_shape(name: str, network: str, tmp_path: Path) -> None:
    """Three rounds; before each the state is put into the store and read from it, and is what it was.

    A method that wants another network says so by a named error as the run begins.
    """
    pytest.importorskip("fedquilt.edge_agent.engines.torch_engine")
    from fedquilt.edge_agent.engines.torch_engine import TorchEngine

    method = methods.load(name)
    if "onnx" in method.engines:
        pytest.skip("this method stitches donors and trains no network")
    known = {field.name for field in fields(method.params)}
    params = method.params(**{key: value for key, value in TRAINING.items() if key in known})
    bundle, store = prepared(NETWORKS[network], tmp_path), Store(tmp_path / "home")
    there: list[Any] = []

    def stepped(state: Any, total: Any) -> Any:
        after = method.step(state, total)
        ref = store.depot.put(tensors.pack(after))
        path = store.depot.path(ref.sha256)
        assert path is not None
        there.append(tensors.unpack(path.read_bytes(), method.state))
        require_alike(there[-1], after)
        return there[-1]

    engine, double = TorchEngine(AMPLE, base_bytes=0), replace(method, step=stepped)
    devices = [replace(each, train=pictured(each.train), held=pictured(each.held)) for each in learners()]
    task = metrics.task_of(NETWORKS[network])
    devices = [replace(each, train=asked(each.train, task), held=asked(each.held, task)) for each in devices]
    if task not in method.tasks:
        with pytest.raises(JobError, match=f"task = '{task}': {name} works with 'classes' only"):
            run_of(name, bundle, devices, asdict(params), engine=None, method=method, seed=3, rounds=3)
        return
    if (name, network) in UNFIT:
        with pytest.raises(ModelError):
            method.init(bundle, params, 3)
        return
    given = asdict(params)
    first, *_, last = run_of(name, bundle, devices, given, engine=engine, method=double, seed=3, rounds=3)
    assert len(there) == 3
    require_alike(tensors.unpack(tensors.pack(first), method.state), first)
    assert tensors.pack(last) != tensors.pack(first)
    for array in method.result(last).tensors.values():
        assert isinstance(array, np.ndarray)


def prepared(network: dict[str, Any], folder: Path) -> Bundle:
    """The bundle that `fedquilt prepare` makes of a network."""
    job = {"model": {key: value for key, value in network.items() if key != "input"}, "input": network.get("input")}
    bundle = prepare.prepare({key: value for key, value in job.items() if value}, folder / "bundle")
    return replace(bundle, meta={**bundle.meta, "pretrained": True})  # some methods hold still what is not


def pictured(examples: Examples) -> Examples:
    """Points of six values as pictures of 8 x 8 pixels."""
    pixels = np.zeros((len(examples), 64), np.float32)
    pixels[:, : examples.x.shape[1]] = examples.x
    return Examples(pixels.reshape(-1, 8, 8), examples.y)


def asked(examples: Examples, task: str) -> Examples:
    """The examples with targets of another task, made of their classes."""
    if task == "regression":
        return Examples(examples.x, np.stack([examples.y, -examples.y], axis=1).astype(np.float32))
    if task == "labels":
        return Examples(examples.x, (examples.y[:, None] >= np.arange(3)).astype(np.uint8))
    return examples


def require_alike(found: Any, wanted: Any, at: str = "state") -> None:
    """The same values, and of every array its dtype, its shape and its bits."""
    assert not isinstance(wanted, np.generic), f"{at}: arithmetic has made a scalar of an array"
    assert isinstance(found, np.ndarray) == isinstance(wanted, np.ndarray), at
    if isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), at
    elif is_dataclass(wanted):
        assert type(found) is type(wanted), at
        for field in fields(wanted):
            require_alike(getattr(found, field.name), getattr(wanted, field.name), f"{at}.{field.name}")
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), at
        for key in wanted:
            require_alike(found[key], wanted[key], f"{at}[{key!r}]")
    elif isinstance(wanted, tuple):
        assert len(found) == len(wanted), at
        for index, each in enumerate(wanted):
            require_alike(found[index], each, f"{at}[{index}]")


# -- by 16 bits -----------------------------------------------------------------------------------


@every
def test_updates_go_up_in_16_bits_unless_the_method_is_exact(name: str) -> None:
    """Two rounds; the first folds raw updates' names, types and shapes, and their values but for a little."""
    here, _, folded, _ = played(name)
    if here.method.exact:
        with pytest.raises(JobError, match=r"\[wire\] codec = 'fp16'.* may not be rounded"):
            settings.parse({"name": "j", "method": name, "wire": {"codec": "fp16"}})
        return
    seen: Folded = {}

    def fold(state: Any, so_far: Any, update: Contribution) -> Any:
        seen[update.round, update.device] = (state, update)
        return here.method.fold(state, so_far, update)

    coded = here.play(method=replace(here.method, fold=fold), rounds=2, wire={"codec": "fp16"})
    assert len(coded) == 3
    first = [update for _, update in folded if update.round == 0]
    assert {update.device for update in first} == {device for round, device in seen if round == 0} != set()
    for raw in first:
        _, update = seen[0, raw.device]
        assert update.bundles.keys() == raw.bundles.keys()
        for what, bundle in raw.bundles.items():
            assert update.bundles[what].keys() == bundle.keys()
            for tensor, array in bundle.items():
                given = update.bundles[what][tensor]
                assert given.dtype == array.dtype
                np.testing.assert_allclose(given, array, rtol=1e-3, atol=1e-4)


# -- what may not be folded -----------------------------------------------------------------------


def spoiled(update: Contribution) -> Iterator[tuple[str, Contribution]]:
    """The update with one thing wrong, in each of its bundles' tensors in turn."""

    def with_bundle(bundle: str, change: Callable[[dict[str, Any]], None]) -> Contribution:
        held = {name: array.copy() for name, array in update.bundles[bundle].items()}
        change(held)
        return replace(update, bundles={**update.bundles, bundle: held})

    for bundle, held in update.bundles.items():
        for name, array in held.items():
            if array.dtype.kind == "f" and array.size:
                yield f"{bundle}/{name} is NaN", with_bundle(bundle, lambda some, n=name: _put(some[n], np.nan))
                yield f"{bundle}/{name} is infinite", with_bundle(bundle, lambda some, n=name: _put(some[n], np.inf))
            for odd, other in strange(array):
                yield f"{bundle}/{name} {odd}", with_bundle(bundle, lambda some, n=name, o=other: some.update({n: o}))
            yield f"{bundle}/{name} is missing", with_bundle(bundle, lambda some, n=name: some.pop(n))
            yield (
                f"{bundle}/{name} is longer",
                with_bundle(bundle, lambda some, n=name: some.update({n: _longer(some[n])})),
            )
        yield (
            f"{bundle} has a stranger",
            with_bundle(bundle, lambda some: some.update(stranger=np.zeros(1, np.float32))),
        )
        without = {key: value for key, value in update.bundles.items() if key != bundle}
        yield f"{bundle} is absent", replace(update, bundles=without)


def strange(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """An array of finite numbers that is of another type, or beyond what may be added up."""
    floats, integers = (np.float32, np.float64), (np.int32, np.int64, np.uint8)
    for kind in (*floats, *integers):
        if array.dtype != kind:
            yield f"is {np.dtype(kind)}", array.astype(kind)
    if array.dtype.kind == "f" and array.size:
        yield "is too large", np.full_like(array, np.finfo(array.dtype).max)
        yield "is 1e300", np.full(array.shape, 1e300)
    elif array.dtype == np.int64 and array.size:
        yield "is too large", np.full_like(array, np.iinfo(np.int64).max)
        yield "is below 0", np.full_like(array, -1)


def _put(array: np.ndarray, value: float) -> None:
    array.reshape(-1)[0] = value


def _longer(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array.reshape(1, -1), array.reshape(1, -1)], axis=1).reshape(-1)


@every
def test_an_update_that_is_not_what_was_asked_for_is_refused(name: str) -> None:
    """NaN, infinity, another type, too large, a missing tensor, another shape, no bundle: each by an UpdateError.

    A further tensor is refused as well, or else counts for nothing.
    """
    here, _, folded, _ = played(name)
    refused = 0
    phases = {getattr(state, "phase", ""): (state, update) for state, update in folded if update.bundles}
    for state, update in phases.values():
        good = tensors.pack(here.method.fold(state, None, update))
        for what, bad in spoiled(update):
            try:
                total = here.method.fold(state, None, bad)
            except UpdateError:
                refused += 1
            else:
                assert "stranger" in what, f"folded, though {what}"
                assert tensors.pack(total) == good, what
    assert refused >= 6 or not phases  # a method that sends no tensors has none to refuse


@every
def test_what_a_round_adds_up_does_not_grow_with_its_devices(name: str) -> None:
    """Three devices or twelve: the same bytes of arrays, and a name at most for each device beside them."""
    here = scene(name)
    arrays, beside = [], []
    for count in (3, 12):
        devices = (members if "onnx" in here.method.engines else learners)(count)
        most: dict[str, tuple[int, int]] = {}

        def step(state: Any, total: Any, most: dict[str, tuple[int, int]] = most) -> Any:
            payload = tensors.pack(total)
            size = tensors.total_bytes([tensors.decode(payload)])
            most["arrays"] = max(most.get("arrays", (0, 0)), (size, len(payload)))
            return here.method.step(state, total)

        here.play(method=replace(here.method, step=step), devices=devices)
        size, whole = most["arrays"]
        arrays.append(size)
        beside.append(whole - size)
    assert arrays[1] <= arrays[0] + 9 * FOR_EACH_BYTES.get(name, 0)
    assert beside[1] <= beside[0] + 9 * FOR_EACH_BYTES.get(name, 40)


# -- what stays -----------------------------------------------------------------------------------


@every
def test_nothing_private_is_in_an_update(name: str) -> None:
    """No array that a device has kept from its last round is in the bytes it sends, in any round."""
    _, _, _, worked = played(name)
    for site, answer in worked:
        sent = b"".join(tensors.encode(bundle) for bundle in answer.bundles.values())
        for kept, array in site.local.items():
            if array.size > 2 and len(np.unique(array)) > 1:  # zeros are found anywhere
                assert array.tobytes() not in sent, f"{name} sends {kept}"
        assert answer.bundles.keys().isdisjoint({"local", "private"})


@every
def test_what_is_received_is_left_as_it_was(name: str) -> None:
    """A client half makes new arrays: neither its private state nor the device's examples change under it."""
    here = scene(name)

    def work(task: Any, site: Site) -> Answer:
        before = tensors.encode(site.local), site.train.x.tobytes(), site.train.y.tobytes()
        answer = here.method.work(task, site)
        assert (tensors.encode(site.local), site.train.x.tobytes(), site.train.y.tobytes()) == before
        return answer

    here.play(method=replace(here.method, work=work), rounds=2)
