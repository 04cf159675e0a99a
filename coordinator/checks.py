"""Checks of model states for finite numbers. Claims of devices are checked in `claims`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedquilt.core import UpdateError


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
