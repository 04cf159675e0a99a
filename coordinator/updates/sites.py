"""Sites: coordinators that act as devices of a parent coordinator.

Both sides run the job's method in the job's rounds, each with a wrapper around the method:

- `adapt_for_sites` wraps the method of a coordinator with sites among its devices. The task of a site contains the
  method state and the job. The update of a site is a partial aggregate, which is checked and merged, or its devices'
  updates.
- `adapt_for_parent` wraps the method of a site. The state of a site is the state of the parent with the result of the
  latest round. Rounds of a site send, fold and check like the method in that state, and the step keeps the partial
  aggregate or the updates.

A site sends a partial aggregate if the method's folds are exact (`fedquilt.arrays.exact_sums`) and the method can check
foreign aggregates. Otherwise a site forwards its devices' updates, and the parent folds them in the order of all
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

SUM: Final = "site.sum"  # bundle with an accumulator: its arrays by number, and where in it they belong
FORM: Final = "form"  # tensor of that, uint8 (n,): as of `fedquilt.arrays.tensors.split_state`
TABLE: Final = "boards"  # tensor of each bundle, uint8 (n,): JSON of a list of `SiteUpdatePart`
BUNDLE_BYTES: Final = 32 << 20  # of tensors in one bundle of updates; the last update in it may be beyond
BUNDLE_TENSORS: Final = 8000  # likewise


class SiteUpdatePart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a site's update for one device. With a partial aggregate, only the name is set."""

    device: Name
    weight: Amount = 0.0
    metrics: Metrics = {}
    bundles: tuple[ShortText, ...] = ()


def encode_parts(parts: Sequence[SiteUpdatePart]) -> np.ndarray:
    return np.frombuffer(msgspec.json.encode(parts), np.uint8)


def bundle_from_aggregate(arrays: Tensors, form: str, boards: Sequence[str]) -> dict[str, Any]:
    """Return the bundle of a partial aggregate of these devices. Arrays may stay on disk."""
    told = {
        FORM: np.frombuffer(form.encode(), np.uint8),
        TABLE: encode_parts([SiteUpdatePart(each) for each in boards]),
    }
    return {**tensor_shapes(arrays), **told}


def aggregate_from_bundle(bundle: Tensors, kind: type) -> Any:
    """Return the partial aggregate in a site's bundle. Arrays on disk are read when they are used."""
    form, there = bundle.get(FORM), tensor_shapes(bundle)
    if form is None or form.dtype != np.uint8:
        raise UpdateError("a site's sum does not say what it is of: the site has to be of this version of fedquilt")
    slots = {name: np.empty(0) for name in there if name not in (FORM, TABLE)}
    names = {id(slot): name for name, slot in slots.items()}
    try:
        found: Any = tensors.state_from_parts(slots, {"state": form.tobytes().decode()}, kind)
    except (StoreError, UnicodeDecodeError) as error:
        raise UpdateError(f"a site's {kind.__name__} cannot be read: {error}") from None
    return exact_sums.map_limbs(found, lambda slot: there[names[id(slot)]], lambda slot: bundle[names[id(slot)]])


class _SiteBundle(Mapping[str, np.ndarray]):
    """Bundle of one device: the tensors of a site's update with the device's name prefix, without this prefix."""

    __slots__ = ("_before", "_names", "_whole")

    def __init__(self, whole: Tensors, before: str, names: Sequence[str]) -> None:
        self._whole, self._before, self._names = whole, before, names

    def __getitem__(self, name: str) -> np.ndarray:
        return self._whole[self._before + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._before) for name in self._names)

    def __len__(self) -> int:
        return len(self._names)


def bundle_updates(given: Sequence[DeviceUpdate]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the named bundles of a site's update, at least one, with these updates in order."""
    number, size, parts, held = 0, 0, list[SiteUpdatePart](), dict[str, np.ndarray]()
    for update in given:
        for place, bundle in enumerate(update.bundles.values()):
            for name, array in bundle.items():
                held[f"{len(parts)}/{place}/{name}"] = array
                size += array.nbytes
        parts.append(SiteUpdatePart(update.device, update.weight, dict(update.metrics), tuple(update.bundles)))
        if len(held) >= BUNDLE_TENSORS or size >= BUNDLE_BYTES:
            yield f"{SITE_BUNDLES}{number}", {TABLE: encode_parts(parts), **held}
            number, size, parts, held = number + 1, 0, [], {}
    if parts or not number:
        yield f"{SITE_BUNDLES}{number}", {TABLE: encode_parts(parts), **held}


def parts_of_site(update: DeviceUpdate) -> list[SiteUpdatePart]:
    """Return the parts of a site's update, sorted by device."""
    seen, found = set[str](), []
    for bundle in update.bundles.values():
        for part in _decode_parts(bundle):
            if part.device in seen:
                raise UpdateError(f"it has {part.device} twice")
            seen.add(part.device)
            found.append(part)
            if not math.isfinite(part.weight):
                raise UpdateError(f"{part.device}: its weight is not a finite number")
            if len(set(part.bundles)) < len(part.bundles):
                raise UpdateError(f"{part.device} has two bundles of one name")
    return sorted(found, key=lambda part: part.device)


def split_site_update(update: DeviceUpdate) -> list[DeviceUpdate]:
    """Return the updates inside a site's update. Tensors are read when they are used."""
    found = []
    for name, bundle in update.bundles.items():
        if not name.startswith(SITE_BUNDLES) or name == SUM:
            raise UpdateError(f"bundle {name!r} stands beside updates that are passed up")
        found += _split_bundle(update.round, bundle)
    if (weight := math.fsum(each.weight for each in found)) != update.weight:
        raise UpdateError(f"the updates of {len(found)} boards weigh {weight:g}, in one that weighs {update.weight:g}")
    return found


def _split_bundle(round: int, bundle: Tensors) -> list[DeviceUpdate]:
    parts = _decode_parts(bundle)
    names: dict[str, list[str]] = {
        f"{at}/{place}/": [] for at, part in enumerate(parts) for place in range(len(part.bundles))
    }
    for key in bundle:
        before = "/".join(key.split("/", 2)[:2]) + "/"
        if before in names and len(key) > len(before):
            names[before].append(key)
        elif key != TABLE:
            raise UpdateError(f"tensor {key[:80]!r} belongs to none of its boards")
    return [
        DeviceUpdate(
            part.device,
            round,
            part.weight,
            part.metrics,
            {
                each: _SiteBundle(bundle, f"{at}/{place}/", names[f"{at}/{place}/"])
                for place, each in enumerate(part.bundles)
            },
        )
        for at, part in enumerate(parts)
    ]


def _decode_parts(bundle: Tensors) -> list[SiteUpdatePart]:
    given = bundle.get(TABLE)
    if given is None or given.dtype != np.uint8 or given.ndim != 1:
        raise UpdateError(f"it has no table of its boards ({TABLE!r}): the site has to be of this version of fedquilt")
    try:
        return msgspec.json.decode(given.tobytes(), type=list[SiteUpdatePart])
    except DECODE_ERRORS as error:
        raise UpdateError(f"its table of boards cannot be read: {error}") from None


STATE: Final = "state"  # bundle of a site's task
NOTHING: Final = np.zeros(0, np.uint8)

FILE: Final = "file "  # before the name of a file of the job's bundle, as a bundle of a site's task

Half: TypeAlias = Method | EvaluationRound
Around: TypeAlias = Callable[[Method, JobSettings, Mapping[str, BlobRef]], Method]


def site_aggregate_type(of: Aggregation, state: Any) -> type | None:
    """Return the type of the sites' partial aggregates, or None if sites forward updates."""
    return of.accumulator(state) if of.check_sums is not None else None


def adapt_for_sites(method: Method, job: JobSettings, files: Mapping[str, BlobRef]) -> Method:
    """Return the method for a coordinator with sites among its devices."""
    params = {"job": msgspec.to_builtins(job)}
    settle = method.evaluation_round
    if settle is not None:
        order = {**params, "settling": True}
        settle = replace(
            settle,
            send=_wrap_send(settle.send, order, files),
            aggregation=_accept_site_updates(settle.aggregation),
        )
    send, aggregation = _wrap_send(method.send, params, files), _accept_site_updates(method.aggregation)
    return replace(method, send=send, aggregation=aggregation, evaluation_round=settle)


def _wrap_send(
    plain: Callable[..., Any], params: Mapping[str, Any], files: Mapping[str, BlobRef]
) -> Callable[[Any, DeviceView], TaskSpec | None]:
    """Return a function that sends sites the state and the job, and other devices their usual task."""
    latest: list[tuple[Any, dict[str, Tensors | BlobRef]]] = []  # the state sent last, packed once for all sites

    def send(state: Any, view: DeviceView) -> TaskSpec | None:
        order: TaskSpec | None = plain(state, view)
        if not _count_devices(view):
            return order
        if not latest or latest[0][0] is not state:
            latest[:] = [(state, _bundles_from_state(state, files))]
        return replace(order or TaskSpec({}, {}), params=params, bundles=latest[0][1])

    return send


def _bundles_from_state(state: Any, files: Mapping[str, BlobRef]) -> dict[str, Tensors | BlobRef]:
    arrays, skeleton = tensors.split_state(state)
    named = {f"{FILE}{name}": ref for name, ref in files.items() if ref.sha256 in skeleton["state"]}
    return {STATE: {"packed": np.frombuffer(tensors.encode_tensors(arrays, skeleton), np.uint8)}, **named}


def _accept_site_updates(plain: Aggregation) -> Aggregation:
    """Return an aggregation that also checks and folds partial aggregates and forwarded updates of sites."""

    def fold(state: Any, so_far: Any, update: DeviceUpdate) -> Any:
        if not has_site_bundles(update.bundles):
            return plain.fold(state, so_far, update)
        if SUM not in update.bundles:
            check_update(state, update)
            for each in split_site_update(update):
                so_far = plain.fold(state, so_far, each)
            return so_far
        total = check_aggregate(state, update)
        return exact_sums.copy_accumulator(total) if so_far is None else exact_sums.merge_accumulators(so_far, total)

    def check_aggregate(state: Any, update: DeviceUpdate) -> Any:
        kind = site_aggregate_type(plain, state)
        if kind is None or plain.check_sums is None:
            raise UpdateError(f"{update.device} sent the sum of a site, and this round takes updates alone")
        total = aggregate_from_bundle(update.bundles[SUM], kind)
        plain.check_sums(state, total, update.weight)
        return total

    def check_update(state: Any, update: DeviceUpdate) -> None:
        if not has_site_bundles(update.bundles):
            plain.require_valid_update(state, update)
        elif SUM in update.bundles:
            check_aggregate(state, update)
        else:
            for each in split_site_update(update):
                with validation.name_device_in_errors(each.device):
                    plain.require_valid_update(state, each)

    return replace(plain, fold=fold, check_update=check_update)


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

    inner: np.ndarray  # uint8 (n,), as `tensors.pack_state`; (0,): none has come yet
    total: Mapping[str, np.ndarray] = field(default_factory=dict)  # arrays of an accumulator
    form: str = ""  # where in it they belong (`tensors.split_state`); "": of nobody, or updates are passed up
    sent: tuple[ForwardedUpdate, ...] = ()  # updates that are passed up, in the order of devices


def adapt_for_parent(method: Method, job: JobSettings, files: Mapping[str, BlobRef]) -> Method:
    """Return the method for a site, whose rounds end with a partial aggregate or forwarded updates."""
    known: dict[int, tuple[np.ndarray, Any]] = {}  # by identity of its bytes: the state of the running round

    def unpack_parent_state(state: SiteJobState) -> Any:
        found = known.get(id(state.inner))
        if not state.inner.size:
            raise JobError(f"this home is a site's: submit {job.name} to the coordinator above, whose jobs it works on")
        if found is None:
            known.clear()
            found = known[id(state.inner)] = (state.inner, tensors.unpack_state(state.inner.tobytes(), method.state))
        return found[1]

    def result(state: SiteJobState) -> Artefact:
        raise JobError(f"this home is a site's: the result of {job.name} is at the coordinator above")

    settle = method.evaluation_round
    return replace(
        method,
        state=SiteJobState,
        init=lambda bundle, params, seed: SiteJobState(NOTHING),
        **_site_functions(method, unpack_parent_state),
        result=result,
        is_done=lambda state: False,
        explain=lambda state: (),
        evaluation_round=None
        if settle is None
        else EvaluationRound(is_needed=lambda state: False, **_site_functions(settle, unpack_parent_state)),
    )


def _site_functions(half: Half, of: Callable[[SiteJobState], Any]) -> dict[str, Any]:
    plain = half.aggregation

    def accumulator(state: SiteJobState) -> type | None:
        return site_aggregate_type(plain, of(state))

    def send(state: SiteJobState, view: DeviceView) -> TaskSpec | None:
        found: TaskSpec | None = half.send(of(state), view)
        return found

    def fold(state: SiteJobState, so_far: Any, update: DeviceUpdate) -> Any:
        if accumulator(state) is not None:
            return plain.fold(of(state), so_far, update)
        plain.require_valid_update(of(state), update)
        held: list[DeviceUpdate] = [] if so_far is None else so_far
        held.append(update)
        return held

    def step(state: SiteJobState, total: Any) -> SiteJobState:
        if accumulator(state) is not None:
            arrays, told = ({}, {"state": ""}) if total is None else tensors.split_state(total)
            return SiteJobState(state.inner, arrays, told["state"])
        sent = (
            ForwardedUpdate(each.device, each.round, each.weight, each.metrics, each.bundles) for each in total or ()
        )
        return SiteJobState(state.inner, sent=tuple(sent))

    def check_update(state: SiteJobState, update: DeviceUpdate) -> None:
        plain.require_valid_update(of(state), update)

    def schema(state: SiteJobState) -> UpdateSchema | None:
        return plain.schema(of(state))

    aggregation = Aggregation(fold, accumulator=accumulator, schema=schema, check_update=check_update)
    return {"send": send, "aggregation": aggregation, "step": step}


def site_state_from_task(inner: Tensors) -> SiteJobState:
    found = inner.get("packed", NOTHING)
    if found.dtype != np.uint8 or not found.size:
        raise UpdateError("the task of the coordinator above has no state: it has to be of this version of fedquilt")
    return SiteJobState(found)
