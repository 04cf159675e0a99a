"""Sites: coordinators that are devices of a coordinator above them, and answer with the sum of their boards.

Both sides run the job's own method in the job's own rounds; what differs is wrapped around the method, once:

- `above` is the method of a coordinator that may have sites among its devices. A site's order is the method's state and
  the job; its update is the accumulator of its boards, which is checked and merged.
- `below` is the method of a site. Its state is the one that came from above, with the sum of the last round; its rounds
  order, fold and check what the method does in that state, and its step keeps the sum.

Sums are exact (`fedquilt.exact`), so the bits are those of one coordinator with all the boards. Methods whose fold does
not add up, or that cannot check another's sum, have nothing for a site.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import exact, tensors
from fedquilt.coordinator.settings import Job
from fedquilt.core import (
    Artefact,
    Contribution,
    DeviceView,
    Expected,
    JobError,
    Method,
    Order,
    StoreError,
    Tensors,
    UpdateError,
    alike,
    expected,
    required,
    same_for,
    soundness,
    summed,
)

STATE: Final = "state"  # bundle of a site's task
SUM: Final = "sum"  # bundle of a site's update
BOARDS: Final = "boards"  # metric of it: number of boards in the sum
TIMES: Final = 10  # a packed sum is at most so many times as large as the tensors that a board sends
SPARE_BYTES: Final = 1 << 20
NOTHING: Final = np.zeros(0, np.uint8)


def packed(value: Any) -> np.ndarray:
    """A state or an accumulator as bytes, uint8 (n,)."""
    return np.frombuffer(tensors.pack(value), np.uint8)


def unpacked(given: np.ndarray, kind: type) -> Any:
    """The value that `packed` made.

    Raises:
        UpdateError: it is none of this type.
    """
    try:
        return tensors.unpack(given.tobytes(), kind)
    except StoreError as error:
        raise UpdateError(f"a site's {kind.__name__} cannot be read: {error}") from None


# -- above ----------------------------------------------------------------------------------------


def above(method: Method, job: Job) -> Method:
    """The method for a coordinator that may have sites among its devices.

    Args:
        method: the job's.
        job: its settings, which go to sites.
    """
    kind, sound, common = summed(method.fold), soundness(method.fold), alike(method.send)
    table = msgspec.to_builtins(job)

    @functools.wraps(method.send)
    def send(state: Any, view: DeviceView) -> Order | None:
        order = method.send(state, view)
        if order is None or not _boards(view):
            return order
        if kind is None or sound is None:
            return None
        return replace(order, params={"job": table}, bundles={STATE: {"packed": packed(state)}})

    @functools.wraps(method.fold)
    def fold(state: Any, so_far: Any, update: Contribution) -> Any:
        if SUM not in update.bundles:
            return method.fold(state, so_far, update)
        if kind is None or sound is None:
            raise UpdateError(f"{update.device} sent the sum of a site, and this method takes none")
        given = update.bundles[SUM].get("packed", NOTHING)
        if given.dtype != np.uint8:
            raise UpdateError(f"{update.device} sent a sum of {given.dtype}: bytes are wanted")
        total = unpacked(given, kind)
        sound(state, total, update.weight)
        return total if so_far is None else exact.join(so_far, total)

    def require(state: Any, update: Contribution) -> None:
        if SUM in update.bundles:
            fold(state, None, update)
        else:
            required(method.fold, state, update)

    def takes(state: Any) -> Expected | None:
        known = expected(method.fold, state)
        if known is None or sound is None:
            return known
        size = sum(each.nbytes for bundle in known.bundles.values() for each in bundle.values())
        most = tensors.Shaped((TIMES * size + SPARE_BYTES,), np.dtype(np.uint8))
        return replace(known, other=Expected({SUM: {"packed": most}}, whole=False))

    fold.__dict__.update(expected=takes, require=require)
    if common is not None:
        send = same_for(lambda view: (_boards(view) > 0, common(view)))(send)
    return replace(method, send=send, fold=fold)


def _boards(view: DeviceView) -> int:
    return 0 if view.profile is None else view.profile.boards


# -- below ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """State of a site's job: that of the coordinator above, and the accumulator of the last round, as bytes."""

    inner: np.ndarray  # uint8 (n,), as `packed`; (0,): none has come yet
    total: np.ndarray  # uint8 (n,); (0,): no round since


def below(method: Method, job: Job) -> Method:
    """The method for a site: rounds of a job's method that end with their sum."""
    kind = summed(method.fold)
    known: dict[int, tuple[np.ndarray, Any]] = {}  # by identity of its bytes: the state of the running round

    def of(state: Given) -> Any:
        found = known.get(id(state.inner))
        if not state.inner.size:
            raise JobError(f"this home is a site's: submit {job.name} to the coordinator above, whose jobs it works on")
        if found is None:
            known.clear()
            found = known[id(state.inner)] = (state.inner, tensors.unpack(state.inner.tobytes(), method.state))
        return found[1]

    def send(state: Given, view: DeviceView) -> Order | None:
        return method.send(of(state), view)

    def fold(state: Given, so_far: Any, update: Contribution) -> Any:
        return method.fold(of(state), so_far, update)

    def step(state: Given, total: Any) -> Given:
        return Given(state.inner, NOTHING if total is None else packed(total))

    def result(state: Given) -> Artefact:
        return Artefact("weights", {"site": True}, {})

    def require(state: Given, update: Contribution) -> None:
        required(method.fold, of(state), update)

    def takes(state: Given) -> Expected | None:
        return expected(method.fold, of(state))

    send.__dict__.update(method.send.__dict__)
    fold.__dict__.update({**method.fold.__dict__, "adds_up": kind, "expected": takes, "require": require})
    return replace(
        method,
        state=Given,
        init=lambda bundle, params, seed: Given(NOTHING, NOTHING),
        send=send,
        fold=fold,
        step=step,
        result=result,
        done=lambda state: False,
        explain=lambda state: (),
        settle=None,
    )


def summed_up(metrics: Mapping[str, float], boards: int) -> dict[str, float]:
    """Metrics of a site's update: the means of its boards, and their number."""
    return {**metrics, BOARDS: float(boards)}


def given(inner: Tensors) -> Given:
    """State of a site's job for a round of the coordinator above, from its task's bundle.

    Raises:
        UpdateError: the bundle holds no state.
    """
    found = inner.get("packed", NOTHING)
    if found.dtype != np.uint8 or not found.size:
        raise UpdateError("the task of the coordinator above has no state: it has to be of this version of fedquilt")
    return Given(found, NOTHING)
