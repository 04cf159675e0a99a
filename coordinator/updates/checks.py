"""Checks of model states for finite numbers. Claims of devices are checked in `claims`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, Final

import numpy as np

from fedquilt import compression
from fedquilt.arrays import tensors
from fedquilt.core import Encoding, Update, UpdateError, UpdateSchema
from fedquilt.core.messages import has_site_bundles


@contextmanager
def name_device_in_errors(device: str) -> Iterator[None]:
    """Prefix the message of an UpdateError with the device's name, unless already included."""
    try:
        yield
    except UpdateError as error:
        said = str(error)
        if re.search(rf"(?<![\w.-]){re.escape(device)}(?![\w-])", said):
            raise
        raise UpdateError(f"{device}: {said}") from None


def require_finite_state(state: Any, devices: tuple[str, ...]) -> None:
    """Raise UpdateError if a new state contains numbers that are not finite.

    Args:
        state: State of the method, a dataclass.
        devices: Ids of the devices whose updates were aggregated, for the error message.

    Raises:
        UpdateError: If a number is not finite.
    """
    for at, value in _iterate_floats(state, ""):
        finite = np.isfinite(value).all() if isinstance(value, np.ndarray | np.generic) else math.isfinite(value)
        if not finite:
            some = ", ".join(devices[:5]) + (" ..." if len(devices) > 5 else "")
            raise UpdateError(
                f"{at} came out as numbers that are not finite, from updates of {some}: the round is not committed; "
                "run the job anew with a lower learning rate"
            )


def _iterate_floats(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, float | np.floating):
        yield at, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            yield at, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _iterate_floats(getattr(value, field.name), f"{at}.{field.name}".lstrip("."))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _iterate_floats(each, f"{at}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _iterate_floats(each, f"{at}[{index}]")


UNKNOWN_MB: Final = 1024  # that a device may send where the method does not say how much it is
LOSSY: Final = 2  # times as many bytes as the tensors have: topk with all entries, each with its place
HEADER_BYTES: Final = 1024  # of a safetensors file without tensors, more than enough
ENTRY_BYTES: Final = 300  # of a header for each tensor, besides its name
SUM_TIMES: Final = 10  # a site's sum is at most so many times as large as the tensors that a board sends
SITE_BYTES: Final = 2 << 20  # what a site's update may have besides
BOARDS_MOST: Final = 10_000  # whose updates a site may pass up


def max_bundle_bytes(expected: Mapping[str, Any], wire: Encoding) -> int:
    factor = 1 if wire.codec == "raw" else LOSSY
    held = sum(prod(each.shape) * each.dtype.itemsize for each in expected.values())
    return factor * (held + sum(ENTRY_BYTES + 2 * len(name) for name in expected)) + HEADER_BYTES


def require_manifest_fits(update: Update, expected: UpdateSchema | None, wire: Encoding, boards: int = 0) -> None:
    """Raise UpdateError if an update does not fit the running round, judged by its manifest.

    Args:
        update: The update as the device announced it.
        expected: The tensors that the method aggregates, or None if they are not known beforehand.
        wire: The encoding of the job.
        boards: The number of devices behind a site, or 0 for any other device.
    """
    whole_bytes = sum(ref.size for ref in update.bundles.values())
    if has_site_bundles(update.bundles):
        return _require_site_size(whole_bytes, expected, boards)
    if expected is None:
        if whole_bytes > UNKNOWN_MB << 20:
            raise UpdateError(f"larger than {UNKNOWN_MB} MB")
        return
    if odd := sorted(update.bundles.keys() - expected.bundles.keys()):
        raise UpdateError(f"bundle {odd[0]!r} was not asked for")
    if expected.whole and (absent := sorted(expected.bundles.keys() - update.bundles.keys())):
        raise UpdateError(f"it has no bundle {absent[0]!r}")
    for bundle, ref in update.bundles.items():
        like = expected.bundles[bundle]
        if (most := max_bundle_bytes(like, wire)) < ref.size:
            raise UpdateError(f"bundle {bundle!r} has {ref.size} bytes, and what was asked for has {most} at the most")
        if bundle in update.layouts:
            sent = tensors.specs_from_layout(update.layouts[bundle])
            if (held := sum(each.nbytes for each in sent.values())) > ref.size:
                raise UpdateError(f"bundle {bundle!r} has {ref.size} bytes, and its tensors {held}")
            _require_expected_tensors(compression.decoded_specs(wire, sent, like), like, expected.whole)


class ManifestValidator:
    """Validator of the manifests of a round. Equal manifests are checked once.

    Args:
        expected: The tensors that the method aggregates, or None if they are not known beforehand.
        wire: The encoding of the job.
    """

    def __init__(self, expected: UpdateSchema | None, wire: Encoding) -> None:
        self._expected, self._wire = expected, wire
        self._fitted: object = None  # sizes and layouts of the last update that fitted

    def manifest_problem(self, update: Update, boards: int = 0) -> str:
        """Return why an update does not fit the running round, or "" if it fits.

        `boards` is the number of devices behind a site, or 0 for any other device.
        """
        told = {name: ref.size for name, ref in update.bundles.items()}, update.layouts
        if told == self._fitted:
            return ""
        try:
            require_manifest_fits(update, self._expected, self._wire, boards)
        except UpdateError as error:
            return f"{update.device}: {error}"
        self._fitted = None if boards else told
        return ""


def _require_site_size(whole_bytes: int, expected: UpdateSchema | None, boards: int) -> None:
    if not boards:
        raise UpdateError("it is what a site sends, and the device has no right to be one")
    times = max(SUM_TIMES, min(boards, BOARDS_MOST))
    each = UNKNOWN_MB << 20
    if expected is not None:
        each = sum(max_bundle_bytes(bundle, Encoding()) for bundle in expected.bundles.values())
    if whole_bytes > (most := times * each + SITE_BYTES):
        raise UpdateError(f"it has {whole_bytes} bytes, and {boards} boards send {most} at the most")


def _require_expected_tensors(told: Mapping[str, Any], like: Mapping[str, Any], whole: bool) -> None:
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
