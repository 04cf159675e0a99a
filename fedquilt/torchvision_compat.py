"""Import of torchvision beside a torch that it was not compiled for: the one place with the workaround.

torchvision's wheel carries compiled operators. Where they do not load (a CPU-only torch beside the
wheel from PyPI; NVIDIA's own torch on a Jetson) `import torchvision` fails as a whole with
"operator torchvision::nms does not exist", though networks, transforms and data sets need none of
them. Declaring the two operators it looks up, without a kernel, lets the import succeed;
calling one of them still fails with an error.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, Final

from fedquilt.core import ModelError

SYMPTOM: Final = "operator torchvision::nms does not exist"
SCHEMA: Final = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
MEND: Final = "pip install 'fedquilt[train]'"

Import = Callable[[str], ModuleType]


def torchvision(load: Import = importlib.import_module) -> ModuleType:
    """Import torchvision, ready for `models`, `transforms` and `datasets`.

    Raises:
        ModelError: torchvision is not installed; says how to install it.
        RuntimeError: its import fails in another way than described above.
    """
    with warnings.catch_warnings():  # older ones warn that their JPEG reader, which we never use, is absent
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        try:
            return load("torchvision")
        except ModuleNotFoundError as error:
            raise ModelError(f"this needs torchvision, and {error.name} is not installed: {MEND}") from None
        except RuntimeError as error:
            if SYMPTOM not in str(error):
                raise
        _declare_operators()
        return load("torchvision")


@cache
def _declare_operators() -> Any:
    """Declare the operators once; the declarations live as long as the library object, which the cache keeps."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + SCHEMA)
    return library
