"""Conformance of methods: plain functions that take a method's name and raise AssertionError.

A package with a method calls them in its own tests, or runs `fedquilt conformance NAME`:

    @pytest.mark.parametrize("check", conformance.CHECKS)
    def test_conformance(check):
        check("mine")
"""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt import exact, methods, metrics, progress, tensor_files, tensors
from fedquilt.coordinator import settings
from fedquilt.coordinator.store import Store
from fedquilt.core import (
    Answer,
    Bundle,
    Contribution,
    DeviceView,
    FedquiltError,
    JobError,
    Method,
    ModelError,
    Site,
    UpdateError,
    shorten_error,
    summed,
)
from fedquilt.on_disk import Scratch
from fedquilt.testing.scenes import (
    MIXED,
    NETWORKS,
    Folded,
    Skipped,
    asked,
    by_memory,
    known,
    packed,
    pictured,
    played,
    prepared,
    scene,
    torch_engine,
)
from fedquilt.testing.spoiled import require_alike, spoiled
from fedquilt.testing.toys import learners, members
from fedquilt.testing.toys import play as run_of

# -- the same again -------------------------------------------------------------------------------


def the_same_seed_gives_the_same_bits_and_another_order_of_devices_too(name: str) -> None:
    """After every round, with the devices listed the other way round; and a round changes something."""
    here, run, _, _ = played(name)
    turned = replace(here, budgets=here.budgets[::-1])  # taken in turn: each device keeps its own
    assert packed(turned.play(devices=here.devices[::-1])) == packed(run)
    assert len(set(packed(run))) == len(run) > 1


def a_run_goes_on_from_any_round_as_if_it_had_not_stopped(name: str) -> None:
    """At every round the state goes through storage, as at a restart, and every one ends in the same bits."""
    here, run, _, _ = played(name)

    def step(state: Any, total: Any) -> Any:
        return here.method.step(tensors.unpack(tensors.pack(state), here.method.state), total)

    assert packed(here.play(method=replace(here.method, step=step))) == packed(run)


def a_checkpoint_is_the_state_in_every_bit(name: str) -> None:
    """Packed, unpacked and packed again, in each of its phases; what it yields is the same as well."""
    here, run, _, _ = played(name)
    for state in run:
        again: Any = tensors.unpack(tensors.pack(state), here.method.state)
        assert tensors.pack(again) == tensors.pack(state)
        assert here.method.done(again) == here.method.done(state)
        assert here.method.explain(again) == here.method.explain(state)


def folding_and_stepping_change_no_state(name: str) -> None:
    """A state is a value: what was folded into and stepped from is as it was."""
    here, run, folded, _ = played(name)
    before = packed(run)
    for state, update in folded[:4]:
        here.method.step(state, here.method.fold(state, None, update))
    assert packed(run) == before


# -- on other networks ----------------------------------------------------------------------------


def a_run_on_any_network_goes_on_from_the_store_in_type_and_shape(
    name: str, network: str, unfit: bool | None = None
) -> None:
    """Three rounds; before each the state is put into the store and read from it, and is what it was.

    A method that wants another network says so by a named error as the run begins.

    Args:
        name: of the method.
        network: one of NETWORKS.
        unfit: whether the method refuses it; None: either.
    """
    method, engine = methods.load(name), torch_engine()
    if "onnx" in method.engines:
        raise Skipped("this method stitches donors and trains no network")
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "home") as store:
        _on(name, method, engine, prepared(NETWORKS[network], Path(folder)), store, unfit, NETWORKS[network])


def _on(
    name: str,
    method: Method,
    engine: Any,
    bundle: Bundle,
    store: Store,
    unfit: bool | None,
    network: Mapping[str, Any],
) -> None:
    given, refused = known(method.params), ""
    task = metrics.task_of(network)
    there: list[Any] = []

    def stepped(state: Any, total: Any) -> Any:
        after = method.step(state, total)
        ref = store.depot.put(tensors.pack(after))
        path = store.depot.path(ref.sha256)
        assert path is not None
        there.append(tensors.unpack(path.read_bytes(), method.state))
        require_alike(there[-1], after)
        return there[-1]

    double = replace(method, step=stepped)
    devices = [replace(each, train=pictured(each.train), held=pictured(each.held)) for each in learners()]
    devices = [replace(each, train=asked(each.train, task), held=asked(each.held, task)) for each in devices]
    if task not in method.tasks:
        told = ""
        try:
            run_of(name, bundle, devices, given, engine=None, method=method, seed=3, rounds=3)
        except JobError as error:
            told = str(error)
        assert f"task = {task!r}" in told, told or f"a run with task = {task!r} begins, which is none of the method's"
        return
    try:
        method.init(bundle, method.params(**given), 3)
    except ModelError as error:
        refused = str(error)
    if unfit is not None:
        assert bool(refused) == unfit, refused or "the method was expected to refuse this network"
    if refused:
        return
    first, *_, last = run_of(name, bundle, devices, given, engine=engine, method=double, seed=3, rounds=3)
    assert len(there) == 3
    require_alike(tensors.unpack(tensors.pack(first), method.state), first)
    assert tensors.pack(last) != tensors.pack(first)
    for array in method.result(last).tensors.values():
        assert isinstance(array, np.ndarray)


# -- by 16 bits -----------------------------------------------------------------------------------


def updates_go_up_in_16_bits_unless_the_method_is_exact(name: str) -> None:
    """Two rounds; the first folds raw updates' names, types and shapes, and their values but for a little."""
    here, _, folded, _ = played(name)
    if here.method.exact:
        refused = ""
        try:
            settings.parse({"name": "j", "method": here.name, "wire": {"codec": "fp16"}})
        except JobError as error:
            refused = str(error)
        assert "may not be rounded" in refused, "its jobs take a codec that rounds"
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


def an_update_that_is_not_what_was_asked_for_is_refused(name: str) -> None:
    """NaN, infinity, another type, too large, a missing tensor, another shape, no bundle: each by an UpdateError.

    A further tensor is refused as well, or else counts for nothing.
    """
    here, _, folded, _ = played(name)
    refused = 0
    phases = {getattr(state, "phase", ""): (state, update) for state, update in folded if update.bundles}
    for state, update in phases.values():
        sum_of_one = here.method.fold(state, None, update)
        good = tensors.pack(sum_of_one)
        for what, bad in spoiled(update):
            try:
                total = here.method.fold(state, None, bad)
            except UpdateError:
                refused += 1
            else:
                assert "stranger" in what, f"folded, though {what}"
                assert tensors.pack(total) == good, what
                continue
            with contextlib.suppress(UpdateError):
                here.method.fold(state, sum_of_one, replace(bad, device="zz-another"))
            assert tensors.pack(sum_of_one) == good, f"a refused update is in the sum: {what}"
    assert refused >= 6 or not phases  # a method that sends no tensors has none to refuse


def what_adds_up_does_so_in_any_order_and_in_groups(name: str) -> None:
    """Each round's updates in turn, backwards, and as two sites' sums that were stored and merged: the same bits.

    Raises:
        Skipped: the method's sums depend on the order of devices (`core.adds_up`).
    """
    here, _, folded, _ = played(name)
    fold, added = here.method.fold, 0

    def total(updates: Sequence[Contribution]) -> Any:
        return reduce(lambda so_far, update: fold(state, so_far, update), updates, None)

    for number in sorted({update.round for _, update in folded}):
        state = next(state for state, update in folded if update.round == number)
        updates = [update for _, update in folded if update.round == number]
        if (kind := summed(fold, state)) is None:
            continue
        added += 1
        wanted = tensors.pack(here.method.step(state, total(updates)))
        assert tensors.pack(here.method.step(state, total(updates[::-1]))) == wanted, "another order, other bits"
        one, *others = (tensors.pack(total(some)) for some in (updates[1::2], updates[::2]) if some)
        merged: Any = tensors.unpack(one, kind)
        for other in others:
            merged = exact.join(merged, tensors.unpack(other, kind))
        assert tensors.pack(here.method.step(state, merged)) == wanted, "other groups, other bits"
    if not added:
        raise Skipped("its sums are made in sorted order of devices, and are not merged")


def a_state_and_sums_on_the_disk_come_to_the_same_bits(name: str) -> None:
    """Each round with tensors of the state that are read where they are used, as a coordinator has large ones."""
    here, _, folded, _ = played(name)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        for number in sorted({update.round for _, update in folded}):
            state = next(state for state, update in folded if update.round == number)
            updates = [update for _, update in folded if update.round == number]
            tensor_files.write(path, *tensors.parts(state))
            apart = tensor_files.read_state(path, type(state), lazy_bytes=1)
            here.method.send(apart, DeviceView("a", None))
            with exact.laid(Scratch(folder, least=1) if summed(here.method.fold, apart) else None):
                total = reduce(lambda so_far, update: here.method.fold(apart, so_far, update), updates, None)
                found = here.method.step(apart, total)
            wanted = reduce(lambda so_far, update: here.method.fold(state, so_far, update), updates, None)
            assert tensors.pack(found) == tensors.pack(here.method.step(state, wanted)), f"round {number}"


def what_a_round_adds_up_does_not_grow_with_its_devices(name: str, each_bytes: int = 0) -> None:
    """Three devices or twelve: the same bytes of arrays, and a name at most for each device beside them.

    Args:
        name: of the method.
        each_bytes: bytes that the method has to keep for each device.

    Raises:
        Skipped: the method says that it keeps something for each device (`Method.keeps`), and no `each_bytes` is given.
    """
    here = scene(name)
    if here.method.keeps and not each_bytes:
        raise Skipped(f"by its own account a round keeps {here.method.keeps}")
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
    assert arrays[1] <= arrays[0] + 9 * each_bytes
    assert beside[1] <= beside[0] + 9 * max(each_bytes, 40)


# -- what stays -----------------------------------------------------------------------------------


def nothing_private_is_in_an_update(name: str) -> None:
    """No array that a device has kept from its last round is in the bytes it sends, in any round."""
    _, _, _, worked = played(name)
    for site, answer in worked:
        sent = b"".join(tensors.encode(bundle) for bundle in answer.bundles.values())
        for kept, array in site.local.items():
            if array.size > 2 and len(np.unique(array)) > 1:  # zeros are found anywhere
                assert array.tobytes() not in sent, f"{name} sends {kept}"
        assert answer.bundles.keys().isdisjoint({"local", "private"})


def what_is_received_is_left_as_it_was(name: str) -> None:
    """A client half makes new arrays: neither its private state nor the device's examples change under it."""
    here = scene(name)

    def work(task: Any, site: Site) -> Answer:
        before = tensors.encode(site.local), site.train.x.tobytes(), site.train.y.tobytes()
        answer = here.method.work(task, site)
        assert (tensors.encode(site.local), site.train.x.tobytes(), site.train.y.tobytes()) == before
        return answer

    here.play(method=replace(here.method, work=work), rounds=2)


# -- all of them ----------------------------------------------------------------------------------

CHECKS: Final[tuple[Callable[[str], None], ...]] = (
    the_same_seed_gives_the_same_bits_and_another_order_of_devices_too,
    a_run_goes_on_from_any_round_as_if_it_had_not_stopped,
    a_checkpoint_is_the_state_in_every_bit,
    folding_and_stepping_change_no_state,
    updates_go_up_in_16_bits_unless_the_method_is_exact,
    an_update_that_is_not_what_was_asked_for_is_refused,
    what_adds_up_does_so_in_any_order_and_in_groups,
    a_state_and_sums_on_the_disk_come_to_the_same_bits,
    what_a_round_adds_up_does_not_grow_with_its_devices,
    nothing_private_is_in_an_update,
    what_is_received_is_left_as_it_was,
)
"""What is checked of a method by its name; one that goes by memory is checked again with MIXED behind it."""


def run(name: str) -> Iterator[tuple[str, str, str]]:
    """Run every check on a method: (the check in words, "passed", "skipped" or "failed", reason).

    Raises:
        JobError: there is no such method, or it cannot be imported.
    """
    methods.load(name)
    kinds = [name, *([f"{name}{MIXED}"] if by_memory(name) else [])]
    todo: list[tuple[str, Callable[[], None]]] = []
    for kind in kinds:
        on = " (mixed fleet)" if kind != name else ""
        todo += [(f"{_words(check)}{on}", partial(check, kind)) for check in CHECKS]
    on_any = a_run_on_any_network_goes_on_from_the_store_in_type_and_shape
    todo += [(f"{_words(on_any)} ({network})", partial(on_any, name, network)) for network in NETWORKS]
    for number, (words, check) in enumerate(todo):
        progress.LINE.part(f"{name}: {words}", number, len(todo))
        try:
            check()
        except Skipped as reason:
            yield words, "skipped", str(reason)
        except AssertionError as error:
            yield words, "failed", _describe_assertion(error)
        except FedquiltError as error:
            yield words, "failed", f"{type(error).__name__}: {error}"
        except Exception as error:  # code from outside may raise anything
            frame = traceback.extract_tb(error.__traceback__)[-1]
            yield words, "failed", f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        else:
            yield words, "passed", ""


def _words(check: Callable[..., None]) -> str:
    return check.__name__.replace("_", " ")


def _describe_assertion(error: AssertionError) -> str:
    """Return the message of an assertion, or its line, with file and line number."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = shorten_error(str(error))
    return f"{said or frame.line} ({Path(frame.filename).name}, line {frame.lineno})"
