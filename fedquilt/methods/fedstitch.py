"""FedStitch: a network stitched from blocks of pre-trained donors, by forward passes only.

Paper: Zhan et al., Heterogeneity-Aware Coordination for Federated Learning via Stitching Pre-trained
Blocks, IWQoS 2024 (arXiv 2409.07202), sections 3 and 4, Algorithm 1. Compatibility and junctions follow
Teerapittayanon et al., StitchNet (arXiv 2301.01947).

A job runs through phases, kept in the state:

- score: devices score the blocks that may follow one partial network, and vote, for some sub-rounds.
- fit: devices send the sums from which the winners' junctions are solved; then the next network is scored.
- gather: devices send moments of their images' features at every tap of donors and finished networks.
- validate: devices count each candidate's right answers on their held-out examples; the best is chosen.

Gather and validate take as many rounds as hearing every device once takes.

Deviations, where the paper's letter cannot run or measures something else:

- CKA uses the unbiased estimator: on 64 images the biased one gives 0.5 to 1 for independent noise.
- Every block is screened by its input, which needs no junction; only the best few are scored by their output. Their
  junctions are fitted on other images than are scored: on the same images wide blocks always score 1.
- Junctions are centred ridge regressions with bias, solved from sums over devices. Eq. 3 is singular with fewer rows
  than channels, and the paper does not say who has the data to solve it.
- Votes decide only where a path leaves a donor, and for which block: the last donor's remaining blocks, which need no
  junction, complete every path. So whole donors are finished networks before the first vote, and a search that is cut
  short returns one of them rather than a stem.
- Picks, winners and finalists take turns among donors: ranked by scores alone, a donor with one block left out comes
  before every network stitched from several.
- Outputs can also be scored by what the end of the path says of the labels (`criterion`).
- A device is rewarded if its rank reaches the median of the devices in the same vote, which together keep their
  weight. The paper publishes no threshold; a fixed one rewards nearly all devices, so that being asked is what counts.
- The result is a linear head over several taps: pooled maps at some depths of some donors and at the ends of finished
  networks, chosen and solved in closed form from the devices' sums (`fedquilt.models.stitching.joint_head`; cf. Fed3R,
  arXiv 2406.01116). Every donor with a new head and every finished network alone are candidates too, and the log tells
  what joining and what stitching adds. With `expansions = 0` nothing is stitched, and the job takes a few rounds.
- A device that explores is judged by its greedy picks; its second vote on a network replaces its first.
- The search-space optimizer drops a block only if the gap of the scores exceeds the spread between devices.
- The network is chosen on the devices' held-out examples, never on a test set.
- Beyond the paper: the log tells a junction's error on devices that it was not solved from, which lowers the path's
  score with `residual = "weigh"`; paths with a score below `stop_below` are given up.

`mode = "paper"` undoes these where it can, whatever else [params] says: see PAPER. Deviations that remain there:

- Scores are taken on other images than the junction was fitted on, as on the same ones all wide blocks would score 1.
- Eq. 3, whose inverse does not exist with fewer rows than channels, is solved for the least norm. The paper does not
  say who solves it, and its server has no data: the coordinator solves it from the sums of all devices asked to fit.
- A donor's terminating block is offered only if its classes are aligned with the labels.
- A path is expanded once: to the letter, Algorithm 1 returns inside its loop, and its set of paths never shrinks.
- Weights, and which of a device's votes counts, are settled when a vote closes: not after each of the five sub-rounds.
- Unpublished constants are ours (theta 0.6, alpha and beta 0.1, epsilon 0.3 falling), and so is the choice among the
  22 networks, on held-out shares.

The deadline and the energy coordinator belong to coordinator and agent: [cohort] deadline = "paper", slack.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np

from fedquilt import exact, profiles
from fedquilt.core import (
    Answer,
    Artefact,
    Bundle,
    DeviceView,
    JobError,
    Method,
    ModelError,
    Order,
    Site,
    Task,
)
from fedquilt.models.stitching import (
    accumulators,
    candidates,
    device_statistics,
    judging,
    least_squares,
    names,
    orders,
    scoring,
    search,
    stitched,
    taps,
)
from fedquilt.models.stitching.accumulators import Counts, Fits, Sum, Votes
from fedquilt.models.stitching.least_squares import Gathered
from fedquilt.models.stitching.moment_sums import Gathering
from fedquilt.models.stitching.search_state import PAPER, Candidate, Params, State

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
    """The order for one device in the current phase; None: nothing to ask of it."""
    match state.phase:
        case "score":
            return orders.score_order(state, device)
        case "fit":
            return orders.fit_order(state)
        case "done":
            return None
    if device.device in state.heard:
        return None  # the coordinator asks another device instead
    return orders.gather_order(state) if state.phase == "gather" else orders.count_order(state)


def step(state: State, total: Sum | None) -> State:
    """Close a round: take in its sums and, when the phase is complete, enter the next one; None: nobody answered."""
    if total is None or (isinstance(total, Gathering | Counts) and not total.devices):
        if state.phase == "score" and state.ballots:
            return replace(search.close_vote(state), turn=state.turn + 1)
        if state.phase in ("gather", "validate") and state.heard:  # no device is left to ask
            return replace(_closed(state), turn=state.turn + 1)
        return replace(state, log=())
    devices = total.ballots if isinstance(total, Votes) else total.devices
    known = state.seen
    state = replace(state, seen=_union(known, devices))
    match total:
        case Votes():
            after = search.add_ballots(state, total.ballots)
        case Fits():
            after = _fitted(state, total.moments)
        case _:
            state = replace(state, heard=_union(state.heard, devices), subround=state.subround + 1)
            after = _gathered(state, total) if isinstance(total, Gathering) else _counted(state, total)
            after = _closed(after) if _all_heard(state, known) else after
    return replace(after, turn=state.turn + 1)


def result(state: State) -> Artefact:
    """The chosen network (`stitched.to_artefact`).

    The artefact's meta also holds "search", a summary of every candidate, and "gains", what joining and what stitching
    add to the accuracy. A job cut short while gathering returns the candidate with the least generalised
    cross-validation criterion, solved from the sums so far; one cut short earlier returns the finished network with the
    best score and its donor's classifier.

    Raises:
        ModelError: nothing was gathered, and no network was finished.
    """
    if state.phase == "gather" and state.gathered is not None:
        state = replace(state, candidates=_solved(state))
    if not state.candidates:
        ends = state.finalists or tuple(search.distinct(state))
        state = replace(state, candidates=tuple(candidates.aligned(finalist) for finalist in ends))
    best = judging.best(state, state.candidates)
    if best is None:
        raise ModelError("no network is finished: raise the job's rounds, or [params] expansions or max_upsampling")
    meta, arrays = stitched.to_artefact(judging.handed_out(state, best), state.stock)
    told = judging.summaries(state)
    return Artefact("stitched", {**meta, "search": told, "gains": judging.gains(state)}, arrays)


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
    told = f"{len(junctions)} junctions after {names.path(state.current.path)} solved from {rows:.0f} positions"
    return search.grow(replace(state, log=(told, *notes)), junctions, residuals)


def _residual(block: str, sums: Gathered, ridge: float) -> tuple[float | None, str]:
    """Leave-one-group-out residual variance of a junction (None: unknown), with a sentence for the log."""
    left, variances = least_squares.left_out(sums.groups, ridge), [group.yy for group in sums.groups]
    if not left or not any(variances):
        return None, f"to {block}: what it leaves of a device that it was not solved from is not known"
    mean = float(np.average(left, weights=variances))
    told = f"{100 * mean:.1f} % of the variance, {100 * max(left):.1f} % at worst"
    return mean, f"to {block}: solved without a device, it leaves {told}"


def _gathered(state: State, total: Gathering) -> State:
    sums = total.value(candidates.restored(state.gathered))
    notes = [f"{sums.n:.0f} images of {len(state.heard)} devices at {len(state.taps)} taps"]
    if total.short:
        notes.append(f"{total.short} of {len(total.devices)} devices: memory for some of the wanted images only")
    return replace(state, gathered=candidates.stored(sums), log=tuple(notes))


def _counted(state: State, total: Counts) -> State:
    counts = exact.values(total.sums)
    pairs = zip(state.candidates, counts["right"], strict=True)
    known = tuple(replace(candidate, right=candidate.right + int(right)) for candidate, right in pairs)
    examples = state.examples + int(counts["examples"][0])
    note = f"{len(known)} candidates on {examples} held-out examples of {len(state.heard)} devices"
    return replace(state, candidates=known, examples=examples, log=(note,))


def _all_heard(state: State, known: tuple[str, ...]) -> bool:
    """Whether the phase is over without another round.

    The number of devices is unknown. The devices of the search count as all devices if a sub-round of the search
    brought no new one (`State.saturated`), or if the first round of this phase heard every one of them; otherwise the
    phase ends with a round in which nobody is left to ask. While validating, the devices gathered from are all devices.

    Args:
        state: after this round's answers were added to `seen` and `heard`.
        known: devices that had answered before this round.
    """
    if state.subround >= state.params.head_rounds:
        return True
    complete = bool(known) and set(state.seen) <= set(state.heard)
    return complete and (state.phase == "validate" or state.saturated or state.subround == 1)


def _closed(state: State) -> State:
    """Close a phase in which every device was heard: solve candidates after gather, choose one after validate."""
    if state.phase == "validate":
        best = max(range(len(state.candidates)), key=lambda i: judging.merit(state, state.candidates[i]))
        return replace(state, phase="done", chosen=best, log=tuple(judging.told(state)))
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


def _union(some: tuple[str, ...], others: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*some, *others}))


# -- client ---------------------------------------------------------------------------------------


def work(task: Task, site: Site) -> Answer:
    """Carry out one phase's task on a device, by forward passes only.

    Raises:
        ModelError: the task's phase is unknown to this version of the agent.
        DataError: too few examples, or labels that the job does not have.
    """
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
    fold=accumulators.fold,
    step=step,
    result=result,
    done=lambda state: state.phase == "done",
    explain=lambda state: state.log,
    tasks=("classes",),  # donors are classifiers
    exact=True,  # linear systems are solved from the moments, and votes are counted
    keeps="every device's ballot, and sums and moments of devices apart from each other, up to a bound",
)
