"""Data sets from plug-in packages, found by entry point or `module:name`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedquilt import plugins
from fedquilt.core import DataError, Examples, JobError
from fedquilt.data.readers.base import ExampleReader, convert_labels
from fedquilt.data.spec import DataSpec


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
