"""AFL: a new head for one frozen network in one round, in closed form, the same however the examples are split.

Paper: He et al., AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models, CVPR 2025
(arXiv 2405.16240). Each device runs the frozen network on its examples and sends second moments of the features; the
head is the least-squares solution of one-hot labels on the features of all devices together. Nothing is trained.

The result does not depend on the number of devices, on their order, or on who has which examples: it equals the
solution on all examples in one place, to rounding.

Deviations, and what is beyond the paper:
- Devices send plain moments X'X and X'Y. The paper's devices send (X'X + gamma I) and their own solution of it, which
  hold the same numbers; its server merges these pairwise (absolute aggregation law) and then takes gamma off again (RI
  process). Without gamma moments add, and there is nothing to take off. `ridge` = 0 is what the paper's RI process ends
  with; where it is singular, the solution of least norm.
- X'X goes as the triangular factor of the centred features beside their mean, in float64: with fewer examples than
  features that is smaller, and the board holds no square matrix. Where memory holds the features of some of a device's
  examples only, the others are left out, which the log says.
- `ridge` above 0 is the central ridge solution, with lambda taken as a share of the features' mean square.
- `gcv` (not in the paper): features are standardised, the head has a bias, and generalised cross-validation chooses
  the ridge from the same moments.
- `random_features` (not in the paper): so many random projections of the features behind a ReLU take their place.
- `rounds` > 1 (not in the paper): each device is heard once; for fleets that are not asked all at once.
- A class that no device has is never predicted; the log names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt.core import (
    Answer,
    Artefact,
    BlobRef,
    Bundle,
    Contribution,
    DeviceView,
    JobError,
    Method,
    ModelError,
    Order,
    Site,
    Task,
    UpdateError,
    adds_up,
    checked_by,
    derive_seed,
)
from fedquilt.models.stitching import candidates, joint_head, least_squares, moment_sums, orders, stitched, taps
from fedquilt.models.stitching.class_moments import Sums
from fedquilt.models.stitching.moment_sums import Gathering
from fedquilt.models.stitching.search_state import Stored
from fedquilt.models.stitching.stitched import Stock


@dataclass(frozen=True)
class Params:
    """Hyper-parameters."""

    donor: str = ""  # which of the job's donors; "": the first
    ridge: Annotated[float, Meta(ge=0)] = 0.0  # lambda, as a share of the features' mean square; 0: the paper's result
    gcv: bool = False  # standardise, add a bias, and choose the ridge by generalised cross-validation
    random_features: Annotated[int, Meta(ge=0)] = 0  # so many random ReLU features of the network's; 0: its own
    rounds: Annotated[int, Meta(ge=1)] = 1  # in which devices are heard, each once


@dataclass(frozen=True)
class State:
    """What has been gathered, and from whom."""

    params: Params
    seed: int
    stock: Stock
    files: dict[str, BlobRef]
    path: tuple[str, ...]  # of the donor, up to the last block before its classifier
    turn: int = 0  # rounds in which somebody was heard
    heard: tuple[str, ...] = ()  # devices, sorted
    gathered: Stored | None = None  # None: nobody was heard, or the head is solved
    head: dict[str, np.ndarray] = field(default_factory=dict)  # {}: not solved yet
    log: tuple[str, ...] = ()


# -- server ---------------------------------------------------------------------------------------


def init(bundle: Bundle, params: Params, seed: int) -> State:
    """The state before the first round.

    Raises:
        ModelError: the bundle holds no donor blocks.
        JobError: it has no donor of that name, or `ridge` is given beside `gcv`, which chooses it.
    """
    stock = stitched.stock(bundle.meta)
    donor = params.donor or next(iter(stock.donors))
    if donor not in stock.donors:
        raise JobError(f"[params] donor: the bundle has no donor {donor!r}; it has {', '.join(sorted(stock.donors))}")
    if params.gcv and params.ridge:
        raise JobError(f"[params] ridge = {params.ridge:g}: gcv = true chooses the ridge; leave out one of the two")
    path = stock.donors[donor].blocks[:-1]
    if missing := [name for block in path for name in stock.blocks[block].files if name not in bundle.files]:
        raise ModelError(f"the bundle lacks {', '.join(missing[:3])}: prepare it anew")
    return State(params, seed, stock, dict(bundle.files), path)


def send(state: State, device: DeviceView) -> Order | None:
    """Ask a device for its sums, once."""
    if done(state) or device.device in state.heard:
        return None
    ask = taps.GatherAsk(
        turn=state.turn,
        input=state.stock.input,
        blocks={name: state.stock.blocks[name] for name in state.path},
        paths=(state.path,),
        widths=(_width(state),),
        labels=len(state.stock.labels),
        samples=None,
        projection_seed=_seed(state),
        relu=state.params.random_features > 0,
        exact=True,
    )
    return orders.moments_order(ask, state.files)


def sound(state: State, total: Gathering, weight: float) -> None:
    """Check a site's moments before they are merged.

    Raises:
        UpdateError: they are none of so many examples, or of so many devices.
    """
    moment_sums.require(total, len(state.stock.labels), _width(state), weight, exact=True)


def require(state: State, update: Contribution) -> None:
    """Check an update before it is added to the sums.

    Raises:
        UpdateError: it answers another round, or its moments are not what was asked for.
    """
    if update.metrics.get("turn") != state.turn:
        raise UpdateError(f"answers turn {update.metrics.get('turn')} of the job, which is at {state.turn}")
    if update.device not in state.heard:
        moment_sums.checked(update, len(state.stock.labels), _width(state), exact=True)


@adds_up(Gathering, sound)
@checked_by(require)
def fold(state: State, so_far: Gathering | None, update: Contribution) -> Gathering:
    """Add one device's moments, in place; errors as of `require`. Those of a device that was heard count already."""
    require(state, update)
    so_far = so_far or Gathering()
    return so_far if update.device in state.heard else so_far.plus(update)


def step(state: State, total: Gathering | None) -> State:
    """Add a round's moments; solve after the last round, or once a round brings nobody new."""
    if total is None or not total.devices:
        return _closed(state) if state.heard else replace(state, log=())
    sums = total.value(candidates.restored(state.gathered))
    heard = tuple(sorted({*state.heard, *total.devices}))
    notes = [f"moments of {sums.n:.0f} examples of {len(heard)} devices"]
    if total.short:
        notes.append(f"{total.short} of {len(total.devices)} devices: memory for some of their examples only")
    state = replace(
        state, turn=state.turn + 1, heard=heard, gathered=candidates.stored(sums, exact=True), log=tuple(notes)
    )
    return _closed(state) if state.turn >= state.params.rounds else state


def done(state: State) -> bool:
    """Whether the head is solved."""
    return bool(state.head)


def result(state: State) -> Artefact:
    """The donor's blocks under the new head (`stitched.to_artefact`); of a job that was cut short from who was heard.

    Raises:
        ModelError: nobody was heard.
    """
    if not done(state) and state.gathered is None:
        raise ModelError("no device has sent its moments yet: there is no head")
    head = joint_head.handed_out(state.head or _solved(state))
    meta, arrays = stitched.to_artefact(stitched.Network((state.path,), {}, head), state.stock)
    return Artefact("stitched", meta, arrays)


def solved(params: Params, sums: Sums) -> dict[str, np.ndarray]:
    """The head from the sums of all devices: {"weights": (labels, d), "bias": (labels,)}, float64.

    What a state holds is finite: the bias of a class without examples is `joint_head.NEVER`.
    """
    if params.gcv:
        given = joint_head.standardised(sums)
        inner = given.correlation.copy()
        inner[np.diag_indices(len(inner))] += joint_head.strength(given).ridge
        weights = np.linalg.solve(inner, given.cross).T * given.inverse
        bias = given.shares - weights @ given.mean
    else:
        zero, labels = np.zeros_like(sums.mean), len(sums.counts)
        xx = sums.scatter + sums.n * np.outer(sums.mean, sums.mean)
        moments = least_squares.Moments(sums.n, zero, np.zeros(labels), xx, sums.totals.T, sums.n)
        weights, bias = least_squares.solve(moments, params.ridge)
    return {"weights": weights, "bias": np.where(sums.counts > 0, bias, joint_head.NEVER)}


def _solved(state: State) -> dict[str, np.ndarray]:
    sums = candidates.restored(state.gathered)
    assert sums is not None
    head = solved(state.params, sums)
    if state.params.random_features:
        channels = state.stock.blocks[state.path[-1]].out_shape[0]
        head["hidden"] = stitched.random_features(channels, state.params.random_features, _seed(state)).T
    return {part: array.astype(np.float32) for part, array in head.items()}


def _closed(state: State) -> State:
    assert state.gathered is not None
    notes = [f"the head of {state.path[0].rpartition('.')[0]} solved from {state.gathered.counts.sum():.0f} examples"]
    pairs = zip(state.stock.labels, state.gathered.counts, strict=True)
    if nobodys := [label for label, count in pairs if not count]:
        notes.append(f"nobody has examples of {', '.join(nobodys)}: never predicted")
    return replace(state, head=_solved(state), gathered=None, log=(*state.log, *notes))


def _width(state: State) -> int:
    return state.params.random_features or state.stock.blocks[state.path[-1]].out_shape[0]


def _seed(state: State) -> int:
    return derive_seed("features", state.seed)


# -- client ---------------------------------------------------------------------------------------


def work(task: Task, site: Site) -> Answer:
    """Sums of the pooled features at the donor's tap, and of the labels."""
    return taps.gather(msgspec.convert(task.params, taps.GatherAsk), site)


METHOD = Method(
    paper="arXiv 2405.16240",
    params=Params,
    state=State,
    engines=("onnx",),
    init=init,
    send=send,
    work=work,
    check=None,
    fold=fold,
    step=step,
    result=result,
    done=done,
    explain=lambda state: state.log,
    tasks=("classes",),
    exact=True,  # moments are solved for
)
