"""FedStitch: a network stitched from blocks of pre-trained donors, by forward passes only.

Paper: Zhan et al., Heterogeneity-Aware Coordination for Federated Learning via Stitching Pre-trained
Blocks, IWQoS 2024 (arXiv 2409.07202), sections 3 and 4, Algorithm 1. Compatibility and junctions follow
Teerapittayanon et al., StitchNet (arXiv 2301.01947).

A job goes through phases, kept in the state:
    score     devices score the pool of one partial network and vote, for some sub-rounds
    fit       devices send the sums that the winners' junctions are solved from; back to score
    gather    devices send sums of what donors and finished networks make of their images, at every tap
    validate  devices count right answers of each candidate on their held-out examples; the best is chosen
In the last two every device is heard once, for as many rounds as that takes.

Deviations, each because the paper's letter cannot run, or measures something else:
- CKA is the unbiased estimator: at 64 images the biased one says 0.5 to 1 of independent noise.
- Scores: every block is screened by its input (no junction needed), the best few are scored by their
  output, with a junction fitted on other images than are scored: in-sample, wide blocks always score 1.
- Junctions are centred ridge regressions with bias, solved from sums over devices (Eq. 3 is singular
  with fewer rows than channels, and the paper does not say who has the data to solve it).
- Votes are about where and to what a donor is left: a path ends as its last donor goes on, since a donor's own next
  block takes no junction. So whole donors are finished networks before the first vote, and a search that is cut short
  hands out one of these rather than a stem. Picks, winners and finalists take turns among donors: by scores alone, a
  donor with a block left out goes before all that is stitched of several.
- Beside CKA, an output can be scored by what the end of the path says of the labels (criterion).
- A device is rewarded from the median rank of those it votes with, which together keep their weight: the paper
  publishes no threshold, a fixed one rewards nearly all, and then being asked is what counts.
- The result is a linear head over several taps: pooled maps at some depths of some donors and at the ends of finished
  networks, chosen and solved in closed form from the devices' sums (`fedquilt.models.stitching.joint_head`; cf. Fed3R,
  arXiv 2406.01116). Every donor with a new head and every finished network alone are candidates beside it, and what
  joining and what stitching adds is told. With expansions = 0 nothing is stitched: a job of a few rounds.
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

import msgspec
import numpy as np

from fedquilt import profiles, tensors
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
from fedquilt.models.stitching import (
    candidates,
    class_moments,
    device_statistics,
    least_squares,
    orders,
    scoring,
    search,
    stitched,
    taps,
    vote,
)
from fedquilt.models.stitching.class_moments import Pending
from fedquilt.models.stitching.least_squares import Gathered
from fedquilt.models.stitching.search_state import PAPER, Candidate, Params, State, describe
from fedquilt.models.stitching.vote import Ballot

GROUPS_BYTES = 256 << 20  # held for the residuals of a round's junctions; larger devices' sums share a group


@dataclass(frozen=True)
class Sum:
    """A round's accumulator; which part is filled follows from the phase."""

    ballots: Mapping[str, Ballot]  # device -> its votes
    moments: tuple[Gathered, ...]  # of each junction
    counts: Mapping[str, np.ndarray]  # "examples" (1,), "right" (candidates,)
    pending: Pending = Pending()  # of all taps
    devices: tuple[str, ...] = ()  # whose answers these are, sorted
    short: int = 0  # of these: had no memory for the moments of as many images as were asked for


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
    if params.price_ms and not params.board:
        raise JobError("[params] price_ms weighs milliseconds: say of which board, by a profile's name in `board`")
    if params.board:
        profiles.load(params.board)
    state = search.begun(params, seed, stock, dict(bundle.files))
    if state.current is None and params.expansions:
        raise ModelError("no block may follow any starting block: raise max_upsampling, or take other donors")
    return state


def send(state: State, device: DeviceView) -> Order | None:
    match state.phase:
        case "score":
            return orders.score_order(state, device)
        case "fit":
            return orders.fit_order(state)
        case "done":
            return None
    if device.device in state.heard:
        return None  # somebody else is asked instead
    return orders.gather_order(state) if state.phase == "gather" else orders.count_order(state)


def fold(state: State, so_far: Sum | None, update: Contribution) -> Sum:
    """Take one device's answer.

    Raises:
        UpdateError: it answers another step of the search, or is not what was asked for.
    """
    turn = update.metrics.get("turn")
    if turn != state.turn:
        raise UpdateError(f"answers turn {turn} of the search, which is at {state.turn}")
    so_far = so_far or Sum({}, (), {})
    if state.phase in ("gather", "validate") and update.device in state.heard:
        return so_far  # its sums are counted already
    so_far = replace(so_far, devices=_union(so_far.devices, (update.device,)))
    match state.phase:
        case "score":
            given = vote.ballot(
                update.bundles.get("scores", {}),
                state.pool,
                state.params.k,
                search.epsilon(state),
                search.coin(state, update.device),
                state.params.spread,
            )
            return replace(so_far, ballots={**so_far.ballots, update.device: given})
        case "validate":
            counts = _counts(update, len(state.candidates))
            return replace(so_far, counts={k: v + so_far.counts.get(k, 0) for k, v in counts.items()})
        case "gather":
            width = sum(candidates.layout(state).widths)
            part = class_moments.from_tensors(update.bundles.get("moments", {}), len(state.stock.labels), width)
            class_moments.require_weight(part, update.weight)
            short = so_far.short + (update.metrics.get("short", 0.0) > 0)
            return replace(so_far, pending=so_far.pending.plus(part), short=short)
    new = [least_squares.from_tensors(update.bundles.get(f"moments.{i}", {}), *s) for i, s in enumerate(_shapes(state))]
    groups = GROUPS_BYTES // sum(each.nbytes for each in new)
    before = so_far.moments or (None,) * len(new)
    gathered = [least_squares.gather(*pair, groups) for pair in zip(before, new, strict=True)]
    return replace(so_far, moments=tuple(gathered))


def step(state: State, total: Sum | None) -> State:
    if total is None:
        if state.phase == "score" and state.ballots:
            return replace(search.close_vote(state), turn=state.turn + 1)
        if state.phase in ("gather", "validate") and state.heard:  # nobody is left to be heard
            return replace(_closed(state), turn=state.turn + 1)
        return replace(state, log=())
    known = state.seen
    state = replace(state, seen=_union(known, total.devices))
    if state.phase == "score":
        after = search.add_ballots(state, total.ballots)
    elif state.phase == "fit":
        after = _fitted(state, total.moments)
    else:
        state = replace(state, heard=_union(state.heard, total.devices), subround=state.subround + 1)
        after = _gathered(state, total) if state.phase == "gather" else _counted(state, total.counts)
        after = _closed(after) if _all_heard(state, known) else after
    return replace(after, turn=state.turn + 1)


def result(state: State) -> Artefact:
    """The chosen network (`stitched.to_artefact`), under "search" what is known of every candidate, and under "gains"
    what joining and stitching add.

    Of a job that was cut short it is the candidate that generalised cross-validation likes best, solved from what has
    been gathered; before that, the finished network with the best score, with its donor's classifier.

    Raises:
        ModelError: nothing was gathered, and no network was finished.
    """
    if state.phase == "gather" and state.gathered is not None:
        state = replace(state, candidates=_solved(state))
    if not state.candidates:
        ends = state.finalists or tuple(search.distinct(state))
        state = replace(state, candidates=tuple(candidates.aligned(finalist) for finalist in ends))
    best = candidates.best(state, state.candidates)
    if best is None:
        raise ModelError("no network is finished: raise the job's rounds, or [params] expansions or max_upsampling")
    meta, arrays = stitched.to_artefact(candidates.handed_out(state, best), state.stock)
    told = candidates.summaries(state)
    return Artefact("stitched", {**meta, "search": told, "gains": candidates.gains(state)}, arrays)


def _shapes(state: State) -> list[tuple[int, int]]:
    """Channels in and out of each junction that the devices' sums are for."""
    blocks = state.stock.blocks
    assert state.current is not None
    channels = blocks[state.current.path[-1]].out_shape[0]
    return [(channels, blocks[name].in_shape[0]) for name in search.projected(state)]


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


def _gathered(state: State, total: Sum) -> State:
    sums = total.pending.with_stored(candidates.restored(state.gathered))
    notes = [f"{sums.n:.0f} images of {len(state.heard)} devices at {len(state.taps)} taps"]
    if total.short:
        notes.append(f"{total.short} of {len(total.devices)} devices: memory for some of the wanted images only")
    return replace(state, gathered=candidates.stored(sums), log=tuple(notes))


def _counted(state: State, counts: Mapping[str, np.ndarray]) -> State:
    pairs = zip(state.candidates, counts["right"], strict=True)
    known = tuple(replace(candidate, right=candidate.right + int(right)) for candidate, right in pairs)
    examples = state.examples + int(counts["examples"][0])
    note = f"{len(known)} candidates on {examples} held-out examples of {len(state.heard)} devices"
    return replace(state, candidates=known, examples=examples, log=(note,))


def _all_heard(state: State, known: tuple[str, ...]) -> bool:
    """Whether the phase is over without another round.

    How many devices there are is not known. Those of the search are all where it has noticed that, or where one round
    brought them all at once; else a round in which nobody is left tells. Those that were gathered from are all.

    Args:
        known: devices that had answered before this round.
    """
    if state.subround >= state.params.head_rounds:
        return True
    complete = bool(known) and set(state.seen) <= set(state.heard)
    return complete and (state.phase == "validate" or state.saturated or state.subround == 1)


def _closed(state: State) -> State:
    """Go on from a phase in which every device was heard."""
    if state.phase == "validate":
        best = max(range(len(state.candidates)), key=lambda i: candidates.merit(state, state.candidates[i]))
        return replace(state, phase="done", chosen=best, log=tuple(candidates.told(state)))
    assert state.gathered is not None
    found, counts = _solved(state), state.gathered.counts
    notes = [f"{len(found)} candidates solved from {counts.sum():.0f} images of {len(state.heard)} devices"]
    if nobodys := [label for label, count in zip(state.stock.labels, counts, strict=True) if not count]:
        notes.append(f"nobody has examples of {', '.join(nobodys)}: no candidate ever says so")
    state = replace(state, phase="validate", candidates=found, gathered=None, heard=(), subround=0)
    return replace(state, log=(*state.log, *notes))


def _solved(state: State) -> tuple[Candidate, ...]:
    sums = candidates.restored(state.gathered)
    assert sums is not None
    return candidates.solved(state, sums)


def _union(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*some, *others}))


def _counts(update: Contribution, nets: int) -> dict[str, np.ndarray]:
    given = update.bundles.get("counts", {})
    sizes, kind = {"examples": 1, "right": nets}, np.dtype(np.int64)
    if missing := sorted(sizes.keys() - given.keys()):
        raise UpdateError(f"counts: no usable {', '.join(missing)}")
    counts = {name: given[name] for name in sizes}
    try:
        tensors.require_same(counts, {name: tensors.Shaped((size,), kind) for name, size in sizes.items()})
    except UpdateError as error:
        raise UpdateError(f"counts: {error}") from None
    if (counts["right"] > counts["examples"][0]).any():
        raise UpdateError("counts: more right answers than examples")
    return counts


# -- client ---------------------------------------------------------------------------------------


def work(task: Task, site: Site) -> Answer:
    match task.params["phase"]:
        case "score":
            return scoring.score(msgspec.convert(task.params, scoring.ScoreAsk), site)
        case "fit":
            return device_statistics.fit(msgspec.convert(task.params, device_statistics.FitAsk), site)
        case "gather":
            return taps.gather(msgspec.convert(task.params, taps.GatherAsk), site)
        case "validate":
            return taps.count(msgspec.convert(task.params, taps.CountAsk), site)
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
