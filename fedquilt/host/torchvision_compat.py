"""Import of a torchvision that was compiled for another torch.

If torchvision's compiled operators cannot be loaded (as with a CPU-only torch, or NVIDIA's torch on a Jetson), `import
torchvision` fails with "operator torchvision::nms does not exist", although networks, transforms and data sets need no
compiled operators. Declaring two operators without kernels lets the import succeed. Calling them still fails.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, Final

from fedquilt import extras
from fedquilt.core import ModelError

SYMPTOM: Final = "operator torchvision::nms does not exist"
SCHEMA: Final = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

ImportFunction = Callable[[str], ModuleType]


def import_torchvision(load: ImportFunction = importlib.import_module) -> ModuleType:
    with warnings.catch_warnings():  # old versions warn about a missing JPEG reader, which is not used
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        try:
            return load("torchvision")
        except ModuleNotFoundError as error:
            command = extras.installation_command("train")
            raise ModelError(f"torchvision is required, and {error.name} is not installed: {command}") from None
        except RuntimeError as error:
            if SYMPTOM not in str(error):
                raise
        _declare_nms_operators()
        return load("torchvision")


@cache
def _declare_nms_operators() -> Any:
    # The declarations exist as long as the library object, which the cache holds.
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + SCHEMA)
    return library
