"""Robust means against their definitions, written down naively, and against what they promise."""

import itertools
import tracemalloc
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from fedquilt.methods import robust
from fedquilt.methods.robust import UpdateRows

NAMES = ["w", "b", "gain"]


def drawn(count: int, seed: int = 0, spread: float = 1.0) -> list[dict[str, np.ndarray]]:
    """Updates around (1, 1, ...) of 7 x 3, 5 and () values, the last one without axes."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"w": (7, 3), "b": (5,), "gain": ()}
    return [
        {name: np.asarray(1 + spread * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(count)
    ]


def flat(update: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([update[name].astype(np.float64).reshape(-1) for name in NAMES])


def everything(updates: Sequence[dict[str, np.ndarray]], f: int) -> dict[str, dict[str, np.ndarray]]:
    """What each rule makes of the updates; f of them may be arbitrary."""
    rows, centre = UpdateRows(updates), {name: np.zeros_like(array) for name, array in updates[0].items()}
    lengths = robust.difference_norms(rows, NAMES, centre)
    best = np.argsort(robust.krum_scores(rows, NAMES, f), kind="stable")
    return {
        "trimmed_mean": robust.trimmed_mean(rows, NAMES, f),
        "median": robust.median(rows, NAMES),
        "krum": robust.mean_of_rows(rows, NAMES, best[:1]),
        "multi_krum": robust.mean_of_rows(rows, NAMES, best[: len(rows) - f]),
        "clipped": robust.clipped_mean(rows, NAMES, centre, lengths, float(np.median(lengths))),
    }


RULES = tuple(everything(drawn(5), 1))


@pytest.fixture(autouse=True, params=[robust.BLOCK_VALUES, 4], ids=["one block", "blocks of 4 values"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in one block each, and cut into several."""
    monkeypatch.setattr(robust, "BLOCK_VALUES", request.param)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_trimmed_mean_and_median_are_their_definitions_value_by_value(count, cut):
    if count <= 2 * cut:
        pytest.skip("nothing would be left")
    updates = drawn(count)
    table = [flat(update).tolist() for update in updates]
    trimmed = [sorted(values)[cut : count - cut] for values in zip(*table, strict=True)]
    found = robust.trimmed_mean(UpdateRows(updates), NAMES, cut)
    assert flat(found) == pytest.approx([sum(values) / len(values) for values in trimmed], rel=1e-6)
    assert flat(robust.median(UpdateRows(updates), NAMES)) == pytest.approx(np.median(table, axis=0), rel=1e-6)
    assert {name: (a.shape, a.dtype) for name, a in found.items()} == {
        name: (a.shape, a.dtype) for name, a in updates[0].items()
    }


@pytest.mark.parametrize("f", [0, 1, 2])
def test_krums_scores_are_their_definition(f):
    updates = drawn(8)
    points = [flat(update) for update in updates]
    naive = [
        sum(sorted(float(((a - b) ** 2).sum()) for j, b in enumerate(points) if j != i)[: 8 - f - 2])
        for i, a in enumerate(points)
    ]
    assert robust.krum_scores(UpdateRows(updates), NAMES, f) == pytest.approx(naive, rel=1e-9)


def test_clipping_is_its_definition_and_leaves_short_changes_alone():
    """Centre + mean of min(1, radius / norm) * change; with a radius beyond all norms it is the mean."""
    updates, centre = drawn(6), drawn(1, seed=9)[0]
    lengths = robust.difference_norms(UpdateRows(updates), NAMES, centre)
    changes = [flat(update) - flat(centre) for update in updates]
    assert lengths == pytest.approx([np.linalg.norm(change) for change in changes])
    radius = float(np.sort(lengths)[2])
    clipped = np.mean([change * min(1.0, radius / np.linalg.norm(change)) for change in changes], axis=0)
    found = robust.clipped_mean(UpdateRows(updates), NAMES, centre, lengths, radius)
    assert flat(found) == pytest.approx(flat(centre) + clipped, rel=1e-5)
    whole = robust.clipped_mean(UpdateRows(updates), NAMES, centre, lengths, 1e9)
    assert flat(whole) == pytest.approx(np.mean([flat(update) for update in updates], axis=0), rel=1e-5)
    same = robust.clipped_mean(UpdateRows([centre, centre]), NAMES, centre, np.zeros(2), 0.0)
    assert flat(same) == pytest.approx(flat(centre))


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_updates_does_not_matter(rule):
    updates = drawn(7)
    before = flat(everything(updates, 2)[rule])
    for shift in range(1, 7):
        assert flat(everything(updates[shift:] + updates[:shift], 2)[rule]) == pytest.approx(before, rel=1e-6)
    assert flat(everything(updates[::-1], 2)[rule]) == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1e2, 1e6, 1e18])
def test_below_the_breakdown_point_no_attacker_moves_the_result_further_than_honest_updates_lie(rule, size):
    f, honest = 3, drawn(6, seed=3, spread=0.1)
    points = np.array([flat(update) for update in honest])
    diameter = max(np.linalg.norm(a - b) for a, b in itertools.combinations(points, 2))
    for signs in ((1, 1, 1), (1, -1, 1), (1, -3, 9)):
        wrong = [{name: np.asarray(sign * size * np.ones_like(a)) for name, a in honest[0].items()} for sign in signs]
        found = flat(everything([*wrong, *honest], f)[rule])
        if rule in ("trimmed_mean", "median"):
            assert np.all((found >= points.min(axis=0) - 1e-6) & (found <= points.max(axis=0) + 1e-6))
        elif rule == "clipped":
            lengths = np.sort(np.linalg.norm([flat(update) for update in (*wrong, *honest)], axis=1))
            assert np.linalg.norm(found) <= lengths[4] * (1 + 1e-6)
        else:
            nearest = np.linalg.norm(points - found, axis=1).max()
            assert nearest <= (1 + np.sqrt(9 - f - 2)) * diameter


@pytest.mark.parametrize("rule", ["trimmed_mean", "median", "krum", "multi_krum"])
def test_beyond_the_breakdown_point_attackers_who_agree_win(rule):
    honest, far = drawn(4, spread=0.1), 1e4
    wrong = [{name: np.full_like(a, far) for name, a in honest[0].items()} for _ in range(5)]
    assert np.abs(flat(everything([*wrong, *honest], 3)[rule])).max() > far / 3


def test_a_rule_holds_one_block_of_every_update_and_no_more(monkeypatch):
    monkeypatch.setattr(robust, "BLOCK_VALUES", 1 << 14)
    updates = [{"w": np.full(1 << 20, index, np.float32)} for index in range(8)]
    rows, centre = UpdateRows(updates), {"w": np.zeros(1 << 20, np.float32)}
    block, result = 8 * (1 << 14) * 8, 4 << 20
    for made in (
        lambda: robust.trimmed_mean(rows, ["w"], 2),
        lambda: robust.krum_scores(rows, ["w"], 2),
        lambda: robust.clipped_mean(rows, ["w"], centre, robust.difference_norms(rows, ["w"], centre), 0.5),
        lambda: robust.median(UpdateRows(updates, [[0, 1], [2, 3], [4, 5], [6, 7]]), ["w"]),
    ):
        tracemalloc.start()
        made()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < result + 4 * block


def test_buckets_hold_everybody_once_and_differ_less():
    updates = drawn(7)
    groups = robust.draw_buckets(7, 2, np.random.default_rng(5))
    assert sorted(index for group in groups for index in group) == list(range(7))
    assert sorted(map(len, groups)) == [1, 2, 2, 2]
    assert groups != robust.draw_buckets(7, 2, np.random.default_rng(6))
    rows = UpdateRows(updates, groups)
    assert len(rows) == 4
    read = np.concatenate([block for name in NAMES for _, block in rows.iterate_blocks(name)], axis=1)
    assert read == pytest.approx(np.array([np.mean([flat(updates[i]) for i in group], axis=0) for group in groups]))


def test_a_counter_is_nobodys_alone():
    """Of 3, 2^53 and 4 it is 4; an even number of them is rounded down."""
    counters = [{"n": np.array(value, np.int64)} for value in (3, 2**53, 4)]
    found = robust.median(UpdateRows(counters), ["n"])["n"]
    assert (found, found.dtype, found.shape) == (4, np.int64, ())
    assert robust.median(UpdateRows(counters[1:]), ["n"])["n"] == (2**53 + 4) // 2


@pytest.mark.parametrize(
    ("rule", "count", "f", "size", "fine"),
    [
        ("krum", 7, 2, 1, True),
        ("krum", 6, 2, 1, False),
        ("multi_krum", 6, 2, 1, False),
        ("median", 5, 2, 1, True),
        ("trimmed_mean", 4, 2, 1, False),
        ("median", 10, 2, 2, True),
        ("median", 10, 2, 3, False),
        ("krum", 20, 4, 2, False),
    ],
)
def test_too_few_rows_for_the_attackers_are_known_beforehand(rule, count, f, size, fine):
    """More than 2 f + 2 for Krum, more than 2 f for the others; buckets count as if each attacker spoiled one."""
    assert robust.tolerates_attackers(rule, count, f, size) is fine
