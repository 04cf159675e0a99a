"""FedStitch: a network stitched from blocks of pre-trained donors, by forward passes only.

Paper: Zhan et al., Heterogeneity-Aware Coordination for Federated Learning via Stitching Pre-trained
Blocks, IWQoS 2024 (arXiv 2409.07202), sections 3 and 4, Algorithm 1. Compatibility and junctions follow
Teerapittayanon et al., StitchNet (arXiv 2301.01947).

A job goes through phases, kept in the state:
    score     devices score the pool of one partial network and vote, for some sub-rounds
    fit       devices send the sums that the winners' junctions are solved from; back to score
    head      devices send the sums that each finished network's linear head is solved from
    validate  devices count right answers on their held-out examples; the best network is chosen
    refine    the chosen network's head is solved anew, from the sums of as many devices as come

Deviations, each because the paper's letter cannot run, or measures something else:
- CKA is the unbiased estimator: at 64 images the biased one says 0.5 to 1 of independent noise.
- Scores: every block is screened by its input (no junction needed), the best few are scored by their
  output, with a junction fitted on other images than are scored: in-sample, wide blocks always score 1.
- Junctions are centred ridge regressions with bias, solved from sums over devices (Eq. 3 is singular
  with fewer rows than channels, and the paper does not say who has the data to solve it).
- A finished network gets a closed-form head for the job's own labels (cf. Fed3R, arXiv 2406.01116).
- Votes are about where and to what a donor is left: a path ends as its last donor goes on, since a donor's own next
  block takes no junction. So whole donors are finished networks before the first vote, and a search that is cut short
  hands out one of these rather than a stem. Picks, winners and finalists take turns among donors: by scores alone, a
  donor with a block left out goes before all that is stitched of several.
- Beside CKA, an output can be scored by what the end of the path says of the labels (criterion).
- A device is rewarded from the median rank of those it votes with, which together keep their weight: the paper
  publishes no threshold, a fixed one rewards nearly all, and then being asked is what counts.
- Devices that explore are judged by their greedy picks; a device's second vote replaces its first.
- Of the search space optimizer's cuts only those beyond the spread between devices are made.
- The network is chosen on the devices' held-out examples, never on a test set.
- Beyond the paper: what a junction leaves of a device that it was not solved from is told, and counts in the
  path's score with residual = "weigh"; paths whose score falls under stop_below are given up.
mode = "paper" goes back on these where it can run, whatever [params] say beside it: see PAPER. What cannot run there:
- Scores on the images that the junction was fitted on: all wide blocks would score 1. They are taken on others.
- Eq. 3, whose inverse does not exist with fewer rows than channels: the least-norm solution takes its place. Who solves
  it is not said, and the server has no data: winners' junctions are solved centrally, from the sums of all that fit.
- Terminating blocks of donors whose classes nobody has aligned with the labels.
- Algorithm 1 to the letter: it returns inside its loop, and its set of paths never shrinks. A path is expanded once.
- Weights after each of the five sub-rounds, and two votes of a device in one sum: both are settled when a vote closes.
- Its constants, which are not published (theta 0.6, alpha and beta 0.1, epsilon 0.3 falling), and a choice among the 22
  networks without held-out shares.
The deadline and the energy coordinator belong to coordinator and agent: [cohort] deadline = "paper", slack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from fedquilt import tensors
from fedquilt.core import (
    Answer,
    Artefact,
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
)
from fedquilt.models.stitching import device_statistics, least_squares, orders, scoring, search, stitched, vote
from fedquilt.models.stitching.least_squares import Gathered, Moments
from fedquilt.models.stitching.search_state import PAPER, Finalist, Params, State, describe
from fedquilt.models.stitching.vote import Ballot

GROUPS_BYTES = 256 << 20  # held for the residuals of a round's junctions; larger devices' sums share a group


@dataclass(frozen=True)
class Sum:
    """A round's accumulator; which part is filled follows from the phase."""

    ballots: Mapping[str, Ballot]  # device -> its votes
    moments: tuple[Gathered, ...]  # of each junction, or of each head
    counts: Mapping[str, np.ndarray]  # "examples" (1,), "ridge" and "aligned" (finalists,)
    devices: tuple[str, ...] = ()  # whose answers these are, sorted


# -- server ---------------------------------------------------------------------------------------


def init(bundle: Bundle, params: Params, seed: int) -> State:
    """The state before the first round.

    Raises:
        ModelError: the bundle holds no donor blocks, or none that can be stitched.
        JobError: the parameters cannot be used with these donors.
    """
    if params.mode == "paper":
        params = replace(params, **PAPER)
    stock = stitched.stock(bundle.meta)
    wanted = [name for block in stock.blocks.values() for name in (*block.files, *block.scored.files)]
    missing = [name for name in wanted if name not in bundle.files]
    if missing:
        raise ModelError(f"the bundle lacks {', '.join(missing[:3])}: prepare it anew")
    if params.head == "aligned" and not any(donor.align for donor in stock.donors.values()):
        raise JobError("head = 'aligned', but no donor says which classes are which label: give a donor `align`")
    if params.criterion != "cka" and params.score_at == "input":
        raise JobError(f"criterion = '{params.criterion}' judges outputs: let score_at be 'hybrid' or 'output'")
    state = search.begun(params, seed, stock, dict(bundle.files))
    if state.current is None:
        raise ModelError("no block may follow any starting block: raise max_upsampling, or take other donors")
    return state


def send(state: State, device: DeviceView) -> Order | None:
    if state.phase == "score":
        return orders.score_order(state, device)
    if state.phase == "fit":
        return orders.fit_order(state)
    return None if state.phase == "done" else orders.finalists_order(state)


def fold(state: State, so_far: Sum | None, update: Contribution) -> Sum:
    """Take one device's answer.

    Raises:
        UpdateError: it answers another step of the search, or is not what was asked for.
    """
    turn = update.metrics.get("turn")
    if turn != state.turn:
        raise UpdateError(f"answers turn {turn} of the search, which is at {state.turn}")
    so_far = so_far or Sum({}, (), {})
    if state.phase == "refine" and update.device in state.heard:
        return so_far  # its sums are counted already
    so_far = replace(so_far, devices=_union(so_far.devices, (update.device,)))
    if state.phase == "score":
        given = vote.ballot(
            update.bundles.get("scores", {}),
            state.pool,
            state.params.k,
            search.epsilon(state),
            search.coin(state, update.device),
            state.params.spread,
        )
        return replace(so_far, ballots={**so_far.ballots, update.device: given})
    if state.phase == "validate":
        counts = _counts(update, len(state.finalists))
        return replace(so_far, counts={k: v + so_far.counts.get(k, 0) for k, v in counts.items()})
    shapes = _shapes(state)
    new = [least_squares.from_tensors(update.bundles.get(f"moments.{i}", {}), *s) for i, s in enumerate(shapes)]
    groups = GROUPS_BYTES // sum(each.nbytes for each in new) if state.phase == "fit" else 0
    before = so_far.moments or (None,) * len(new)
    gathered = [least_squares.gather(*pair, groups) for pair in zip(before, new, strict=True)]
    return replace(so_far, moments=tuple(gathered))


def step(state: State, total: Sum | None) -> State:
    if total is None:
        if state.phase == "score" and state.ballots:
            return replace(search.close_vote(state), turn=state.turn + 1)
        return replace(state, log=())
    state = replace(state, seen=_union(state.seen, total.devices))
    if state.phase == "score":
        after = search.add_ballots(state, total.ballots)
    elif state.phase == "fit":
        after = _fitted(state, total.moments)
    elif state.phase == "head":
        after = _headed(state, total)
    elif state.phase == "validate":
        after = _validated(state, total.counts)
    else:
        after = _refined(state, total)
    return replace(after, turn=state.turn + 1)


def result(state: State) -> Artefact:
    """The chosen network: blocks by id, junctions between them (resize, then project), and its head.

    With a head the terminating block is left out: the head takes the pooled maps before it. Of a job that
    was cut short it is the finished network with the best score, without a head.

    Raises:
        ModelError: no network was finished.
    """
    candidates = state.finalists or tuple(search.distinct(state))
    if not candidates:
        raise ModelError("no network is finished: raise the job's rounds, or [params] expansions or max_upsampling")
    best = max(candidates, key=lambda finalist: _merit(state, finalist))
    path = best.path[:-1] if best.head else best.path
    blocks = [state.stock.blocks[name] for name in path]
    arrays: dict[str, np.ndarray] = {}
    junctions = []
    for i in range(1, len(path)):
        found = state.junctions.get(stitched.junction_name(path[: i + 1]))
        entry = {"before": i, "in_shape": blocks[i - 1].out_shape, "out_shape": blocks[i].in_shape}
        if found is None:
            junctions.append({**entry, "kind": "none", "weights": None, "bias": None})
            continue
        names = {part: f"junction.{i}.{part}" for part in ("weights", "bias")}
        arrays |= {names[part]: found[part] for part in names}
        junctions.append({**entry, "kind": "projection", **names})
    head = None
    if best.head:
        head = {"features": "gap", "weights": "head.weights", "bias": "head.bias"}
        arrays |= {f"head.{part}": array for part, array in best.head.items()}
    meta = {
        "path": list(path),
        "junctions": junctions,
        "head": head,
        "align": None if head else orders.groups(state, best.path),
        "labels": state.stock.labels,
        "input": state.stock.input,
        "search": [_summary(state, finalist) for finalist in candidates],
    }
    return Artefact("stitched", msgspec.json.decode(msgspec.json.encode(meta)), arrays)


def _shapes(state: State) -> list[tuple[int, int]]:
    """Channels in and out of each regression that the devices' sums are for."""
    blocks = state.stock.blocks
    if state.phase == "fit":
        assert state.current is not None
        channels = blocks[state.current.path[-1]].out_shape[0]
        return [(channels, blocks[name].in_shape[0]) for name in search.projected(state)]
    wide = state.params.random_features
    return [(wide or blocks[net.path[-2]].out_shape[0], len(state.stock.labels)) for net in search.in_hand(state)]


def _fitted(state: State, sums: tuple[Gathered, ...]) -> State:
    assert state.current is not None
    junctions, residuals, notes = {}, {}, []
    for name, each in zip(search.projected(state), sums, strict=True):
        weights, bias = least_squares.solve(each.total, state.params.ridge)
        junctions[stitched.junction_name((*state.current.path, name))] = {
            "weights": weights.astype(np.float32),
            "bias": bias.astype(np.float32),
        }
        residuals[name], note = _residual(name, each, state.params.ridge)
        notes.append(note)
    rows = sums[0].total.n
    told = f"{len(junctions)} junctions after {describe(state.current.path)} solved from {rows:.0f} positions"
    return search.grow(replace(state, log=(told, *notes)), junctions, residuals)


def _residual(block: str, sums: Gathered, ridge: float) -> tuple[float | None, str]:
    """What a junction leaves of the variance of groups of devices that it was not solved from; and a sentence."""
    left, variances = least_squares.left_out(sums.groups, ridge), [group.yy for group in sums.groups]
    if not left or not any(variances):
        return None, f"to {block}: what it leaves of a device that it was not solved from is not known"
    mean = float(np.average(left, weights=variances))
    told = f"{100 * mean:.1f} % of the variance, {100 * max(left):.1f} % at worst"
    return mean, f"to {block}: solved without a device, it leaves {told}"


def _headed(state: State, total: Sum) -> State:
    pairs = zip(state.finalists, total.moments, strict=True)
    finalists = tuple(_with_head(state, finalist, each.total) for finalist, each in pairs)
    note = f"{len(finalists)} heads solved from {total.moments[0].total.n:.0f} images"
    return replace(state, phase="validate", finalists=finalists, heard=total.devices, log=(note,))


def _refined(state: State, total: Sum) -> State:
    """Add the sums of devices that are new; after the last round, solve."""
    new = [each.total for each in total.moments]
    before = [state.refined] if state.refined else []
    refined = least_squares.merge([*before, *new]) if before or new else None
    state = replace(state, refined=refined, heard=_union(state.heard, total.devices), subround=state.subround + 1)
    images = 0.0 if refined is None else refined.n
    note = f"the chosen network's head has {images:.0f} images of {len(state.heard)} devices"
    if state.subround < state.params.head_rounds and not _all_heard(state):
        return replace(state, log=(note,))
    finalists = list(state.finalists)
    if refined is not None:
        finalists[state.chosen] = _with_head(state, finalists[state.chosen], refined)
    return replace(state, phase="done", finalists=tuple(finalists), refined=None, log=(f"{note}: solved",))


def _with_head(state: State, finalist: Finalist, sums: Moments) -> Finalist:
    weights, bias = least_squares.solve(sums, state.params.head_ridge)
    if state.params.random_features:
        width = state.stock.blocks[finalist.path[-2]].out_shape[0]
        seed = orders.projection_seed(state)
        weights = weights @ stitched.random_features(width, state.params.random_features, seed).T
    return replace(finalist, head={"weights": weights.astype(np.float32), "bias": bias.astype(np.float32)})


def _all_heard(state: State) -> bool:
    """Whether every device that has ever taken part is in the heads."""
    return set(state.seen) <= set(state.heard)


def _union(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*some, *others}))


def _counts(update: Contribution, nets: int) -> dict[str, np.ndarray]:
    given = update.bundles.get("counts", {})
    sizes, kind = {"examples": 1, "ridge": nets, "aligned": nets}, np.dtype(np.int64)
    if missing := sorted(sizes.keys() - given.keys()):
        raise UpdateError(f"counts: no usable {', '.join(missing)}")
    counts = {name: given[name] for name in sizes}
    try:
        tensors.require_same(counts, {name: tensors.Shaped((size,), kind) for name, size in sizes.items()})
    except UpdateError as error:
        raise UpdateError(f"counts: {error}") from None
    if any((array > counts["examples"][0]).any() for array in counts.values()):
        raise UpdateError("counts: more right answers than examples")
    return counts


def _validated(state: State, counts: Mapping[str, np.ndarray]) -> State:
    examples = int(counts["examples"][0])
    finalists = []
    for i, finalist in enumerate(state.finalists):
        aligned = int(counts["aligned"][i]) if orders.groups(state, finalist.path) is not None else None
        finalists.append(replace(finalist, examples=examples, ridge=int(counts["ridge"][i]), aligned=aligned))
    after = replace(state, phase="done", finalists=tuple(finalists))
    ordered = sorted(finalists, key=lambda finalist: _merit(after, finalist), reverse=True)
    after = replace(after, chosen=finalists.index(ordered[0]))
    if state.params.head == "ridge" and state.params.head_rounds > 1 and not _all_heard(state):
        after = replace(after, phase="refine", heard=(), subround=0)
    notes = [f"{_name(finalist)}: {_percent(after, finalist)} on {examples} held-out" for finalist in ordered]
    return replace(after, log=(*notes, f"chosen: {_name(ordered[0])}"))


def _name(finalist: Finalist) -> str:
    """As it is handed out: a head that was solved takes the place of the last block."""
    return f"{describe(finalist.path[:-1])} > new head" if finalist.head else describe(finalist.path)


def _accuracy(state: State, finalist: Finalist) -> float | None:
    """Of the way of labelling that the job asks for; None: nothing was held out."""
    right = finalist.ridge if state.params.head == "ridge" else finalist.aligned
    return right / finalist.examples if right is not None and finalist.examples else None


def _percent(state: State, finalist: Finalist) -> str:
    accuracy = _accuracy(state, finalist)
    return "not validated" if accuracy is None else f"{100 * accuracy:.1f} %"


def _merit(state: State, finalist: Finalist) -> tuple[float, float, int]:
    accuracy = _accuracy(state, finalist)
    return (-1.0 if accuracy is None else accuracy, finalist.score, -len(finalist.path))


def _summary(state: State, finalist: Finalist) -> dict[str, Any]:
    aligned = finalist.aligned
    joined = finalist.residuals[:-1] if finalist.head else finalist.residuals  # a head replaces the last block
    return {
        "path": finalist.path,
        "score": finalist.score,
        "accuracy": _accuracy(state, finalist),
        "aligned_accuracy": aligned / finalist.examples if aligned is not None and finalist.examples else None,
        "examples": finalist.examples,
        "residual": max((each for each in joined if each is not None), default=None),
    }


# -- client ---------------------------------------------------------------------------------------


def work(task: Task, site: Site) -> Answer:
    match task.params["phase"]:
        case "score":
            return scoring.score(msgspec.convert(task.params, scoring.ScoreAsk), site)
        case "fit":
            return device_statistics.fit(msgspec.convert(task.params, device_statistics.FitAsk), site)
        case "head":
            return device_statistics.head(msgspec.convert(task.params, device_statistics.HeadAsk), site)
        case "validate":
            return device_statistics.validate(msgspec.convert(task.params, device_statistics.ValidateAsk), site)
        case phase:
            raise ModelError(f"this agent knows no phase {phase!r} of a stitching job: update it")


METHOD = Method(
    paper="arXiv 2409.07202",
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
    done=lambda state: state.phase == "done",
    explain=lambda state: state.log,
    tasks=("classes",),  # donors are classifiers, and votes are for classes
    exact=True,  # moments are solved for, votes are counted
)
