"""What a site's update holds: whose it is, and a sum of its boards' updates or, where none can stand for them, all.

The bundles of such an update are named `site.…`, and travel raw, whatever the job's codec: the site has decoded them.
One of updates has a table of its boards, and their tensors named by board, bundle and tensor: several such bundles make
one update, so that none is too large for a manifest, or has a header too large to be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt import exact, tensors
from fedquilt.core import (
    UNDECODABLE,
    Amount,
    Contribution,
    Label,
    Metrics,
    Name,
    StoreError,
    Tensors,
    UpdateError,
    shapes,
)
from fedquilt.core.rights import SITE_BUNDLES

SUM: Final = "site.sum"  # bundle with an accumulator: its arrays by number, and where in it they belong
FORM: Final = "form"  # tensor of that, uint8 (n,): as of `fedquilt.tensors.parts`
TABLE: Final = "boards"  # tensor of each bundle, uint8 (n,): JSON of a list of `Part`
BUNDLE_BYTES: Final = 32 << 20  # of tensors in one bundle of updates; the last update in it may be beyond
BUNDLE_TENSORS: Final = 8000  # likewise


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """A board in a site's update: its name alone beside a sum, else what it has sent beside its tensors."""

    device: Name
    weight: Amount = 0.0
    metrics: Metrics = {}
    bundles: tuple[Label, ...] = ()


def table(parts: Sequence[Part]) -> np.ndarray:
    """Boards as a tensor, uint8 (n,)."""
    return np.frombuffer(msgspec.json.encode(parts), np.uint8)


def summed(arrays: Tensors, form: str, boards: Sequence[str]) -> dict[str, Any]:
    """Bundle of an accumulator of these boards' updates, whose arrays may lie on the disk."""
    told = {FORM: np.frombuffer(form.encode(), np.uint8), TABLE: table([Part(each) for each in boards])}
    return {**shapes(arrays), **told}


def total(bundle: Tensors, kind: type) -> Any:
    """The accumulator of a site's update. Its sums are those of the bundle, read where they are used if on the disk.

    Raises:
        UpdateError: it is none of this type.
    """
    form, there = bundle.get(FORM), shapes(bundle)
    if form is None or form.dtype != np.uint8:
        raise UpdateError("a site's sum does not say what it is of: the site has to be of this version of fedquilt")
    slots = {name: np.empty(0) for name in there if name not in (FORM, TABLE)}
    names = {id(slot): name for name, slot in slots.items()}
    try:
        found: Any = tensors.whole(slots, {"state": form.tobytes().decode()}, kind)
    except (StoreError, UnicodeDecodeError) as error:
        raise UpdateError(f"a site's {kind.__name__} cannot be read: {error}") from None
    return exact.laid_out(found, lambda slot: there[names[id(slot)]], lambda slot: bundle[names[id(slot)]])


class _Bundle(Mapping[str, np.ndarray]):
    """One bundle of one board: tensors of a mapping whose names begin alike, without that. Small: there are many."""

    __slots__ = ("_before", "_names", "_whole")

    def __init__(self, whole: Tensors, before: str, names: Sequence[str]) -> None:
        self._whole, self._before, self._names = whole, before, names

    def __getitem__(self, name: str) -> np.ndarray:
        return self._whole[self._before + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._before) for name in self._names)

    def __len__(self) -> int:
        return len(self._names)


def bundled(given: Sequence[Contribution]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Bundles of an update that passes these updates up: one at least, whose table is empty if there are none."""
    number, size, parts, held = 0, 0, list[Part](), dict[str, np.ndarray]()
    for update in given:
        for place, bundle in enumerate(update.bundles.values()):
            for name, array in bundle.items():
                held[f"{len(parts)}/{place}/{name}"] = array
                size += array.nbytes
        parts.append(Part(update.device, update.weight, dict(update.metrics), tuple(update.bundles)))
        if len(held) >= BUNDLE_TENSORS or size >= BUNDLE_BYTES:
            yield f"{SITE_BUNDLES}{number}", {TABLE: table(parts), **held}
            number, size, parts, held = number + 1, 0, [], {}
    if parts or not number:
        yield f"{SITE_BUNDLES}{number}", {TABLE: table(parts), **held}


def parts_of_site(update: Contribution) -> list[Part]:
    """Return the parts of a site's update, one for each board, sorted by the board's name.

    Raises:
        UpdateError: it does not name them, one of them is named twice, or a number of it is not finite.
    """
    seen, found = set[str](), []
    for bundle in update.bundles.values():
        for part in _parts(bundle):
            if part.device in seen:
                raise UpdateError(f"it has {part.device} twice")
            seen.add(part.device)
            found.append(part)
            if not math.isfinite(part.weight):
                raise UpdateError(f"{part.device}: its weight is not a finite number")
            if len(set(part.bundles)) < len(part.bundles):
                raise UpdateError(f"{part.device} has two bundles of one name")
    return sorted(found, key=lambda part: part.device)


def contributions(update: Contribution) -> list[Contribution]:
    """The updates that a site's update passes up, in its own order; tensors are read when they are asked for.

    Raises:
        UpdateError: it holds something else, or weighs something else than they do.
    """
    found = []
    for name, bundle in update.bundles.items():
        if not name.startswith(SITE_BUNDLES) or name == SUM:
            raise UpdateError(f"bundle {name!r} stands beside updates that are passed up")
        found += _cut(update.round, bundle)
    if (weight := math.fsum(each.weight for each in found)) != update.weight:
        raise UpdateError(f"the updates of {len(found)} boards weigh {weight:g}, in one that weighs {update.weight:g}")
    return found


def _cut(round: int, bundle: Tensors) -> list[Contribution]:
    parts = _parts(bundle)
    names: dict[str, list[str]] = {
        f"{at}/{place}/": [] for at, part in enumerate(parts) for place in range(len(part.bundles))
    }
    for key in bundle:
        before = "/".join(key.split("/", 2)[:2]) + "/"
        if before in names and len(key) > len(before):
            names[before].append(key)
        elif key != TABLE:
            raise UpdateError(f"tensor {key[:80]!r} belongs to none of its boards")
    return [
        Contribution(
            part.device,
            round,
            part.weight,
            part.metrics,
            {
                each: _Bundle(bundle, f"{at}/{place}/", names[f"{at}/{place}/"])
                for place, each in enumerate(part.bundles)
            },
        )
        for at, part in enumerate(parts)
    ]


def _parts(bundle: Tensors) -> list[Part]:
    given = bundle.get(TABLE)
    if given is None or given.dtype != np.uint8 or given.ndim != 1:
        raise UpdateError(f"it has no table of its boards ({TABLE!r}): the site has to be of this version of fedquilt")
    try:
        return msgspec.json.decode(given.tobytes(), type=list[Part])
    except UNDECODABLE as error:
        raise UpdateError(f"its table of boards cannot be read: {error}") from None
