"""Baselines over toy donors whose blocks are numpy functions, and what such runs take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedquilt.core import Bundle, Examples, Method
from fedquilt.methods.fedstitch import METHOD, SearchParams
from fedquilt.models import stitching
from fedquilt.models.stitching.search import steps
from fedquilt.models.stitching.search.state import ScoredPath, SearchState, resolve_settings
from fedquilt.models.stitching.vote import Winner
from fedquilt.testing.toy_networks import SMALL_SEARCH, build_donors, image_devices, run_method, write_bundle
from fedquilt.tools.experiments.baselines import BaselineSetup


def bench(place: Path) -> BaselineSetup:
    bundle, runner = build_donors()
    write_bundle(place, bundle)
    train, held = (pooled([getattr(each, part) for each in image_devices()]) for part in ("train", "held_out"))
    return BaselineSetup(bundle, Path, runner, train, held)


def path_method(path: Sequence[str]) -> Method:
    def force_path(state: SearchState) -> SearchState:
        while state.phase == "score":
            assert state.current is not None
            winner = Winner(path[len(state.current.path)], 1.0, 1.0, 1)
            state = replace(state, winners=(winner,))
            if steps.winners_needing_junction(state):
                return replace(state, phase="fit")
            state = steps.grow_paths(state, {})
        return state

    def init(bundle: Bundle, params: SearchParams, seed: int) -> SearchState:
        start = ScoredPath(tuple(path[:1]), tuple(path[1:]), 1.0)
        alone = replace(resolve_settings(params), completion=False)  # else the donors would be finished beside it
        return force_path(replace(METHOD.init(bundle, alone, seed), frontier=(), current=start))

    return replace(METHOD, init=init, step=lambda state, total: force_path(METHOD.step(state, total)))


def pooled(shares: list[Examples]) -> Examples:
    return Examples(np.concatenate([each.x for each in shares]), np.concatenate([each.y for each in shares]))


def test_a_path_that_is_given_is_taken_with_junctions_where_blocks_are_strangers() -> None:
    """ash.0 > ash.1 > fir.1 > fir.2, although a search would be offered more: one junction, one head, no score."""
    bundle, runner = build_donors()
    led, params = path_method(["ash.0", "ash.1", "fir.1", "fir.2"]), {**SMALL_SEARCH, "depth": 5}
    run = run_method("fedstitch", bundle, image_devices(), params, engine=runner, method=led, rounds=1000)
    assert [state.phase for state in run] == ["fit", "gather", "validate", "done"]


def test_a_donors_new_head_is_that_of_a_job_in_which_devices_are_asked_one_by_one(tmp_path: Path) -> None:
    made = bench(tmp_path)
    for each in made.evaluate_new_heads():
        led, one = path_method(made.donor_pool.donors[each.name].blocks), {"size": 1}
        run = run_method(
            "fedstitch",
            made.bundle,
            image_devices(),
            SMALL_SEARCH,
            engine=made.engine,
            method=led,
            cohort=one,
            rounds=99,
        )
        alone = (made.donor_pool.donors[each.name].blocks[:-1],)
        number = next(i for i, candidate in enumerate(run[-1].candidates, 1) if candidate.paths == alone)
        assert made.compute_accuracy(METHOD.candidate(run[-1], number)) == each.accuracy


def test_donors_are_tested_as_they_are(tmp_path: Path) -> None:
    made = bench(tmp_path)
    found = made.evaluate_unmodified()
    assert [each.name for each in found] == ["ash", "elm"]
    stock = stitching.stitched_network.load_donor_pool(made.bundle.meta)
    x = (made.test.x[:, None].astype(np.float32) / 255 - 0.5) / 0.5
    for each in found:
        logits = x
        for name in stock.donors[each.name].blocks:
            logits = made.engine.run(Path(f"{name}.onnx"), logits)
        assert each.accuracy == pytest.approx(float((logits.argmax(axis=1) == made.test.y).mean()))
