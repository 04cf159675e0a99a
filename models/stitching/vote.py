"""The coordinator's arithmetic: whose judgement counts how much, and which blocks win.

Source: FedStitch (arXiv 2409.07202), sections 4.2 and 4.3, Algorithm 1 lines 14 to 26. The "RL
weighted aggregator" is an epsilon-greedy choice on the devices and multiplicative weights here. The
paper publishes no constants and no definition of the rank; ours are in the functions below.

Deviations: a device that explored is judged by its greedy picks (else exploration is punished as
skewed data); it is rewarded where its rank is no worse than the median of those judged with it (a fixed
threshold is under or over nearly all of them, so that no weight moves beside another); what the devices
of one vote weigh together stays as it was (else being asked counts as merit); picks can be spread over
donors; with fewer than three others there is no judgement; picks are recomputed from the scores and the
task's own coin, so that a device cannot vote for what its scores do not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedquilt import tensors
from fedquilt.core import Tensors, UpdateError
from fedquilt.models.stitching.stitched import Block

Theta = float | Literal["median"]

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


def in_turns(ordered: Iterable[int], kinds: Sequence[str]) -> list[int]:
    """The same positions with their kinds taking turns: the first of each kind, then the second of each, and so on."""
    turns: dict[str, int] = {}
    placed = []
    for place, j in enumerate(ordered):
        placed.append((turns.setdefault(kinds[j], 0), place, j))
        turns[kinds[j]] += 1
    return [j for _, _, j in sorted(placed)]


def _donors(pool: Sequence[str]) -> list[str]:
    return [name.rpartition(".")[0] for name in pool]


def greedy(score: np.ndarray, level: np.ndarray, pool: Sequence[str], k: int, spread: bool = False) -> list[int]:
    """The K best positions; with `spread` no donor has a second one before every donor has one, if K allows."""
    ordered = ranking(score, level, pool)
    return (in_turns(ordered, _donors(pool)) if spread else ordered)[:k]


def choose(
    score: np.ndarray, level: np.ndarray, pool: Sequence[str], k: int, epsilon: float, seed: int, spread: bool = False
) -> tuple[list[int], bool]:
    """A device's K picks, and whether it explored: the coin is the seed's, so either side can toss it."""
    coin = tensors.rng("explore", seed)
    k = min(k, len(pool))
    if coin.random() < epsilon:
        return sorted(int(j) for j in coin.choice(len(pool), size=k, replace=False)), True
    return greedy(score, level, pool, k, spread), False


def ballot(given: Tensors, pool: Sequence[str], k: int, epsilon: float, seed: int, spread: bool = False) -> Ballot:
    """The ballot in what a device sent; `k`, `epsilon`, `seed` and `spread` are those it was told to choose by.

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
    wanted, explored = choose(score, level, pool, k, epsilon, seed, spread)
    if picks.tolist() != wanted:
        raise UpdateError(f"scores: picks {picks.tolist()} do not follow from the scores, which say {wanted}")
    return Ballot(screen, score, level, picks, explored)


def percentiles(given: Ballot) -> np.ndarray:
    """Of each block: the share of the pool that scores no better, in (0, 1]."""
    merit = given.score + 4.0 * given.level  # scores lie in [-1, 1]: levels never mix
    return (merit[None, :] <= merit[:, None]).mean(axis=1)


# -- all devices ----------------------------------------------------------------------------------


def cross_ranks(
    ballots: Mapping[str, Ballot],
    pool: Sequence[str],
    k: int,
    spread: bool = False,
    judged: Literal["greedy", "picks"] = "greedy",
) -> dict[str, float]:
    """r_i: the mean percentile, on all other devices, of device i's K greedy picks. {} with too few others.

    With `judged` "picks", the paper's letter, it is that of the picks it sent: of one that explored the random ones.
    """
    if len(ballots) <= MIN_OTHERS:
        return {}
    seen = {device: percentiles(given) for device, given in ballots.items()}
    ranks = {}
    for device, given in sorted(ballots.items()):
        best = list(given.picks) if judged == "picks" else greedy(given.score, given.level, pool, k, spread)
        ranks[device] = float(np.mean([seen[other][best].mean() for other in sorted(seen) if other != device]))
    return ranks


def reweigh(
    weights: Mapping[str, float],
    ranks: Mapping[str, float],
    theta: Theta,
    alpha: float,
    beta: float,
    normalise: Literal["cohort", "all"] = "cohort",
) -> dict[str, float]:
    """Multiply weights by 1 + alpha where the rank reaches theta, else by 1 - beta; sum 1, each within WEIGHTS / N.

    Args:
        weights: of every device seen, sum 1.
        ranks: `cross_ranks` of the devices judged in this vote; {}: weights are only normalised.
        theta: a rank in [0, 1], or "median": the median of `ranks`.
        alpha: reward.
        beta: penalty.
        normalise: the weights that are rescaled. "cohort": those of the devices in `ranks`, which together keep their
            weight (but for the limits WEIGHTS). "all", as in the paper: those of all devices, so that a device asked
            can gain weight at the expense of devices not asked.
    """
    if not ranks:
        return _normalised(weights)
    limit = float(np.median(list(ranks.values()))) if theta == "median" else theta
    moved = {device: weights[device] * (1 + alpha if rank >= limit else 1 - beta) for device, rank in ranks.items()}
    before, after = (sum(group[device] for device in sorted(ranks)) for group in (weights, moved))
    share = before / after if normalise == "cohort" else 1.0
    return _normalised({**weights, **{device: weight * share for device, weight in moved.items()}})


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


def tally(
    ballots: Mapping[str, Ballot], weights: Mapping[str, float], pool: Sequence[str], k: int, spread: bool = False
) -> list[Winner]:
    """The K blocks with the most votes; each of a device's picks gets its weight.

    Ties go to the higher weighted mean of the score that every device gave, then to the block id. With `spread`
    no donor wins a second time before every donor that was voted for has won, if K allows.
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
    elected = (in_turns(chosen, _donors(pool)) if spread else chosen)[:k]
    return [Winner(pool[j], float(votes[j]), _mean_score(ballots, weights, j), int(voters[j])) for j in elected]


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
