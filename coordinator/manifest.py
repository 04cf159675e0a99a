"""Whether an update can be folded, from its manifest alone: before a byte of it is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from fedquilt import compression, tensors
from fedquilt.core import Encoding, Expected, Update, UpdateError
from fedquilt.core.rights import has_site_bundles

UNKNOWN_MB: Final = 1024  # that a device may send where neither the job nor the method says how much it is
LOSSY: Final = 2  # times as many bytes as the tensors have: topk with all entries, each with its place
HEADER_BYTES: Final = 1024  # of a safetensors file without tensors, more than enough
ENTRY_BYTES: Final = 300  # of a header for each tensor, besides its name
SUM_TIMES: Final = 10  # a site's sum is at most so many times as large as the tensors that a board sends
SITE_BYTES: Final = 2 << 20  # what a site's update may have besides
BOARDS_MOST: Final = 10_000  # whose updates a site may pass up


def most_bytes(expected: Mapping[str, Any], wire: Encoding) -> int:
    """What a bundle of these tensors takes at the most, in the job's codec."""
    factor = 1 if wire.codec == "raw" else LOSSY
    held = sum(prod(each.shape) * each.dtype.itemsize for each in expected.values())
    return factor * (held + sum(ENTRY_BYTES + 2 * len(name) for name in expected)) + HEADER_BYTES


def require_fit(
    update: Update, expected: Expected | None, wire: Encoding, most_mb: int | None, boards: int = 0
) -> None:
    """Check an update's bundles, sizes, and tensors as far as it tells them.

    Args:
        update: as the device announced it.
        expected: tensors that the method folds; None: the method does not know them beforehand.
        wire: codec of the job.
        most_mb: the job's `max_update_mb`; None: it follows from what is expected.
        boards: of the device, if it is a site.

    Raises:
        UpdateError: it cannot be folded; says what differs.
    """
    whole_bytes = sum(ref.size for ref in update.bundles.values())
    if most_mb is None and expected is None:
        most_mb = UNKNOWN_MB
    if has_site_bundles(update.bundles):
        return _require_site_size(whole_bytes, expected, most_mb, boards)
    if most_mb is not None and whole_bytes > most_mb << 20:
        raise UpdateError(f"larger than max_update_mb = {most_mb}")
    if expected is None:
        return
    if odd := sorted(update.bundles.keys() - expected.bundles.keys()):
        raise UpdateError(f"bundle {odd[0]!r} was not asked for")
    if expected.whole and (absent := sorted(expected.bundles.keys() - update.bundles.keys())):
        raise UpdateError(f"it has no bundle {absent[0]!r}")
    for bundle, ref in update.bundles.items():
        like = expected.bundles[bundle]
        if (most := most_bytes(like, wire)) < ref.size:
            raise UpdateError(f"bundle {bundle!r} has {ref.size} bytes, and what was asked for has {most} at the most")
        if bundle in update.layouts:
            sent = tensors.shaped(update.layouts[bundle])
            if (held := sum(each.nbytes for each in sent.values())) > ref.size:
                raise UpdateError(f"bundle {bundle!r} has {ref.size} bytes, and its tensors {held}")
            _require_tensors(compression.told(wire, sent, like), like, expected.whole)


class Manifests:
    """Manifests of a round's updates: what is alike in many of them is checked once.

    Args:
        expected: as for `require_fit`, like `wire` and `most_mb`.
        wire: codec of the job.
        most_mb: the job's `max_update_mb`.
    """

    def __init__(self, expected: Expected | None, wire: Encoding, most_mb: int | None) -> None:
        self._expected, self._wire, self._most_mb = expected, wire, most_mb
        self._fitted: object = None  # sizes and layouts of the last update that fitted

    def unfit(self, update: Update, boards: int = 0) -> str:
        """Why an update cannot be folded, as its manifest says; "": it can. `boards`: as of `require_fit`."""
        told = {name: ref.size for name, ref in update.bundles.items()}, update.layouts
        if told == self._fitted:
            return ""
        try:
            require_fit(update, self._expected, self._wire, self._most_mb, boards)
        except UpdateError as error:
            return f"{update.device}: {error}"
        self._fitted = None if boards else told
        return ""


def _require_site_size(whole_bytes: int, expected: Expected | None, most_mb: int | None, boards: int) -> None:
    """Raise UpdateError if the device is no site, or its update is larger than its boards can make it."""
    if not boards:
        raise UpdateError("it is what a site sends, and the device has no right to be one")
    times = max(SUM_TIMES, min(boards, BOARDS_MOST))
    each = most_mb << 20 if most_mb is not None else 0
    if most_mb is None and expected is not None:
        each = sum(most_bytes(bundle, Encoding()) for bundle in expected.bundles.values())
    if whole_bytes > (most := times * each + SITE_BYTES):
        raise UpdateError(f"it has {whole_bytes} bytes, and {boards} boards send {most} at the most")


def _require_tensors(told: Mapping[str, Any], like: Mapping[str, Any], whole: bool) -> None:
    odd = sorted(told.keys() ^ like.keys() if whole else told.keys() - like.keys())
    if odd:
        raise UpdateError(f"tensor names differ: {', '.join(odd[:5])}{' ...' if len(odd) > 5 else ''}")
    for name, each in told.items():
        wanted = like[name]
        if each.dtype != wanted.dtype:
            raise UpdateError(f"tensor {name!r} is {each.dtype}, expected {wanted.dtype}")
        if whole and each.shape != wanted.shape:
            raise UpdateError(f"tensor {name!r} has shape {each.shape}, expected {wanted.shape}")
        if prod(each.shape) > prod(wanted.shape):
            raise UpdateError(f"tensor {name!r} has shape {each.shape}, expected {wanted.shape} or a part of it")
