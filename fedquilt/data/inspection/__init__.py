"""Inspection of a data set, and the `[data]` and `[input]` tables that read it.

The tables state every choice, and a bundle and an exported network store them, so that training, evaluation and
predictions read files alike. Inspection reads files on this machine, and sends nothing.
"""

from __future__ import annotations

import math
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
SAMPLE: Final = 256  # images of which colours and scales are measured
AT_ONCE: Final = 2**26  # numbers of an array that are looked through at once
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
    if label and kind not in ("csv", "parquet", "npz"):
        raise DataError(f"{source} has no columns, and its classes are known: leave --label out")
    reader = examples.open_split(DataSpec.parse(measured_settings.complete_data_table(data)))
    if not len(reader.y):
        raise DataError(f"{source} holds no examples: add some")
    if not reader.shape:
        raise DataError(f"{source}: examples have shape ({len(reader.y)},): save x.reshape(-1, 1)")
    if (reader.y == reader.y[:1]).all():
        raise DataError(
            f"{source}: all {len(reader.y)} examples have the same label, so there is nothing to learn: "
            "add examples with others, or name another --label"
        )
    _fill_gaps(reader, data, source, notes)
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
    if not source or not Path(source).exists():
        raise DataError(
            f"no data at {source or repr(source)}"
            + (
                toml.suggest_file(Path(source))
                or f": name a CSV, Parquet or .npz file, a folder of images by class or of IDX files, {SKLEARN}iris or "
                f"{TORCHVISION}MNIST"
            )
        )
    return {"path": source}


def _name_arrays(path: Path, label: str) -> dict[str, Any]:
    """Return the [data] keys of an .npz file. `x` is left out if several arrays could be the inputs."""
    others = [name for name in npz.list_arrays(path) if name != label]
    return {"y": label, **({"x": others[0]} if len(others) == 1 else {})}


def _inspect_folder(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the [data] keys of a folder of images by class."""
    splits = [split for split in ("train", "test") if (path / "train").is_dir() and (path / split).is_dir()]
    table: dict[str, Any] = {"labels": files.list_subfolders(path / "train" if splits else path)}
    sizes: list[tuple[int, int]] = []
    for split in splits or ["train"]:
        spec = DataSpec(path=str(path), split=split)
        sizes += pixels.measure_sizes(files.find_files_by_class(path, spec, pixels.SUFFIXES, "images")[0])
    sides = sorted(map(min, sizes))
    low, high = sides[0], max(map(max, sizes))
    if low != high or high > 2 * SIDE:
        table["size"] = min(SIDE, sides[(len(sides) - 1) // 2])
        span = f"{low} pixels" if low == high else f"{low} to {high} pixels a side"
        notes.append(f"images of {span} are scaled to {table['size']} x {table['size']}")
    return table


def _fill_gaps(reader: ExampleReader, data: dict[str, Any], source: str, notes: list[str]) -> None:
    """Add a fill to [data] if arrays of numbers have gaps.

    Raises:
        DataError: If all numbers are missing.
    """
    if reader.dtype.kind != "f" or reader.features:
        return
    count, each = len(reader.y), max(1, math.prod(reader.shape))
    step = max(1, AT_ONCE // each)
    gaps = sum(
        int(np.isnan(reader.take(np.arange(first, min(first + step, count)))).sum()) for first in range(0, count, step)
    )
    if not gaps:
        return
    x = reader.take(_choose_rows(reader, step))
    if np.isnan(x).all():
        raise DataError(f"{source}: the inputs are NaN in all of {len(x)} examples: save the numbers, or other arrays")
    data["fill"] = float(f"{np.nanmedian(x):.6g}")
    notes.append(f"missing: {gaps} of {count * each} numbers, filled with the median of all, {data['fill']:g}")


def _choose_rows(reader: ExampleReader, most: int) -> np.ndarray:
    """Return rows at equal distances, at most `most` of them."""
    return np.unique(np.linspace(0, len(reader.y) - 1, min(len(reader.y), most)).astype(np.int64))


def _inspect_inputs(reader: ExampleReader, data: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the [input] table of examples."""
    if not _is_image(reader):
        if len(reader.shape) == 1 and not reader.features:
            notes.append(f"{reader.shape[0]} numbers each")
        notes.append("numbers are standardised: mean 0, standard deviation 1")
        return {"standardise": True}
    x = inputs.fill_missing(reader.take(_choose_rows(reader, SAMPLE)), data.get("fill"))
    grey = x.ndim == 3 or x.shape[3] == 1 or bool((x == x[..., :1]).all())
    high = max(reader.shape[:2])
    side = high if high <= 2 * SIDE else SIDE
    table: dict[str, Any] = {"channels": 1 if grey else 3, "size": side}
    maps = images.prepare_images(x, table).transpose(0, 2, 3, 1)
    scales = inputs.measure_scales(maps)
    table |= {key: [float(f"{value:.4g}") for value in getattr(scales, key)] for key in ("mean", "std")}
    notes.append(f"{'grey' if grey else 'colour'} images, {side} x {side} pixels, levels standardised")
    return table


def _is_image(reader: ExampleReader) -> bool:
    shape = reader.shape
    if reader.dtype.kind not in "uf":
        return False
    if len(shape) == 3:
        return shape[2] in (1, 3)
    return len(shape) == 2 and (reader.dtype.kind == "u" or shape[0] == shape[1])
