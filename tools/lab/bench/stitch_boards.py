"""Synthetic updates of light devices to FedStitch tasks: votes, sums, moments and counts.

Features and scores are drawn instead of computed, as light boards run nothing. Sums of them are made by the functions
by which agents make theirs: once for a task, then moved by the board's number, so that no two boards send the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt.arrays import tensors
from fedquilt.core import Tensors
from fedquilt.data import inputs
from fedquilt.formats import job_bundle
from fedquilt.models.stitching import vote
from fedquilt.models.stitching.algebra import class_moments, least_squares
from fedquilt.models.stitching.device.junction_moments import FitRequest
from fedquilt.models.stitching.device.scoring import ScoreRequest
from fedquilt.models.stitching.device.taps import CountRequest, GatherRequest
from fedquilt.models.stitching.stitched_network import Block, Donor, DonorPool
from fedquilt.tools.lab.bench.protocol_devices import EXAMPLES, SentUpdate, model_shift, update_from_blobs

LABELS: Final = 10
SIDE: Final = 4  # of the blocks' maps
DONORS: Final = ("east", "west")
SMALL: Final = 48  # features of both donors together
ROWS: Final = 80  # images for which a device that does nothing else computes the features of all donors


def write(folder: Path, features: int = SMALL) -> None:
    blocks = {}
    for donor in DONORS:
        shapes = ((1, 2 * SIDE, 2 * SIDE), *((c, SIDE, SIDE) for c in (features // 8, features // 8 * 3)), (LABELS,))
        for i, kind in enumerate(("start", "middle", "end")):
            told = Block(donor, i, kind, ((f"{donor}.{i}",),), (), shapes[i], shapes[i + 1], 1e4, 1000, 1000, 1000)  # type: ignore[arg-type]
            blocks[told.id] = told
    donors = {donor: Donor(tuple(f"{donor}.{i}" for i in range(3)), LABELS) for donor in DONORS}
    shown: inputs.Table = {"channels": 1, "size": 2 * SIDE, "mean": (0.0,), "std": (1.0,)}
    stock = DonorPool(shown, tuple(map(str, range(LABELS))), donors, blocks)
    job_bundle.write_bundle(folder, msgspec.to_builtins(stock), {name: name.encode() for name in blocks})


def params(features: int = SMALL) -> dict[str, Any]:
    return {"expansions": int(features == SMALL), "score_at": "input"}


def answer(asked: Mapping[str, Any], number: int) -> SentUpdate:
    weight, told = EXAMPLES, {"turn": float(asked["turn"])}
    match asked["phase"]:
        case "score":
            bundles, more = _draw_scores(msgspec.convert(asked, ScoreRequest), number)
            told |= more
        case "fit":
            bundles = _make_junction_sums(msgspec.convert(asked, FitRequest), 1 + model_shift(number))
        case "gather":
            bundles, told["short"] = _moments(msgspec.convert(asked, GatherRequest), 1 + model_shift(number)), 0.0
            weight = int(bundles["moments"]["counts"].sum())
        case "validate":
            bundles = _counts(msgspec.convert(asked, CountRequest), number)
    return update_from_blobs(
        {name: tensors.encode_tensors(each) for name, each in bundles.items()}, float(weight), told
    )


def _draw_scores(ask: ScoreRequest, number: int) -> tuple[dict[str, Tensors], dict[str, float]]:
    values = np.random.default_rng((ask.turn, number)).random(len(ask.pool))
    level = np.zeros(len(ask.pool), np.int64)
    picks, explored = vote.choose_picks(values, level, ask.pool, ask.k, ask.epsilon, ask.coin, ask.spread)
    given = {"screen": values, "score": values, "level": level, "picks": np.array(picks, np.int64)}
    return {"scores": given}, {"score": float(values.max()), "explored": float(explored), "doubtful": 0.0}


def _make_junction_sums(ask: FitRequest, by: float) -> dict[str, Tensors]:
    p, found = ask.blocks[ask.path[-1]].out_shape[0], dict[str, Tensors]()
    for i, name in enumerate(ask.winners):
        one = _junction(ask.turn + i, p, ask.blocks[name].in_shape, ask.bias)
        xx, xy = one.xx * by**2, one.xy * by**2
        moved = least_squares.RegressionMoments(one.n, one.mean_x * by, one.mean_y * by, xx, xy, one.yy * by**2)
        found[f"moments.{i}"] = least_squares.to_tensors(moved, exact=ask.ridge == 0)
    return found


@functools.lru_cache(8)
def _junction(seed: int, p: int, shape: tuple[int, ...], bias: bool) -> least_squares.RegressionMoments:
    roll = np.random.default_rng(seed)
    x, y = (roll.random((EXAMPLES * prod(shape[1:]), c), np.float32) for c in (p, shape[0]))
    return least_squares.compute_moments(x, y, bias)


def _moments(ask: GatherRequest, by: float) -> dict[str, Tensors]:
    one = _features(ask.turn, sum(ask.widths), ask.labels)
    moved = replace(one, means=one.means * by, factor=one.factor * by)
    return {"moments": class_moments.to_tensors(moved, ask.exact)}


@functools.lru_cache(2)
def _features(seed: int, width: int, labels: int) -> class_moments.DeviceMoments:
    rows = EXAMPLES if width < ROWS * EXAMPLES else ROWS
    z = np.random.default_rng(seed).random((rows, width), np.float32)
    return class_moments.device_moments(z, np.arange(rows) % labels, labels)


def _counts(ask: CountRequest, number: int) -> dict[str, Tensors]:
    right = (np.arange(len(ask.candidates)) + number) % (EXAMPLES + 1)
    return {"counts": {"examples": np.array([EXAMPLES], np.int64), "right": right.astype(np.int64)}}
