"""Model in use, replaced while running when the `current` link points to another file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from fedquilt.core import FedquiltError, ModelError
from fedquilt.host.disk import REAL
from fedquilt.tools.artefacts.classifier import Classifier

AGAIN_S: Final = 30.0  # until a model that could not be loaded is tried again

Key = tuple[str, int, int, int]


class ServedModel(NamedTuple):
    network: Classifier
    sha256: str
    key: Key


def resolve_model_file(models: Path) -> Path:
    """Return the ONNX file of a place, with links resolved.

    Args:
        models: Folder with a link `current` to a model's folder, a model's folder, or an ONNX file.

    Raises:
        ModelError: If there is no model.
    """
    if models.is_dir():
        current = models / "current"
        inside = (current if current.is_symlink() or current.is_dir() else models) / "model.onnx"
    else:
        inside = models
    found = inside.resolve()
    if not found.is_file():
        mend = (
            "`fedquilt rollout model` puts one there, or name a folder that has one, or a file that `fedquilt model "
            "export` wrote"
        )
        raise ModelError(f"there is no model {inside}: {mend}")
    return found


class ModelSwitcher:
    """Current model of a place.

    A request reads `now` once, so that its model stays loaded until the request is complete.

    Args:
        place: Model folder or file, as for `resolve_model_file`.
        clock: Clock in seconds.

    Raises:
        ModelError: If the model is missing or unusable.
        MemoryBudgetError: If there is too little memory.
    """

    def __init__(self, place: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._place, self._clock = place, clock
        self._failed: Key | None = None
        self._failed_s = 0.0
        self.trouble = ""  # why the model that is there is not the one in use; "": it is
        self.now = self._load_and_try_model(resolve_model_file(place))

    def reload_if_changed(self) -> bool:
        """Load the model of the place if it has changed. Return whether a new model is in use.

        If loading fails, the old model stays in use, and `trouble` states the reason.
        """
        try:
            path = resolve_model_file(self._place)
            key = _make_file_key(path)
            if key == self.now.key:
                self.trouble = ""
                return False
            if key == self._failed and self._clock() < self._failed_s + AGAIN_S:
                return False
            self._failed, self._failed_s = key, self._clock()
            self.now = self._load_and_try_model(path)
        except (FedquiltError, OSError) as error:
            self.trouble = f"{error}; the one before answers meanwhile"
            return False
        self._failed, self.trouble = None, ""
        return True

    def _load_and_try_model(self, path: Path) -> ServedModel:
        # the first run is the slowest, and shows whether the network is usable
        try:
            key, sha256 = _make_file_key(path), REAL.hash_file(path)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        network = Classifier(path)
        if (shape := network.input_shape) is not None:
            network.compute_scores(
                np.zeros((1, *shape), np.float32)
            )  # the first answer takes longest, and shows what is wrong
        if _make_file_key(path) != key:
            raise ModelError(f"{path} was changed while it was read")
        return ServedModel(network, sha256, key)


def _make_file_key(path: Path) -> Key:
    found = path.stat()
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns
