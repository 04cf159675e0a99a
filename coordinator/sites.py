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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from fedquilt.arrays import exact_sums, tensors
from fedquilt.coordinator.settings import JobSettings
from fedquilt.coordinator.updates import checks, site_updates
from fedquilt.core import (
    Aggregation,
    Artefact,
    BlobRef,
    DeviceUpdate,
    DeviceView,
    EvaluationRound,
    JobError,
    Method,
    TaskSpec,
    Tensors,
    UpdateError,
    UpdateSchema,
)
from fedquilt.core.messages import has_site_bundles

STATE: Final = "state"  # bundle of a site's task
NOTHING: Final = np.zeros(0, np.uint8)

FILE: Final = "file "  # before the name of a file of the job's bundle, as a bundle of a site's task

Half: TypeAlias = Method | EvaluationRound
Around: TypeAlias = Callable[[Method, JobSettings, Mapping[str, BlobRef]], Method]


def site_aggregate_type(of: Aggregation, state: Any) -> type | None:
    """Return the type of the sites' partial aggregates, or None if sites forward updates."""
    return of.accumulator(state) if of.check_sums is not None else None


# -- above ----------------------------------------------------------------------------------------


def adapt_for_sites(method: Method, job: JobSettings, files: Mapping[str, BlobRef]) -> Method:
    """Return the method for a coordinator that may have sites among its devices.

    Args:
        method: The job's method.
        job: The settings of the job, which are sent to sites.
        files: The files of the bundle. Files named by a state are sent with the state.
    """
    params = {"job": msgspec.to_builtins(job)}
    settle = method.settle
    if settle is not None:
        order = {**params, "settling": True}
        settle = replace(
            settle,
            send=_wrap_send(settle.send, order, files),
            aggregation=_accept_site_updates(settle.aggregation),
        )
    send, aggregation = _wrap_send(method.send, params, files), _accept_site_updates(method.aggregation)
    return replace(method, send=send, aggregation=aggregation, settle=settle)


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
        if site_updates.SUM not in update.bundles:
            check_update(state, update)
            for each in site_updates.split_site_update(update):
                so_far = plain.fold(state, so_far, each)
            return so_far
        total = check_aggregate(state, update)
        return exact_sums.copy_accumulator(total) if so_far is None else exact_sums.merge_accumulators(so_far, total)

    def check_aggregate(state: Any, update: DeviceUpdate) -> Any:
        kind = site_aggregate_type(plain, state)
        if kind is None or plain.check_sums is None:
            raise UpdateError(f"{update.device} sent the sum of a site, and this round takes updates alone")
        total = site_updates.aggregate_from_bundle(update.bundles[site_updates.SUM], kind)
        plain.check_sums(state, total, update.weight)
        return total

    def check_update(state: Any, update: DeviceUpdate) -> None:
        if not has_site_bundles(update.bundles):
            plain.require_valid_update(state, update)
        elif site_updates.SUM in update.bundles:
            check_aggregate(state, update)
        else:
            for each in site_updates.split_site_update(update):
                with checks.name_device_in_errors(each.device):
                    plain.require_valid_update(state, each)

    return replace(plain, fold=fold, check_update=check_update)


def _count_devices(view: DeviceView) -> int:
    return 0 if view.profile is None else view.profile.boards


# -- below ----------------------------------------------------------------------------------------


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

    settle = method.settle
    return replace(
        method,
        state=SiteJobState,
        init=lambda bundle, params, seed: SiteJobState(NOTHING),
        **_site_functions(method, unpack_parent_state),
        result=result,
        done=lambda state: False,
        explain=lambda state: (),
        settle=None
        if settle is None
        else EvaluationRound(wanted=lambda state: False, **_site_functions(settle, unpack_parent_state)),
    )


def _site_functions(half: Half, of: Callable[[SiteJobState], Any]) -> dict[str, Any]:
    """Return the send, aggregation and step of a site, whose step keeps the aggregate or the updates."""
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
    """Return the initial state of a site's job, from the bundle of a task of the parent.

    Raises:
        UpdateError: If the bundle contains no state.
    """
    found = inner.get("packed", NOTHING)
    if found.dtype != np.uint8 or not found.size:
        raise UpdateError("the task of the coordinator above has no state: it has to be of this version of fedquilt")
    return SiteJobState(found)
