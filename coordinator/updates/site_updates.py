"""Format of a site's update: the partial aggregate of its devices, or their updates.

The bundles of such an update are named `site.*` and sent without the job's codec, because the site has decoded them. A
bundle of updates has a table of devices, and tensors named by device, bundle and tensor. One update is divided into
several such bundles, so that manifests and tensor headers stay small enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from fedquilt.arrays import exact_sums, tensors
from fedquilt.core import (
    UNDECODABLE,
    Amount,
    DeviceUpdate,
    Label,
    Metrics,
    Name,
    StoreError,
    Tensors,
    UpdateError,
    tensor_shapes,
)
from fedquilt.core.messages import SITE_BUNDLES

SUM: Final = "site.sum"  # bundle with an accumulator: its arrays by number, and where in it they belong
FORM: Final = "form"  # tensor of that, uint8 (n,): as of `fedquilt.arrays.tensors.split_state`
TABLE: Final = "boards"  # tensor of each bundle, uint8 (n,): JSON of a list of `SiteUpdatePart`
BUNDLE_BYTES: Final = 32 << 20  # of tensors in one bundle of updates; the last update in it may be beyond
BUNDLE_TENSORS: Final = 8000  # likewise


class SiteUpdatePart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a site's update for one device. With a partial aggregate, only the name is set."""

    device: Name
    weight: Amount = 0.0
    metrics: Metrics = {}
    bundles: tuple[Label, ...] = ()


def encode_parts(parts: Sequence[SiteUpdatePart]) -> np.ndarray:
    """Return the parts as a tensor of JSON bytes, uint8 (n,)."""
    return np.frombuffer(msgspec.json.encode(parts), np.uint8)


def bundle_from_aggregate(arrays: Tensors, form: str, boards: Sequence[str]) -> dict[str, Any]:
    """Return the bundle of a partial aggregate of these devices. Arrays may stay on disk."""
    told = {
        FORM: np.frombuffer(form.encode(), np.uint8),
        TABLE: encode_parts([SiteUpdatePart(each) for each in boards]),
    }
    return {**tensor_shapes(arrays), **told}


def aggregate_from_bundle(bundle: Tensors, kind: type) -> Any:
    """Return the partial aggregate in a site's bundle. Arrays on disk are read when they are used.

    Raises:
        UpdateError: If the bundle contains no partial aggregate of this type.
    """
    form, there = bundle.get(FORM), tensor_shapes(bundle)
    if form is None or form.dtype != np.uint8:
        raise UpdateError("a site's sum does not say what it is of: the site has to be of this version of fedquilt")
    slots = {name: np.empty(0) for name in there if name not in (FORM, TABLE)}
    names = {id(slot): name for name, slot in slots.items()}
    try:
        found: Any = tensors.state_from_parts(slots, {"state": form.tobytes().decode()}, kind)
    except (StoreError, UnicodeDecodeError) as error:
        raise UpdateError(f"a site's {kind.__name__} cannot be read: {error}") from None
    return exact_sums.map_limbs(found, lambda slot: there[names[id(slot)]], lambda slot: bundle[names[id(slot)]])


class _SiteBundle(Mapping[str, np.ndarray]):
    """Bundle of one device: the tensors of a site's update with the device's name prefix, without this prefix."""

    __slots__ = ("_before", "_names", "_whole")

    def __init__(self, whole: Tensors, before: str, names: Sequence[str]) -> None:
        self._whole, self._before, self._names = whole, before, names

    def __getitem__(self, name: str) -> np.ndarray:
        return self._whole[self._before + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._before) for name in self._names)

    def __len__(self) -> int:
        return len(self._names)


def bundle_updates(given: Sequence[DeviceUpdate]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the named bundles of a site's update, at least one, with these updates in order."""
    number, size, parts, held = 0, 0, list[SiteUpdatePart](), dict[str, np.ndarray]()
    for update in given:
        for place, bundle in enumerate(update.bundles.values()):
            for name, array in bundle.items():
                held[f"{len(parts)}/{place}/{name}"] = array
                size += array.nbytes
        parts.append(SiteUpdatePart(update.device, update.weight, dict(update.metrics), tuple(update.bundles)))
        if len(held) >= BUNDLE_TENSORS or size >= BUNDLE_BYTES:
            yield f"{SITE_BUNDLES}{number}", {TABLE: encode_parts(parts), **held}
            number, size, parts, held = number + 1, 0, [], {}
    if parts or not number:
        yield f"{SITE_BUNDLES}{number}", {TABLE: encode_parts(parts), **held}


def parts_of_site(update: DeviceUpdate) -> list[SiteUpdatePart]:
    """Return the parts of a site's update, sorted by device.

    Raises:
        UpdateError: If the table of devices is missing, names a device twice, or contains a weight that is not finite.
    """
    seen, found = set[str](), []
    for bundle in update.bundles.values():
        for part in _decode_parts(bundle):
            if part.device in seen:
                raise UpdateError(f"it has {part.device} twice")
            seen.add(part.device)
            found.append(part)
            if not math.isfinite(part.weight):
                raise UpdateError(f"{part.device}: its weight is not a finite number")
            if len(set(part.bundles)) < len(part.bundles):
                raise UpdateError(f"{part.device} has two bundles of one name")
    return sorted(found, key=lambda part: part.device)


def split_site_update(update: DeviceUpdate) -> list[DeviceUpdate]:
    """Return the updates inside a site's update. Tensors are read when they are used.

    Raises:
        UpdateError: If the update contains anything else, or its weight is not the sum of their weights.
    """
    found = []
    for name, bundle in update.bundles.items():
        if not name.startswith(SITE_BUNDLES) or name == SUM:
            raise UpdateError(f"bundle {name!r} stands beside updates that are passed up")
        found += _split_bundle(update.round, bundle)
    if (weight := math.fsum(each.weight for each in found)) != update.weight:
        raise UpdateError(f"the updates of {len(found)} boards weigh {weight:g}, in one that weighs {update.weight:g}")
    return found


def _split_bundle(round: int, bundle: Tensors) -> list[DeviceUpdate]:
    parts = _decode_parts(bundle)
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
        DeviceUpdate(
            part.device,
            round,
            part.weight,
            part.metrics,
            {
                each: _SiteBundle(bundle, f"{at}/{place}/", names[f"{at}/{place}/"])
                for place, each in enumerate(part.bundles)
            },
        )
        for at, part in enumerate(parts)
    ]


def _decode_parts(bundle: Tensors) -> list[SiteUpdatePart]:
    given = bundle.get(TABLE)
    if given is None or given.dtype != np.uint8 or given.ndim != 1:
        raise UpdateError(f"it has no table of its boards ({TABLE!r}): the site has to be of this version of fedquilt")
    try:
        return msgspec.json.decode(given.tobytes(), type=list[SiteUpdatePart])
    except UNDECODABLE as error:
        raise UpdateError(f"its table of boards cannot be read: {error}") from None
