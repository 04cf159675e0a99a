"""Optional packages, the extras that install them, and errors for missing ones."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
    "prometheus_client": "metrics",
    "starlette": "web",
    "uvicorn": "web",
    "ray": "ray",
}


CPU_WHEELS_HINT: Final = "for a CPU, add --extra-index-url https://download.pytorch.org/whl/cpu"
BOARD_EXTRAS: Final = ("gpu", "identity", "images", "jetson", "metrics", "onnx", "parquet", "train")


def missing_message(module: str) -> str:
    if module.split(".")[0] == "fedquilt":  # the wheel for boards has only some modules
        return f"this needs the full package fedquilt, which is not installed: {installation_command('')}"
    extra = EXTRAS.get(module.split(".")[0], "")
    hint = f" ({CPU_WHEELS_HINT})" if extra == "train" and not _is_board_distribution() else ""
    return f"this needs {module}, which is not installed: {installation_command(extra)}{hint}"


def installation_command(extra: str) -> str:
    if not extra:
        return "pip install 'fedquilt'"
    name = "fedquilt-board" if extra in BOARD_EXTRAS and _is_board_distribution() else "fedquilt"
    return f"pip install '{name}[{extra}]'"


def _is_board_distribution() -> bool:
    return any(Path(__file__).parents[1].glob("fedquilt_board-*.dist-info"))


def load_optional(module: str) -> ModuleType:
    """Import and return a module of an extra, or raise JobError with the command that installs the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != module.split(".")[0]:
            raise
        raise JobError(missing_message(module)) from None


@contextmanager
def report_missing_extras() -> Iterator[None]:
    """Convert the ModuleNotFoundError of an optional package to a JobError. Also usable as a decorator."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRAS:
            raise
        raise JobError(missing_message(str(error.name))) from None
