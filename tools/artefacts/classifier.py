"""A network in an ONNX file that `fedquilt export` wrote, and how the examples that it classifies are read.

What is read may come from anybody: images are decoded up to a number of pixels, arrays up to the bytes that are there
for them, and nothing in a file is code.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil

from fedquilt import metrics
from fedquilt.core import DataError, ModelError
from fedquilt.data import inputs
from fedquilt.edge_agent.engines import training
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine

SUFFIXES: Final = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
PIXELS_MOST: Final = 16_000_000  # of an image from the network: 48 MB as colours, four times that while it is prepared
HEADER_MOST: Final = 10_000  # bytes of an array's header, which numpy reads with a parser of its own
ARRAYS_MOST: Final = 16  # in an .npz


class Examples(NamedTuple):
    """Stored examples of an .npz file."""

    x: np.ndarray  # (n, ...)
    y: np.ndarray | None  # (n,): numbers of their labels, where they are known


class Classifier:
    """A network with its labels. One thread at a time may use it.

    Args:
        model: the ONNX file.
        labels: names of its classes; None: as the file has them, or else their numbers.
        threads: within one operation; 0: one per core.

    Raises:
        ModelError: it is no network that `fedquilt export` wrote, or one that predicts no classes.
    """

    def __init__(self, model: Path, labels: Sequence[str] | None = None, *, threads: int = 0) -> None:
        self.model = model
        self._engine = OnnxEngine(psutil.virtual_memory().available, threads=threads)
        facts = self._engine.facts(model)
        self._network = _table(model, facts, "network")
        self._input = _table(model, facts, "input")
        if self._input is None and self._network is None:
            raise ModelError(f"{model} does not say its labels: give a network that `fedquilt export` wrote")
        if self._network is not None and (task := metrics.task_of(self._network)) != "classes":
            raise ModelError(f"{model} predicts {task}, and a network that chooses one of several classes is wanted")
        self.labels = list(labels or _labels(model, facts, self._network))

    @property
    def image(self) -> Mapping[str, Any] | None:
        """The table of its inputs if they are images; None: they are numbers."""
        for table in (self._input, (self._network or {}).get("input"), self._network):
            if table is not None and "channels" in table and "size" in table:
                return table
        return None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one prepared example; None: the graph does not state it.

        Raises:
            ModelError, MemoryBudgetError: it cannot be loaded.
        """
        found = self._engine.input_shape(self.model)
        return None if None in found else tuple(size for size in found if size is not None)

    def prepared(self, x: np.ndarray) -> np.ndarray:
        """Network inputs (n, ...) float32 of stored examples (n, ...), as in training.

        Raises:
            DataError: examples of another shape or type, or numbers that are not finite.
        """
        if self._input is not None:
            made = inputs.prepare(x, self._input)
        else:
            assert self._network is not None
            made = training.features(x, self._network)
        if not np.isfinite(made).all():
            raise DataError("the example holds numbers that are not finite")
        if (wanted := self.shape) is not None and made.shape[1:] != wanted:
            raise DataError(f"an example of shape {made.shape[1:]}, and the network takes {wanted}")
        return made

    def scores(self, prepared: np.ndarray) -> np.ndarray:
        """Outputs of the network, (n, labels) float32, of which the largest wins.

        Raises:
            ModelError: it cannot take these inputs, or answers with something else than a number for each label.
            MemoryBudgetError: there is too little memory.
        """
        found = self._engine.run(self.model, prepared)
        if found.ndim != 2 or found.shape[1] != len(self.labels):
            made = f"{found.shape[1:]} numbers" if found.ndim != 2 else f"{found.shape[1]}"
            raise ModelError(
                f"{self.model} answers with {made} for an example, and there are {len(self.labels)} labels"
            )
        if not np.isfinite(found).all():
            raise ModelError(f"{self.model} answers with numbers that are not finite")
        return found

    def pixels(self, file: Path | bytes) -> np.ndarray:
        """An image as it is stored, (h, w) or (h, w, 3) uint8.

        Args:
            file: a path, or the bytes of a PNG or JPEG of at most PIXELS_MOST pixels.

        Raises:
            DataError: it is no image, or a larger one, or Pillow is not installed, or the network takes no images.
        """
        wanted = self.image
        if wanted is None:
            raise DataError("the network takes numbers, not images: give an .npy or .npz file with them")
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError:
            raise DataError("reading image files needs Pillow: pip install 'fedquilt[images]'") from None
        named = f"the image {file}" if isinstance(file, Path) else "the image"
        try:
            with (
                Image.open(file) if isinstance(file, Path) else Image.open(io.BytesIO(file), formats=("PNG", "JPEG"))
            ) as image:
                if isinstance(file, bytes) and image.width * image.height > PIXELS_MOST:
                    raise Image.DecompressionBombError(f"{image.width} x {image.height}")
                return np.asarray(image.convert("L" if wanted["channels"] == 1 else "RGB"))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            most = f"at most {PIXELS_MOST / 1e6:.0f} million pixels are read"
            raise DataError(f"cannot read {named}: {most if isinstance(file, bytes) else error}") from None
        except UnidentifiedImageError as error:
            said = "it is no PNG or JPEG" if isinstance(file, bytes) else str(error)
            raise DataError(f"cannot read {named}: {said}") from None
        except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:  # Pillow's, by the kind of damage
            raise DataError(f"cannot read {named}: {error}") from None


def _table(model: Path, facts: Mapping[str, str], name: str) -> dict[str, Any] | None:
    """A JSON table of a graph's metadata; None: it has none of this name."""
    if name not in facts:
        return None
    try:
        found = json.loads(facts[name])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"{model}: what its metadata say under {name!r} is no table: export it again")
    return found


def _labels(model: Path, facts: Mapping[str, str], network: Mapping[str, Any] | None) -> list[str]:
    try:
        found = json.loads(facts["labels"]) if "labels" in facts else None
    except ValueError:
        found = []
    if found is None and network is not None:
        found = [str(number) for number in range(int(network.get("classes", 0)))]
    if found is None:
        raise ModelError(f"{model} does not say its labels: give a network that `fedquilt export` wrote")
    if not isinstance(found, list) or not found:
        raise ModelError(f"{model}: what its metadata say under 'labels' is no list of names: name them in a file")
    return [str(each) for each in found]


# -- arrays ---------------------------------------------------------------------------------------


def array(data: bytes) -> np.ndarray:
    """The array of an .npy file's bytes.

    Raises:
        DataError: it is none, it holds something else than numbers, or not as many bytes as it states.
    """
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, order, kind = read(file, max_header_size=HEADER_MOST)
    except Exception as error:  # numpy's parser raises what Python's does
        raise DataError(f"cannot read the array: {' '.join(str(error).split())[:200]}") from None
    left = len(data) - file.tell()
    if kind.kind not in "fiub":
        raise DataError(f"an array of type {kind}: expected numbers")
    if any(size < 0 for size in shape) or _product(shape) * kind.itemsize != left:
        raise DataError(f"the array of shape {shape} and type {kind} is not the {left} bytes that are there")
    return np.frombuffer(data, kind, offset=file.tell()).reshape(shape, order="F" if order else "C")


def arrays(data: bytes, most_bytes: int) -> dict[str, np.ndarray]:
    """The arrays of an .npz file's bytes, by name.

    Args:
        data: the file.
        most_bytes: that they may have together, unpacked.

    Raises:
        DataError: it is none, or holds more, or one of the arrays is none of numbers.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as held:
            found = held.infolist()
            if len(found) > ARRAYS_MOST:
                raise DataError(f"an .npz of {len(found)} arrays: at most {ARRAYS_MOST} are read")
            if sum(each.file_size for each in found) > most_bytes:
                raise DataError(f"the .npz unpacks to more than the {most_bytes} bytes that are allowed")
            return {each.filename.removesuffix(".npy"): array(held.read(each)) for each in found}
    except DataError:
        raise
    except Exception as error:  # what zipfile and zlib raise has no common base
        raise DataError(f"cannot read the .npz: {' '.join(str(error).split())[:200]}") from None


def examples(held: Mapping[str, np.ndarray], labels: int, name: str = "the .npz") -> Examples:
    """The examples in the arrays of an .npz file: "x_test" or "x", and "y_test" or "y" if there are any labels.

    Args:
        held: the arrays.
        labels: number of the network's labels.
        name: of the file, for errors.

    Raises:
        DataError: there are no examples, or labels that do not fit them.
    """
    x = next((held[key] for key in ("x_test", "x") if key in held), None)
    y = next((held[key] for key in ("y_test", "y") if key in held), None)
    if x is None or not x.ndim or not len(x):
        raise DataError(f"{name} holds no examples: they are expected under 'x_test' or 'x'")
    if y is not None and (y.shape != (len(x),) or y.dtype.kind not in "ui" or y.min() < 0 or y.max() >= labels):
        raise DataError(f"{name}: labels must be one of 0 to {labels - 1} for each of the {len(x)} images")
    return Examples(x, y)


def _product(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
