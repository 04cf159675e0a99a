"""Parameters of a search over paths, and its state between rounds.

`fedquilt.models.stitching.search.steps` has the steps from one state to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from fedquilt.core import BlobRef
from fedquilt.models.stitching.algebra import cka, least_squares
from fedquilt.models.stitching.device import scoring
from fedquilt.models.stitching.stitched_network import DonorPool, EarlyExit
from fedquilt.models.stitching.vote import Ballot, Winner

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(ge=0)]
Limit = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class SearchParams:
    """Hyper-parameters of FedStitch, with the paper's symbols."""

    mode: Literal["default", "paper"] = "default"  # with "paper" the search follows the paper exactly
    expansions: Annotated[int, Meta(ge=0)] = 0  # maximum number of votes; 0: donors are joined, not stitched
    k: Count = 3  # K: blocks that each device picks, and winners of a vote
    depth: Annotated[int, Meta(ge=2)] | None = None  # D_max: maximum blocks of a path; none: those of the longest donor
    subrounds: Count = 5  # maximum number of rounds in which devices join a vote
    finished: Count = 22  # maximum number of stitched networks
    finalists: Count = 12  # finished networks that become candidates, the best-scoring first
    max_upsampling: Annotated[float, Meta(ge=1)] = 2.0  # maximum enlargement of maps between two blocks, per axis
    score_at: scoring.ScoreAt = "hybrid"  # CKA of inputs, of outputs, or of the outputs of the best inputs
    samples: Annotated[int, Meta(ge=4)] = 64  # images scored on, and as many for the junctions of output scores
    fit_samples: Count = 128  # images on which each device fits junctions
    head_samples: Count = 1000  # images of each device that the head is fitted on
    head_rounds: Count = 100  # maximum rounds to gather, and to validate; fewer if all devices have reported
    features: Count = 6144  # maximum features of all taps together; the shallowest taps are left out first
    budget_mflop: Limit | None = None  # maximum MFLOP of an example, two per multiply-add; none: no limit
    budget_ms: Limit | None = None  # maximum milliseconds of an example on `board`
    budget_mb: Limit | None = None  # maximum MB of weights
    budget_joules: Limit | None = None  # maximum joules of an example on `board`
    board: str = ""  # profile of the board whose milliseconds and joules are reported


@dataclass(frozen=True)
class SearchSettings(SearchParams):
    # the search
    close_early: bool = True  # whether a vote closes after a sub-round without a new device
    completion: bool = True  # whether a path ends with the rest of its last donor, so that only junctions need votes
    order: Literal["best", "random"] = "best"  # the partial network expanded next
    space_margin: Positive = 2.0  # gap of scores in standard errors that drops a shallower block; 0: as in the paper
    # scores
    screen: Count = 8  # with "hybrid": number of blocks that are scored by their output
    positions: Annotated[int, Meta(ge=16)] = 1024  # positions of maps on which the junction for a score is fitted
    estimator: cka.Estimator = "unbiased"
    # votes
    spread: bool = True  # whether picks and winners contain the best block of each donor before any second block
    theta: Share | Literal["median"] = "median"  # theta: rank (mean percentile of picks on others) that is rewarded
    normalise: Literal["cohort", "all"] = "cohort"  # weights rescaled after a vote; with "all", selection adds weight
    judged: Literal["greedy", "picks"] = "greedy"  # with "picks" devices that explored are judged by their random picks
    # junctions and heads
    ridge: Positive = least_squares.RIDGE  # lambda of junctions, as a share of the mean variance; 0: minimum norm
    bias: bool = True  # whether junctions have a bias, fitted on centred maps
    head: Literal["ridge", "aligned"] = "ridge"  # "aligned" keeps the donors' classifiers and aligns their classes


PAPER: Mapping[str, Any] = {
    "close_early": False,
    "expansions": 100,
    "finished": 22,
    "subrounds": 5,
    "k": 3,
    "completion": False,
    "order": "random",
    "space_margin": 0.0,
    "samples": 64,
    "score_at": "output",
    "estimator": "biased",
    "spread": False,
    "theta": 0.6,
    "normalise": "all",
    "judged": "picks",
    "ridge": 0.0,
    "bias": False,
    "head": "aligned",
    "finalists": 22,
}


def resolve_settings(params: SearchParams) -> SearchSettings:
    if isinstance(params, SearchSettings):
        return params
    return SearchSettings(**{**vars(params), **(PAPER if params.mode == "paper" else {})})


Phase = Literal["score", "fit", "gather", "validate", "done"]


@dataclass(frozen=True)
class ScoredPath:
    """Path of blocks, the candidates for its next block, and the product of its scores."""

    path: tuple[str, ...]
    pool: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class Candidate:
    """Candidate for the result: parallel paths under one head, or a path with a donor's classifier.

    Attributes:
        kind: "joined" for several taps, "donor" for one tap of an unmodified donor, "stitched" for one finished
            network, "aligned" for one finished network with its terminating block, or "cascade".
        paths: Paths from a starting block to a tap, or of an aligned network to its terminating block.
        head: "weights" (labels, d) and "bias" (labels,) on the taps' pooled maps side by side, or {} if aligned.
        ridge: Penalty of the head, selected by generalised cross-validation.
        criterion: Generalised cross-validation criterion of the head, or None with too few examples. Lower is better.
        score: Product of the blocks' scores of a finished network.
        early: Cheaper candidate of a "cascade", whose other attributes are those of the larger one.
    """

    kind: Literal["joined", "donor", "stitched", "aligned", "cascade"]
    paths: tuple[tuple[str, ...], ...]
    head: dict[str, np.ndarray] = field(default_factory=dict)
    ridge: float | None = None
    criterion: float | None = None
    score: float | None = None
    early: EarlyExit | None = None


@dataclass(frozen=True)
class PackedSums:
    counts: np.ndarray  # as in `ClassMoments`
    totals: np.ndarray
    half: np.ndarray  # upper triangle of the scatter, packed by rows


@dataclass(frozen=True)
class SearchState:
    params: SearchSettings
    seed: int
    stock: DonorPool
    files: dict[str, BlobRef]
    frontier: tuple[ScoredPath, ...]
    phase: Phase = "score"
    turn: int = 0  # number of steps; updates of other steps are rejected
    expansions: int = 0
    subround: int = 0
    saturated: bool = False  # whether a sub-round had no new device, so that all devices are known
    current: ScoredPath | None = None  # the partial network being expanded
    pool: tuple[str, ...] = ()  # blocks that may follow the current network
    ballots: dict[str, Ballot] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)  # device -> weight of its vote; the sum is 1
    winners: tuple[Winner, ...] = ()
    dropped: tuple[str, ...] = ()
    junctions: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    finished: tuple[ScoredPath, ...] = ()
    seen: tuple[str, ...] = ()  # devices with an update in any phase, sorted
    heard: tuple[str, ...] = ()  # devices with an update in the current phase, sorted, in "gather" and "validate"
    taps: tuple[tuple[str, ...], ...] = ()  # paths whose pooled ends are gathered
    gathered: PackedSums | None = None  # moments of the devices in `heard`
    finalists: tuple[ScoredPath, ...] = ()
    candidates: tuple[Candidate, ...] = ()  # the cheapest first
    examples: int = 0  # held-out examples that the candidates were validated on
    right: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """(candidates, candidates) numbers of held-out examples that both of two candidates predict correctly."""
    by_margin: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0, 0), np.int64))
    """(early candidates, margin bins, candidates, candidates) of the same numbers by bin of margin, in "validate"."""
    in_bin: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # (early, bins) held-out examples
    log: tuple[str, ...] = ()  # sentences about the last step
