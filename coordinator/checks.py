"""Finite numbers in every state, and the device named in errors. `claims` checks what a device claims."""

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
def named(device: str) -> Iterator[None]:
    """Prefix the message of an UpdateError with the device's name, unless it is named already."""
    try:
        yield
    except UpdateError as error:
        said = str(error)
        if re.search(rf"(?<![\w.-]){re.escape(device)}(?![\w-])", said):
            raise
        raise UpdateError(f"{device}: {said}") from None


def require_state(state: Any, devices: tuple[str, ...]) -> None:
    """Check a new state for finite numbers before it is stored.

    Args:
        state: dataclass of the method.
        devices: ids of those whose updates it was made of.

    Raises:
        UpdateError: a number is not finite; says where.
    """
    for at, value in _numbers(state, ""):
        finite = np.isfinite(value).all() if isinstance(value, np.ndarray | np.generic) else math.isfinite(value)
        if not finite:
            some = ", ".join(devices[:5]) + (" ..." if len(devices) > 5 else "")
            raise UpdateError(
                f"{at} came out as numbers that are not finite, from updates of {some}: the round is not committed; "
                "run the job anew with a lower learning rate"
            )


def _numbers(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Yield every floating-point value of a state, arrays whole, with its name."""
    if isinstance(value, float | np.floating):
        yield at, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            yield at, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), f"{at}.{field.name}".lstrip("."))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, f"{at}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _numbers(each, f"{at}[{index}]")
