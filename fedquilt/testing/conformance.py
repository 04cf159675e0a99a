"""Conformance checks of methods: functions of a method's name that raise AssertionError.

A package with a method calls the checks in its own tests, or runs `fedquilt lab conformance NAME`:

    @pytest.mark.parametrize("check", conformance.CHECKS)
    def test_conformance(check):
        check("mine")
"""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt import methods, metrics, plugins
from fedquilt.arrays import disk_arrays, exact_sums, tensors
from fedquilt.arrays.disk_arrays import ScratchFile
from fedquilt.console import progress
from fedquilt.coordinator import settings
from fedquilt.coordinator.storage.store import Store
from fedquilt.core import (
    Aggregation,
    Bundle,
    ClientContext,
    ClientResult,
    DeviceUpdate,
    DeviceView,
    FedquiltError,
    JobError,
    Method,
    ModelError,
    UpdateError,
    shorten_error,
)
from fedquilt.data.readers import arrays as readers_plugin
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import devices as sensors
from fedquilt.edge_agent import engines
from fedquilt.models.networks import registry
from fedquilt.testing.toy_networks import (
    MIXED,
    NETWORKS,
    CheckSkipped,
    Folded,
    as_images,
    depends_on_memory,
    device_profile,
    image_members,
    make_scene,
    make_torch_engine,
    packed_states,
    point_members,
    prepare_bundle,
    record_run,
    run_method,
    training_params,
    with_targets,
)

# -- the same again -------------------------------------------------------------------------------


def run_is_reproducible(name: str) -> None:
    """Assert that all states are bit-identical when the devices are listed in reverse order.

    A round must change the state.
    """
    here, run, _, _ = record_run(name)
    turned = replace(here, budgets=here.budgets[::-1])  # taken in turn: each device keeps its own
    assert packed_states(turned.run_rounds(devices=here.devices[::-1])) == packed_states(run)
    assert len(set(packed_states(run))) == len(run) > 1


def run_resumes_from_any_round(name: str) -> None:
    """Assert that packing and unpacking the state before each step does not change the run."""
    here, run, _, _ = record_run(name)

    def step(state: Any, total: Any) -> Any:
        return here.method.step(tensors.unpack_state(tensors.pack_state(state), here.method.state), total)

    assert packed_states(here.run_rounds(method=replace(here.method, step=step))) == packed_states(run)


def state_survives_packing(name: str) -> None:
    """Assert that each packed and unpacked state is bit-identical, with equal `done` and `explain`."""
    here, run, _, _ = record_run(name)
    for state in run:
        again: Any = tensors.unpack_state(tensors.pack_state(state), here.method.state)
        assert tensors.pack_state(again) == tensors.pack_state(state)
        assert here.method.done(again) == here.method.done(state)
        assert here.method.explain(again) == here.method.explain(state)


def fold_and_step_keep_state(name: str) -> None:
    """Assert that `fold` and `step` do not modify the state that they receive."""
    here, run, folded, _ = record_run(name)
    before = packed_states(run)
    for state, update in folded[:4]:
        here.method.step(state, here.method.aggregation.fold(state, None, update))
    assert packed_states(run) == before


def common_task_is_the_same_for_all_devices(name: str) -> None:
    """Assert that `send` ignores the device if the method declares `common_task`.

    Raises:
        CheckSkipped: If the method sends tasks made for each device.
    """
    here, run, _, _ = record_run(name)
    if not here.method.common_task:
        raise CheckSkipped("its tasks are made for each device")
    small = DeviceView("b", device_profile(1), (0,))
    for state in run:
        first, other = here.method.send(state, DeviceView("a", None)), here.method.send(state, small)
        assert first is not None
        assert other is not None
        assert (other.params, other.work, other.check) == (first.params, first.work, first.check)
        require_identical(dict(other.bundles), dict(first.bundles), "bundles")


# -- on other networks ----------------------------------------------------------------------------


def run_works_on_network(name: str, network: str, unfit: bool | None = None) -> None:
    """Assert that a run works on another network, with each state stored and read again.

    A method that does not support the network must raise a ModelError at the start of the run.

    Args:
        name: The name of the method.
        network: One of NETWORKS.
        unfit: Whether the method must reject the network, or None if both are permitted.
    """
    method, engine = methods.load(name), make_torch_engine()
    if "onnx" in method.engines:
        raise CheckSkipped("this method stitches donors and trains no network")
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "home") as store:
        _require_run_on_network(
            name, method, engine, prepare_bundle(NETWORKS[network], Path(folder)), store, unfit, NETWORKS[network]
        )


def _require_run_on_network(
    name: str,
    method: Method,
    engine: Any,
    bundle: Bundle,
    store: Store,
    unfit: bool | None,
    network: Mapping[str, Any],
) -> None:
    given, refused = training_params(method.params), ""
    task = metrics.task_from_network(network)
    there: list[Any] = []

    def step_through_store(state: Any, total: Any) -> Any:
        after = method.step(state, total)
        ref = store.blob_store.store_bytes(tensors.pack_state(after))
        path = store.blob_store.blob_path(ref.sha256)
        assert path is not None
        there.append(tensors.unpack_state(path.read_bytes(), method.state))
        require_identical(there[-1], after)
        return there[-1]

    double = replace(method, step=step_through_store)
    devices = [replace(each, train=as_images(each.train), held=as_images(each.held)) for each in point_members()]
    devices = [
        replace(each, train=with_targets(each.train, task), held=with_targets(each.held, task)) for each in devices
    ]
    if task not in method.traits.prediction_tasks:
        told = ""
        try:
            run_method(name, bundle, devices, given, engine=None, method=method, seed=3, rounds=3)
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
    first, *_, last = run_method(name, bundle, devices, given, engine=engine, method=double, seed=3, rounds=3)
    assert len(there) == 3
    require_identical(tensors.unpack_state(tensors.pack_state(first), method.state), first)
    assert tensors.pack_state(last) != tensors.pack_state(first)
    for array in method.result(last).tensors.values():
        assert isinstance(array, np.ndarray)


# -- by 16 bits -----------------------------------------------------------------------------------


def updates_work_in_16_bits(name: str) -> None:
    """Assert that updates with the codec fp16 arrive with small errors, unless the method is exact.

    Jobs of an exact method must be refused with this codec.
    """
    here, _, folded, _ = record_run(name)
    if here.method.traits.exact_updates:
        refused = ""
        try:
            settings.parse_job({"name": "j", "method": here.name, "wire": {"codec": "fp16"}})
        except JobError as error:
            refused = str(error)
        assert "may not be rounded" in refused, "its jobs take a codec that rounds"
        return
    seen: Folded = {}

    def fold(state: Any, so_far: Any, update: DeviceUpdate) -> Any:
        seen[update.round, update.device] = (state, update)
        return here.method.aggregation.fold(state, so_far, update)

    coded = here.run_rounds(
        method=replace(here.method, aggregation=Aggregation(fold)), rounds=2, wire={"codec": "fp16"}
    )
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


def invalid_updates_are_rejected(name: str) -> None:
    """Assert that `fold` rejects invalid updates with UpdateError and keeps its accumulator.

    Invalid are NaN, infinity, another dtype, too large values, missing tensors or bundles, and other shapes. An
    additional tensor may also be ignored.
    """
    here, _, folded, _ = record_run(name)
    refused = 0
    phases = {getattr(state, "phase", ""): (state, update) for state, update in folded if update.bundles}
    for state, update in phases.values():
        sum_of_one = here.method.aggregation.fold(state, None, update)
        good = tensors.pack_state(sum_of_one)
        for what, bad in corrupted_updates(update):
            try:
                total = here.method.aggregation.fold(state, None, bad)
            except UpdateError:
                refused += 1
            else:
                assert "stranger" in what, f"folded, though {what}"
                assert tensors.pack_state(total) == good, what
                continue
            with contextlib.suppress(UpdateError):
                here.method.aggregation.fold(state, sum_of_one, replace(bad, device="zz-another"))
            assert tensors.pack_state(sum_of_one) == good, f"a refused update is in the sum: {what}"
    assert refused >= 6 or not phases  # a method that sends no tensors has none to refuse


def accumulators_merge_in_any_order(name: str) -> None:
    """Assert that updates in any order and merged accumulators give bit-identical states.

    Raises:
        CheckSkipped: If the accumulators of the method depend on the order of devices.
    """
    here, _, folded, _ = record_run(name)
    aggregation, added = here.method.aggregation, 0

    def total(updates: Sequence[DeviceUpdate]) -> Any:
        return reduce(lambda so_far, update: aggregation.fold(state, so_far, update), updates, None)

    for number in sorted({update.round for _, update in folded}):
        state = next(state for state, update in folded if update.round == number)
        updates = [update for _, update in folded if update.round == number]
        if (kind := aggregation.accumulator(state)) is None:
            continue
        added += 1
        wanted = tensors.pack_state(here.method.step(state, total(updates)))
        assert tensors.pack_state(here.method.step(state, total(updates[::-1]))) == wanted, "another order, other bits"
        one, *others = (tensors.pack_state(total(some)) for some in (updates[1::2], updates[::2]) if some)
        merged: Any = tensors.unpack_state(one, kind)
        for other in others:
            merged = exact_sums.merge_accumulators(merged, tensors.unpack_state(other, kind))
        assert tensors.pack_state(here.method.step(state, merged)) == wanted, "other groups, other bits"
    if not added:
        raise CheckSkipped("its sums are made in sorted order of devices, and are not merged")


def state_on_disk_gives_same_result(name: str) -> None:
    """Assert that states and sums on the disk give bit-identical results."""
    here, _, folded, _ = record_run(name)
    aggregation = here.method.aggregation
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        for number in sorted({update.round for _, update in folded}):
            state = next(state for state, update in folded if update.round == number)
            updates = [update for _, update in folded if update.round == number]
            disk_arrays.write_safetensors(path, *tensors.split_state(state))
            apart = disk_arrays.read_state(path, type(state), lazy_bytes=1)
            here.method.send(apart, DeviceView("a", None))
            with exact_sums.sums_on_disk(ScratchFile(folder, least=1) if aggregation.accumulator(apart) else None):
                total = reduce(lambda so_far, update: aggregation.fold(apart, so_far, update), updates, None)
                found = here.method.step(apart, total)
            wanted = reduce(lambda so_far, update: aggregation.fold(state, so_far, update), updates, None)
            assert tensors.pack_state(found) == tensors.pack_state(here.method.step(state, wanted)), f"round {number}"


def accumulator_does_not_grow(name: str, each_bytes: int = 0) -> None:
    """Assert that the accumulators of three and of twelve devices have arrays of equal size.

    Args:
        name: The name of the method.
        each_bytes: The bytes that the method must keep for each device.

    Raises:
        CheckSkipped: If the method declares data for each device (`Traits.per_device_data`) and `each_bytes` is 0.
    """
    here = make_scene(name)
    if here.method.traits.per_device_data and not each_bytes:
        raise CheckSkipped(f"by its own account a round keeps {here.method.traits.per_device_data}")
    arrays, beside = [], []
    for count in (3, 12):
        devices = (image_members if "onnx" in here.method.engines else point_members)(count)
        most: dict[str, tuple[int, int]] = {}

        def step(state: Any, total: Any, most: dict[str, tuple[int, int]] = most) -> Any:
            payload = tensors.pack_state(total)
            size = tensors.total_bytes([tensors.decode_tensors(payload)])
            most["arrays"] = max(most.get("arrays", (0, 0)), (size, len(payload)))
            return here.method.step(state, total)

        here.run_rounds(method=replace(here.method, step=step), devices=devices)
        size, whole = most["arrays"]
        arrays.append(size)
        beside.append(whole - size)
    assert arrays[1] <= arrays[0] + 9 * each_bytes
    assert beside[1] <= beside[0] + 9 * max(each_bytes, 40)


# -- what stays -----------------------------------------------------------------------------------


def update_contains_no_private_state(name: str) -> None:
    """Assert that no array of a device's private state is contained in the device's update."""
    _, _, _, worked = record_run(name)
    for site, answer in worked:
        sent = b"".join(tensors.encode_tensors(bundle) for bundle in answer.bundles.values())
        for kept, array in site.local.items():
            if array.size > 2 and len(np.unique(array)) > 1:  # zeros are found anywhere
                assert array.tobytes() not in sent, f"{name} sends {kept}"
        assert answer.bundles.keys().isdisjoint({"local", "private"})


def client_half_keeps_inputs(name: str) -> None:
    """Assert that `work` does not modify the private state or the examples of a device."""
    here = make_scene(name)

    def work(task: Any, site: ClientContext) -> ClientResult:
        before = tensors.encode_tensors(site.local), site.train.x.tobytes(), site.train.y.tobytes()
        answer = here.method.work(task, site)
        assert (tensors.encode_tensors(site.local), site.train.x.tobytes(), site.train.y.tobytes()) == before
        return answer

    here.run_rounds(method=replace(here.method, work=work), rounds=2)


# -- all of them ----------------------------------------------------------------------------------

CHECKS: Final[tuple[Callable[[str], None], ...]] = (
    run_is_reproducible,
    run_resumes_from_any_round,
    state_survives_packing,
    fold_and_step_keep_state,
    common_task_is_the_same_for_all_devices,
    updates_work_in_16_bits,
    invalid_updates_are_rejected,
    accumulators_merge_in_any_order,
    state_on_disk_gives_same_result,
    accumulator_does_not_grow,
    update_contains_no_private_state,
    client_half_keeps_inputs,
)
"""What is checked of a method by its name; one that goes by memory is checked again with MIXED behind it."""


def run_checks(name: str) -> Iterator[tuple[str, str, str]]:
    """Run all checks on a method. Yield title, "passed", "skipped" or "failed", and reason of each.

    Raises:
        JobError: If the method does not exist or cannot be imported.
    """
    methods.load(name)
    kinds = [name, *([f"{name}{MIXED}"] if depends_on_memory(name) else [])]
    todo: list[tuple[str, Callable[[], None]]] = []
    for kind in kinds:
        on = " (mixed fleet)" if kind != name else ""
        todo += [(f"{_check_title(check)}{on}", partial(check, kind)) for check in CHECKS]
    on_any = run_works_on_network
    todo += [(f"{_check_title(on_any)} ({network})", partial(on_any, name, network)) for network in NETWORKS]
    for number, (words, check) in enumerate(todo):
        progress.LINE.set_part(f"{name}: {words}", number, len(todo))
        try:
            check()
        except CheckSkipped as reason:
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


def _check_title(check: Callable[..., None]) -> str:
    return check.__name__.replace("_", " ")


def _describe_assertion(error: AssertionError) -> str:
    """Return the message of an assertion, or its line, with file and line number."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = shorten_error(str(error))
    return f"{said or frame.line} ({Path(frame.filename).name}, line {frame.lineno})"


# -- corrupted updates ----------------------------------------------------------------------------


def corrupted_updates(update: DeviceUpdate) -> Iterator[tuple[str, DeviceUpdate]]:
    """Yield copies of an update with one error each, and a description of the error."""

    def replace_tensor(bundle: str, name: str, array: np.ndarray | None) -> DeviceUpdate:
        held = {**update.bundles[bundle], name: array}
        kept = {key: value for key, value in held.items() if value is not None}
        return replace(update, bundles={**update.bundles, bundle: kept})

    for bundle, held in update.bundles.items():
        for name, array in held.items():
            if array.dtype.kind == "f" and array.size:
                yield f"{bundle}/{name} is NaN", replace_tensor(bundle, name, _with_first_value(array, np.nan))
                yield f"{bundle}/{name} is infinite", replace_tensor(bundle, name, _with_first_value(array, np.inf))
            for odd, other in invalid_arrays(array):
                yield f"{bundle}/{name} {odd}", replace_tensor(bundle, name, other)
            yield f"{bundle}/{name} is missing", replace_tensor(bundle, name, None)
            yield f"{bundle}/{name} is longer", replace_tensor(bundle, name, _repeat_array(array))
        yield f"{bundle} has a stranger", replace_tensor(bundle, "stranger", np.zeros(1, np.float32))
        without = {key: value for key, value in update.bundles.items() if key != bundle}
        yield f"{bundle} is absent", replace(update, bundles=without)


def invalid_arrays(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield copies of an array with another dtype or with too large values, and descriptions."""
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


def _with_first_value(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.copy()
    changed.reshape(-1)[0] = value
    return changed


def _repeat_array(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array.reshape(1, -1), array.reshape(1, -1)], axis=1).reshape(-1)


def require_identical(found: Any, wanted: Any, at: str = "state") -> None:
    """Assert that two values are equal, and all arrays equal in dtype, shape and bits."""
    assert not isinstance(wanted, np.generic), f"{at}: arithmetic has made a scalar of an array"
    assert isinstance(found, np.ndarray) == isinstance(wanted, np.ndarray), at
    if isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), at
    elif is_dataclass(wanted):
        assert type(found) is type(wanted), at
        for field in fields(wanted):
            require_identical(getattr(found, field.name), getattr(wanted, field.name), f"{at}.{field.name}")
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), at
        for key in wanted:
            require_identical(found[key], wanted[key], f"{at}[{key!r}]")
    elif isinstance(wanted, tuple):
        assert len(found) == len(wanted), at
        for index, each in enumerate(wanted):
            require_identical(found[index], each, f"{at}[{index}]")


# -- packages -------------------------------------------------------------------------------------

BUDGET_BYTES = 1 << 40


def check_package(name: str) -> Iterator[tuple[bool, str]]:
    """Check a method, or all plug-ins of an installed package.

    Yields:
        Whether a check has passed, and a line with the result.

    Raises:
        JobError: If there is no such method or package.
    """
    given = plugins.package_plugins(name)
    if not given:
        yield from _check_method(name)
        return
    ours = {"method": methods.builtin_names(), "network": registry.OURS, "engine": tuple(engines.NEEDS)}
    for plugin in given:
        try:
            plugins.find_plugin(plugin.kind, plugin.name, ours.get(plugin.kind, ()))
        except JobError as error:
            yield False, f"failed   {error}"
            continue
        if plugin.kind == "method":
            yield from _check_method(plugin.name)
        else:
            yield _check_plugin(plugin)


def _check_method(name: str) -> Iterator[tuple[bool, str]]:
    yield True, f"method {name}:"
    for words, how, why in run_checks(name):
        yield how != "failed", f"  {how:8} {words}" + (f": {why}" if why else "")


def _check_plugin(plugin: plugins.Plugin) -> tuple[bool, str]:
    """Import and try a plug-in. Return whether it works, and a line that states this."""
    tries: dict[str, Callable[[], object]] = {
        "network": lambda: registry.require_callable(plugin.name, plugins.import_plugin(plugin)),
        "data": lambda: [
            readers_plugin.open_plugin_data(DataSpec(dataset=plugin.name, split=split)) for split in ("train", "test")
        ],
        "meter": lambda: sensors.create_meter(plugin.name).read(0.0),
        "engine": lambda: engines.create_engine(plugin.name, BUDGET_BYTES).close(),
    }
    try:
        tries[plugin.kind]()
    except FedquiltError as error:
        return False, f"failed   {error}"
    except Exception as error:  # code from outside may raise anything
        return False, f"failed   {plugin}: {type(error).__name__}: {error}"
    return True, f"passed   {plugin} is one"
