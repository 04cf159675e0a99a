"""Inspection of a data set, and the `[data]` and `[input]` tables that read it.

The tables state every choice, and a bundle and an exported network store them, so that training, evaluation and
predictions read files alike. Inspection reads files on this machine, and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt.core import DataError
from fedquilt.data import examples, images, inputs, measured_settings, readers
from fedquilt.data.inspection import labels, tables
from fedquilt.data.readers import ExampleReader, files, npz, pixels, plugin
from fedquilt.data.spec import SKLEARN, DataSpec
from fedquilt.formats import toml

TORCHVISION: Final = "torchvision/"  # before the name of a data set of torchvision's
SAMPLE: Final = 256  # images of which sizes, colours and scales are measured
SIDE: Final = 32  # pixels to which large images, and those of several sizes, are scaled


@dataclass(frozen=True)
class DataInspection:
    """What a data set holds, with the settings that read it.

    Attributes:
        data: Table [data] of a job, with the path as it was given.
        input: Table [input] of a job.
        shape: Shape of one stored example.
        outputs: Number of classes, or of numbers to predict.
        examples: Number of training examples.
        notes: Sentences on what was found and chosen.
    """

    data: dict[str, Any]
    input: dict[str, Any]
    shape: tuple[int, ...]
    outputs: int
    examples: int
    notes: tuple[str, ...]


def inspect_data(source: str, label: str = "") -> DataInspection:
    """Inspect a file, a folder, or a data set by name: "sklearn/iris", "torchvision/MNIST".

    Args:
        source: Path or name.
        label: Column of a table, or array of an .npz, that is predicted; "" for "y".

    Raises:
        DataError: If the data cannot be read, or what is predicted is unknown.
    """
    data = _locate_data(source)
    kind = readers.detect_format(Path(data.get("path", "")), DataSpec(**data)) if "path" in data else "sklearn"
    if label and kind not in ("csv", "parquet", "npz"):
        raise DataError(f"{source} has no columns, and its classes are known: leave --label out")
    notes: list[str] = []
    if kind in ("csv", "parquet"):
        data |= tables.inspect_table(Path(source), label, notes)
    elif kind == "npz":
        data |= _name_arrays(Path(source), label) if label else {}
        data |= labels.choose_settings(npz.read_labels(Path(source), DataSpec(**data)), source)
    elif kind == "sklearn":
        data |= labels.choose_settings(plugin.load_sklearn_data(DataSpec(**data))[1], source)
    elif kind == "folder":
        data |= _inspect_folder(Path(source), notes)
    reader = examples.open_split(DataSpec.parse(measured_settings.complete_data_table(data)))
    if (reader.y == reader.y[:1]).all():
        raise DataError(
            f"{source}: all {len(reader.y)} examples have the same label, so there is nothing to learn: "
            "add examples with others, or name another --label"
        )
    given = _inspect_inputs(reader, data, notes)
    notes.append(labels.describe_labels(reader.y, data))
    outputs = reader.y.shape[1] if reader.y.ndim > 1 else max(2, len(data.get("labels", ())) or int(reader.y.max()) + 1)
    return DataInspection(
        data, given, reader.shape, outputs, len(reader.y), (f"{source}: {len(reader.y)} examples", *notes)
    )


def _locate_data(source: str) -> dict[str, Any]:
    if source.startswith(SKLEARN):
        return {"dataset": source}
    name = source.removeprefix(TORCHVISION)
    if name != source and "/" not in name:
        return {"dataset": name, "path": "torchvision", "download": True}
    if not Path(source).exists():
        raise DataError(
            f"no data at {source}"
            + (
                toml.suggest_file(Path(source))
                or f": name a CSV, Parquet or .npz file, a folder of images by class or of IDX files, {SKLEARN}iris or "
                f"{TORCHVISION}MNIST"
            )
        )
    return {"path": source}


def _name_arrays(path: Path, label: str) -> dict[str, Any]:
    """Return the [data] keys of an .npz: its labels, and its inputs if only one other array is in the file."""
    others = [name for name in npz.list_arrays(path) if name != label]
    return {"y": label, **({"x": others[0]} if len(others) == 1 else {})}


def _inspect_folder(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the [data] keys of a folder of images by class."""
    spec = DataSpec(path=str(path))
    found, _ = files.find_files_by_class(path, spec, pixels.SUFFIXES, "images")
    root = path / "train" if (path / "train").is_dir() else path
    table: dict[str, Any] = {"labels": files.list_subfolders(root)}
    sizes = pixels.measure_sizes(found[:: max(1, len(found) // SAMPLE)])
    low, high = min(map(min, sizes)), max(map(max, sizes))
    if len(set(sizes)) > 1 or low != high or high > 2 * SIDE:
        table["size"] = min(SIDE, low)
        span = f"{low} pixels" if low == high else f"{low} to {high} pixels a side"
        notes.append(f"images of {span} are scaled to {table['size']} x {table['size']}")
    return table


def _inspect_inputs(reader: ExampleReader, data: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the [input] table of examples, and add a fill to [data] where arrays have gaps."""
    if reader.dtype.kind == "f" and not reader.features:
        x = reader.take(np.arange(len(reader.y)))
        if gaps := int(np.isnan(x).sum()):
            data["fill"] = float(f"{np.nanmedian(x):.6g}")
            notes.append(f"missing: {gaps} of {x.size} numbers, filled with the median of all, {data['fill']:g}")
    if not _is_image(reader):
        if len(reader.shape) == 1 and not reader.features:
            notes.append(f"{reader.shape[0]} numbers each")
        notes.append("numbers are standardised: mean 0, standard deviation 1")
        return {"standardise": True}
    rows = np.unique(np.linspace(0, len(reader.y) - 1, min(len(reader.y), SAMPLE)).astype(np.int64))
    x = reader.take(rows)
    grey = x.ndim == 3 or x.shape[3] == 1 or bool((x == x[..., :1]).all())
    high = max(reader.shape[:2])
    side = high if high <= 2 * SIDE else SIDE
    table: dict[str, Any] = {"channels": 1 if grey else 3, "size": side}
    maps = images.prepare_images(x, table).transpose(0, 2, 3, 1)
    scales = inputs.measure_scales(maps)
    table |= {"mean": [round(value, 4) for value in scales.mean], "std": [round(value, 4) for value in scales.std]}
    notes.append(f"{'grey' if grey else 'colour'} images, {side} x {side} pixels, levels standardised")
    return table


def _is_image(reader: ExampleReader) -> bool:
    shape = reader.shape
    if len(shape) == 3:
        return shape[2] in (1, 3)
    return len(shape) == 2 and (reader.dtype.kind == "u" or shape[0] == shape[1])
