"""Conformance checks: functions that raise AssertionError if the method of a name fails.

A package with a method calls the checks in its own tests, or runs `fedquilt lab conformance NAME`:

    @pytest.mark.parametrize("check", conformance.CHECKS)
    def test_conformance(check):
        check("mine")
"""

from __future__ import annotations

import contextlib
import math
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
from fedquilt.data.readers import arrays as array_readers
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent import devices, engines
from fedquilt.models.networks import registry
from fedquilt.testing.corrupted_updates import corrupted_updates
from fedquilt.testing.toy_networks import (
    MIXED_SUFFIX,
    NETWORKS,
    CheckSkipped,
    FoldInputs,
    as_images,
    depends_on_memory,
    device_profile,
    image_devices,
    make_scenario,
    make_torch_engine,
    packed_states,
    point_devices,
    prepare_bundle,
    record_run,
    run_method,
    training_params,
    with_targets,
)

# -- reproducibility ------------------------------------------------------------------------------


def run_is_reproducible(name: str) -> None:
    """Assert that all states are bit-identical for devices in reverse order, and that rounds change them."""
    scenario, run, _, _ = record_run(name)
    # Budgets follow the order of devices, so each device keeps its budget.
    reversed_scenario = replace(scenario, budgets=scenario.budgets[::-1])
    assert packed_states(reversed_scenario.run_rounds(devices=scenario.devices[::-1])) == packed_states(run)
    assert len(set(packed_states(run))) == len(run) > 1


def run_resumes_from_any_round(name: str) -> None:
    """Assert that packing and unpacking the state before each step does not change the run."""
    scenario, run, _, _ = record_run(name)

    def step(state: Any, total: Any) -> Any:
        return scenario.method.step(tensors.unpack_state(tensors.pack_state(state), scenario.method.state), total)

    assert packed_states(scenario.run_rounds(method=replace(scenario.method, step=step))) == packed_states(run)


def state_survives_packing(name: str) -> None:
    """Assert that each packed and unpacked state is bit-identical, with equal `is_done` and `explain`."""
    scenario, run, _, _ = record_run(name)
    for state in run:
        unpacked: Any = tensors.unpack_state(tensors.pack_state(state), scenario.method.state)
        assert tensors.pack_state(unpacked) == tensors.pack_state(state)
        assert scenario.method.is_done(unpacked) == scenario.method.is_done(state)
        assert scenario.method.explain(unpacked) == scenario.method.explain(state)


def fold_and_step_keep_state(name: str) -> None:
    """Assert that `fold` and `step` do not modify the state that they receive."""
    scenario, run, fold_inputs, _ = record_run(name)
    packed_before = packed_states(run)
    for state, update in fold_inputs[:4]:
        scenario.method.step(state, scenario.method.aggregation.fold(state, None, update))
    assert packed_states(run) == packed_before


def common_task_is_the_same_for_all_devices(name: str) -> None:
    """Assert that `send` ignores the device if the method declares `common_task`.

    Raises:
        CheckSkipped: If the method sends tasks made for each device.
    """
    scenario, run, _, _ = record_run(name)
    if not scenario.method.common_task:
        raise CheckSkipped("the method sends different tasks to devices")
    small_device = DeviceView("b", device_profile(1), (0,))
    for state in run:
        task_spec = scenario.method.send(state, DeviceView("a", None))
        other_task_spec = scenario.method.send(state, small_device)
        assert task_spec is not None
        assert other_task_spec is not None
        assert other_task_spec.params == task_spec.params
        assert (other_task_spec.work, other_task_spec.check) == (task_spec.work, task_spec.check)
        require_identical(dict(other_task_spec.bundles), dict(task_spec.bundles), "bundles")


# -- other networks -------------------------------------------------------------------------------


def run_works_on_network(name: str, network: str, unfit: bool | None = None) -> str:
    """Assert that a run works on another network, with each state stored and read again.

    A method that does not support the network must raise a ModelError at the start of the run.

    Args:
        name: The name of the method.
        network: One of NETWORKS.
        unfit: Whether the method must reject the network, or None if it may.

    Returns:
        Why the method refuses the network, or "" if it trains the network.

    Raises:
        CheckSkipped: If torch is not installed, or the method trains no network.
    """
    method, engine = methods.load(name), make_torch_engine()
    if "onnx" in method.engines:
        raise CheckSkipped("the method stitches donors and trains no network")
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "home") as store:
        return _require_run_on_network(
            name, method, engine, prepare_bundle(NETWORKS[network], Path(folder)), store, unfit, NETWORKS[network]
        )


def _require_run_on_network(
    name: str, method: Method, engine: Any, bundle: Bundle, store: Store, unfit: bool | None, network: Mapping[str, Any]
) -> str:
    params, init_error = training_params(method.params), ""
    task = metrics.task_from_network(network)
    stored_states: list[Any] = []

    def step_through_store(state: Any, total: Any) -> Any:
        new_state = method.step(state, total)
        ref = store.blob_store.store_bytes(tensors.pack_state(new_state))
        path = store.blob_store.blob_path(ref.sha256)
        assert path is not None
        stored_states.append(tensors.unpack_state(path.read_bytes(), method.state))
        require_identical(stored_states[-1], new_state)
        return stored_states[-1]

    storing_method = replace(method, step=step_through_store)
    devices = [
        replace(
            device,
            train=with_targets(as_images(device.train), task),
            held_out=with_targets(as_images(device.held_out), task),
        )
        for device in point_devices()
    ]
    if task not in method.traits.prediction_tasks:
        message = ""
        try:
            run_method(name, bundle, devices, params, engine=None, method=method, seed=3, rounds=3)
        except JobError as error:
            message = str(error)
        assert f"task = {task!r}" in message, (
            message or f"a run with task = {task!r} starts, although the method does not support this task"
        )
        return f"task = {task!r}, as its traits say"
    try:
        method.init(bundle, method.params(**params), 3)
    except ModelError as error:
        init_error = str(error)
    if unfit is not None:
        assert bool(init_error) == unfit, init_error or "the method should reject this network"
    if init_error:
        return init_error
    first_state, *_, last_state = run_method(
        name, bundle, devices, params, engine=engine, method=storing_method, seed=3, rounds=3
    )
    assert len(stored_states) == 3
    require_identical(tensors.unpack_state(tensors.pack_state(first_state), method.state), first_state)
    assert tensors.pack_state(last_state) != tensors.pack_state(first_state)
    for array in method.result(last_state).tensors.values():
        assert isinstance(array, np.ndarray)
    return ""


# -- codecs ---------------------------------------------------------------------------------------


def updates_work_in_16_bits(name: str) -> None:
    """Assert that fp16 updates arrive with small errors, or that jobs of an exact method reject fp16."""
    scenario, _, fold_inputs, _ = record_run(name)
    if scenario.method.traits.exact_updates:
        error_message = ""
        try:
            settings.parse_job({"name": "j", "method": scenario.name, "wire": {"codec": "fp16"}})
        except JobError as error:
            error_message = str(error)
        assert "requires exact updates" in error_message, "jobs of this exact method accept a lossy codec"
        return
    received_updates: FoldInputs = {}

    def fold(state: Any, accumulator: Any, update: DeviceUpdate) -> Any:
        received_updates[update.round, update.device] = (state, update)
        return scenario.method.aggregation.fold(state, accumulator, update)

    states = scenario.run_rounds(
        method=replace(scenario.method, aggregation=Aggregation(fold)), rounds=2, wire={"codec": "fp16"}
    )
    assert len(states) == 3
    first_updates = [update for _, update in fold_inputs if update.round == 0]
    assert (
        {update.device for update in first_updates}
        == {device for round, device in received_updates if round == 0}
        != set()
    )
    for raw in first_updates:
        _, update = received_updates[0, raw.device]
        assert update.bundles.keys() == raw.bundles.keys()
        for bundle_name, bundle in raw.bundles.items():
            assert update.bundles[bundle_name].keys() == bundle.keys()
            for tensor, array in bundle.items():
                received = update.bundles[bundle_name][tensor]
                assert received.dtype == array.dtype
                np.testing.assert_allclose(received, array, rtol=1e-3, atol=1e-4)


# -- aggregation ----------------------------------------------------------------------------------


def invalid_updates_are_rejected(name: str) -> None:
    """Assert that `fold` rejects invalid updates with UpdateError and leaves its accumulator unchanged.

    Invalid are NaN, infinity, another dtype, too large values, missing tensors or bundles, and other shapes. Unknown
    tensors may also be ignored.
    """
    scenario, _, fold_inputs, _ = record_run(name)
    rejected_count = 0
    phases = {getattr(state, "phase", ""): (state, update) for state, update in fold_inputs if update.bundles}
    for state, update in phases.values():
        sum_of_one = scenario.method.aggregation.fold(state, None, update)
        expected_sum = tensors.pack_state(sum_of_one)
        for description, bad_update in corrupted_updates(update):
            try:
                total = scenario.method.aggregation.fold(state, None, bad_update)
            except UpdateError:
                rejected_count += 1
            else:
                assert "unknown tensor" in description, f"an update was folded although {description}"
                assert tensors.pack_state(total) == expected_sum, description
                continue
            with contextlib.suppress(UpdateError):
                scenario.method.aggregation.fold(state, sum_of_one, replace(bad_update, device="zz-another"))
            assert tensors.pack_state(sum_of_one) == expected_sum, f"a rejected update was added: {description}"
    assert rejected_count >= 6 or not phases  # a method without tensors in its updates rejects nothing


def accumulators_merge_in_any_order(name: str) -> None:
    """Assert that updates in any order and merged accumulators give bit-identical states.

    Raises:
        CheckSkipped: If the accumulators of the method depend on the order of devices.
    """
    scenario, _, fold_inputs, _ = record_run(name)
    aggregation, checked_rounds = scenario.method.aggregation, 0

    def total(updates: Sequence[DeviceUpdate]) -> Any:
        return reduce(lambda accumulator, update: aggregation.fold(state, accumulator, update), updates, None)

    for round_ in sorted({update.round for _, update in fold_inputs}):
        state = next(state for state, update in fold_inputs if update.round == round_)
        updates = [update for _, update in fold_inputs if update.round == round_]
        if (kind := aggregation.accumulator(state)) is None:
            continue
        checked_rounds += 1
        expected = tensors.pack_state(scenario.method.step(state, total(updates)))
        assert tensors.pack_state(scenario.method.step(state, total(updates[::-1]))) == expected, (
            "the state depends on the order of the updates"
        )
        first_sum, *other_sums = (tensors.pack_state(total(part)) for part in (updates[1::2], updates[::2]) if part)
        merged: Any = tensors.unpack_state(first_sum, kind)
        for packed_sum in other_sums:
            merged = exact_sums.merge_accumulators(merged, tensors.unpack_state(packed_sum, kind))
        assert tensors.pack_state(scenario.method.step(state, merged)) == expected, "merging changes the state"
    if not checked_rounds:
        raise CheckSkipped("the accumulators depend on the order of devices and are not merged")


def changes_scale_and_noise_covers_them(name: str) -> None:
    """Assert that clipping scales all that counts of an update, and that noise covers it.

    Raises:
        CheckSkipped: If the method does not support [privacy], or only with other networks.
    """
    scenario, _, fold_inputs, _ = record_run(name)
    aggregation, change = scenario.method.aggregation, scenario.method.aggregation.change
    if change is None or change.norm is None or change.add_noise is None:
        raise CheckSkipped("the method does not support [privacy]")
    if change.unprotected_names(fold_inputs[0][0]):
        raise CheckSkipped("the network has statistics or counters")
    state, states_without_change = fold_inputs[0][0], set()
    for update in (replace(each, weight=1.0) for _, each in fold_inputs[:2]):
        half = change.scale(state, state, update, 0.5)
        assert math.isclose(change.norm(state, half), change.norm(state, update) / 2, rel_tol=1e-3), "norm of a half"
        unchanged = aggregation.fold(state, None, change.scale(state, state, update, 0.0))
        states_without_change.add(tensors.pack_state(scenario.method.step(state, unchanged)))
    assert len(states_without_change) == 1, "a state depends on more of an update than its change"
    sizes = dict[str, int]()

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        sizes[name] = math.prod(shape)
        return np.zeros(shape)

    change.add_noise(aggregation.fold(state, None, update), draw)
    assert sum(sizes.values()) == sum(array.size for bundle in update.bundles.values() for array in bundle.values())


def state_on_disk_gives_same_result(name: str) -> None:
    """Assert that states and sums on the disk give the results of those in memory, bit for bit."""
    scenario, _, fold_inputs, _ = record_run(name)
    aggregation = scenario.method.aggregation
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        for round_ in sorted({update.round for _, update in fold_inputs}):
            state = next(state for state, update in fold_inputs if update.round == round_)
            updates = [update for _, update in fold_inputs if update.round == round_]
            disk_arrays.write_safetensors(path, *tensors.split_state(state))
            disk_state = disk_arrays.read_state(path, type(state), lazy_bytes=1)
            scenario.method.send(disk_state, DeviceView("a", None))
            with exact_sums.sums_on_disk(
                ScratchFile(folder, min_entries=1) if aggregation.accumulator(disk_state) else None
            ):
                total = reduce(
                    lambda accumulator, update: aggregation.fold(disk_state, accumulator, update), updates, None
                )
                disk_result = scenario.method.step(disk_state, total)
            expected_total = reduce(
                lambda accumulator, update: aggregation.fold(state, accumulator, update), updates, None
            )
            assert tensors.pack_state(disk_result) == tensors.pack_state(scenario.method.step(state, expected_total)), (
                f"round {round_}"
            )


def accumulator_does_not_grow(name: str, bytes_per_device: int = 0) -> None:
    """Assert that the accumulators of three and of twelve devices have arrays of equal size.

    Args:
        name: The name of the method.
        bytes_per_device: The bytes by which the accumulator may grow for each device.

    Raises:
        CheckSkipped: If the method declares `Traits.per_device_data`, and `bytes_per_device` is 0.
    """
    scenario = make_scenario(name)
    if scenario.method.traits.per_device_data and not bytes_per_device:
        raise CheckSkipped(f"the method declares per_device_data: {scenario.method.traits.per_device_data}")
    array_bytes, overhead = [], []
    for count in (3, 12):
        devices = (image_devices if "onnx" in scenario.method.engines else point_devices)(count)
        largest_sizes: dict[str, tuple[int, int]] = {}

        def step(state: Any, total: Any, sizes: dict[str, tuple[int, int]] = largest_sizes) -> Any:
            payload = tensors.pack_state(total)
            size = tensors.total_bytes([tensors.decode_tensors(payload)])
            sizes["arrays"] = max(sizes.get("arrays", (0, 0)), (size, len(payload)))
            return scenario.method.step(state, total)

        scenario.run_rounds(method=replace(scenario.method, step=step), devices=devices)
        size, packed_size = largest_sizes["arrays"]
        array_bytes.append(size)
        overhead.append(packed_size - size)
    assert array_bytes[1] <= array_bytes[0] + 9 * bytes_per_device
    assert overhead[1] <= overhead[0] + 9 * max(bytes_per_device, 40)


# -- client half ----------------------------------------------------------------------------------


def update_contains_no_private_state(name: str) -> None:
    """Assert that no array of a device's private state is contained in the device's update."""
    _, _, _, runs = record_run(name)
    for site, client_result in runs:
        sent_bytes = b"".join(tensors.encode_tensors(bundle) for bundle in client_result.bundles.values())
        for tensor_name, array in site.private_state.items():
            if array.size > 2 and len(np.unique(array)) > 1:  # zeros are found anywhere
                assert array.tobytes() not in sent_bytes, f"{name} sends {tensor_name}"
        assert client_result.bundles.keys().isdisjoint({"local", "private"})


def private_state_is_declared(name: str) -> None:
    """Assert that `Traits.private_data` is not empty if devices keep a private state."""
    scenario, _, _, runs = record_run(name)
    tensor_names = sorted({tensor for _, client_result in runs for tensor in client_result.private_state})
    assert scenario.method.traits.private_data or not tensor_names, (
        f"devices keep {', '.join(tensor_names[:3])}: name it in private_data"
    )


def client_half_keeps_inputs(name: str) -> None:
    """Assert that `work` does not modify the private state or the examples of a device."""
    scenario = make_scenario(name)

    def work(task: Any, site: ClientContext) -> ClientResult:
        inputs_before = tensors.encode_tensors(site.private_state), site.train.x.tobytes(), site.train.y.tobytes()
        client_result = scenario.method.work(task, site)
        assert (
            tensors.encode_tensors(site.private_state),
            site.train.x.tobytes(),
            site.train.y.tobytes(),
        ) == inputs_before
        return client_result

    scenario.run_rounds(method=replace(scenario.method, work=work), rounds=2)


# -- all checks -----------------------------------------------------------------------------------

CHECKS: Final[tuple[Callable[[str], None], ...]] = (
    run_is_reproducible,
    run_resumes_from_any_round,
    state_survives_packing,
    fold_and_step_keep_state,
    common_task_is_the_same_for_all_devices,
    updates_work_in_16_bits,
    invalid_updates_are_rejected,
    accumulators_merge_in_any_order,
    changes_scale_and_noise_covers_them,
    state_on_disk_gives_same_result,
    accumulator_does_not_grow,
    update_contains_no_private_state,
    private_state_is_declared,
    client_half_keeps_inputs,
)
"""Checks of a method by its name. A method that depends on memory is checked again with MIXED_SUFFIX appended."""


def run_checks(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (title, status, reason) of each check. The status is "passed", "refused", "skipped" or "failed".

    Raises:
        JobError: If the method does not exist or cannot be imported.
    """
    method = methods.load(name)
    scenario_names = [name, *([f"{name}{MIXED_SUFFIX}"] if depends_on_memory(name) else [])]
    checks: list[tuple[str, Callable[[], str | None], str]] = []
    for scenario_name in scenario_names:
        suffix = " (mixed fleet)" if scenario_name != name else ""
        checks += [(f"{_check_title(check)}{suffix}", partial(check, scenario_name), "") for check in CHECKS]
    network_check = run_works_on_network
    checks += [
        (f"{_check_title(network_check)} ({network})", partial(network_check, name, network), _task_hint(method, table))
        for network, table in NETWORKS.items()
    ]
    for number, (title, check, hint) in enumerate(checks):
        progress.LINE.set_part(f"{name}: {title}", number, len(checks))
        outcome, reason = _run_check(check)
        yield title, outcome, f"{reason}{hint}" if outcome == "failed" else reason


def _task_hint(method: Method, network: Mapping[str, Any]) -> str:
    task = metrics.task_from_network(network)
    if task == "classes" or task not in method.traits.prediction_tasks:
        return ""
    return f" If the method does not support {task!r}, leave it out of traits.prediction_tasks."


def _run_check(check: Callable[[], str | None]) -> tuple[str, str]:
    try:
        refusal = check()
    except CheckSkipped as reason:
        return "skipped", str(reason)
    except AssertionError as error:
        return "failed", _describe_assertion(error)
    except FedquiltError as error:
        return "failed", f"{type(error).__name__}: {error}"
    except Exception as error:  # a plug-in may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "failed", f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
    return ("refused", refusal) if refusal else ("passed", "")


def _check_title(check: Callable[..., str | None]) -> str:
    return check.__name__.replace("_", " ")


def _describe_assertion(error: AssertionError) -> str:
    """Return the message of a failed assertion, or its source line, with file and line number."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = shorten_error(str(error))
    return f"{message or frame.line} ({Path(frame.filename).name}, line {frame.lineno})"


# -- values and states ----------------------------------------------------------------------------


def require_identical(actual: Any, expected: Any, location: str = "state") -> None:
    """Assert that two values are equal, and all arrays equal in dtype, shape and bits."""
    assert not isinstance(expected, np.generic), f"{location} is a numpy scalar: convert it with np.asarray"
    assert isinstance(actual, np.ndarray) == isinstance(expected, np.ndarray), location
    if isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape, actual.tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), (
            location
        )
    elif is_dataclass(expected):
        assert type(actual) is type(expected), location
        for field in fields(expected):
            require_identical(getattr(actual, field.name), getattr(expected, field.name), f"{location}.{field.name}")
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), location
        for key in expected:
            require_identical(actual[key], expected[key], f"{location}[{key!r}]")
    elif isinstance(expected, tuple):
        assert len(actual) == len(expected), location
        for index, item in enumerate(expected):
            require_identical(actual[index], item, f"{location}[{index}]")


# -- packages -------------------------------------------------------------------------------------

BUDGET_BYTES = 1 << 40


def check_package(name: str) -> Iterator[tuple[bool, str]]:
    """Check a method, or all plug-ins of an installed package, one by one.

    Yields:
        False for a failed check and True otherwise, and a line with the result.

    Raises:
        JobError: If there is no such method or package.
    """
    package_plugins = plugins.package_plugins(name)
    if not package_plugins:
        yield from _check_method(name)
        return
    builtin_names = {
        "method": methods.builtin_names(),
        "network": registry.BUILTIN_NETWORKS,
        "engine": tuple(engines.NEEDS),
    }
    for plugin in package_plugins:
        try:
            plugins.find_plugin(plugin.kind, plugin.name, builtin_names.get(plugin.kind, ()))
        except JobError as error:
            yield False, f"failed   {error}"
            continue
        if plugin.kind == "method":
            yield from _check_method(plugin.name)
        else:
            yield _check_plugin(plugin)


def _check_method(name: str) -> Iterator[tuple[bool, str]]:
    yield True, f"method {name}:"
    for title, outcome, reason in run_checks(name):
        yield outcome != "failed", f"  {outcome:8} {title}" + (f": {reason}" if reason else "")


def _check_plugin(plugin: plugins.Plugin) -> tuple[bool, str]:
    """Import and try a plug-in. Return whether the plug-in works, and a line with the result."""
    trials: dict[str, Callable[[], object]] = {
        "network": lambda: registry.require_callable(plugin.name, plugins.import_plugin(plugin)),
        "data": lambda: [
            array_readers.open_plugin_data(DataSpec(dataset=plugin.name, split=split)) for split in ("train", "test")
        ],
        "meter": lambda: devices.create_meter(plugin.name).read(0.0),
        "engine": lambda: engines.create_engine(plugin.name, BUDGET_BYTES).close(),
    }
    try:
        (trials.get(plugin.kind) or partial(plugins.import_plugin, plugin))()
    except Exception as error:  # a plug-in may raise anything
        reason = str(error) if isinstance(error, FedquiltError) else f"{plugin}: {type(error).__name__}: {error}"
        return False, f"failed   {reason}"
    return True, f"passed   {plugin}"
