"""Metadata and inputs of an exported network. Imports numpy but no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fedquilt import metrics
from fedquilt.core import DECODE_ERRORS, DataError, JobError, ModelError, TaskKind
from fedquilt.data import inputs, reading_settings
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines import training
from fedquilt.formats import toml
from fedquilt.onnx import graph_check
from fedquilt.onnx.graph_check import Shape


class Scale(NamedTuple):
    mean: tuple[float, ...]
    std: tuple[float, ...]


class ExportedModel(NamedTuple):
    """Metadata of a network written by `fedquilt model export`. Fields of other files are None.

    The graph standardises its inputs by `scale`. The tables describe only what is done before the graph.
    """

    input: Mapping[str, Any] | None  # [input] table of a stitched network
    network: Mapping[str, Any] | None  # table of a trained network
    labels: tuple[str, ...] | None  # class names of a stitched network
    reading: Mapping[str, Any]  # settings for reading files in training (fedquilt.data.reading_settings)
    scale: Scale | None = None  # None if the graph does not standardise

    @property
    def task(self) -> TaskKind | None:
        if self.network is not None:
            return metrics.task_from_network(self.network)
        return None if self.labels is None else "classes"

    def prepare_inputs(self, x: np.ndarray) -> np.ndarray:
        """Return the graph's inputs (n, ...) in float32 for stored examples (n, ...)."""
        if self.input is not None:
            return inputs.prepare_inputs(x, self.input)
        network = self.network or {}
        prepared = training.network_inputs(x, network)
        flat = prepared.reshape(len(prepared), -1)  # the graph takes images if the table declares them
        return (
            flat if flat.shape[1] == network.get("inputs") and "channels" not in network.get("input", {}) else prepared
        )

    def standardise(self, prepared: np.ndarray) -> np.ndarray:
        """Standardise prepared inputs as the graph does itself."""
        if self.scale is None:
            return prepared
        axes = (-1, 1, 1) if prepared.ndim == 4 else (-1,)
        mean, std = (np.array(values, np.float32).reshape(axes) for values in self.scale)
        return (prepared - mean) / std


def read_metadata(metadata: Mapping[str, str]) -> ExportedModel:
    """Return the metadata that `fedquilt model export` wrote into a graph, or raise ModelError if damaged."""
    tables = {name: _decode_entry(metadata, name, dict) for name in ("input", "network", "reading", "scale")}
    labels = _decode_entry(metadata, "labels", list)
    if tables["input"] is not None:
        _require_input(tables["input"], "input")
    if tables["network"] is not None:
        _require_network(tables["network"])
    settings = tables["reading"] or {}
    _require_reading_settings(settings)
    return ExportedModel(
        tables["input"],
        tables["network"],
        None if labels is None else tuple(map(str, labels)),
        settings,
        None if tables["scale"] is None else _convert_scale(tables["scale"]),
    )


def output_names(model: ExportedModel, reading: DataSpec, outputs: int | None) -> tuple[str, ...]:
    """Return the names of classes, labels or numbers that the network predicts, or () if unknown.

    Args:
        model: The metadata.
        reading: The metadata's reading settings as a [data] table.
        outputs: Number of outputs that the graph declares, or None.
    """
    if model.task in ("regression", "labels"):
        return reading_settings.target_names(reading, outputs) if outputs else ()
    return model.labels or reading.labels or tuple(map(str, range(outputs or 0)))


def _convert_scale(table: Mapping[str, Any]) -> Scale:
    try:
        return msgspec.convert([table.get("mean"), table.get("std")], Scale)
    except msgspec.ValidationError as error:
        raise _metadata_error("scale", error) from None


def _require_network(network: Mapping[str, Any]) -> None:
    if "input" in network:
        _require_input(network["input"], "network")
    if network.get("name") == "transformer" and not isinstance(network.get("vocabulary"), int):
        raise _metadata_error("network", "the transformer's vocabulary size is missing")
    try:
        metrics.task_from_network(network)
    except JobError as error:
        raise _metadata_error("network", error) from None


def _require_input(table: Any, name: str) -> None:
    try:
        settings = toml.convert_table(table, dict[str, Any], "[input]")
        # The exported graph contains the standardisation.
        inputs.parse_input_table({key: value for key, value in settings.items() if key != "standardise"})
    except JobError as error:
        raise _metadata_error(name, error) from None


def _require_reading_settings(settings: Mapping[str, Any]) -> None:
    if odd := sorted(settings.keys() - reading_settings.READING_KEYS):
        raise _metadata_error("reading", f"unknown key {odd[0]!r}")
    try:
        reading_settings.spec_with_settings(settings, {"path": "."})
    except JobError as error:
        raise _metadata_error("reading", error) from None


def _metadata_error(name: str, reason: object = None) -> ModelError:
    detail = "" if reason is None else f" ({reason})"
    return ModelError(
        f"metadata {name!r} of the model are damaged{detail}: export it again with `fedquilt model export`"
    )


def require_shape(inputs: np.ndarray, expected_shape: Shape) -> None:
    actual_shape = inputs.shape[1:]
    if not graph_check.fits_shape(actual_shape, expected_shape):
        expected_text = graph_check.format_shape(expected_shape)
        raise DataError(
            f"the network takes inputs of shape {expected_text}, the examples of this device have shape {actual_shape}"
        )


def require_scores(scores: np.ndarray) -> None:
    """Raise ModelError if a score is NaN or an example has no finite maximum. Other scores may be -inf."""
    if np.isnan(scores).any() or not np.isfinite(scores.max(axis=1, initial=-np.inf)).all():
        raise ModelError("the outputs of the network are not finite: check the weights, or export the network again")


def _decode_entry(metadata: Mapping[str, str], name: str, kind: type) -> Any:
    if name not in metadata:
        return None
    try:
        value = msgspec.json.decode(metadata[name])
    except DECODE_ERRORS:
        value = None
    if not isinstance(value, kind):
        raise _metadata_error(name)
    return value
