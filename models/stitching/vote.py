"""Votes on blocks: the devices' weights, and the blocks that win. numpy only.

Source: FedStitch (arXiv 2409.07202), sections 4.2 and 4.3, Algorithm 1 lines 14 to 26. The paper's "RL weighted
aggregator" is an epsilon-greedy choice on the devices and multiplicative weights here. The paper publishes neither
constants nor a definition of the rank; ours are in the functions below.

Deviations:

- A device that explored is judged by its greedy picks; otherwise exploration is punished as if its data were skewed.
- A device is rewarded if its rank reaches the median of the devices judged with it. A fixed threshold is below or above
  nearly all ranks, so that no weight moves relative to another.
- The devices of one vote keep their total weight; otherwise being asked counts as merit.
- Picks can be spread over donors.
- With fewer than three others a device is not judged.
- Picks are recomputed from the scores and the task's coin, so that a device cannot vote against its own scores.
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

MIN_OTHERS = 3  # other devices needed to judge one
WEIGHTS = (0.2, 5.0)  # least and largest weight of a device, as multiples of an equal share
RELATIVE = 1e-9  # sums of votes that differ by a smaller share of the total are equal


@dataclass(frozen=True)
class Ballot:
    """One device's scores of a pool of b blocks.

    With scoring in two stages, `level` is 1 for blocks that reached the second stage. Scores of different levels are
    never compared: level 1 ranks above level 0.
    """

    screen: np.ndarray  # (b,) float64: score of the first stage, which every block has
    score: np.ndarray  # (b,) float64: score at the block's own level
    level: np.ndarray  # (b,) int64: 0 or 1
    picks: np.ndarray  # (k,) int64: positions in the pool
    explored: bool  # the picks were drawn at random


@dataclass(frozen=True)
class Winner:
    """A block that won a vote."""

    block: str
    votes: float  # total weight of its voters
    score: float  # weighted mean at the highest level at which any device scored it
    voters: int  # number of devices that picked it


# -- one device -----------------------------------------------------------------------------------


def ranking(score: np.ndarray, level: np.ndarray, pool: Sequence[str]) -> list[int]:
    """Positions in the pool, best first; equal scores are ordered by block id."""
    return sorted(range(len(pool)), key=lambda j: (-level[j], -score[j], pool[j]))


def in_turns(ordered: Iterable[int], kinds: Sequence[str]) -> list[int]:
    """Reorder positions so that their kinds take turns: the first of each kind, then the second of each, and so on."""
    turns: dict[str, int] = {}
    placed = []
    for place, j in enumerate(ordered):
        placed.append((turns.setdefault(kinds[j], 0), place, j))
        turns[kinds[j]] += 1
    return [j for _, _, j in sorted(placed)]


def _donors(pool: Sequence[str]) -> list[str]:
    return [name.rpartition(".")[0] for name in pool]


def greedy(score: np.ndarray, level: np.ndarray, pool: Sequence[str], k: int, spread: bool = False) -> list[int]:
    """The K best positions in the pool; with `spread`, donors take turns."""
    ordered = ranking(score, level, pool)
    return (in_turns(ordered, _donors(pool)) if spread else ordered)[:k]


def choose(
    score: np.ndarray, level: np.ndarray, pool: Sequence[str], k: int, epsilon: float, seed: int, spread: bool = False
) -> tuple[list[int], bool]:
    """A device's K picks, and whether it explored; a function of the seed, so that either side can compute it."""
    coin = tensors.rng("explore", seed)
    k = min(k, len(pool))
    if coin.random() < epsilon:
        return sorted(int(j) for j in coin.choice(len(pool), size=k, replace=False)), True
    return greedy(score, level, pool, k, spread), False


def ballot(given: Tensors, pool: Sequence[str], k: int, epsilon: float, seed: int, spread: bool = False) -> Ballot:
    """Check and read the ballot that a device sent.

    Args:
        given: the device's tensors.
        pool: the block ids that it was to score.
        k: number of picks, as in its task; likewise the arguments that follow.
        epsilon: probability of exploring.
        seed: of its choice.
        spread: whether donors take turns in its picks.

    Raises:
        UpdateError: a block has no score, a score is not finite or not in [-1, 1], or the picks do not follow from the
            scores and the seed.
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
    """Percentile of each block, (b,): the share of the pool that scores no better, in (0, 1]."""
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
    """Rank r_i of each device: mean percentile of its K greedy picks on all other devices. {}: too few devices.

    With `judged` "picks", as in the paper, the picks that the device sent count, which are random if it explored.
    """
    if len(ballots) <= MIN_OTHERS:
        return {}
    ordered = sorted(ballots)
    seen = np.array([percentiles(ballots[device]) for device in ordered])
    alike: dict[tuple[int, ...], list[int]] = {}  # picks -> places of the devices that have them
    for place, given in enumerate(ballots[device] for device in ordered):
        best = given.picks if judged == "picks" else greedy(given.score, given.level, pool, k, spread)
        alike.setdefault(tuple(map(int, best)), []).append(place)
    ranks = dict.fromkeys(ordered, 0.0)
    for picks, places in alike.items():
        means = np.ascontiguousarray(seen[:, picks]).mean(axis=1)  # each device's of these picks
        ranks.update({ordered[place]: float(np.delete(means, place).mean()) for place in places})
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
    """Add newcomers with the mean weight, and normalise."""
    new = [device for device in devices if device not in weights]
    mean = sum(weights.values()) / len(weights) if weights else 1.0
    return _normalised({**weights, **dict.fromkeys(new, mean)})


def _normalised(weights: Mapping[str, float]) -> dict[str, float]:
    """Scale weights so that they sum to 1 after clipping to WEIGHTS / N, by bisection."""
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
    """The K blocks with the most votes; a device votes for each of its picks with its weight.

    Ties go to the higher weighted mean of the first stage's scores, then to the smaller block id. With `spread`, the
    donors that were voted for take turns.
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
    """Ids of blocks that this path and its children need not consider again (the search-space optimizer).

    A block is dropped if it is strictly shallower than its donor's best-scoring block and the gap of the scores exceeds
    `margin` standard errors across devices; margin 0 drops all of these, as the paper does. Terminating blocks stay.
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
        return False  # the spread between devices is unknown
    return bool(gap.mean() > margin * gap.std(ddof=1) / np.sqrt(len(gap)))
