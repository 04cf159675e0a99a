"""Which updates of a round need not be folded again when it is committed."""

import numpy as np

from fedquilt.arrays import exact_sums
from fedquilt.coordinator.updates import aggregation
from fedquilt.coordinator.updates.aggregation import PartialAggregate
from fedquilt.core import BlobRef, Update, Usage


def update(device: str, weight: float = 1.0) -> Update:
    return Update(
        job="a",
        round=0,
        attempt=0,
        device=device,
        weight=weight,
        bundles={"model": BlobRef(sha256="0" * 64, size=1)},
        metrics={"loss": 1.0},
        usage=Usage(wall_s=1.0),
    )


def folded(*devices: str, any_order: bool = False) -> PartialAggregate:
    made = PartialAggregate(any_order)
    for device in devices:
        assert made.can_fold_in_order(device)
        made.include_update(device, aggregation.fold_inputs(update(device)), (*(made.total or ()), device))
    return made


def left(made: PartialAggregate, *devices: str, **others: Update) -> tuple[object, list[str]]:
    """Devices left to fold, and the sum that they are added to."""
    found = made.remaining_devices({name: update(name) for name in devices} | others)
    return made.total, found


def test_the_sum_of_the_first_is_gone_on_with():
    assert left(folded("a", "b"), "c", "a", "b") == (("a", "b"), ["c"])
    assert left(folded("a", "b", "c"), "c", "a", "b") == (("a", "b", "c"), [])
    assert left(folded(), "c", "a", "b") == (None, ["a", "b", "c"])


def test_all_are_folded_anew_when_one_is_missing_or_another_than_it_was_told():
    assert left(folded("a", "b"), "b", "c") == (None, ["b", "c"])
    assert left(folded("a", "c"), "a", "b", "c") == (None, ["a", "b", "c"])
    assert left(folded("a"), a=update("a", weight=2.0)) == (None, ["a"])


def test_what_adds_up_in_any_order_is_folded_as_it_comes_and_anew_only_when_it_does_not_count():
    assert left(folded("c", "a", any_order=True), "a", "b", "c") == (("c", "a"), ["b"])
    assert left(folded("c", "a", any_order=True), "a", "b") == (None, ["a", "b"])
    assert left(folded("c", any_order=True), "a", c=update("c", weight=2.0)) == (None, ["a", "c"])


def test_what_does_not_come_after_all_others_cannot_be_added():
    made = folded("b")
    assert not made.can_fold_in_order("a")
    assert not made.can_fold_in_order("b")
    assert made.can_fold_in_order("c")
    assert made.contains_update(update("b"))
    assert not made.contains_update(update("b", weight=2.0))
    assert not made.contains_update(update("c"))


def test_an_update_is_folded_at_once_if_nobody_before_it_is_awaited_or_the_order_does_not_matter():
    answered = {"b": update("b")}
    assert folded("b").can_fold_now("c", answered, {"c", "d"})
    assert not folded("b").can_fold_now("d", answered, {"c", "d"})
    assert not folded().can_fold_now("c", answered, {"c"})  # b has answered and is not folded
    assert folded("b", any_order=True).can_fold_now("d", answered, {"c", "d"})
    assert folded("b", any_order=True).can_fold_now("a", answered, {"a"})
    assert not folded("b", any_order=True).can_fold_now("b", answered, {"b"})


def apart(*devices: str, of: PartialAggregate | None = None) -> PartialAggregate:
    """Folding with the sum of these devices, a 1 for each, that somebody else has made."""
    made = PartialAggregate(any_order=True) if of is None else of
    total = {"w": exact_sums.add_to_sum(None, np.ones(2, np.float32), len(devices))}
    made.add_pending_sum({device: aggregation.fold_inputs(update(device)) for device in devices}, lambda: total)
    return made


def gathered(made: PartialAggregate, *devices: str, **others: Update) -> tuple[float | None, list[str]]:
    updates = {name: update(name) for name in devices} | others
    made.merge_pending_sums(updates)
    total, found = left(made, *devices, **others)
    return None if total is None else float(total["w"].rounded_value()[0]), found


def test_sums_that_others_have_made_are_merged_if_exactly_these_updates_count():
    assert gathered(apart("a", "b", of=apart("c")), "a", "b", "c", "d") == (3.0, ["d"])
    assert gathered(apart("a", "b", of=apart("c")), "a", "c") == (1.0, ["a"])
    assert gathered(apart("a", "b"), "b", a=update("a", weight=2.0)) == (None, ["a", "b"])
    made = PartialAggregate(any_order=True)
    made.add_pending_sum({"a": aggregation.fold_inputs(update("a"))}, lambda: None)  # who was to make it has not
    assert gathered(made, "a") == (None, ["a"])


def test_what_is_in_a_sum_that_others_have_made_is_not_folded_again_as_it_comes():
    made = apart("a", "b")
    assert made.contains_update(update("a"))
    assert not made.contains_update(update("a", weight=2.0))
    assert not made.can_fold_in_order("b")
    assert not made.can_fold_now("b", {}, ["b"])
    assert made.can_fold_in_order("c")
