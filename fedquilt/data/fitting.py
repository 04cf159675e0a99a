"""Whether a job's data fit its network, as far as headers and labels tell: found before boards find it one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedquilt import metrics, plugins
from fedquilt.core import DataError
from fedquilt.data import examples
from fedquilt.data.readers import Reader
from fedquilt.data.spec import DataSpec

MEND = "give the job data that fit, or another network and a new bundle"


def require_fit(meta: Mapping[str, Any], spec: DataSpec) -> Reader:
    """Open the data of a [data] table and compare them with what a bundle holds. No inputs are read.

    Of a network from outside, what it tells was seen when it was prepared; what it takes, boards see.

    Args:
        meta: of the bundle, as `fedquilt prepare` writes it.

    Returns:
        The data as they were opened.

    Raises:
        JobError: the network is of another package, which has another content here.
        DataError: the data cannot be opened, their inputs have a shape that the network does not take, or their labels
            are not what it predicts; names both sides.
    """
    plugins.require_current(meta.get("plugins") or {})
    reader = examples.open_(spec)
    network: Mapping[str, Any] = meta.get("network", {})
    while isinstance(network.get("of"), Mapping):  # a network of exits is one of another network
        network = {**network["of"], **{key: network[key] for key in ("input", "task") if key in network}}
    name = f"network {network.get('name', '')!r}"
    task = metrics.task_of(network)
    if task != spec.task:
        raise DataError(
            f"{spec.where}: [data] task is {spec.task!r}, and {name} was prepared for {task!r}: set `task` in [data] "
            "and [model] alike, and prepare anew"
        )
    if "donors" in meta:
        _require_labels(reader, spec, len(meta["labels"]), "the job has labels for")
    elif isinstance(outputs := meta.get("outputs", network.get("classes")), int):
        if task == "classes":
            _require_labels(reader, spec, outputs, f"{name} predicts")
        else:
            _require_outputs(reader, spec, outputs, name)
    wanted = network.get("input") or meta.get("input") or {}
    if "channels" in wanted:
        if not _is_image(reader.shape):
            raise DataError(
                f"{spec.where}: examples have shape {reader.shape}, and the job's input are images: (height, width) or "
                f"(height, width, 1 or 3) are wanted; {MEND}"
            )
        return reader
    features = max((len(wanted.get(key, ())) for key in ("mean", "std")), default=0)
    if features > 1 and reader.shape[-1:] != (features,):
        raise DataError(
            f"{spec.where}: examples of shape {reader.shape}{_named(reader)}, and the job's [input] standardises "
            f"{features} features; {MEND}"
        )
    if "donors" in meta:
        _require_series(reader, spec, meta)
    _require_shape(reader, spec, network, name)
    return reader


def _require_series(reader: Reader, spec: DataSpec, meta: Mapping[str, Any]) -> None:
    """Raises DataError unless examples have the shape that donors of time series take."""
    donor, facts = next(iter(meta["donors"].items()))
    wanted = tuple(meta["blocks"][facts["blocks"][0]]["in_shape"])
    if reader.shape != wanted:
        raise DataError(
            f"{spec.where}: examples of shape {reader.shape}{_named(reader)}, donor {donor!r} takes {wanted}; {MEND}"
        )


def _require_shape(reader: Reader, spec: DataSpec, network: Mapping[str, Any], name: str) -> None:
    """Raises DataError unless examples have the shape that the network's table names."""
    shape, kind = reader.shape, network.get("name")
    if kind in ("mlp", "rezero") and math.prod(shape) != network["inputs"]:
        raise DataError(
            f"{spec.where}: examples of shape {shape} hold {math.prod(shape)} values each{_named(reader)}, {name} "
            f"takes {network['inputs']}; {MEND}"
        )
    if kind in ("conv1d", "gru") and shape != (network["steps"], network["channels"]):
        raise DataError(
            f"{spec.where}: examples of shape {shape}{_named(reader)}, {name} takes {network['steps']} steps of "
            f"{network['channels']} channels; {MEND}"
        )
    if kind == "transformer":
        if shape != (network["length"],):
            raise DataError(f"{spec.where}: examples of shape {shape}, {name} takes {network['length']} tokens; {MEND}")
        if reader.tokens > network["vocabulary"]:
            raise DataError(
                f"{spec.where}: the vocabulary has {reader.tokens} tokens, {name} knows {network['vocabulary']}; {MEND}"
            )


def _named(reader: Reader, most: int = 8) -> str:
    """The features' names in brackets; nothing where they have none."""
    if not reader.features:
        return ""
    more = f" and {len(reader.features) - most} more" if len(reader.features) > most else ""
    return f" ({', '.join(reader.features[:most])}{more})"


def _require_outputs(reader: Reader, spec: DataSpec, outputs: int, name: str) -> None:
    if reader.y.shape[1] != outputs:
        what = "numbers" if spec.task == "regression" else "labels"
        raise DataError(f"{spec.where}: each example has {reader.y.shape[1]} {what}, {name} predicts {outputs}; {MEND}")


def _require_labels(reader: Reader, spec: DataSpec, classes: int, who: str) -> None:
    low, high = int(reader.y.min(initial=0)), int(reader.y.max(initial=0))
    if low < 0 or high >= classes:
        raise DataError(
            f"{spec.where}: labels run from {low} to {high}, {who} {classes} classes (0 to {classes - 1}); {MEND}"
        )


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
