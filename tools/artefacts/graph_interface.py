"""Description of an exported graph's input and output, for people who run the file with another program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fedquilt.data import reading_settings
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines import exported_model
from fedquilt.edge_agent.engines.exported_model import ExportedModel
from fedquilt.onnx import graph_check
from fedquilt.onnx.graph_check import GraphValue

MAX_NAMES: Final = 30


def describe_interface(path: Path) -> list[str]:
    checked = graph_check.check_bytes(path.read_bytes())
    metadata = exported_model.read_metadata(checked.metadata)
    reading = reading_settings.spec_with_settings(metadata.reading, {"path": "."})
    (source,), (result,) = checked.inputs, checked.outputs
    count = result.shape[1] if result.shape is not None and len(result.shape) == 2 else None
    names = exported_model.output_names(metadata, reading, count)
    return [
        f"input {_format_value(source)}, {_describe_examples(metadata, reading, source)}",
        f"output {_format_value(result)}, {_describe_outputs(metadata, names)}",
    ]


def _format_value(value: GraphValue) -> str:
    sizes = ", ".join("n" if size is None else str(size) for size in value.shape or ())
    return f"{value.name}: float32 ({sizes})"


def _describe_examples(metadata: ExportedModel, reading: DataSpec, source: GraphValue) -> str:
    network = metadata.network or {}
    input_table = network.get("input", metadata.input)
    if input_table is not None and "channels" in input_table:
        return "images (channels, height, width), levels from 0 to 1"
    if reading.text is not None:
        return "token numbers"
    if reading.audio is not None:
        return "log-mel spectrograms"
    if names := reading_settings.input_names(reading):
        return f"{'steps of ' * (reading.windows is not None)}{_join_names(names)}{_describe_fill(reading)}"
    return "numbers as stored" if input_table is not None else "numbers as stored, unsigned integers as 0 to 1"


def _describe_fill(reading: DataSpec) -> str:
    if isinstance(reading.fill, float):
        return f" (missing: {reading.fill:g})"
    numbers = {name: value for name, value in (reading.fill or {}).items() if name not in reading.categories}
    return f" (missing: {', '.join(f'{name} {value:g}' for name, value in numbers.items())})" if numbers else ""


def _describe_outputs(metadata: ExportedModel, names: Sequence[str]) -> str:
    match metadata.task:
        case "regression":
            return _join_names(names)
        case "labels":
            return f"a score above 0 for each label that applies: {_join_names(names)}"
    return f"a score for each class, the largest is the prediction: {_join_names(names)}"


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"
