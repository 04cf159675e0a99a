"""Sites: coordinators that act as devices of a parent coordinator.

Both sides run the job's method in the job's rounds, each with a wrapper around the method:

- `adapt_for_sites` wraps the method of a coordinator with sites among its devices. The task of a site contains the
  method state and the job. The update of a site is a partial aggregate, which is checked and merged, or its devices'
  updates.
- `adapt_for_parent` wraps the method of a site. The state of a site is the state of the parent with the result of the
  latest round. Rounds of a site send, fold and check like the method in that state, and the step keeps the partial
  aggregate or the updates.

A site sends a partial aggregate if the method's folds are exact (`fedquilt.arrays.exact_sums`) and the method can check
aggregates of others. Otherwise a site forwards its devices' updates, and the parent folds them in the order of all
devices. So the result is bit-identical to that of one coordinator with all the devices.

The bundles of a site's update are named `site.*` and sent without the job's codec, because the site has decoded them. A
bundle of updates has a table of devices, and tensors named by device, bundle and tensor. One update is divided into
several such bundles, so that manifests and tensor headers stay small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from fedquilt.arrays import exact_sums, tensors
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.updates import validation
from fedquilt.core import (
    DECODE_ERRORS,
    Aggregation,
    Amount,
    Artefact,
    BlobRef,
    DeviceUpdate,
    DeviceView,
    EvaluationRound,
    JobError,
    Method,
    Metrics,
    Name,
    ShortText,
    StoreError,
    TaskSpec,
    Tensors,
    UpdateError,
    UpdateSchema,
    tensor_shapes,
)
from fedquilt.core.messages import SITE_BUNDLES, has_site_bundles

AGGREGATE_BUNDLE: Final = "site.sum"  # bundle of a partial aggregate: its arrays by number, and SKELETON_TENSOR
SKELETON_TENSOR: Final = "form"  # uint8 (n,), skeleton of the aggregate (`fedquilt.arrays.tensors.split_state`)
DEVICE_TABLE: Final = "boards"  # uint8 (n,) in each bundle, JSON of a list of `SiteUpdatePart`
BUNDLE_BYTES: Final = 32 << 20  # bytes of tensors after which a bundle of updates is full
BUNDLE_TENSORS: Final = 8000  # number of tensors after which a bundle of updates is full


class SiteUpdatePart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a site's update for one device. In a partial aggregate, only the device is set."""

    device: Name
    weight: Amount = 0.0
    metrics: Metrics = {}
    bundles: tuple[ShortText, ...] = ()


def encode_parts(parts: Sequence[SiteUpdatePart]) -> np.ndarray:
    return np.frombuffer(msgspec.json.encode(parts), np.uint8)


def bundle_from_aggregate(arrays: Tensors, skeleton: str, devices: Sequence[str]) -> dict[str, Any]:
    tables = {
        SKELETON_TENSOR: np.frombuffer(skeleton.encode(), np.uint8),
        DEVICE_TABLE: encode_parts([SiteUpdatePart(device) for device in devices]),
    }
    return {**tensor_shapes(arrays), **tables}


def aggregate_from_bundle(bundle: Tensors, kind: type) -> Any:
    """Return the partial aggregate in a site's bundle. Arrays on disk are read when they are used.

    Raise UpdateError unless the bundle contains an aggregate of class `kind`.
    """
    skeleton, shapes = bundle.get(SKELETON_TENSOR), tensor_shapes(bundle)
    if skeleton is None or skeleton.dtype != np.uint8:
        raise UpdateError("a site's aggregate has no valid skeleton: install the same version of fedquilt on the site")
    slots = {name: np.empty(0) for name in shapes if name not in (SKELETON_TENSOR, DEVICE_TABLE)}
    names = {id(slot): name for name, slot in slots.items()}
    try:
        aggregate: Any = tensors.state_from_parts(slots, {"state": skeleton.tobytes().decode()}, kind)
    except (StoreError, UnicodeDecodeError) as error:
        raise UpdateError(f"a site's {kind.__name__} cannot be read: {error}") from None
    return exact_sums.map_limbs(aggregate, lambda slot: shapes[names[id(slot)]], lambda slot: bundle[names[id(slot)]])


class _SiteBundle(Mapping[str, np.ndarray]):
    """Bundle of one device within a site's bundle, whose tensors have the device's prefix in their names."""

    __slots__ = ("_names", "_prefix", "_tensors")

    def __init__(self, tensors: Tensors, prefix: str, names: Sequence[str]) -> None:
        self._tensors, self._prefix, self._names = tensors, prefix, names

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._names)

    def __len__(self) -> int:
        return len(self._names)


def bundle_updates(updates: Sequence[DeviceUpdate]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the named bundles of a site's update, at least one, with these updates in order."""
    number, size, parts, bundle_tensors = 0, 0, list[SiteUpdatePart](), dict[str, np.ndarray]()
    for update in updates:
        for bundle_index, bundle in enumerate(update.bundles.values()):
            for name, array in bundle.items():
                bundle_tensors[f"{len(parts)}/{bundle_index}/{name}"] = array
                size += array.nbytes
        parts.append(SiteUpdatePart(update.device, update.weight, dict(update.metrics), tuple(update.bundles)))
        if len(bundle_tensors) >= BUNDLE_TENSORS or size >= BUNDLE_BYTES:
            yield f"{SITE_BUNDLES}{number}", {DEVICE_TABLE: encode_parts(parts), **bundle_tensors}
            number, size, parts, bundle_tensors = number + 1, 0, [], {}
    if parts or not number:
        yield f"{SITE_BUNDLES}{number}", {DEVICE_TABLE: encode_parts(parts), **bundle_tensors}


def parts_of_site(update: DeviceUpdate) -> list[SiteUpdatePart]:
    """Return the parts of a site's update, sorted by device, or raise UpdateError if one is invalid."""
    devices, parts = set[str](), []
    for bundle in update.bundles.values():
        for part in _decode_parts(bundle):
            if part.device in devices:
                raise UpdateError(f"device {part.device} occurs twice in the site's update")
            devices.add(part.device)
            parts.append(part)
            if not math.isfinite(part.weight):
                raise UpdateError(f"{part.device}: the weight is not a finite number")
            if len(set(part.bundles)) < len(part.bundles):
                raise UpdateError(f"{part.device} has two bundles of the same name")
    return sorted(parts, key=lambda part: part.device)


def split_site_update(update: DeviceUpdate) -> list[DeviceUpdate]:
    """Return the devices' updates in a site's update. Tensors are read when they are used.

    Raises:
        UpdateError: If a bundle belongs to none of the updates, or if their weights do not add up to the site's.
    """
    updates = []
    for name, bundle in update.bundles.items():
        if not name.startswith(SITE_BUNDLES) or name == AGGREGATE_BUNDLE:
            raise UpdateError(f"bundle {name!r} is not allowed in a site's forwarded updates")
        updates += _split_bundle(update.round, bundle)
    if (weight := math.fsum(part.weight for part in updates)) != update.weight:
        raise UpdateError(
            f"weights of {len(updates)} forwarded updates add up to {weight:g}, but the site claims {update.weight:g}"
        )
    return updates


def _split_bundle(round: int, bundle: Tensors) -> list[DeviceUpdate]:
    """Return the devices' updates in a bundle, or raise UpdateError if a tensor belongs to no device."""
    parts = _decode_parts(bundle)
    names: dict[str, list[str]] = {
        f"{part_index}/{bundle_index}/": []
        for part_index, part in enumerate(parts)
        for bundle_index in range(len(part.bundles))
    }
    for key in bundle:
        prefix = "/".join(key.split("/", 2)[:2]) + "/"
        if prefix in names and len(key) > len(prefix):
            names[prefix].append(key)
        elif key != DEVICE_TABLE:
            raise UpdateError(f"tensor {key[:80]!r} belongs to none of the site's devices")
    return [
        DeviceUpdate(
            part.device,
            round,
            part.weight,
            part.metrics,
            {
                name: _SiteBundle(bundle, f"{part_index}/{bundle_index}/", names[f"{part_index}/{bundle_index}/"])
                for bundle_index, name in enumerate(part.bundles)
            },
        )
        for part_index, part in enumerate(parts)
    ]


def _decode_parts(bundle: Tensors) -> list[SiteUpdatePart]:
    table = bundle.get(DEVICE_TABLE)
    if table is None or table.dtype != np.uint8 or table.ndim != 1:
        raise UpdateError(
            f"the table of devices ({DEVICE_TABLE!r}) is missing: install the same version of fedquilt on the site"
        )
    try:
        return msgspec.json.decode(table.tobytes(), type=list[SiteUpdatePart])
    except DECODE_ERRORS as error:
        raise UpdateError(f"the table of devices cannot be read: {error}") from None


STATE: Final = "state"  # bundle of a site's task
NO_STATE: Final = np.zeros(0, np.uint8)

FILE: Final = "file "  # prefix of bundles of a site's task that are files of the job's bundle

MethodFunctions: TypeAlias = Method | EvaluationRound
AdaptMethod: TypeAlias = Callable[[Method, JobSettings, Mapping[str, BlobRef]], Method]


def site_aggregate_type(aggregation: Aggregation, state: Any) -> type | None:
    """Return the type of the sites' partial aggregates, or None if sites forward updates."""
    return aggregation.accumulator(state) if aggregation.check_sums is not None else None


def adapt_for_sites(method: Method, job: JobSettings, files: Mapping[str, BlobRef]) -> Method:
    """Return the method for a coordinator with sites among its devices."""
    params = {"job": msgspec.to_builtins(job)}
    evaluation_round = method.evaluation_round
    if evaluation_round is not None:
        evaluation_round = replace(
            evaluation_round,
            send=_send_state_to_sites(evaluation_round.send, {**params, "settling": True}, files),
            aggregation=_accept_site_updates(evaluation_round.aggregation),
        )
    send, aggregation = _send_state_to_sites(method.send, params, files), _accept_site_updates(method.aggregation)
    return replace(method, send=send, aggregation=aggregation, evaluation_round=evaluation_round)


def _send_state_to_sites(
    send_task_spec: Callable[..., Any], params: Mapping[str, Any], files: Mapping[str, BlobRef]
) -> Callable[[Any, DeviceView], TaskSpec | None]:
    cached: list[tuple[Any, dict[str, Tensors | BlobRef]]] = []  # latest state and its bundles

    def send(state: Any, view: DeviceView) -> TaskSpec | None:
        task_spec: TaskSpec | None = send_task_spec(state, view)
        if not _count_devices(view):
            return task_spec
        if not cached or cached[0][0] is not state:
            cached[:] = [(state, _bundles_from_state(state, files))]
        return replace(task_spec or TaskSpec({}, {}), params=params, bundles=cached[0][1])

    return send


def _bundles_from_state(state: Any, files: Mapping[str, BlobRef]) -> dict[str, Tensors | BlobRef]:
    arrays, skeleton = tensors.split_state(state)
    files_by_name = {f"{FILE}{name}": ref for name, ref in files.items() if ref.sha256 in skeleton["state"]}
    return {STATE: {"packed": np.frombuffer(tensors.encode_tensors(arrays, skeleton), np.uint8)}, **files_by_name}


def _accept_site_updates(aggregation: Aggregation) -> Aggregation:
    """Return an aggregation that also checks and folds partial aggregates and forwarded updates of sites."""

    def fold(state: Any, total_so_far: Any, update: DeviceUpdate) -> Any:
        if not has_site_bundles(update.bundles):
            return aggregation.fold(state, total_so_far, update)
        if AGGREGATE_BUNDLE not in update.bundles:
            check_update_or_parts(state, update)
            for part in split_site_update(update):
                total_so_far = aggregation.fold(state, total_so_far, part)
            return total_so_far
        site_total = check_aggregate(state, update)
        return (
            exact_sums.copy_accumulator(site_total)
            if total_so_far is None
            else exact_sums.merge_accumulators(total_so_far, site_total)
        )

    def check_aggregate(state: Any, update: DeviceUpdate) -> Any:
        kind = site_aggregate_type(aggregation, state)
        if kind is None or aggregation.check_sums is None:
            raise UpdateError(f"{update.device} sent a partial aggregate, but this job requires single updates")
        total = aggregate_from_bundle(update.bundles[AGGREGATE_BUNDLE], kind)
        aggregation.check_sums(state, total, update.weight)
        return total

    def check_update_or_parts(state: Any, update: DeviceUpdate) -> None:
        if not has_site_bundles(update.bundles):
            aggregation.require_valid_update(state, update)
        elif AGGREGATE_BUNDLE in update.bundles:
            check_aggregate(state, update)
        else:
            for part in split_site_update(update):
                with validation.name_device_in_errors(part.device):
                    aggregation.require_valid_update(state, part)

    return replace(aggregation, fold=fold, check_update=check_update_or_parts)


def _count_devices(view: DeviceView) -> int:
    return 0 if view.profile is None else view.profile.site_device_count


@dataclass(frozen=True)
class ForwardedUpdate:
    device: str
    round: int
    weight: float
    metrics: Mapping[str, float]
    bundles: Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class SiteJobState:
    """State of a site's job: the state of the parent, and the result of the latest round."""

    parent_state: np.ndarray  # uint8 (n,), packed by `tensors.pack_state`, or (0,) before the first task
    total: Mapping[str, np.ndarray] = field(default_factory=dict)  # arrays of the partial aggregate
    form: str = ""  # skeleton of the partial aggregate (`tensors.split_state`), or "" without an aggregate
    sent: tuple[ForwardedUpdate, ...] = ()  # forwarded updates, in the order of device ids


def adapt_for_parent(method: Method, job: JobSettings, files: Mapping[str, BlobRef]) -> Method:
    """Return the method for a site, whose rounds end with a partial aggregate or forwarded updates."""
    cached_states: dict[int, tuple[np.ndarray, Any]] = {}  # `id` of the packed state -> packed and unpacked state

    def unpack_parent_state(state: SiteJobState) -> Any:
        cached = cached_states.get(id(state.parent_state))
        if not state.parent_state.size:
            raise JobError(f"this home belongs to a site: submit {job.name} to the parent coordinator instead")
        if cached is None:
            cached_states.clear()
            cached = cached_states[id(state.parent_state)] = (
                state.parent_state,
                tensors.unpack_state(state.parent_state.tobytes(), method.state),
            )
        return cached[1]

    def result(state: SiteJobState) -> Artefact:
        raise JobError(f"this home belongs to a site: the parent coordinator has the result of {job.name}")

    evaluation_round = method.evaluation_round
    return replace(
        method,
        state=SiteJobState,
        init=lambda bundle, params, seed: SiteJobState(NO_STATE),
        **_site_functions(method, unpack_parent_state),
        result=result,
        is_done=lambda state: False,
        explain=lambda state: (),
        evaluation_round=None
        if evaluation_round is None
        else EvaluationRound(is_needed=lambda state: False, **_site_functions(evaluation_round, unpack_parent_state)),
    )


def _site_functions(functions: MethodFunctions, parent_state: Callable[[SiteJobState], Any]) -> dict[str, Any]:
    parent_aggregation = functions.aggregation

    def accumulator(state: SiteJobState) -> type | None:
        return site_aggregate_type(parent_aggregation, parent_state(state))

    def send(state: SiteJobState, view: DeviceView) -> TaskSpec | None:
        task_spec: TaskSpec | None = functions.send(parent_state(state), view)
        return task_spec

    def fold(state: SiteJobState, total_so_far: Any, update: DeviceUpdate) -> Any:
        if accumulator(state) is not None:
            return parent_aggregation.fold(parent_state(state), total_so_far, update)
        parent_aggregation.require_valid_update(parent_state(state), update)
        updates: list[DeviceUpdate] = [] if total_so_far is None else total_so_far
        updates.append(update)
        return updates

    def step(state: SiteJobState, total: Any) -> SiteJobState:
        if accumulator(state) is not None:
            arrays, skeleton = ({}, {"state": ""}) if total is None else tensors.split_state(total)
            return SiteJobState(state.parent_state, arrays, skeleton["state"])
        forwarded = (
            ForwardedUpdate(update.device, update.round, update.weight, update.metrics, update.bundles)
            for update in total or ()
        )
        return SiteJobState(state.parent_state, sent=tuple(forwarded))

    def check_update(state: SiteJobState, update: DeviceUpdate) -> None:
        parent_aggregation.require_valid_update(parent_state(state), update)

    def schema(state: SiteJobState) -> UpdateSchema | None:
        return parent_aggregation.schema(parent_state(state))

    aggregation = Aggregation(fold, accumulator=accumulator, schema=schema, check_update=check_update)
    return {"send": send, "aggregation": aggregation, "step": step}


def site_state_from_task(bundle: Tensors) -> SiteJobState:
    """Return a site's state from the state bundle of the parent's task. Raise UpdateError without a state."""
    packed = bundle.get("packed", NO_STATE)
    if packed.dtype != np.uint8 or not packed.size:
        raise UpdateError("the parent coordinator's task has no state: install the same version of fedquilt on both")
    return SiteJobState(packed)
