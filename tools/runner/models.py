"""The model in use: loaded beside the one before and exchanged at once, whenever what `current` leads to is another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from fedquilt.core import FedquiltError, ModelError
from fedquilt.disk import REAL
from fedquilt.tools.artefacts.classifier import Classifier

AGAIN_S: Final = 30.0  # until a model that could not be loaded is tried again

Key = tuple[str, int, int, int]


class Loaded(NamedTuple):
    """A model that has answered once."""

    network: Classifier
    sha256: str
    key: Key


def target(models: Path) -> Path:
    """The ONNX file that a place leads to at this moment, links resolved.

    Args:
        models: a folder with a link `current` to a model's folder, a model's folder, or an ONNX file.

    Raises:
        ModelError: there is none; says what was looked for.
    """
    if models.is_dir():
        current = models / "current"
        inside = (current if current.is_symlink() or current.is_dir() else models) / "model.onnx"
    else:
        inside = models
    found = inside.resolve()
    if not found.is_file():
        mend = "`fedquilt deploy` puts one there, or name a folder that has one, or a file that `fedquilt export` wrote"
        raise ModelError(f"there is no model {inside}: {mend}")
    return found


class Models:
    """Follows a place, and has the model to answer with.

    A request takes `now` once and answers with that: the one before lives as long as somebody answers with it.

    Args:
        place: as `target` takes it.
        labels: names of classes; None: those of the file.
        threads: within one operation; 0: one per core.
        clock: seconds.

    Raises:
        ModelError: there is no model, or it cannot be used.
        MemoryBudgetError: there is too little memory for it.
    """

    def __init__(
        self,
        place: Path,
        labels: Sequence[str] | None = None,
        *,
        threads: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place, self._labels, self._threads, self._clock = place, labels, threads, clock
        self._failed: Key | None = None
        self._failed_s = 0.0
        self.trouble = ""  # why the model that is there is not the one in use; "": it is
        self.now = self._load(target(place))

    def look(self) -> bool:
        """Take up another model if there is one; True: it is in use now. What cannot be used changes nothing."""
        try:
            path = target(self._place)
            key = _key(path)
            if key == self.now.key:
                self.trouble = ""
                return False
            if key == self._failed and self._clock() < self._failed_s + AGAIN_S:
                return False
            self._failed, self._failed_s = key, self._clock()
            self.now = self._load(path)
        except (FedquiltError, OSError) as error:
            self.trouble = f"{error}; the one before answers meanwhile"
            return False
        self._failed, self.trouble = None, ""
        return True

    def _load(self, path: Path) -> Loaded:
        try:
            key, sha256 = _key(path), REAL.digest(path)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        network = Classifier(path, self._labels, threads=self._threads)
        if (shape := network.shape) is not None:
            network.scores(np.zeros((1, *shape), np.float32))  # the first answer takes longest, and shows what is wrong
        if _key(path) != key:
            raise ModelError(f"{path} was changed while it was read")
        return Loaded(network, sha256, key)


def _key(path: Path) -> Key:
    found = path.stat()
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns
