"""Optional packages with their extras, and the error when one is missing."""

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
    "cv2": "camera",
    "pyarrow": "parquet",
    "pandas": "frames",
    "polars": "frames",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "prometheus_client": "metrics",
    "starlette": "web",
    "uvicorn": "web",
    "ray": "ray",
}


def missing(module: str) -> str:
    """Sentence that says what to install for a missing module."""
    extra = EXTRAS.get(module.split(".")[0], "")
    return f"this needs {module}, which is not installed: pip install 'fedquilt{f'[{extra}]' if extra else ''}'"


def load(module: str) -> ModuleType:
    """Import an optional package.

    Raises:
        JobError: it is not installed; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise
        raise JobError(missing(module)) from None


@contextmanager
def named() -> Iterator[None]:
    """Turn a missing optional package into a sentence, as the commands do; also a decorator.

    Raises:
        JobError: one is not installed; says which extra has it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRAS:
            raise
        raise JobError(missing(str(error.name))) from None
