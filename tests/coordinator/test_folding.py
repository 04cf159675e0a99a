"""Which updates of a round need not be folded again when it is committed."""

from fedquilt.coordinator import folding
from fedquilt.coordinator.folding import Folding
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


def folded(*devices: str) -> Folding:
    made = Folding()
    for device in devices:
        assert made.follows(device)
        made.take(device, folding.told(update(device)), (*(made.total or ()), device))
    return made


def test_the_sum_of_the_first_is_gone_on_with() -> None:
    answered = {name: update(name) for name in ("c", "a", "b")}
    assert folded("a", "b").of(answered) == (("a", "b"), ["c"])
    assert folded("a", "b", "c").of(answered) == (("a", "b", "c"), [])
    assert folded().of(answered) == (None, ["a", "b", "c"])


def test_all_are_folded_anew_when_one_is_missing_or_another_than_it_was_told() -> None:
    assert folded("a", "b").of({"b": update("b"), "c": update("c")}) == (None, ["b", "c"])
    assert folded("a", "c").of({name: update(name) for name in "abc"}) == (None, ["a", "b", "c"])
    assert folded("a").of({"a": update("a", weight=2.0)}) == (None, ["a"])


def test_what_does_not_come_after_all_others_cannot_be_added() -> None:
    made = folded("b")
    assert not made.follows("a")
    assert not made.follows("b")
    assert made.follows("c")
    assert made.holds(update("b"))
    assert not made.holds(update("b", weight=2.0))
    assert not made.holds(update("c"))
