"""Predictions of exported ONNX networks for files and arrays.

Files may come from untrusted sources: images are decoded up to a number of pixels, arrays up to their stated size,
and no file content is executed.
"""

from __future__ import annotations

import io
import math
import shutil
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import psutil

from fedquilt.core import DataError, Examples, ModelError, TaskKind, shorten_error
from fedquilt.data import inputs, reading_settings
from fedquilt.data.readers import audio, images, text
from fedquilt.data.readers import table as table_reader
from fedquilt.data.readers.base import convert_labels, number_labels
from fedquilt.data.spec import DataSpec
from fedquilt.edge_agent.engines import evaluation_sums, exported_model
from fedquilt.edge_agent.engines.onnx_engine import OnnxEngine
from fedquilt.onnx import weights

MAX_HEADER_BYTES: Final = 10_000  # numpy's parser of headers is slow for longer ones
MAX_ARRAYS: Final = 16  # arrays of an .npz
NUMBER_KINDS: Final = "fiub"  # kinds of NumPy's types; labels may also be words, "U"
_PARSER: Final = threading.Lock()  # numpy reads a header by `ast`, which fails in CPython 3.11 in two threads at once


class StoredExamples(NamedTuple):
    x: np.ndarray  # (n, ...)
    y: np.ndarray | None  # targets of the task, or None for unlabelled examples


class Answer(NamedTuple):
    """Prediction for one example.

    | task | prediction | score |
    |---|---|---|
    | classes | name of a class | the network's output for this class, not a probability |
    | labels | names of the labels whose score is above 0 | output by label |
    | regression | number by target | None |
    """

    prediction: str | list[str] | dict[str, float]
    score: float | dict[str, float] | None


@dataclass(frozen=True)
class OutputSpec:
    """Task of a network, and the names of its classes, labels or numbers."""

    task: TaskKind
    names: tuple[str, ...]

    def decode_outputs(self, outputs: np.ndarray) -> Answer:
        if self.task == "regression":
            return Answer(dict(zip(self.names, outputs.tolist(), strict=True)), None)
        if self.task == "labels":
            scores = dict(zip(self.names, outputs.tolist(), strict=True))
            return Answer([name for name, score in scores.items() if score > 0], scores)
        best = int(outputs.argmax())
        return Answer(self.names[best], float(outputs[best]))

    def decode_target(self, target: np.ndarray) -> str | list[str] | dict[str, float]:
        """Return the true value of one example in the form of `Answer.prediction`."""
        if self.task == "regression":
            return dict(zip(self.names, target.tolist(), strict=True))
        if self.task == "labels":
            return [name for name, is_set in zip(self.names, target.tolist(), strict=True) if is_set]
        return self.names[int(target)]

    def encode_target(self, value: Any) -> np.ndarray:
        """Return a true value, in the form of `Answer.prediction` or as a class number, as a target of the task.

        Raise DataError for other values.
        """
        if self.task == "regression":
            return self._encode_numbers(value)
        if self.task == "labels":
            if not isinstance(value, list) or not set(map(str, value)) <= set(self.names):
                raise DataError(f"unknown labels {str(value)[:100]!r}: send a list of {_join_names(self.names)}")
            return np.array([name in value for name in self.names], np.uint8)
        number = self.names.index(value) if isinstance(value, str) and value in self.names else value
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(self.names):
            raise DataError(f"unknown label {str(value)[:100]!r}: choose one of {_join_names(self.names)}")
        return np.array(number, np.int64)

    def compare(self, values: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the differences between outputs and target of one example. A right name has the difference 0."""
        if self.task == "regression":
            return values - target
        if self.task == "labels":
            return (values > 0).astype(np.int8) - target.astype(np.int8)
        return np.atleast_1d(values.argmax() - target)

    def _encode_numbers(self, value: Any) -> np.ndarray:
        numbers = value if isinstance(value, dict) else {self.names[0]: value}
        are_numbers = all(
            isinstance(number, int | float) and not isinstance(number, bool) for number in numbers.values()
        )
        if numbers.keys() != set(self.names) or not are_numbers or not all(map(math.isfinite, numbers.values())):
            raise DataError(f"{str(value)[:100]!r} is not a number for each of {_join_names(self.names)}: send numbers")
        return np.array([numbers[name] for name in self.names], np.float32)


class Predictor:
    """Network in an ONNX file. Not thread-safe."""

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
        names = exported_model.output_names(self._metadata, self._reading, self._engine.output_count(self._file))
        self.output = OutputSpec(self._metadata.task or "classes", names)
        if not names or (self._metadata.network is None and self._metadata.input is None):
            raise ModelError(f"{model} has no labels in its metadata: use a file written by `fedquilt model export`")

    @property
    def has_probabilities(self) -> bool:
        """Whether the softmax of the outputs is a probability, as in classifiers trained with the cross-entropy."""
        return self._metadata.network is not None and self.output.task == "classes"

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
        """Return the outputs (n, names), float32. Raise ModelError unless each name has an output."""
        scores = self._engine.run(self._file, prepared)
        if scores.ndim != 2 or scores.shape[1] != len(self.output.names):
            shape = scores.shape[1] if scores.ndim == 2 else scores.shape[1:]
            raise ModelError(
                f"{self.model} outputs {shape} numbers for {len(self.output.names)} names: export it again"
            )
        try:
            exported_model.require_scores(scores)
        except ModelError as error:
            raise ModelError(f"{self.model}: {error}") from None
        return scores

    def standardise(self, prepared: np.ndarray) -> np.ndarray:
        """Standardise prepared inputs as the graph does itself."""
        return self._metadata.standardise(prepared)

    def require_targets(self, y: np.ndarray, place: str) -> np.ndarray:
        """Return labels as targets of the task, or raise DataError that names `place`."""
        if self._reading.labels and self.output.task == "classes" and y.ndim == 1:
            y = number_labels(y, place, self._reading.labels)
        targets = convert_labels(y, place, self.output.task)
        examples = Examples(np.empty((len(targets), 0)), targets)
        try:
            evaluation_sums.require_targets(examples, len(self.output.names), self.output.task)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        return targets

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
        if y is not None and len(y) != len(x):
            raise DataError(f"{name} has {len(y)} labels for {len(x)} examples: store one label for each example")
        return StoredExamples(x, None if y is None else self.require_targets(y, name))

    def read_uploaded_rows(self, data: bytes) -> StoredExamples:
        with tempfile.NamedTemporaryFile(suffix=".csv") as file:
            file.write(data)
            file.flush()
            try:
                return self.read_rows(Path(file.name))
            except DataError as error:
                raise DataError(str(error).replace(file.name, "the table")) from None


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:50])


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
