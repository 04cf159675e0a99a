"""Whether a job's data fit its network, as far as headers and labels tell: found before boards find it one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedquilt.core import DataError
from fedquilt.data import examples
from fedquilt.data.readers import Reader
from fedquilt.data.spec import DataSpec

MEND = "give the job data that fit, or another network and a new bundle"


def require_fit(meta: Mapping[str, Any], spec: DataSpec) -> None:
    """Open the data of a [data] table and compare them with what a bundle holds. No inputs are read.

    A network of a user's own may take and tell anything: boards see what it makes of the data.

    Args:
        meta: of the bundle, as `fedquilt prepare` writes it.

    Raises:
        DataError: the data cannot be opened, their inputs have a shape that the network does not take, or a label is
            none of its classes; names both sides.
    """
    reader = examples.open_(spec)
    network: Mapping[str, Any] = meta.get("network", {})
    while isinstance(network.get("of"), Mapping):  # a network of exits is one of another network
        network = {**network["of"], **({"input": network["input"]} if "input" in network else {})}
    name = f"network {network.get('name', '')!r}"
    if "donors" in meta:
        _require_labels(reader, spec, len(meta["labels"]), "the job has labels for")
    elif isinstance(network.get("classes"), int):
        _require_labels(reader, spec, network["classes"], f"{name} tells")
    if network.get("input") or meta.get("input"):
        if not _is_image(reader.shape):
            raise DataError(
                f"{spec.where}: examples have shape {reader.shape}, and the job's input are images: (height, width) or "
                f"(height, width, 1 or 3) are wanted; {MEND}"
            )
    elif network.get("name") == "mlp" and math.prod(reader.shape) != network["inputs"]:
        raise DataError(
            f"{spec.where}: examples of shape {reader.shape} hold {math.prod(reader.shape)} values each, {name} takes "
            f"{network['inputs']}; {MEND}"
        )


def _require_labels(reader: Reader, spec: DataSpec, classes: int, who: str) -> None:
    low, high = int(reader.y.min(initial=0)), int(reader.y.max(initial=0))
    if low < 0 or high >= classes:
        raise DataError(
            f"{spec.where}: labels run from {low} to {high}, {who} {classes} classes (0 to {classes - 1}); {MEND}"
        )


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
