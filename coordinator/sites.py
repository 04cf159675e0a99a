"""Sites: coordinators that are devices of a coordinator above them, and answer for their boards.

Both sides run the job's own method in the job's own rounds; what differs is wrapped around the method, once:

- `above` is the method of a coordinator that may have sites among its devices. A site's order is the method's state and
  the job; its update is the accumulator of its boards, which is checked and merged, or its boards' updates.
- `below` is the method of a site. Its state is the one that came from above, with what the last round has brought; its
  rounds order, fold and check what the method does in that state, and its step keeps the sum, or the updates.

A site sends a sum where the method's folds add up (`fedquilt.exact`) and can check a sum that comes from elsewhere. It
passes its boards' updates up where they do not: they are folded above, in the order of all devices. So the bits are
those of one coordinator with all the boards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from fedquilt import exact, tensors
from fedquilt.coordinator import checks, passed
from fedquilt.coordinator.settings import Job
from fedquilt.core import (
    Artefact,
    BlobRef,
    Contribution,
    DeviceView,
    Expected,
    JobError,
    Method,
    Order,
    Settle,
    Tensors,
    UpdateError,
    alike,
    expected,
    required,
    same_for,
    soundness,
    summed,
)
from fedquilt.core.rights import has_site_bundles

STATE: Final = "state"  # bundle of a site's task
NOTHING: Final = np.zeros(0, np.uint8)

FILE: Final = "file "  # before the name of a file of the job's bundle, as a bundle of a site's task

Half: TypeAlias = Method | Settle
Around: TypeAlias = Callable[[Method, Job, Mapping[str, BlobRef]], Method]


def sums(half: Half, state: Any) -> type | None:
    """Type of what sites send for this half of a method in this state; None: they pass their boards' updates up."""
    return summed(half.fold, state) if soundness(half.fold) is not None else None


# -- above ----------------------------------------------------------------------------------------


def above(method: Method, job: Job, files: Mapping[str, BlobRef]) -> Method:
    """The method for a coordinator that may have sites among its devices.

    Args:
        method: the job's.
        job: its settings, which go to sites.
        files: of its bundle; those that a state names go with it.
    """
    params = {"job": msgspec.to_builtins(job)}
    settle = method.settle
    if settle is not None:
        order = {**params, "settling": True}
        settle = replace(settle, send=_sending(settle.send, order, files), fold=_folding(settle))
    return replace(method, send=_sending(method.send, params, files), fold=_folding(method), settle=settle)


def _sending(
    plain: Callable[..., Any], params: Mapping[str, Any], files: Mapping[str, BlobRef]
) -> Callable[[Any, DeviceView], Order | None]:
    common = alike(plain)
    latest: list[tuple[Any, dict[str, Tensors | BlobRef]]] = []  # the state sent last, packed once for all sites

    @functools.wraps(plain)
    def send(state: Any, view: DeviceView) -> Order | None:
        order: Order | None = plain(state, view)
        if not _boards(view):
            return order
        if not latest or latest[0][0] is not state:
            latest[:] = [(state, _state(state, files))]
        return replace(order or Order({}, {}), params=params, bundles=latest[0][1])

    return send if common is None else same_for(lambda view: (_boards(view) > 0, common(view)))(send)


def _state(state: Any, files: Mapping[str, BlobRef]) -> dict[str, Tensors | BlobRef]:
    """A state as the bundles of a site's task, with the files that it names, as its orders may."""
    arrays, skeleton = tensors.parts(state)
    named = {f"{FILE}{name}": ref for name, ref in files.items() if ref.sha256 in skeleton["state"]}
    return {STATE: {"packed": np.frombuffer(tensors.encode(arrays, skeleton), np.uint8)}, **named}


def _folding(half: Half) -> Callable[..., Any]:
    sound, plain = soundness(half.fold), half.fold

    @functools.wraps(plain)
    def fold(state: Any, so_far: Any, update: Contribution) -> Any:
        if not has_site_bundles(update.bundles):
            return plain(state, so_far, update)
        if passed.SUM not in update.bundles:
            require(state, update)
            for each in passed.contributions(update):
                so_far = plain(state, so_far, each)
            return so_far
        total = checked(state, update)
        return exact.held(total) if so_far is None else exact.join(so_far, total)

    def checked(state: Any, update: Contribution) -> Any:
        kind = sums(half, state)
        if kind is None or sound is None:
            raise UpdateError(f"{update.device} sent the sum of a site, and this round takes updates alone")
        total = passed.total(update.bundles[passed.SUM], kind)
        sound(state, total, update.weight)
        return total

    def require(state: Any, update: Contribution) -> None:
        if not has_site_bundles(update.bundles):
            required(plain, state, update)
        elif passed.SUM in update.bundles:
            checked(state, update)
        else:
            for each in passed.contributions(update):
                with checks.named(each.device):
                    required(plain, state, each)

    fold.__dict__["require"] = require
    return fold


def _boards(view: DeviceView) -> int:
    return 0 if view.profile is None else view.profile.boards


# -- below ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """A board's update, as it is passed up."""

    device: str
    round: int
    weight: float
    metrics: Mapping[str, float]
    bundles: Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Given:
    """State of a site's job: that of the coordinator above, and what the last round has brought."""

    inner: np.ndarray  # uint8 (n,), as `tensors.pack`; (0,): none has come yet
    total: Mapping[str, np.ndarray] = field(default_factory=dict)  # arrays of an accumulator
    form: str = ""  # where in it they belong (`tensors.parts`); "": of nobody, or updates are passed up
    sent: tuple[Sent, ...] = ()  # updates that are passed up, in the order of devices


def below(method: Method, job: Job, files: Mapping[str, BlobRef]) -> Method:
    """The method for a site: rounds of a job's method that end with their sum, or their updates; as of `above`."""
    known: dict[int, tuple[np.ndarray, Any]] = {}  # by identity of its bytes: the state of the running round

    def of(state: Given) -> Any:
        found = known.get(id(state.inner))
        if not state.inner.size:
            raise JobError(f"this home is a site's: submit {job.name} to the coordinator above, whose jobs it works on")
        if found is None:
            known.clear()
            found = known[id(state.inner)] = (state.inner, tensors.unpack(state.inner.tobytes(), method.state))
        return found[1]

    def result(state: Given) -> Artefact:
        raise JobError(f"this home is a site's: the result of {job.name} is at the coordinator above")

    settle = method.settle
    return replace(
        method,
        state=Given,
        init=lambda bundle, params, seed: Given(NOTHING),
        **_halved(method, of),
        result=result,
        done=lambda state: False,
        explain=lambda state: (),
        settle=None if settle is None else Settle(wanted=lambda state: False, **_halved(settle, of)),
    )


def _halved(half: Half, of: Callable[[Given], Any]) -> dict[str, Any]:
    """`send`, `fold` and `step` of a site for a method, or for its settling rounds."""
    plain = half.fold

    def adds_up(state: Given) -> type | None:
        return sums(half, of(state))

    @functools.wraps(half.send)
    def send(state: Given, view: DeviceView) -> Order | None:
        found: Order | None = half.send(of(state), view)
        return found

    def fold(state: Given, so_far: Any, update: Contribution) -> Any:
        if adds_up(state) is not None:
            return plain(of(state), so_far, update)
        required(plain, of(state), update)
        held: list[Contribution] = [] if so_far is None else so_far
        held.append(update)
        return held

    def step(state: Given, total: Any) -> Given:
        if adds_up(state) is not None:
            arrays, told = ({}, {"state": ""}) if total is None else tensors.parts(total)
            return Given(state.inner, arrays, told["state"])
        sent = (Sent(each.device, each.round, each.weight, each.metrics, each.bundles) for each in total or ())
        return Given(state.inner, sent=tuple(sent))

    def require(state: Given, update: Contribution) -> None:
        required(plain, of(state), update)

    def takes(state: Given) -> Expected | None:
        return expected(plain, of(state))

    fold.__dict__.update(adds_up=adds_up, expected=takes, require=require)
    return {"send": send, "fold": fold, "step": step}


def given(inner: Tensors) -> Given:
    """State of a site's job for a round of the coordinator above, from its task's bundle.

    Raises:
        UpdateError: the bundle holds no state.
    """
    found = inner.get("packed", NOTHING)
    if found.dtype != np.uint8 or not found.size:
        raise UpdateError("the task of the coordinator above has no state: it has to be of this version of fedquilt")
    return Given(found)
