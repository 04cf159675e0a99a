"""What a search over paths is told and what it knows: its parameters, and its state from round to round.

`fedquilt.models.stitching.search` is the steps that lead from one state to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from fedquilt.core import BlobRef
from fedquilt.models.stitching import cka, least_squares, scoring
from fedquilt.models.stitching.stitched import Stock
from fedquilt.models.stitching.vote import Ballot, Winner

Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class Params:
    """Hyper-parameters; the paper's symbol where it has one."""

    mode: Literal["default", "paper"] = "default"  # "paper": PAPER overrides what follows
    # the search
    k: Count = 3  # K: blocks each device picks, and winners of a vote
    depth: Annotated[int, Meta(ge=2)] | None = None  # D_max: blocks of a path at most; none: as the longest donor has
    subrounds: Count = 5  # rounds whose votes are summed
    close_early: bool = True  # fewer sub-rounds once they bring no new device
    expansions: Annotated[int, Meta(ge=0)] = 24  # partial networks expanded at most; 0: donors are joined, not stitched
    finished: Count = 22  # networks finished at most, beside the donors
    completion: bool = True  # a path ends as its last donor goes on, and only junctions are voted on; False: all blocks
    order: Literal["best", "random"] = "best"  # which partial network is next
    native_continuation: Literal["allow", "penalise", "exclude"] = "allow"  # a donor's own next block
    native_penalty: Share = 0.1  # with "penalise": what its score loses
    max_upsampling: Annotated[float, Meta(ge=1)] = 2.0  # blocks that need maps enlarged by more are not offered
    space_optimizer: bool = True
    space_margin: Positive = 2.0  # standard errors beyond which a shallower block is dropped; 0: the paper's letter
    stop_below: Share = 0.0  # paths whose product of scores is lower are given up; 0: never. Not in the paper
    # scores
    criterion: scoring.Criterion = (
        "cka"  # of outputs: likeness to the donor's own, or what the path's end says of labels
    )
    samples: Annotated[int, Meta(ge=4)] = 64  # images scored on, and as many for the junctions of output scores
    score_at: scoring.ScoreAt = "hybrid"
    screen: Count = 8  # with "hybrid": blocks that are scored by their output
    early: Annotated[int, Meta(ge=0)] = 16  # images after which a hopeless output is scored no further; 0: never
    early_margin: Share = 0.2  # how far below the K-th best its score then is
    positions: Annotated[int, Meta(ge=16)] = 1024  # of the maps that the junction of an output score is fitted on
    estimator: cka.Estimator = "unbiased"
    maps: cka.Maps = "flatten"
    # votes
    weighted: bool = True  # False: plain voting
    spread: bool = True  # a device's picks, and the winners, take each donor's best before any donor's second
    theta: Share | Literal["median"] = "median"  # theta: mean percentile of a device's picks on others that is rewarded
    normalise: Literal["cohort", "all"] = "cohort"  # whose weights make room; "all": being asked is worth weight
    judged: Literal["greedy", "picks"] = "greedy"  # "picks": of a device that explored the random ones
    alpha: Positive = 0.1  # alpha: reward, times 1 + depth / D_max
    beta: Annotated[float, Meta(ge=0, le=0.5)] = 0.1  # beta: penalty, times 1 + depth / D_max
    explore: Share = 0.3  # epsilon of the first expansion
    explore_decay: Share = 0.9  # per expansion
    explore_floor: Share = 0.05
    # junctions and heads
    ridge: Positive = least_squares.RIDGE  # lambda of junctions, as a share of the mean variance; 0: least norm
    bias: bool = True  # False: junctions without bias and centring
    fit_samples: Count = 128  # images each device fits junctions on
    # what a junction leaves of a device that it was not solved from: "weigh" takes it off the path's score
    residual: Literal["report", "weigh"] = "report"  # not in the paper
    head: Literal["ridge", "aligned"] = "ridge"  # "aligned": the donors' own classes
    join: bool = True  # one head over several depths of all donors; False: a head for each finished network alone
    features: Count = 6144  # of all taps together at most; the shallowest step down first
    head_samples: Count = 1000  # images each device gives to the head
    head_rounds: Count = 100  # rounds that devices are heard in, for the head and again to validate; fewer once all are
    random_features: Annotated[int, Meta(ge=0)] = 0  # project each tap onto so many before they are sent; 0: all
    finalists: Count = 12  # finished networks that are candidates, the best-scoring first
    # points of accuracy that a candidate has to bring for each MFLOP, MB of weights and ms of an example that it costs
    price_mflop: Positive = 0.0
    price_mb: Positive = 0.0
    price_ms: Positive = 0.0
    board: str = ""  # whose milliseconds count: a profile's name


PAPER: Mapping[str, Any] = {
    "close_early": False,
    "expansions": 100,
    "finished": 22,
    "subrounds": 5,
    "k": 3,
    "completion": False,
    "order": "random",
    "native_continuation": "allow",
    "space_optimizer": True,
    "space_margin": 0.0,
    "stop_below": 0.0,
    "criterion": "cka",
    "samples": 64,
    "score_at": "output",
    "early": 0,
    "estimator": "biased",
    "weighted": True,
    "spread": False,
    "theta": 0.6,
    "normalise": "all",
    "judged": "picks",
    "ridge": 0.0,
    "bias": False,
    "residual": "report",
    "head": "aligned",
    "finalists": 22,
}

Phase = Literal["score", "fit", "gather", "validate", "done"]


@dataclass(frozen=True)
class Net:
    """A path, the blocks it may still take, and the product of the scores along it."""

    path: tuple[str, ...]
    pool: tuple[str, ...]
    score: float
    residuals: tuple[float | None, ...] = ()  # of each junction, `projection.left_out`; None: no projection, or unknown


@dataclass(frozen=True)
class Finalist:
    """A finished network that goes on to be validated."""

    path: tuple[str, ...]
    score: float
    residuals: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A network that may be handed out: paths side by side under one head, or one with a donor's own classifier.

    Attributes:
        kind: "joined" of several taps; "donor": one tap of an unmodified donor; "stitched": one finished network;
            "aligned": one finished network with its terminating block.
        paths: each from a starting block to a tap; of an aligned network to its terminating block.
        head: "weights" (labels, d) and "bias" (labels,) on the taps' pooled maps side by side; {}: aligned.
        ridge: strength that generalised cross-validation has chosen for the head.
        criterion: what that comes to, less is better; None: of too few examples there is none.
        score: of the finished network, the product of its blocks' scores.
        residual: of its junctions, the worst that is known.
        right: answers on held-out examples (`State.examples`).
    """

    kind: Literal["joined", "donor", "stitched", "aligned"]
    paths: tuple[tuple[str, ...], ...]
    head: dict[str, np.ndarray] = field(default_factory=dict)
    ridge: float | None = None
    criterion: float | None = None
    score: float | None = None
    residual: float | None = None
    right: int = 0


@dataclass(frozen=True)
class Stored:
    """`class_moments.Sums` as a state keeps them: of the symmetric matrix one half."""

    counts: np.ndarray
    totals: np.ndarray
    half: np.ndarray


@dataclass(frozen=True)
class State:
    """Where the search stands."""

    params: Params
    seed: int
    stock: Stock
    files: dict[str, BlobRef]
    frontier: tuple[Net, ...]
    phase: Phase = "score"
    turn: int = 0  # rounds that changed anything
    expansions: int = 0
    subround: int = 0
    saturated: bool = False  # a sub-round has brought no new device: those known are all there are
    current: Net | None = None  # being expanded
    pool: tuple[str, ...] = ()  # what is offered to it
    ballots: dict[str, Ballot] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)  # of every device seen, sum 1
    winners: tuple[Winner, ...] = ()
    dropped: tuple[str, ...] = ()
    junctions: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    finished: tuple[Net, ...] = ()
    seen: tuple[str, ...] = ()  # devices that have ever answered, sorted
    heard: tuple[str, ...] = ()  # those that have answered in this phase, sorted; not in score and fit
    taps: tuple[tuple[str, ...], ...] = ()  # paths whose pooled ends are gathered
    gathered: Stored | None = None  # what the devices heard come to so far
    given_up: tuple[Net, ...] = ()  # scored too low, and kept only until something is finished
    finalists: tuple[Finalist, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    examples: int = 0  # held out, that candidates were validated on
    chosen: int = 0  # of the candidates, once they are validated
    log: tuple[str, ...] = ()  # the last step in plain sentences


def describe(path: tuple[str, ...]) -> str:
    """A path in words, for the log."""
    return " > ".join(path)
