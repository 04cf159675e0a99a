"""Which optional packages belong to which extra, and what is said where one is not installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

from fedquilt.core import JobError

EXTRAS: Final = {
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "torch": "train",
    "torchvision": "train",
    "amqtt": "demo",
    "matplotlib": "report",
    "jinja2": "report",
    "cryptography": "identity",
    "packaging": "flash",
    "PIL": "images",
    "pyarrow": "parquet",
    "pandas": "frames",
    "polars": "frames",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
}


def missing(module: str) -> str:
    """What to install for a module that is not there, in a sentence."""
    extra = EXTRAS.get(module.split(".")[0], "")
    return f"this needs {module}, which is not installed: pip install 'fedquilt{f'[{extra}]' if extra else ''}'"


def load(module: str) -> ModuleType:
    """Import an optional package.

    Raises:
        JobError: it is not installed; says which extra has it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise
        raise JobError(missing(module)) from None


@contextmanager
def named() -> Iterator[None]:
    """Turn the want of an optional package into a sentence, as the commands do; a decorator too.

    Raises:
        JobError: one is not installed; says which extra has it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRAS:
            raise
        raise JobError(missing(str(error.name))) from None
