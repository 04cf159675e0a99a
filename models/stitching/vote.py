"""The coordinator's arithmetic: whose judgement counts how much, and which blocks win.

Source: FedStitch (arXiv 2409.07202), sections 4.2 and 4.3, Algorithm 1 lines 14 to 26. The "RL
weighted aggregator" is an epsilon-greedy choice on the devices and multiplicative weights here. The
paper publishes no constants and no definition of the rank; ours are in the functions below.

Deviations: a device that explored is judged by its greedy picks (else exploration is punished as
skewed data); with fewer than three others there is no judgement; picks are recomputed from the scores
and the task's own coin, so that a device cannot vote for what its scores do not say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedquilt import tensors
from fedquilt.core import Tensors, UpdateError
from fedquilt.models.stitching.stitched import Block

MIN_OTHERS = 3  # devices that must be there to judge one
WEIGHTS = (0.2, 5.0)  # least and largest weight, as multiples of an equal share
RELATIVE = 1e-9  # scores that differ by less are equal


@dataclass(frozen=True)
class Ballot:
    """One device's scores of a pool of b blocks.

    Where scoring has two stages, `level` is 1 for blocks that reached the second; scores of different
    levels are never compared: level 1 ranks above level 0.
    """

    screen: np.ndarray  # (b,) float64: the score that every block got
    score: np.ndarray  # (b,) float64: the score at the block's own level
    level: np.ndarray  # (b,) int64
    picks: np.ndarray  # (k,) int64: positions in the pool
    explored: bool


@dataclass(frozen=True)
class Winner:
    """A block that was voted for."""

    block: str
    votes: float
    score: float  # weighted mean at the highest level that any device scored it
    voters: int


# -- one device -----------------------------------------------------------------------------------


def ranking(score: np.ndarray, level: np.ndarray, pool: Sequence[str]) -> list[int]:
    """Positions in the pool, best first; equal scores by block id."""
    return sorted(range(len(pool)), key=lambda j: (-level[j], -score[j], pool[j]))


def choose(
    score: np.ndarray, level: np.ndarray, pool: Sequence[str], k: int, epsilon: float, seed: int
) -> tuple[list[int], bool]:
    """A device's K picks, and whether it explored: the coin is the seed's, so either side can toss it."""
    coin = tensors.rng("explore", seed)
    k = min(k, len(pool))
    if coin.random() < epsilon:
        return sorted(int(j) for j in coin.choice(len(pool), size=k, replace=False)), True
    return ranking(score, level, pool)[:k], False


def ballot(given: Tensors, pool: Sequence[str], k: int, epsilon: float, seed: int) -> Ballot:
    """The ballot in what a device sent.

    Raises:
        UpdateError: blocks without a score, scores that are not finite or out of [-1, 1], or picks
            that do not follow from the scores and the coin.
    """
    for name, kind in (("screen", np.float64), ("score", np.float64), ("level", np.int64), ("picks", np.int64)):
        array = given.get(name)
        if array is None or array.dtype != kind or array.ndim != 1:
            raise UpdateError(f"scores: no usable {name!r}, which is a list of {np.dtype(kind)}")
        if name != "picks" and len(array) != len(pool):
            raise UpdateError(f"scores: {name!r} holds {len(array)} of {len(pool)} blocks")
        if kind == np.float64 and not (np.abs(array) <= 1).all():
            raise UpdateError(f"scores: {name!r} holds values that are not finite or not in [-1, 1]")
    screen, score, level, picks = (given[name] for name in ("screen", "score", "level", "picks"))
    if not np.isin(level, (0, 1)).all():
        raise UpdateError("scores: 'level' holds values other than 0 and 1")
    wanted, explored = choose(score, level, pool, k, epsilon, seed)
    if picks.tolist() != wanted:
        raise UpdateError(f"scores: picks {picks.tolist()} do not follow from the scores, which say {wanted}")
    return Ballot(screen, score, level, picks, explored)


def percentiles(given: Ballot) -> np.ndarray:
    """Of each block: the share of the pool that scores no better, in (0, 1]."""
    merit = given.score + 4.0 * given.level  # scores lie in [-1, 1]: levels never mix
    return (merit[None, :] <= merit[:, None]).mean(axis=1)


# -- all devices ----------------------------------------------------------------------------------


def cross_ranks(ballots: Mapping[str, Ballot], pool: Sequence[str], k: int) -> dict[str, float]:
    """r_i: the mean percentile, on all other devices, of device i's K greedy picks. {} with too few others."""
    if len(ballots) <= MIN_OTHERS:
        return {}
    seen = {device: percentiles(given) for device, given in ballots.items()}
    ranks = {}
    for device, given in sorted(ballots.items()):
        best = ranking(given.score, given.level, pool)[:k]
        ranks[device] = float(np.mean([seen[other][best].mean() for other in sorted(seen) if other != device]))
    return ranks


def reweigh(
    weights: Mapping[str, float], ranks: Mapping[str, float], theta: float, alpha: float, beta: float
) -> dict[str, float]:
    """New weights: (1 + alpha) where r_i >= theta, else (1 - beta); they sum to 1 within WEIGHTS / N."""
    raised = {
        device: weight * (1.0 if device not in ranks else 1 + alpha if ranks[device] >= theta else 1 - beta)
        for device, weight in weights.items()
    }
    return _normalised(raised)


def joined(weights: Mapping[str, float], devices: Sequence[str]) -> dict[str, float]:
    """The weights with newcomers at an equal share."""
    new = [device for device in devices if device not in weights]
    mean = sum(weights.values()) / len(weights) if weights else 1.0
    return _normalised({**weights, **dict.fromkeys(new, mean)})


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    """The multiple of the weights that sums to 1 after clipping to WEIGHTS / N, found by bisection."""
    names = sorted(weights)
    share = np.array([weights[name] for name in names])
    low, high = (bound / len(names) for bound in WEIGHTS)
    below, above = 0.0, high / share.min()
    for _ in range(100):
        factor = (below + above) / 2
        if np.clip(share * factor, low, high).sum() < 1:
            below = factor
        else:
            above = factor
    clipped = np.clip(share * above, low, high)
    return {name: float(weight) for name, weight in zip(names, clipped, strict=True)}


def tally(ballots: Mapping[str, Ballot], weights: Mapping[str, float], pool: Sequence[str], k: int) -> list[Winner]:
    """The K blocks with the most votes; each of a device's picks gets its weight.

    Ties go to the higher weighted mean of the score that every device gave, then to the block id.
    """
    votes, voters = np.zeros(len(pool)), np.zeros(len(pool), int)
    means, total = np.zeros(len(pool)), sum(weights[device] for device in sorted(ballots))
    for device, given in sorted(ballots.items()):
        votes[given.picks] += weights[device]
        voters[given.picks] += 1
        means += given.screen * (weights[device] / total)
    chosen = [j for j in range(len(pool)) if voters[j]]
    grain = RELATIVE * total  # sums of the same weights in another order are a tie
    chosen.sort(key=lambda j: (-round(float(votes[j]) / grain), -means[j], pool[j]))
    return [Winner(pool[j], float(votes[j]), _mean_score(ballots, weights, j), int(voters[j])) for j in chosen[:k]]


def _mean_score(ballots: Mapping[str, Ballot], weights: Mapping[str, float], j: int) -> float:
    top = max(given.level[j] for given in ballots.values())
    seen = [(weights[device], given.score[j]) for device, given in sorted(ballots.items()) if given.level[j] == top]
    return float(sum(weight * score for weight, score in seen) / sum(weight for weight, _ in seen))


def too_shallow(ballots: Mapping[str, Ballot], blocks: Sequence[Block], margin: float) -> set[str]:
    """Blocks that this path and its children need not consider again (the search-space optimizer).

    Of each donor, those strictly shallower than its best-scoring block, where the gap of the scores exceeds
    `margin` standard errors across devices; margin 0 is the paper's letter. Terminating blocks always stay.
    """
    scores = np.array([ballots[device].screen for device in sorted(ballots)])  # (devices, blocks)
    dropped = set()
    for donor in sorted({block.donor for block in blocks}):
        own = [j for j, block in enumerate(blocks) if block.donor == donor]
        best = max(own, key=lambda j: (scores[:, j].mean(), -blocks[j].index))
        for j in own:
            if blocks[j].index < blocks[best].index and blocks[j].kind != "end":
                gap = scores[:, best] - scores[:, j]
                if _exceeds(gap, margin):
                    dropped.add(blocks[j].id)
    return dropped


def _exceeds(gap: np.ndarray, margin: float) -> bool:
    if margin == 0:
        return True
    if len(gap) < 2:
        return False  # one device says nothing of the spread between devices
    return bool(gap.mean() > margin * gap.std(ddof=1) / np.sqrt(len(gap)))
