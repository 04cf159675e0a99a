"""Taps of a joint head: which are chosen, what devices give for them, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from joint_runs import FULL, SMALL, gathering, played
from toy_tasks import deliver_task

from fedquilt.arrays import tensors
from fedquilt.coordinator.updates import tasks
from fedquilt.core import DeviceUpdate, DeviceView, Examples, UpdateError
from fedquilt.methods.fedstitch import METHOD, SearchState
from fedquilt.models.stitching import stitched_network
from fedquilt.models.stitching.algebra import class_moments
from fedquilt.models.stitching.algebra.class_moments import ExactMomentSums
from fedquilt.models.stitching.device import moments
from fedquilt.models.stitching.search import candidates, cascades
from fedquilt.models.stitching.search.accumulators import CorrectCounts
from fedquilt.models.stitching.search.state import ScoredPath, SearchSettings
from fedquilt.testing.toy_networks import build_donors, image_devices
from fedquilt.tools.simulation import DeviceData


def test_taps_step_down_shallow_first_and_say_so():
    stock = FULL[0].stock
    made = tuple(
        ScoredPath((*path, "elm.2"), (), 1.0) for path in (("ash.0", "elm.1"), ("fir.0", "ash.1"), ("elm.0", "fir.1"))
    )
    state = replace(FULL[0], finalists=made)

    def kept(features):
        taps, notes = candidates.choose_taps(replace(state, params=replace(state.params, features=features)))
        return list(taps), notes

    every, notes = kept(1000)
    assert len(every) == 10
    assert notes == []
    fewer, [note] = kept(40)  # of 57: an early one, the third stitched one, then one half-way through its donor
    assert set(every) - set(fewer) == {("ash.0",), ("elm.0", "fir.1"), ("elm.0",)}
    assert note == ("taps not used, to keep `features` = 40: ash.0, (elm.0 > fir.1), elm.0")
    least, _ = kept(1)
    assert least == [
        path for path in every if candidates.is_native_path(stock, path) and candidates.relative_depth(stock, path) == 1
    ]


def test_a_path_runs_once_for_all_that_begin_with_it():
    _, runner = build_donors()
    played(image_devices(1), runner=runner, expansions=0, rounds=1)
    assert {name: runs for name, runs in runner.runs.items() if runs} == {
        f"{donor}.{i}.onnx": 1 for donor, depth in (("ash", 3), ("elm", 2), ("fir", 2)) for i in range(depth)
    }


def test_a_board_with_little_memory_gives_fewer_images():
    state, task, site = gathering()
    whole = METHOD.work(task, site)
    assert (whole.weight, whole.metrics["short"]) == (45.0, 0.0)
    site.engine.available_bytes = moments.ROOM_DIVISOR * class_moments.factor_bytes(
        40, sum(candidates.tap_widths(state))
    )
    tight = METHOD.work(task, site)
    assert (tight.weight, tight.metrics["short"]) == (40.0, 1.0)
    site.engine.available_bytes = 1
    assert METHOD.work(task, site).weight == moments.MIN_ROWS
    total = METHOD.aggregation.fold(state, None, DeviceUpdate("dev-0", 0, tight.weight, tight.metrics, tight.bundles))
    after = METHOD.step(state, total)
    assert "1 of 1 devices had memory for only some of their images" in after.log


def test_the_orders_memory_counts_the_moments():
    _, task, _ = gathering()
    width = 38
    assert task.work.peak_bytes >= class_moments.factor_bytes(moments.MIN_ROWS, width)
    bundle, _ = build_donors()
    state = METHOD.init(bundle, SearchSettings(**{**SMALL, "expansions": 0}), 3)
    wide = replace(state.stock.blocks["ash.2"], out_shape=(1 << 20, 4, 4))
    state = replace(state, stock=replace(state.stock, blocks={**state.stock.blocks, "ash.2": wide}))
    order = METHOD.send(state, DeviceView("dev-0", None))
    assert order.work.peak_bytes >= class_moments.factor_bytes(moments.MIN_ROWS, 1 << 20)


def test_a_device_is_charged_for_the_images_that_it_gives():
    _, task, _ = gathering(head_samples=30)
    each = task.work.total_for_examples(1).flops
    assert each > 0
    assert [task.work.total_for_examples(own).flops for own in (20, 30, 45, 1000)] == [
        20 * each,
        30 * each,
        30 * each,
        30 * each,
    ]
    state = next(state for state in FULL if state.phase == "validate")
    order = METHOD.send(state, DeviceView("dev-0", None))
    assert order is not None
    asked = tasks.predict_work(order, ("work",), "onnx", held_out_share=0.2)
    networks = {ids for candidate in state.candidates for ids in stitched_network.path_prefixes(candidate.paths)}
    assert asked.total_for_examples(40).flops == pytest.approx(
        10 * sum(state.stock.blocks[ids[-1]].flops for ids in networks)
    )


def test_a_device_sends_a_factor_and_no_matrix_of_features_by_features():
    _, task, site = gathering(head_samples=20)
    sent = METHOD.work(task, site).bundles["moments"]
    assert sent["rows"][0] == 20
    assert sent["factor"].shape == (20 * 38 - 190,)
    assert sent["factor"].dtype == np.float32


def test_moments_of_other_taps_are_refused():
    """A device that was asked for fewer taps cannot be counted for more."""
    state, task, site = gathering()
    answer = METHOD.work(task, site)
    narrow = replace(state, taps=state.taps[:-1])
    with pytest.raises(UpdateError, match="moments"):
        METHOD.aggregation.fold(narrow, None, DeviceUpdate("dev-0", 0, 45.0, answer.metrics, answer.bundles))


def test_a_device_counts_no_more_than_its_update_weighs():
    """Only the weight is held against what a board can have worked through; the counts in the moments must equal it."""
    state, task, site = gathering()
    answer = METHOD.work(task, site)
    assert METHOD.aggregation.fold(
        state, None, DeviceUpdate("dev-0", 0, answer.weight, answer.metrics, answer.bundles)
    ).devices
    told = dict(answer.bundles["moments"])
    many = {**told, "counts": 10**4 * told["counts"], "factor": np.float32(100) * told["factor"]}
    with pytest.raises(UpdateError, match="examples, but the update's weight is"):
        METHOD.aggregation.fold(state, None, DeviceUpdate("dev-0", 0, answer.weight, answer.metrics, {"moments": many}))


@pytest.mark.parametrize(("own", "held", "counted"), [(20, 8, 8), (8, 20, 8), (20, 0, 0)])
def test_a_device_validates_on_no_more_examples_than_it_says_it_has(own, held, counted):
    state = next(state for state in FULL if state.phase == "validate")
    shares = [Examples(np.full((count, 8, 8), 9, np.uint8), np.zeros(count, np.int64)) for count in (own, held)]
    order = METHOD.send(state, DeviceView("dev-0", None))
    answer = METHOD.work(*deliver_task(METHOD, order, DeviceData("dev-0", *shares), build_donors()[1], seed=3))
    assert (answer.weight, answer.bundles["counts"]["examples"].tolist()) == (counted, [counted])
    update = DeviceUpdate("dev-0", 0, answer.weight, answer.metrics, answer.bundles)
    assert METHOD.aggregation.fold(state, None, update).sums["examples"].rounded_value().tolist() == [counted]
    with pytest.raises(UpdateError, match=f"counted on {counted} examples, but the update's weight is {counted + 1}"):
        METHOD.aggregation.fold(state, None, replace(update, weight=counted + 1.0))


def test_a_state_keeps_half_of_the_matrix_and_no_devices_moments():
    run = played(cohort=3)
    state = next(state for state in run if state.phase == "gather" and state.heard)
    width = sum(candidates.tap_widths(state))
    assert state.gathered.half.shape == (width * (width + 1) // 2,)
    assert state.gathered.half.dtype == np.float32
    assert all(state.gathered is None for state in run if state.phase in ("validate", "done"))
    assert tensors.pack_state(tensors.unpack_state(tensors.pack_state(state), SearchState)) == tensors.pack_state(state)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda total: replace(total, devices={}), "the site names no device"),
        (lambda total: replace(total, devices={"dev-0": 2}), "counts a device twice"),
        (lambda total: replace(total, sums={"right": total.sums["right"]}), "names of sums differ: .*examples"),
        (lambda total: replace(total, sums={**total.sums, "right": total.sums["examples"]}), "shape"),
        (lambda total: moved(total, 0.5), "not integers"),
        (lambda total: moved(total, 1000), "more correct predictions than examples|beyond"),
        (lambda total: moved(total, -1000), "negative|beyond"),
    ],
)
def test_a_sites_counts_that_cannot_be_are_refused(spoil, why):
    kinds = {state.phase: METHOD.aggregation.accumulator(state) for state in FULL}
    assert kinds == {"score": None, "fit": None, "gather": ExactMomentSums, "validate": CorrectCounts, "done": None}
    state, sound = next(state for state in FULL if state.phase == "validate"), METHOD.aggregation.check_sums
    nets, early = len(state.candidates), len(cascades.early_candidates(state))
    counts = {"examples": np.array([12]), "right": np.full((nets, nets), 7)}
    bins = np.zeros((early, len(moments.MARGINS) + 1), np.int64)
    bins[:, 3] = 12
    counts |= {"in_bin": bins, "by_margin": 7 * (bins > 0)[..., None, None] * np.ones((nets, nets), np.int64)}
    update = DeviceUpdate("dev-0", 0, 12.0, {"turn": float(state.turn)}, {"counts": counts})
    sound(state, METHOD.aggregation.fold(state, None, update), 12.0)
    with pytest.raises(UpdateError, match="counted on 12 examples, but the update's weight is 13"):
        sound(state, METHOD.aggregation.fold(state, None, update), 13.0)
    with pytest.raises(UpdateError, match=why):
        sound(state, spoil(METHOD.aggregation.fold(state, None, update)), 12.0)


def moved(total: CorrectCounts, by: float) -> CorrectCounts:
    """The same with another number of right answers of the first candidate."""
    total.sums["right"].limbs[0][0] += by
    return total
