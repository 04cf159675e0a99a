"""Data sets of plug-ins and of scikit-learn."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fedquilt import plugins
from fedquilt.core import DataError, Examples, JobError
from fedquilt.data.readers.base import ExampleReader, convert_labels, number_labels
from fedquilt.data.spec import SKLEARN, DataSpec
from fedquilt.formats import toml

NO_SETS: Final = ("load_files", "load_sample_image", "load_sample_images", "load_svmlight_file", "load_svmlight_files")


def open_plugin_data(spec: DataSpec) -> ExampleReader:
    """Open the plug-in data set named by the spec's `dataset`.

    The plug-in is a function that gets the spec (`split` is "train" or "test") and returns inputs (n, ...) and labels
    (n,), as a pair or as `Examples`. Each call must return the same data, because every device draws its share from it.

    Raises:
        DataError: If the plug-in is missing, fails, or returns no examples.
    """
    try:
        plugin = plugins.find_plugin("data", spec.dataset)
        assert plugin is not None  # fedquilt's own data sets are read by `format`, and have no names
        made = plugins.import_plugin(plugin)
        if not callable(made):
            raise plugins.wrong_kind_error(plugin, "a function from a DataSpec to inputs and labels", made)
    except JobError as error:
        raise DataError(str(error)) from None
    try:
        found = made(spec)
    except DataError:
        raise
    except Exception as error:  # code from outside may raise anything
        raise DataError(f"{plugin} fails on split {spec.split!r}: {type(error).__name__}: {error}") from None
    x, y = _require_arrays(plugin, found)
    return ExampleReader(convert_labels(y, str(plugin), spec.task), lambda rows: x[rows], x.shape[1:], x.dtype)


def open_sklearn_data(spec: DataSpec) -> ExampleReader:
    x, y = load_sklearn_data(spec)
    if spec.labels:
        y = number_labels(y, spec.dataset, spec.labels)
    return ExampleReader(convert_labels(y, spec.dataset, spec.task), lambda rows: x[rows], x.shape[1:], x.dtype)


def load_sklearn_data(spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels of the data set "sklearn/NAME", as scikit-learn's `load_NAME` does.

    It has the split "train" only.

    Raises:
        DataError: If scikit-learn is not installed or has no such data set.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise DataError(
            f"{spec.dataset} needs scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    there = [name.removeprefix("load_") for name in dir(datasets) if name.startswith("load_") and name not in NO_SETS]
    name = spec.dataset.removeprefix(SKLEARN)
    if name not in there:
        raise DataError(f"scikit-learn has no data set {name!r}{toml.describe_choices(name, there)}")
    if spec.split != "train":
        raise DataError(f"{spec.dataset} has no split {spec.split!r}, only 'train': set [test] path to other examples")
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return x, y


def _require_arrays(plugin: plugins.Plugin, found: Any) -> tuple[np.ndarray, np.ndarray]:
    pair = (found.x, found.y) if isinstance(found, Examples) else found
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(each, np.ndarray) for each in pair)):
        raise DataError(
            f"{plugin} returns a {type(found).__name__}, and inputs and labels are wanted, two numpy arrays"
        )
    x, y = pair
    if x.ndim < 2 or x.dtype.kind not in "uif" or len(x) != len(y):
        raise DataError(
            f"{plugin} returns inputs of shape {x.shape} and type {x.dtype} with labels of shape {y.shape}: numbers of "
            "shape (n, ...) and one label for each are wanted"
        )
    return x, y
