"""Compatibility of a job's data and network, checked on headers and labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedquilt import metrics, plugins
from fedquilt.core import DataError
from fedquilt.data import examples, inputs
from fedquilt.data.readers import ExampleReader
from fedquilt.data.readers.base import describe_class_problem
from fedquilt.data.spec import DataSpec

SCALE_SAMPLE_ROWS = 10_000  # rows by which the scales of features are compared
CHOICE_HINT = "choose other data, or another network and prepare again"


def open_compatible_data(meta: Mapping[str, Any], spec: DataSpec) -> ExampleReader:
    """Return a reader of a [data] table's examples if they fit the network of a bundle.

    Only headers and labels are read. The input shape of an imported network is not checked. Raise DataError if labels
    or shapes do not fit, and JobError if a module of the network has changed since `fedquilt prepare`.
    """
    plugins.require_unchanged_modules(meta.get("plugins") or {})
    reader = examples.open_split(spec)
    _require_label_variety(reader, spec)
    network: Mapping[str, Any] = meta.get("network", {})
    while isinstance(network.get("of"), Mapping):  # a network of exits is made of another network
        network = {**network["of"], **{key: network[key] for key in ("input", "task") if key in network}}
    name = f"network {network.get('name', '')!r}"
    task = metrics.task_from_network(network)
    if task != spec.task:
        raise DataError(
            f"{spec.source_name}: [data] task is {spec.task!r}, but {name} was prepared for {task!r}: set the same "
            "`task` in [data] and [model], and run `fedquilt prepare` again"
        )
    if "donors" in meta:
        _require_label_range(reader, spec, len(meta["labels"]), "but the job has labels for")
    elif isinstance(outputs := meta.get("outputs", network.get("classes")), int):
        if task == "classes":
            _require_label_range(reader, spec, outputs, f"but {name} predicts")
        else:
            _require_label_width(reader, spec, outputs, name)
    if problem := _describe_shape_problem(meta, network, name, reader):
        raise DataError(f"{spec.source_name}: {problem}; {CHOICE_HINT}")
    return reader


def data_warnings(meta: Mapping[str, Any], reader: ExampleReader, spec: DataSpec) -> list[str]:
    """Return warnings on data that would probably train badly, each with a fix."""
    warnings = []
    if spec.task == "classes" and not spec.sources and len(reader.y) and reader.y.min() == 1:
        problem = describe_class_problem(reader.y, int(reader.y.max()), is_table=bool(reader.features))
        warnings.append(f"{spec.source_name}: no example has class 0; {problem}")
    network: Mapping[str, Any] = meta.get("network", {})
    if len(reader.shape) == 1 and not (network.get("input") or meta.get("input")):
        rows = np.linspace(0, len(reader.y) - 1, min(len(reader.y), SCALE_SAMPLE_ROWS)).astype(np.int64)
        if scale_problem := inputs.describe_unequal_scales(reader.take(rows), reader.features):
            warnings.append(f"{spec.source_name}: {scale_problem}: set [input] standardise = true, and prepare again")
    return warnings


def _require_label_variety(reader: ExampleReader, spec: DataSpec) -> None:
    if spec.split != "train" or len(reader.y) < 2 or (reader.y != reader.y[0]).any():
        return
    label = ", ".join(f"{value:g}" for value in np.ravel(reader.y[0]))
    label_name = f"class {label}" if spec.task == "classes" else f"label {label}"
    raise DataError(
        f"{spec.source_name}: all {len(reader.y)} training examples have {label_name}, so there is nothing to learn: "
        "add examples with other labels"
    )


def _describe_shape_problem(
    meta: Mapping[str, Any], network: Mapping[str, Any], name: str, reader: ExampleReader
) -> str:
    shape, kind, input_table = reader.shape, network.get("name"), network.get("input") or meta.get("input") or {}
    actual = f"examples have shape {shape}{_format_features(reader)}"
    if "channels" in input_table:
        if inputs.is_image_shape(shape):
            return ""
        expected = "(height, width) or (height, width, 1 or 3)"
        return f"examples have shape {shape}, but the job's [input] is for images of shape {expected}"
    features = max((len(input_table.get(key, ())) for key in ("mean", "std")), default=0)
    if features > 1 and shape[-1:] != (features,):
        return f"{actual}, but the job's [input] standardises {features} features"
    if "donors" in meta:
        donor, donor_table = next(iter(meta["donors"].items()))
        donor_shape = tuple(meta["blocks"][donor_table["blocks"][0]]["in_shape"])
        return f"{actual}, but donor {donor!r} takes shape {donor_shape}" if shape != donor_shape else ""
    if kind in ("mlp", "rezero") and (size := math.prod(shape)) != network["inputs"]:
        values = f"have {size} values each{_format_features(reader)}"
        return f"examples of shape {shape} {values}, but {name} takes {network['inputs']}"
    if kind in ("conv1d", "gru") and shape != (network["steps"], network["channels"]):
        return f"{actual}, but {name} takes {network['steps']} steps of {network['channels']} channels"
    if kind == "transformer" and shape != (network["length"],):
        return f"{actual}, but {name} takes {network['length']} tokens"
    if kind == "transformer" and reader.tokens > network["vocabulary"]:
        return f"the vocabulary has {reader.tokens} tokens, but {name} was built for {network['vocabulary']}"
    return ""


def _format_features(reader: ExampleReader, limit: int = 8) -> str:
    if not reader.features:
        return ""
    rest = f" and {len(reader.features) - limit} more" if len(reader.features) > limit else ""
    return f" ({', '.join(reader.features[:limit])}{rest})"


def _require_label_width(reader: ExampleReader, spec: DataSpec, outputs: int, name: str) -> None:
    if reader.y.shape[1] != outputs:
        noun = "numbers" if spec.task == "regression" else "labels"
        raise DataError(
            f"{spec.source_name}: each example has {reader.y.shape[1]} {noun}, but {name} predicts {outputs}; "
            f"{CHOICE_HINT}"
        )


def _require_label_range(reader: ExampleReader, spec: DataSpec, classes: int, expectation: str) -> None:
    if problem := describe_class_problem(reader.y, classes, is_table=bool(reader.features)):
        raise DataError(
            f"{spec.source_name}: labels run from {reader.y.min()} to {reader.y.max()}, {expectation} "
            f"{classes} classes (0 to {classes - 1}); {problem}"
        )
