"""Classification of files and arrays with exported ONNX networks.

Files may come from untrusted sources: images are decoded up to a number of pixels, arrays up to their stated size,
and no file content is executed.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import psutil

from fedquilt.console import table
from fedquilt.core import DataError, ModelError, shorten_error
from fedquilt.data import inputs, reading_settings
from fedquilt.data.readers import audio, images, text
from fedquilt.data.readers import table as table_reader
from fedquilt.data.readers.base import number_labels
from fedquilt.data.spec import TABLES, DataSpec
from fedquilt.edge_agent.engines import exported_model
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.onnx import weights

MAX_HEADER_BYTES: Final = 10_000  # numpy's parser of headers is slow for longer ones
MAX_CLASSES: Final = 1_000_000
MAX_ARRAYS: Final = 16  # arrays of an .npz
NUMBER_KINDS: Final = "fiub"  # kinds of NumPy's types; labels may also be words, "U"
_PARSER: Final = threading.Lock()  # numpy reads a header by `ast`, which fails in CPython 3.11 in two threads at once
BATCH = 64
SCORE = "score: the network's output for the predicted label, not a probability"
Batch = tuple[list[str], list[str | None], np.ndarray]


class StoredExamples(NamedTuple):
    x: np.ndarray  # (n, ...)
    y: np.ndarray | None  # (n,): numbers of their labels, or None for unlabelled examples


class Classifier:
    """Network in an ONNX file, with its labels. Not thread-safe."""

    def __init__(self, model: Path) -> None:
        self.model = self._file = model
        chunks = weights.read_with_external_data(model)
        if len(chunks) > 1:  # engines do not read files that a graph refers to
            folder = tempfile.mkdtemp(prefix="fedquilt-model-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._file = Path(folder) / model.name
            self._file.write_bytes(b"".join(chunks))
        self._engine = OnnxEngine(psutil.virtual_memory().available)
        self._metadata = exported_model.read_metadata(self._engine.read_metadata(self._file))
        self._reading: DataSpec = reading_settings.spec_with_settings(self._metadata.reading, {"path": "."})
        labels = self._metadata.labels or self._reading.labels or _number_classes(self._metadata.network)
        if not labels or (self._metadata.network is None and self._metadata.input is None):
            raise ModelError(f"{model} has no labels in its metadata: use a file written by `fedquilt model export`")
        if self._metadata.task not in (None, "classes"):
            raise ModelError(f"{model} predicts {self._metadata.task}: use a network that predicts classes")
        self.labels = list(labels)

    @property
    def image_settings(self) -> Mapping[str, Any] | None:
        network = self._metadata.network or {}
        tables = (self._metadata.input, network.get("input"), network)
        return next((table for table in tables if table and "channels" in table and "size" in table), None)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        shape = self._engine.input_shape(self._file)
        return None if shape is None or None in shape else tuple(size for size in shape if size is not None)

    def prepare_inputs(self, x: np.ndarray) -> np.ndarray:
        """Return stored examples as float32 network inputs, prepared as in training, or raise DataError."""
        with np.errstate(over="ignore", invalid="ignore"):  # overflows are detected below
            prepared = self._metadata.prepare_inputs(inputs.fill_missing(x, self._reading.fill))
        if not np.isfinite(prepared).all():
            raise DataError("the example has numbers that are not finite: correct or remove the example")
        exported_model.require_shape(prepared, self._engine.input_shape(self._file))
        return prepared

    def compute_scores(self, prepared: np.ndarray) -> np.ndarray:
        """Return the outputs (n, labels), float32, or raise ModelError unless there is a score for each label."""
        scores = self._engine.run(self._file, prepared)
        if scores.ndim != 2 or scores.shape[1] != len(self.labels):
            shape = scores.shape[1] if scores.ndim == 2 else scores.shape[1:]
            raise ModelError(f"{self.model} outputs {shape} scores for {len(self.labels)} labels: export it again")
        try:
            exported_model.require_scores(scores)
        except ModelError as error:
            raise ModelError(f"{self.model}: {error}") from None
        return scores

    @property
    def file_suffixes(self) -> tuple[str, ...]:
        """Suffixes of files with one example each, or () for networks of arrays and tables."""
        if self._reading.audio is not None:
            return (".wav",)
        if self._reading.text is not None:
            return (".txt",)
        return images.SUFFIXES if self.image_settings is not None else ()

    def read_example(self, source: Path | bytes) -> np.ndarray:
        """Return the example in a file, read as in training: an image, a recording or a text."""
        if self._reading.audio is not None:
            return audio.read_spectrogram(source, self._reading.audio)
        if self._reading.text is not None:
            return text.read_tokens(source, self._reading.text)
        if self.image_settings is None:
            raise DataError("the network reads numbers, not images: use an .npy, .npz, .csv or .parquet file")
        return images.read_image(source, self._reading.size, self._reading.depth)

    @property
    def takes_table_rows(self) -> bool:
        return bool(self._reading.x) and self._reading.audio is None and self._reading.text is None

    def read_rows(self, file: Path) -> StoredExamples:
        """Return the examples in the rows of a table, with their labels if the table has them."""
        spec = msgspec.structs.replace(self._reading, path=str(file))
        labelled = set(table_reader.label_columns(spec)) <= set(table_reader.read_column_names(file))
        opener = (
            audio.open_recordings
            if spec.audio is not None
            else text.open_texts
            if spec.text is not None
            else table_reader.open_table
        )
        examples = opener(file, spec, labelled=labelled)
        return StoredExamples(examples.take(np.arange(len(examples.y))), examples.y if labelled else None)

    @property
    def array_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of input and of label arrays in an .npz, those of training first, then "x_test" or "y_test"."""
        own_names = [name if isinstance(name, str) and name else "" for name in (self._reading.x, self._reading.y)]
        return (*filter(None, own_names[:1]), "x_test", "x"), (*filter(None, own_names[1:]), "y_test", "y")

    def examples_from_arrays(self, arrays: Mapping[str, np.ndarray], name: str = "the .npz") -> StoredExamples:
        """Return the examples in arrays with `array_names`, or raise DataError if they do not fit the network."""
        x, y = (next((arrays[key] for key in names if key in arrays), None) for names in self.array_names)
        if x is None or not x.ndim or not len(x):
            raise DataError(f"{name} has no examples: name their array {' or '.join(map(repr, self.array_names[0]))}")
        if x.dtype.kind not in NUMBER_KINDS:
            raise DataError(f"{name}: the examples have the type {x.dtype}: convert them to numbers")
        if y is not None and self._reading.labels and y.shape == (len(x),):
            y = number_labels(y, name, self._reading.labels)
        last_label = len(self.labels) - 1
        if y is not None and (y.shape != (len(x),) or y.dtype.kind not in "ui" or y.min() < 0 or y.max() > last_label):
            raise DataError(f"{name}: the labels are not {len(x)} integers from 0 to {last_label}: correct them")
        return StoredExamples(x, y)

    def read_uploaded_rows(self, data: bytes) -> StoredExamples:
        with tempfile.NamedTemporaryFile(suffix=".csv") as file:
            file.write(data)
            file.flush()
            try:
                return self.read_rows(Path(file.name))
            except DataError as error:
                raise DataError(str(error).replace(file.name, "the table")) from None


def _number_classes(network: Mapping[str, Any] | None) -> tuple[str, ...]:
    # empty if the network's table has no number of classes
    count = (network or {}).get("classes")
    return tuple(map(str, range(count))) if isinstance(count, int) and 0 < count <= MAX_CLASSES else ()


def read_array(data: bytes, kinds: str = NUMBER_KINDS) -> np.ndarray:
    """Return the array in an .npy file's bytes, or raise DataError unless its dtype is one of `kinds`."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with _PARSER:
            shape, is_fortran_order, dtype = read_header(file, max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # numpy's parser raises any exception of Python's parser
        raise DataError(f"cannot read the array: {shorten_error(str(error))}") from None
    remaining_bytes = len(data) - file.tell()
    if dtype.kind not in kinds:
        raise DataError(f"the array has the type {dtype}: convert it to numbers")
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != remaining_bytes:
        raise DataError(f"the array {shape} of type {dtype} does not have {remaining_bytes} bytes: save it again")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran_order else "C")


def read_arrays(data: bytes, max_bytes: int) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_ARRAYS:
                raise DataError(f"the .npz has {len(entries)} arrays: send at most {MAX_ARRAYS}")
            if sum(entry.file_size for entry in entries) > max_bytes:
                raise DataError(f"the unpacked .npz exceeds the limit of {max_bytes} bytes: send fewer examples")
            return {
                entry.filename.removesuffix(".npy"): read_array(archive.read(entry), NUMBER_KINDS + "U")
                for entry in entries
            }
    except DataError:
        raise
    except Exception as error:  # what zipfile and zlib raise has no common base
        raise DataError(f"cannot read the .npz: {shorten_error(str(error))}") from None


@dataclass(frozen=True)
class Prediction:
    image: str  # file, or index in the array
    label: str
    score: float  # largest output of the network, not a probability
    truth: str | None  # true label, or None if unknown


def run_model(model: Path, source: Path) -> list[Prediction]:
    """Return the predicted label of each example in a file or folder, read as in training."""
    network = Classifier(model)
    labels = network.labels
    if source.suffix == ".npz":
        try:
            with np.load(source, allow_pickle=False) as file:
                arrays = {key: file[key] for names in network.array_names for key in names if key in file}
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {source}: {error}") from None
        batches = _batches_of_examples(network.examples_from_arrays(arrays, str(source)), network)
    elif source.suffix.lower() in TABLES:
        batches = _batches_of_examples(network.read_rows(source), network)
    else:
        batches = _batches_from_files(source, network)
    rows = []
    for names, truths, x in batches:
        scores = network.compute_scores(x)
        rows += [
            Prediction(name, labels[best], float(scores[i, best]), truth)
            for i, (name, truth, best) in enumerate(zip(names, truths, scores.argmax(axis=1), strict=True))
        ]
    return rows


def compute_accuracy(rows: Sequence[Prediction]) -> float | None:
    correct = [row.label == row.truth for row in rows if row.truth is not None]
    return sum(correct) / len(correct) if correct else None


def print_predictions(model: Path, source: Path, format: str) -> int:
    rows = run_model(model, source)
    accuracy, labelled = compute_accuracy(rows), sum(row.truth is not None for row in rows)
    if format == "json":
        print(json.dumps({"images": [asdict(row) for row in rows], "accuracy": accuracy}, indent=1))
        return 0
    cells = [[row.image, row.label, f"{row.score:.3f}", *([row.truth or "-"] if labelled else [])] for row in rows]
    accuracy_lines = [] if accuracy is None else [f"{accuracy:.1%} of {labelled} examples are classified correctly"]
    head = ["example", "prediction", "score", *(["label"] if labelled else [])]
    print("\n".join([*table.format_table([head, *cells], "<<><"), SCORE, *accuracy_lines]))
    return 0


def _batches_of_examples(stored: StoredExamples, network: Classifier) -> Iterator[Batch]:
    x, y, labels = stored.x, stored.y, network.labels
    for start in range(0, len(x), BATCH):
        batch = x[start : start + BATCH]
        names = [str(start + i) for i in range(len(batch))]
        truths = [None if y is None else labels[int(y[start + i])] for i in range(len(batch))]
        yield names, truths, network.prepare_inputs(batch)


def _batches_from_files(source: Path, network: Classifier) -> Iterator[Batch]:
    labels, suffixes = network.labels, network.file_suffixes
    if not suffixes:
        raise DataError(
            f"{source}: the network reads numbers: use an .npz with an array 'x', or a table as in training"
        )
    if not source.exists():
        raise DataError(f"{source} does not exist: name a folder or a file of {', '.join(suffixes)}")
    paths = [source]
    if source.is_dir():
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in suffixes)
    if not paths:
        raise DataError(f"{source} has no files that the network reads: add {', '.join(suffixes)} files")
    root = source if source.is_dir() else source.parent
    for start in range(0, len(paths), BATCH):
        batch = paths[start : start + BATCH]
        names = [str(path.relative_to(root)) for path in batch]
        truths = [path.parent.name if path.parent.name in labels else None for path in batch]
        prepared = [network.prepare_inputs(network.read_example(path)[None]) for path in batch]
        yield names, truths, np.concatenate(prepared)
