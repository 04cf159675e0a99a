"""Arrays as examples: .npz files without pickles, and data sets of plug-ins and of scikit-learn."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedquilt import plugins
from fedquilt.core import DataError, Examples, JobError
from fedquilt.data.readers.base import (
    Bytes,
    ExampleReader,
    convert_labels,
    convert_read_errors,
    number_labels,
    read_rows,
)
from fedquilt.data.spec import SKLEARN, DataSpec
from fedquilt.formats import toml

FORMAT_HINT = "save arrays again with numpy.savez, or a table as .csv, .tsv or .parquet"


def open_npz(path: Path, spec: DataSpec) -> ExampleReader:
    with _open_archive(path) as archive:
        names = _list_arrays(archive)
        x, y = (_choose_array_name(path, spec, letter, names) for letter in "xy")
        labels = read_labels(path, spec)
        with archive.open(f"{x}.npy") as stream:
            shape, dtype = _read_npy_header(stream, path, x)
        owner = _read_owner_column(archive, path, spec, names, len(labels))
    if spec.labels and labels.ndim == 1 and spec.task == "classes":
        labels = number_labels(labels, path, spec.labels)
    if len(labels) != shape[0]:
        raise DataError(f"{path}: {x} has {shape[0]} examples and {y} {len(labels)} labels: give one label for each")

    def take(rows: np.ndarray) -> np.ndarray:
        with _open_archive(path) as archive, archive.open(f"{x}.npy") as stream:
            return read_rows(stream, *_read_npy_header(stream, path, x), rows)

    return ExampleReader(convert_labels(labels, path, spec.task), take, shape[1:], dtype, owner=owner)


def read_labels(path: Path, spec: DataSpec) -> np.ndarray:
    with _open_archive(path) as archive:
        y = _choose_array_name(path, spec, "y", _list_arrays(archive))
        with archive.open(f"{y}.npy") as stream:
            shape, dtype = _read_npy_header(stream, path, y, "uifbU")
            return read_rows(stream, shape, dtype, np.arange(shape[0]))


def list_arrays(path: Path) -> list[str]:
    with _open_archive(path) as archive:
        return _list_arrays(archive)


@contextmanager
def _open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    with convert_read_errors(path):
        try:
            archive = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise DataError(f"{path} is not an .npz file: {FORMAT_HINT}") from None
        with archive:
            if "[Content_Types].xml" in archive.namelist():
                raise DataError(f"{path} is an Excel workbook: save the sheet as CSV (UTF-8)")
            yield archive


def _list_arrays(archive: zipfile.ZipFile) -> list[str]:
    return [Path(name).stem for name in archive.namelist() if name.endswith(".npy")]


def _read_owner_column(
    archive: zipfile.ZipFile, path: Path, spec: DataSpec, array_names: Sequence[str], count: int
) -> np.ndarray | None:
    """Return the user of each example as text, (n,), or None without [data] column."""
    if not spec.column:
        return None
    name = next(
        (candidate for candidate in (f"{spec.column}_{spec.split}", spec.column) if candidate in array_names), ""
    )
    if not name:
        raise DataError(f"{path} has no array {spec.column!r}: set [data] column to one of {', '.join(array_names)}")
    with archive.open(f"{name}.npy") as stream:
        shape, dtype = _read_npy_header(stream, path, name, "uiU")
        if shape != (count,):
            raise DataError(f"{path}: {name} has shape {shape}: save one user for each of the {count} examples")
        return read_rows(stream, shape, dtype, np.arange(count)).astype(str)


def _choose_array_name(path: Path, spec: DataSpec, letter: str, array_names: Sequence[str]) -> str:
    configured_name = spec.x if letter == "x" else spec.y
    if not isinstance(configured_name, str):
        raise DataError(f"{path}: [data] {letter} is a list: set the name of one array of the .npz file")
    candidates = [configured_name] if configured_name else [f"{letter}_{spec.split}"]
    if not configured_name and spec.split == "train":
        candidates.append(letter)
    for name in candidates:
        if name in array_names:
            return name
    available = f"to one of {', '.join(array_names)}" if array_names else "after saving arrays"
    raise DataError(f"{path} has no array {' or '.join(candidates)}: set [data] {letter} {available}")


def _read_npy_header(
    stream: Bytes, path: Path, name: str, kinds: str = "uifb"
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return an array's shape and type, or raise DataError. The stream is then at the first value."""
    version = np.lib.format.read_magic(stream)
    header_readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    read_header = header_readers.get(version)
    if read_header is None:
        raise DataError(f"{path}: {name} has .npy version {version}: save a plain array of numbers")
    shape, fortran, dtype = read_header(stream)
    if dtype.kind not in kinds:
        content = "Python objects" if dtype.hasobject else f"values of type {dtype}"
        fix = "save np.stack(...) of examples of one shape" if dtype.hasobject else "save them as numbers"
        raise DataError(f"{path}: {name} has {content} instead of numbers: {fix}")
    if not shape:
        raise DataError(f"{path}: {name} is a single number: save an array with a row for each example")
    if fortran:
        raise DataError(f"{path}: {name} is in Fortran order: save np.ascontiguousarray({name})")
    return shape, dtype


EXCLUDED_LOADERS: Final = (
    "load_files",
    "load_sample_image",
    "load_sample_images",
    "load_svmlight_file",
    "load_svmlight_files",
)


def open_plugin_data(spec: DataSpec) -> ExampleReader:
    """Return a reader of the plug-in data set named by the spec's `dataset`, or raise DataError.

    The plug-in is a function that gets the spec (`split` is "train" or "test") and returns inputs (n, ...) and labels
    (n,), as a pair or as `Examples`. Each call must return the same data, because every device selects its share.
    """
    try:
        plugin = plugins.find_plugin("data", spec.dataset)
        assert plugin is not None  # without built-in names
        load_data = plugins.import_plugin(plugin)
        if not callable(load_data):
            raise plugins.wrong_kind_error(plugin, "a function from a DataSpec to inputs and labels", load_data)
    except JobError as error:
        raise DataError(str(error)) from None
    try:
        data = load_data(spec)
    except DataError:
        raise
    except Exception as error:  # code from outside may raise anything
        raise DataError(f"{plugin} fails on split {spec.split!r}: {type(error).__name__}: {error}") from None
    x, y = _require_arrays(plugin, data)
    return ExampleReader(convert_labels(y, str(plugin), spec.task), lambda rows: x[rows], x.shape[1:], x.dtype)


def open_sklearn_data(spec: DataSpec) -> ExampleReader:
    x, y = load_sklearn_data(spec)
    if spec.labels:
        y = number_labels(y, spec.dataset, spec.labels)
    return ExampleReader(convert_labels(y, spec.dataset, spec.task), lambda rows: x[rows], x.shape[1:], x.dtype)


def load_sklearn_data(spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and labels of scikit-learn's `load_NAME` for "sklearn/NAME", or raise DataError."""
    try:
        from sklearn import datasets
    except ImportError:
        raise DataError(
            f"{spec.dataset} needs scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    loaders = [name for name in dir(datasets) if name.startswith("load_") and name not in EXCLUDED_LOADERS]
    available_names = [name.removeprefix("load_") for name in loaders]
    name = spec.dataset.removeprefix(SKLEARN)
    if name not in available_names:
        raise DataError(f"scikit-learn has no data set {name!r}{toml.describe_choices(name, available_names)}")
    if spec.split != "train":
        raise DataError(f"{spec.dataset} has only the split 'train', not {spec.split!r}: set [test] path")
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return x, y


def _require_arrays(plugin: plugins.Plugin, data: Any) -> tuple[np.ndarray, np.ndarray]:
    pair = (data.x, data.y) if isinstance(data, Examples) else data
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(array, np.ndarray) for array in pair)):
        raise DataError(f"{plugin} returns a {type(data).__name__}: return inputs and labels as two numpy arrays")
    x, y = pair
    if x.ndim < 2 or x.dtype.kind not in "uif" or len(x) != len(y):
        raise DataError(
            f"{plugin} returns inputs of shape {x.shape} and type {x.dtype} with labels of shape {y.shape}: return "
            "numbers of shape (n, ...) and n labels"
        )
    return x, y
