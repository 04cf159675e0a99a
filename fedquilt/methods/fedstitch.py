"""FedStitch: a network stitched from blocks of pre-trained donors, by forward passes only.

Paper: Zhan et al., Heterogeneity-Aware Coordination for Federated Learning via Stitching Pre-trained
Blocks, IWQoS 2024 (arXiv 2409.07202), sections 3 and 4, Algorithm 1. Compatibility and junctions follow
Teerapittayanon et al., StitchNet (arXiv 2301.01947).

A job has these phases, which are part of its state:

- score: devices score the candidate blocks of one partial network, and vote, for some sub-rounds.
- fit: devices send the sums from which the winners' junctions are solved. Then the next network is scored.
- gather: devices send moments of their images' features at every tap of donors and finished networks.
- validate: devices count each candidate's correct predictions on their held-out examples, and one is chosen.

Gather and validate take as many rounds as are needed to reach every device once.

Deviations, where the paper's procedure cannot run or measures something else:

- CKA uses the unbiased estimator: on 64 images the biased estimator gives 0.5 to 1 for independent noise.
- Every block is screened by its input, which needs no junction. Only the best few are scored by their output. Their
  junctions are fitted on other images than are scored, because on the same images wide blocks always score 1.
- Junctions are centred ridge regressions with bias, solved from sums over devices. Eq. 3 is singular with fewer rows
  than channels, and the paper does not say who has the data to solve it.
- Votes decide only where a path leaves a donor, and for which block. The last donor's remaining blocks, which need no
  junction, complete every path, so that a search that ends early returns a whole donor instead of a stem.
- Picks, winners and finalists alternate among donors. By scores alone, a donor with one block left out would rank above
  every network stitched from several donors.
- A device is rewarded if its rank reaches the median of the devices in the same vote, which together keep their
  weight. The paper publishes no threshold. A fixed threshold rewards nearly all devices, so that only selection counts.
- The result is a linear head over several taps: pooled maps at all depths of truncated donors and at the ends of
  finished networks, solved in closed form from the devices' sums (`fedquilt.models.stitching.algebra.joint_head`, cf.
  Fed3R, arXiv 2406.01116). Every donor with a new head and every finished network alone are candidates too, and the
  log reports the gains of joining and of stitching. With `expansions = 0`, the default, nothing is stitched, and the
  job takes few rounds.
- No candidate exceeds the job's budget of MFLOP, MB, milliseconds or joules for an example, and no cascade on average.
- Cascades are candidates too: the answer of a cheap candidate counts if its best score exceeds the second best by at
  least a threshold. Other examples take the remaining blocks of a larger candidate. Budgets compare the mean cost.
- A device that explores is judged by its greedy picks. Its second vote on a network replaces its first.
- The search-space optimizer drops a block only if the gap of the scores exceeds the spread between devices.
- The network is chosen on the devices' held-out examples, never on a test set: the cheapest one within one paired
  standard error of the most accurate one.

`mode = "paper"` removes these deviations where possible, and overrides other [params]. Remaining deviations:

- Scores use other images than the junction's fit, and Eq. 3 is solved for the least norm from the sums of all selected
  devices.
- A donor's terminating block is offered only if its classes are aligned with the labels.
- A path is expanded once. Taken literally, Algorithm 1 returns inside its loop, and its set of paths never shrinks.
- Weights, and the ballot that counts for a device, are determined when a vote closes, not after each of the five
  sub-rounds.
- Unpublished constants are ours (theta 0.6, alpha and beta 0.1, epsilon 0.3 falling), and so is the choice among the
  22 networks by held-out examples.

The deadline and the energy coordinator are part of coordinator and agent: [cohort] deadline = "paper".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np

from fedquilt.arrays import exact_sums
from fedquilt.core import (
    Aggregation,
    Artefact,
    Bundle,
    ClientContext,
    ClientResult,
    DeviceView,
    EvaluationSums,
    JobError,
    Method,
    ModelError,
    Task,
    TaskSpec,
    Traits,
)
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import least_squares
from fedquilt.models.stitching.algebra.class_moments import ExactMomentSums
from fedquilt.models.stitching.algebra.least_squares import RegressionMoments
from fedquilt.models.stitching.device import moments, scoring
from fedquilt.models.stitching.search import accumulators, candidates, cascades, steps, task_specs
from fedquilt.models.stitching.search.accumulators import Accumulator, CorrectCounts, JunctionSums, VoteSums
from fedquilt.models.stitching.search.state import Candidate, SearchParams, SearchState, resolve_settings

# -- server ---------------------------------------------------------------------------------------


def init(bundle: Bundle, params: SearchParams, seed: int) -> SearchState:
    """Return the first state of the search.

    Raises:
        ModelError: If the bundle has no donor blocks, or none that can be stitched.
        JobError: If the parameters do not fit the donors.
    """
    settings = resolve_settings(params)
    pool = stitched_network.load_donor_pool(bundle.meta)
    required_files = [name for block in pool.blocks.values() for name in block.files]
    missing = [name for name in required_files if name not in bundle.files]
    if missing:
        raise ModelError(f"the bundle has no {', '.join(missing[:3])}: run `fedquilt prepare` again")
    if settings.head == "aligned" and not any(donor.align for donor in pool.donors.values()):
        raise JobError("head = 'aligned', but no donor maps its classes to labels: set `align` of a donor")
    candidates.require_usable_budgets(settings)
    state = steps.initial_state(settings, seed, pool, dict(bundle.files))
    candidates.require_networks_within_budget(state)
    if state.current is None and settings.expansions:
        raise ModelError("no block can follow any starting block: raise max_upsampling, or choose other donors")
    return state


def send(state: SearchState, device: DeviceView) -> TaskSpec | None:
    """Return the task spec of the current phase, or None if the device has contributed to the phase."""
    from fedquilt.models.stitching.search import ranking  # the wheel for boards lacks it

    match state.phase:
        case "score":
            return task_specs.score_task_spec(state, device)
        case "fit":
            return task_specs.fit_task_spec(state)
        case "done":
            index = ranking.choose_candidate(state)
            return (
                None if index is None else task_specs.validation_task_spec(state, state.candidates[index : index + 1])
            )
    if device.device in state.heard:
        return None  # the coordinator selects another device instead
    if state.phase == "gather":
        return task_specs.gather_task_spec(state)
    return task_specs.validation_task_spec(state, state.candidates)


def step(state: SearchState, total: Accumulator | None) -> SearchState:
    """Return the state with the sums of a round, in the next phase if this one is complete."""
    if total is None or (isinstance(total, ExactMomentSums | CorrectCounts) and not total.devices):
        if state.phase == "score" and state.ballots:
            return replace(steps.close_vote(state), turn=state.turn + 1)
        if state.phase in ("gather", "validate") and state.heard:  # every reachable device has contributed
            return replace(_close_gather_or_validation(state), turn=state.turn + 1)
        return replace(state, log=())
    devices = total.ballots if isinstance(total, VoteSums) else total.devices
    seen_before = state.seen
    state = replace(state, seen=_union(seen_before, devices))
    match total:
        case VoteSums():
            new_state = steps.add_ballots(state, total.ballots)
        case JunctionSums():
            new_state = _solve_junctions_and_grow(state, total.moments)
        case _:
            state = replace(state, heard=_union(state.heard, devices), subround=state.subround + 1)
            new_state = (
                _add_class_moments(state, total)
                if isinstance(total, ExactMomentSums)
                else _add_correct_counts(state, total)
            )
            new_state = _close_gather_or_validation(new_state) if _is_phase_complete(state, seen_before) else new_state
    return replace(new_state, turn=state.turn + 1)


def result(state: SearchState, candidate: int | None = None) -> Artefact:
    """Return a network as an artefact (`stitched_network.to_artefact`).

    The artefact's meta also contains "search", a summary of all candidates, and "gains", the accuracy gained by joining
    and by stitching. A job that ends while gathering returns the candidate with the least cross-validation criterion. A
    job that ends earlier returns the finished network with the best score and its donor's classifier.

    Args:
        state: State of the search.
        candidate: Number of the candidate from 1, as in the log, or None for the chosen one.

    Raises:
        JobError: If there is no such candidate.
        ModelError: If no moments were gathered and no network is finished.
    """
    from fedquilt.models.stitching.search import ranking  # the wheel for boards lacks it

    if state.phase == "gather" and state.gathered is not None:
        state = cascades.finish_candidates(replace(state, candidates=_solve_candidates(state)))
    if state.phase == "validate":
        state = cascades.finish_candidates(state)
    if not state.candidates:
        finalists = state.finalists or steps.distinct_finalists(state)
        state = replace(state, candidates=candidates.aligned_candidates(state, finalists))
    index = ranking.choose_candidate(state)
    if index is None:
        raise ModelError(
            "no network is finished, or none is within the budget: raise the job's rounds, or [params] expansions, "
            "max_upsampling or the budget"
        )
    if candidate is not None:
        if not 1 <= candidate <= len(state.candidates):
            raise JobError(f"candidate {candidate} does not exist: the run has candidates 1 to {len(state.candidates)}")
        index = candidate - 1
    meta, arrays = stitched_network.to_artefact(ranking.to_network(state, state.candidates[index]), state.stock)
    summary = ranking.summarise_candidates(state)
    return Artefact("stitched", {**meta, "search": summary, "gains": ranking.accuracy_gains(state)}, arrays)


def _solve_junctions_and_grow(state: SearchState, sums: tuple[RegressionMoments, ...]) -> SearchState:
    assert state.current is not None
    junctions = {}
    for name, junction_moments in zip(steps.winners_needing_junction(state), sums, strict=True):
        weights, bias = least_squares.solve_ridge(junction_moments, state.params.ridge)
        junctions[stitched_network.junction_name((*state.current.path, name))] = {
            "weights": weights.astype(np.float32),
            "bias": bias.astype(np.float32),
        }
    path = stitched_network.path_name(state.current.path)
    note = f"{len(junctions)} junctions after {path} solved from {sums[0].n:.0f} positions"
    return steps.grow_paths(replace(state, log=(note,)), junctions)


def _add_class_moments(state: SearchState, total: ExactMomentSums) -> SearchState:
    sums = total.total_sums(candidates.unpack_sums(state.gathered))
    notes = [f"{sums.n:.0f} images of {len(state.heard)} devices at {len(state.taps)} taps"]
    if total.short:
        notes.append(f"{total.short} of {len(total.devices)} devices had memory for only some of their images")
    return replace(state, gathered=candidates.pack_sums(sums), log=tuple(notes))


def _add_correct_counts(state: SearchState, total: CorrectCounts) -> SearchState:
    counts = exact_sums.rounded_values(total.sums)
    examples = state.examples + int(counts["examples"][0])
    correct, by_margin, in_bin = (counts[name].astype(np.int64) for name in ("right", "by_margin", "in_bin"))
    if state.right.size:
        correct, by_margin, in_bin = state.right + correct, state.by_margin + by_margin, state.in_bin + in_bin
    note = f"{len(state.candidates)} candidates on {examples} held-out examples of {len(state.heard)} devices"
    return replace(state, right=correct, by_margin=by_margin, in_bin=in_bin, examples=examples, log=(note,))


def _is_phase_complete(state: SearchState, seen_before: tuple[str, ...]) -> bool:
    """Return whether all devices of earlier rounds have contributed, or the phase has used its rounds."""
    # The number of devices is unknown, so a phase can also end with a round that selects no new device.
    if state.subround >= state.params.head_rounds:
        return True
    complete = bool(seen_before) and set(state.seen) <= set(state.heard)
    return complete and (state.phase == "validate" or state.saturated or state.subround == 1)


def _close_gather_or_validation(state: SearchState) -> SearchState:
    from fedquilt.models.stitching.search import ranking  # the wheel for boards lacks it

    if state.phase == "validate":
        state = cascades.finish_candidates(state)
        return replace(state, phase="done", log=tuple(ranking.describe_validation(state)))
    assert state.gathered is not None
    solved, counts = _solve_candidates(state), state.gathered.counts
    notes = [f"{len(solved)} candidates solved from {counts.sum():.0f} images of {len(state.heard)} devices"]
    if labels_without_examples := [label for label, count in zip(state.stock.labels, counts, strict=True) if not count]:
        notes.append(f"never predicted, because no device has examples: {', '.join(labels_without_examples)}")
    state = replace(state, phase="validate", candidates=solved, gathered=None, heard=(), subround=0)
    return replace(state, log=(*state.log, *notes))


def _solve_candidates(state: SearchState) -> tuple[Candidate, ...]:
    sums = candidates.unpack_sums(state.gathered)
    assert sums is not None
    return candidates.solve_candidates(state, sums)


def _union(devices: tuple[str, ...], new_devices: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*devices, *new_devices}))


# -- client ---------------------------------------------------------------------------------------


def work(task: Task, site: ClientContext) -> ClientResult:
    """Run the task of one phase on a device, by forward passes only."""
    match task.params["phase"]:
        case "score":
            return scoring.score_pool(msgspec.convert(task.params, scoring.ScoreRequest), site)
        case "fit":
            return moments.compute_junction_moments(msgspec.convert(task.params, moments.FitRequest), site)
        case "gather":
            return moments.gather_moments(msgspec.convert(task.params, moments.GatherRequest), site)
        case "validate":
            return moments.count_correct(msgspec.convert(task.params, moments.CountRequest), site)
        case phase:
            raise ModelError(f"phase {phase!r} of a stitching job is unknown to this agent: update the agent")


def check(task: Task, site: ClientContext) -> EvaluationSums:
    """Evaluate the chosen network on the held-out examples. Before the choice, no example is evaluated."""
    if task.params["phase"] != "done":
        return EvaluationSums(examples=0)
    return moments.evaluate_candidate(msgspec.convert(task.params, moments.CountRequest), site)


METHOD = Method(
    paper="arXiv 2409.07202",
    params=SearchParams,
    state=SearchState,
    engines=("onnx",),
    init=init,
    send=send,
    work=work,
    check=check,
    aggregation=Aggregation(
        accumulators.fold_update,
        accumulator=accumulators.accumulator_type,
        check_update=accumulators.validate_update,
        check_sums=accumulators.validate_site_sums,
    ),
    step=step,
    result=result,
    candidate=result,
    is_done=lambda state: state.phase == "done",
    explain=lambda state: state.log,
    traits=Traits(
        sent_data="scores of candidates, and moments of features",
        private_data="the draw of its examples, and Gram matrices",
        prediction_tasks=("classes",),  # donors are classifiers
        equal_classes=True,  # heads are linear discriminants with equal priors
        exact_updates=True,  # linear systems are solved from the moments, and votes are counted
        per_device_data="every device's ballot, and moments of devices apart from each other, up to a bound",
    ),
)
