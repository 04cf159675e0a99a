"""AFL: a new head for a frozen network in one round, solved in closed form.

Paper: He et al., AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models, CVPR 2025
(arXiv 2405.16240). Each device runs the frozen network on its examples and sends second moments of the features. The
head is the least-squares solution of one-hot labels on the features of all devices together. Nothing is trained.

The result does not depend on the number of devices, on their order, or on the split of the examples. Up to rounding it
equals the solution on all examples in one place.

Deviations, and extensions of the paper:
- Devices send plain moments X'X and X'Y. The paper's devices send (X'X + gamma I) and their own solution, which have
  the same content. The paper's server merges these pairwise (absolute aggregation law) and then removes gamma (RI
  process). Without gamma moments add. `ridge` = 0 is the result of the paper's RI process, or the solution of least
  norm if the matrix is singular.
- X'X is sent as the triangular factor of the centred features and their mean, in float64. With fewer examples than
  features this is smaller, and the device holds no square matrix. If memory holds the features of only some of a
  device's examples, the others are left out, and the log reports it.
- `ridge` above 0 is the central ridge solution, with lambda as a share of the features' mean square.
- `gcv` (not in the paper): features are standardised, the head has a bias, and generalised cross-validation selects the
  ridge from the same moments.
- `random_features` (not in the paper): the number of random projections with a ReLU that replace the features.
- `rounds` > 1 (not in the paper): each device takes part once, for fleets that are not selected all at once.
- A class without examples on any device is never predicted, and the log names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedquilt import core
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import class_moments, joint_head, least_squares
from fedquilt.models.stitching.algebra.class_moments import ClassMoments, ExactMomentSums
from fedquilt.models.stitching.device import moments
from fedquilt.models.stitching.search import candidates, task_specs
from fedquilt.models.stitching.search.state import PackedSums
from fedquilt.models.stitching.stitched_network import DonorPool


@dataclass(frozen=True)
class Params:
    """Hyper-parameters of the analytic head."""

    donor: str = ""  # donor of the job; "": the first
    ridge: Annotated[float, Meta(ge=0)] = 0.0  # lambda, as a share of the features' mean square; 0: the paper's result
    gcv: bool = False  # standardise, add a bias, and choose the ridge by generalised cross-validation
    random_features: Annotated[int, Meta(ge=0)] = 0  # random ReLU features that replace the network's; 0: none
    rounds: Annotated[int, Meta(ge=1)] = 1  # rounds in which devices send moments, each device once


@dataclass(frozen=True)
class State:
    """Sums gathered so far, the devices that sent them, and the head once it is solved."""

    params: Params
    seed: int
    stock: DonorPool
    files: dict[str, core.BlobRef]
    path: tuple[str, ...]  # of the donor, up to the last block before its classifier
    turn: int = 0  # rounds with updates
    heard: tuple[str, ...] = ()  # devices that have sent their moments, sorted
    gathered: PackedSums | None = None  # None before the first update and after the head is solved
    head: dict[str, np.ndarray] = field(default_factory=dict)  # empty until solved
    log: tuple[str, ...] = ()


def init(bundle: core.Bundle, params: Params, seed: int) -> State:
    """Return the first state.

    Raises:
        ModelError: If the bundle has no donor blocks.
        JobError: If the donor is unknown, or if both `ridge` and `gcv` are set.
    """
    pool = stitched_network.load_donor_pool(bundle.meta)
    donor = params.donor or next(iter(pool.donors))
    if donor not in pool.donors:
        raise core.JobError(
            f"[params] donor = {donor!r} is not in the bundle: choose one of {', '.join(sorted(pool.donors))}"
        )
    if params.gcv and params.ridge:
        raise core.JobError(
            f"[params] ridge = {params.ridge:g} is not possible with gcv = true, which chooses the ridge: leave out one"
        )
    path = pool.donors[donor].blocks[:-1]
    if missing := [name for block in path for name in pool.blocks[block].files if name not in bundle.files]:
        raise core.ModelError(f"the bundle has no {', '.join(missing[:3])}: run `fedquilt prepare` again")
    return State(params, seed, pool, dict(bundle.files), path)


def send(state: State, device: core.DeviceView) -> core.TaskSpec | None:
    """Return the task spec for a device's moments, or None if they were received or the job is done."""
    if done(state) or device.device in state.heard:
        return None
    request = moments.GatherRequest(
        turn=state.turn,
        input=state.stock.input,
        blocks={name: state.stock.blocks[name] for name in state.path},
        paths=(state.path,),
        widths=(_feature_width(state),),
        labels=len(state.stock.labels),
        samples=None,
        projection_seed=_projection_seed(state) if state.params.random_features else None,
        exact=True,
    )
    return task_specs.moments_task_spec(request, state.files)


def validate_site_sums(state: State, total: ExactMomentSums, weight: float) -> None:
    """Raise UpdateError if a site's moments are impossible for the total weight of its devices."""
    class_moments.validate_site_moments(total, len(state.stock.labels), _feature_width(state), weight, exact=True)


def validate_update(state: State, update: core.DeviceUpdate) -> None:
    """Raise UpdateError if an update belongs to an earlier round, or its moments are invalid."""
    if update.metrics.get("turn") != state.turn:
        raise core.UpdateError(f"the update is for turn {update.metrics.get('turn')}, but the job is at {state.turn}")
    if update.device not in state.heard:
        class_moments.validate_update_moments(update, len(state.stock.labels), _feature_width(state), exact=True)


def fold(state: State, accumulator: ExactMomentSums | None, update: core.DeviceUpdate) -> ExactMomentSums:
    """Return the sums with a device's moments added in place, unless an earlier round added them."""
    validate_update(state, update)
    accumulator = accumulator or ExactMomentSums()
    return accumulator if update.device in state.heard else accumulator.add_update(update)


def step(state: State, total: ExactMomentSums | None) -> State:
    """Return the state with a round's moments, and with the head after the last round.

    The head is also solved after a round without new devices.
    """
    if total is None or not total.devices:
        return _set_final_head(state) if state.heard else replace(state, log=())
    sums = total.total_sums(candidates.unpack_sums(state.gathered))
    heard = tuple(sorted({*state.heard, *total.devices}))
    notes = [f"moments of {sums.n:.0f} examples of {len(heard)} devices"]
    if total.short:
        notes.append(f"{total.short} of {len(total.devices)} devices had memory for only some of their examples")
    state = replace(
        state, turn=state.turn + 1, heard=heard, gathered=candidates.pack_sums(sums, exact=True), log=tuple(notes)
    )
    return _set_final_head(state) if state.turn >= state.params.rounds else state


def done(state: State) -> bool:
    """Return whether the head is solved."""
    return bool(state.head)


def result(state: State) -> core.Artefact:
    """Return the donor's blocks under the new head (`stitched_network.to_artefact`).

    If a job ends early, the head is solved from the moments received so far.

    Raises:
        ModelError: If no device has sent its moments.
    """
    if not done(state) and state.gathered is None:
        raise core.ModelError("no device has sent moments yet, so there is no head: wait for the first update")
    head = joint_head.export_head(state.head or _solve_head_tensors(state))
    meta, arrays = stitched_network.to_artefact(stitched_network.StitchedNetwork((state.path,), {}, head), state.stock)
    return core.Artefact("stitched", meta, arrays)


def solve_head(params: Params, sums: ClassMoments) -> dict[str, np.ndarray]:
    """Return the head solved from the sums of all devices, as float64 "weights" and "bias".

    "weights" is (labels, d) and "bias" (labels,). The bias of a class without examples is `joint_head.ABSENT_BIAS`.
    """
    if params.gcv:
        standardised = joint_head.standardise_sums(sums)
        penalised = standardised.correlation.copy()
        penalised[np.diag_indices(len(penalised))] += joint_head.best_penalty(standardised).ridge
        weights = np.linalg.solve(penalised, standardised.cross).T * standardised.inverse
        bias = standardised.shares - weights @ standardised.mean
    else:
        zero, labels = np.zeros_like(sums.mean), len(sums.counts)
        xx = sums.scatter + sums.n * np.outer(sums.mean, sums.mean)
        moments = least_squares.RegressionMoments(sums.n, zero, np.zeros(labels), xx, sums.totals.T, sums.n)
        weights, bias = least_squares.solve_ridge(moments, params.ridge)
    return {"weights": weights, "bias": np.where(sums.counts > 0, bias, joint_head.ABSENT_BIAS)}


def _solve_head_tensors(state: State) -> dict[str, np.ndarray]:
    sums = candidates.unpack_sums(state.gathered)
    assert sums is not None
    head = solve_head(state.params, sums)
    if state.params.random_features:
        channels = state.stock.blocks[state.path[-1]].out_shape[0]
        head["hidden"] = stitched_network.random_projection(
            channels, state.params.random_features, _projection_seed(state)
        ).T
    return {part: array.astype(np.float32) for part, array in head.items()}


def _set_final_head(state: State) -> State:
    assert state.gathered is not None
    notes = [f"the head of {state.path[0].rpartition('.')[0]} solved from {state.gathered.counts.sum():.0f} examples"]
    pairs = zip(state.stock.labels, state.gathered.counts, strict=True)
    if labels_without_examples := [label for label, count in pairs if not count]:
        notes.append(f"never predicted, because no device has examples: {', '.join(labels_without_examples)}")
    return replace(state, head=_solve_head_tensors(state), gathered=None, log=(*state.log, *notes))


def _feature_width(state: State) -> int:
    return state.params.random_features or state.stock.blocks[state.path[-1]].out_shape[0]


def _projection_seed(state: State) -> int:
    return core.derive_seed("features", state.seed)


def work(task: core.Task, site: core.ClientContext) -> core.ClientResult:
    """Return the moments of the pooled features at the donor's last block, and of the labels."""
    return moments.gather_moments(msgspec.convert(task.params, moments.GatherRequest), site)


METHOD = core.Method(
    paper="arXiv 2405.16240",
    params=Params,
    state=State,
    engines=("onnx",),
    init=init,
    send=send,
    work=work,
    check=None,
    aggregation=core.Aggregation(
        fold, accumulator=lambda state: ExactMomentSums, check_update=validate_update, check_sums=validate_site_sums
    ),
    step=step,
    result=result,
    is_done=done,
    explain=lambda state: state.log,
    traits=core.Traits(  # moments are solved for
        sent_data="second moments of the features, in one round",
        private_data="the draw of its examples",
        prediction_tasks=("classes",),
        exact_updates=True,
    ),
)
