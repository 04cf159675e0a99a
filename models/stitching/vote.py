"""Votes on blocks: the devices' weights, and the winners.

Source: FedStitch (arXiv 2409.07202), sections 4.2 and 4.3, Algorithm 1 lines 14 to 26. The paper's "RL weighted
aggregator" is here an epsilon-greedy choice on the devices and multiplicative weights. The paper publishes neither
constants nor a definition of the rank.

Deviations in addition to those in `fedquilt.methods.fedstitch`: picks can be spread over donors, with fewer than three
other devices a device is not judged, and picks are recomputed from the scores and the task's seed, so that a device
cannot vote against its own scores. Requires numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import Tensors, UpdateError
from fedquilt.models.stitching.stitched_network import Block

Theta = float | Literal["median"]

MIN_OTHERS = 3  # other devices needed to judge one
WEIGHT_LIMITS = (0.2, 5.0)  # minimum and maximum weight of a device, as multiples of an equal share
TIE_TOLERANCE = 1e-9  # sums of votes that differ by a smaller share of the total are a tie


@dataclass(frozen=True)
class Ballot:
    """One device's scores of a pool of b blocks.

    With scoring in two stages, `level` is 1 for blocks that reached the second stage, which rank above the others.
    Scores of different levels are not compared.
    """

    screen: np.ndarray  # (b,) float64: score of the first stage, which every block has
    score: np.ndarray  # (b,) float64: score at the block's own level
    level: np.ndarray  # (b,) int64: 0 or 1
    picks: np.ndarray  # (k,) int64: positions in the pool
    explored: bool  # whether the picks were drawn at random


@dataclass(frozen=True)
class Winner:
    block: str
    votes: float  # total weight of its voters
    score: float  # weighted mean of the scores at the highest level that any device reached
    voters: int  # number of devices that picked the block


# -- one device -----------------------------------------------------------------------------------


def rank_blocks(score: np.ndarray, level: np.ndarray, pool: Sequence[str]) -> list[int]:
    """Return the positions in the pool: the highest level first, then the highest score, then by block id."""
    return sorted(range(len(pool)), key=lambda j: (-level[j], -score[j], pool[j]))


def alternate_kinds(ordered: Iterable[int], kinds: Sequence[str]) -> list[int]:
    """Reorder positions so that their kinds alternate. Positions of one kind keep their order."""
    counts: dict[str, int] = {}
    keyed = []
    for position, j in enumerate(ordered):
        keyed.append((counts.setdefault(kinds[j], 0), position, j))
        counts[kinds[j]] += 1
    return [j for _, _, j in sorted(keyed)]


def _donor_names(pool: Sequence[str]) -> list[str]:
    return [name.rpartition(".")[0] for name in pool]


def greedy_picks(score: np.ndarray, level: np.ndarray, pool: Sequence[str], k: int, spread: bool = False) -> list[int]:
    ordered = rank_blocks(score, level, pool)
    return (alternate_kinds(ordered, _donor_names(pool)) if spread else ordered)[:k]


def choose_picks(
    score: np.ndarray, level: np.ndarray, pool: Sequence[str], k: int, epsilon: float, seed: int, spread: bool = False
) -> tuple[list[int], bool]:
    """Choose up to `k` positions in the pool, best first or, with probability `epsilon`, at random.

    Return the positions, and whether they are random.
    """
    coin = tensors.seeded_rng("explore", seed)
    k = min(k, len(pool))
    if coin.random() < epsilon:
        return sorted(int(j) for j in coin.choice(len(pool), size=k, replace=False)), True
    return greedy_picks(score, level, pool, k, spread), False


def read_ballot(
    sent_tensors: Tensors, pool: Sequence[str], k: int, epsilon: float, seed: int, spread: bool = False
) -> Ballot:
    """Validate and read the ballot that a device sent.

    Raises:
        UpdateError: If a block has no score, a score is not in [-1, 1], or the picks do not follow from scores and
        seed.
    """
    for name, kind in (("screen", np.float64), ("score", np.float64), ("level", np.int64), ("picks", np.int64)):
        array = sent_tensors.get(name)
        if array is None or array.dtype != kind or array.ndim != 1:
            raise UpdateError(f"scores: {name!r} is missing, or not a vector of {np.dtype(kind)}: update the agent")
        if name != "picks" and len(array) != len(pool):
            raise UpdateError(f"scores: {name!r} has {len(array)} values for {len(pool)} blocks")
        if kind == np.float64 and not (np.abs(array) <= 1).all():
            raise UpdateError(f"scores: {name!r} has values that are not finite or not in [-1, 1]")
    screen, score, level, picks = (sent_tensors[name] for name in ("screen", "score", "level", "picks"))
    if not np.isin(level, (0, 1)).all():
        raise UpdateError("scores: 'level' has values other than 0 and 1")
    expected_picks, explored = choose_picks(score, level, pool, k, epsilon, seed, spread)
    if picks.tolist() != expected_picks:
        raise UpdateError(f"scores: picks {picks.tolist()} do not follow from the scores: expected {expected_picks}")
    return Ballot(screen, score, level, picks, explored)


def block_percentiles(ballot: Ballot) -> np.ndarray:
    """Return each block's percentile, (b,): the share of the pool that scores no better, in (0, 1]."""
    merit = ballot.score + 4.0 * ballot.level  # scores lie in [-1, 1]: levels never mix
    return (merit[None, :] <= merit[:, None]).mean(axis=1)


# -- all devices ----------------------------------------------------------------------------------


def cross_ranks(
    ballots: Mapping[str, Ballot],
    pool: Sequence[str],
    k: int,
    spread: bool = False,
    judged: Literal["greedy", "picks"] = "greedy",
) -> dict[str, float]:
    """Return the rank r_i of each device: the mean percentile of its K picks on other devices.

    The result is {} unless each device has MIN_OTHERS others. With `judged` "picks", as in the paper, the picks that
    the device sent count, which are random if the device explored.
    """
    if len(ballots) <= MIN_OTHERS:
        return {}
    ordered = sorted(ballots)
    percentiles = np.array([block_percentiles(ballots[device]) for device in ordered])
    devices_by_picks: dict[tuple[int, ...], list[int]] = {}  # picks -> indices of the devices with these picks
    for index, ballot in enumerate(ballots[device] for device in ordered):
        best = ballot.picks if judged == "picks" else greedy_picks(ballot.score, ballot.level, pool, k, spread)
        devices_by_picks.setdefault(tuple(map(int, best)), []).append(index)
    ranks = dict.fromkeys(ordered, 0.0)
    for picks, indices in devices_by_picks.items():
        means = np.ascontiguousarray(percentiles[:, picks]).mean(axis=1)  # mean percentile on each device
        ranks.update({ordered[index]: float(np.delete(means, index).mean()) for index in indices})
    return ranks


def update_weights(
    weights: Mapping[str, float],
    ranks: Mapping[str, float],
    theta: Theta,
    alpha: float,
    beta: float,
    normalise: Literal["cohort", "all"] = "cohort",
) -> dict[str, float]:
    """Multiply weights by 1 + alpha where the rank reaches theta, else by 1 - beta, and normalise.

    With `normalise` "cohort" the devices in `ranks` keep their total weight unless WEIGHT_LIMITS apply. With "all",
    as in the paper, a selected device can gain weight at the expense of others.
    """
    if not ranks:
        return _normalise_within_limits(weights)
    limit = float(np.median(list(ranks.values()))) if theta == "median" else theta
    new_weights = {name: weights[name] * (1 + alpha if rank >= limit else 1 - beta) for name, rank in ranks.items()}
    old_sum, new_sum = (sum(group[device] for device in sorted(ranks)) for group in (weights, new_weights))
    share = old_sum / new_sum if normalise == "cohort" else 1.0
    return _normalise_within_limits({**weights, **{device: weight * share for device, weight in new_weights.items()}})


def add_devices(weights: Mapping[str, float], devices: Sequence[str]) -> dict[str, float]:
    """Return the weights with new devices, which get the mean weight, normalised to a sum of 1."""
    new_devices = [device for device in devices if device not in weights]
    mean = sum(weights.values()) / len(weights) if weights else 1.0
    return _normalise_within_limits({**weights, **dict.fromkeys(new_devices, mean)})


def _normalise_within_limits(weights: Mapping[str, float]) -> dict[str, float]:
    # Bisection for the factor: after clipping to WEIGHT_LIMITS / N the weights sum to 1.
    names = sorted(weights)
    share = np.array([weights[name] for name in names])
    low, high = (bound / len(names) for bound in WEIGHT_LIMITS)
    low_factor, high_factor = 0.0, high / share.min()
    for _ in range(100):
        factor = (low_factor + high_factor) / 2
        if np.clip(share * factor, low, high).sum() < 1:
            low_factor = factor
        else:
            high_factor = factor
    clipped = np.clip(share * high_factor, low, high)
    return {name: float(weight) for name, weight in zip(names, clipped, strict=True)}


def tally_votes(
    ballots: Mapping[str, Ballot], weights: Mapping[str, float], pool: Sequence[str], k: int, spread: bool = False
) -> list[Winner]:
    """Return up to `k` winners, ordered by the total weight of the devices that picked the block.

    Ties go to the higher weighted mean of the first stage's scores, then to the smaller block id. With `spread`, the
    donors of the voted blocks alternate.
    """
    votes, voters = np.zeros(len(pool)), np.zeros(len(pool), int)
    means, total = np.zeros(len(pool)), sum(weights[device] for device in sorted(ballots))
    for device, ballot in sorted(ballots.items()):
        votes[ballot.picks] += weights[device]
        voters[ballot.picks] += 1
        means += ballot.screen * (weights[device] / total)
    chosen = [j for j in range(len(pool)) if voters[j]]
    grain = TIE_TOLERANCE * total  # sums of the same weights in another order are a tie
    chosen.sort(key=lambda j: (-round(float(votes[j]) / grain), -means[j], pool[j]))
    elected = (alternate_kinds(chosen, _donor_names(pool)) if spread else chosen)[:k]
    return [Winner(pool[j], float(votes[j]), _mean_score(ballots, weights, j), int(voters[j])) for j in elected]


def _mean_score(ballots: Mapping[str, Ballot], weights: Mapping[str, float], j: int) -> float:
    top = max(ballot.level[j] for ballot in ballots.values())
    scored = [(weights[name], ballot.score[j]) for name, ballot in sorted(ballots.items()) if ballot.level[j] == top]
    return float(sum(weight * score for weight, score in scored) / sum(weight for weight, _ in scored))


def shallow_blocks(ballots: Mapping[str, Ballot], blocks: Sequence[Block], margin: float) -> set[str]:
    """Return the ids of blocks that the search-space optimizer drops for a path and its children.

    A block is dropped if it is strictly shallower than its donor's best-scoring block and the gap of the scores exceeds
    `margin` standard errors across devices. Margin 0, as in the paper, drops all shallower blocks. Terminating blocks
    are never dropped.
    """
    scores = np.array([ballots[device].screen for device in sorted(ballots)])  # (devices, blocks)
    dropped = set()
    for donor in sorted({block.donor for block in blocks}):
        donor_indices = [j for j, block in enumerate(blocks) if block.donor == donor]
        best = max(donor_indices, key=lambda j: (scores[:, j].mean(), -blocks[j].index))
        for j in donor_indices:
            if blocks[j].index < blocks[best].index and blocks[j].kind != "end":
                gap = scores[:, best] - scores[:, j]
                if _exceeds_margin(gap, margin):
                    dropped.add(blocks[j].id)
    return dropped


def _exceeds_margin(gap: np.ndarray, margin: float) -> bool:
    if margin == 0:
        return True
    if len(gap) < 2:
        return False  # the spread between devices is unknown
    return bool(gap.mean() > margin * gap.std(ddof=1) / np.sqrt(len(gap)))
