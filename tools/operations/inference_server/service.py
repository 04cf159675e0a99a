"""Predictions of the current model, and statistics on latency, drift and accuracy."""

from __future__ import annotations

import logging
import secrets
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from fedquilt.core import DECODE_ERRORS, DataError, FedquiltError, ModelError
from fedquilt.host.disk import PRIVATE, REAL
from fedquilt.tools.artefacts import predictor
from fedquilt.tools.artefacts.predictor import Answer, OutputSpec, Predictor
from fedquilt.tools.operations.inference_server import drift
from fedquilt.tools.operations.inference_server.drift import DriftCounts, ReferenceDistribution

RETRY_S: Final = 30.0  # pause after a failed load

FileKey = tuple[str, int, int, int]


class ServedModel(NamedTuple):
    network: Predictor
    sha256: str
    key: FileKey


def resolve_model_file(models: Path) -> Path:
    """Return the resolved path of an ONNX file or of a folder's current model, or raise ModelError."""
    if models.is_dir():
        current = models / "current"
        model_path = (current if current.is_symlink() or current.is_dir() else models) / "model.onnx"
    else:
        model_path = models
    path = model_path.resolve()
    if not path.is_file():
        fix = "deploy one with `fedquilt rollout model`, or name a file that `fedquilt model export` wrote"
        raise ModelError(f"model {model_path} is missing: {fix}")
    return path


class ModelSwitcher:
    """Current model of a models folder or file.

    A request reads `current` once, so that its model stays loaded until the request is complete.
    """

    def __init__(self, location: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._location, self._clock = location, clock
        self._failed_key: FileKey | None = None
        self._failed_s = 0.0
        self.trouble = ""  # reason why the newest model is not in use, or ""
        self.current = self._load_and_try_model(resolve_model_file(location))

    def reload_if_changed(self) -> bool:
        """Load the newest model if it has changed. Return whether a new model is in use.

        If loading fails, the old model stays in use, and `trouble` states the reason.
        """
        try:
            path = resolve_model_file(self._location)
            key = _make_file_key(path)
            if key == self.current.key:
                self.trouble = ""
                return False
            if key == self._failed_key and self._clock() < self._failed_s + RETRY_S:
                return False
            self._failed_key, self._failed_s = key, self._clock()
            self.current = self._load_and_try_model(path)
        except (FedquiltError, OSError) as error:
            self.trouble = f"{error} (the previous model stays in use)"
            return False
        self._failed_key, self.trouble = None, ""
        return True

    def _load_and_try_model(self, path: Path) -> ServedModel:
        # the first run is the slowest, and shows whether the network is usable
        try:
            key, sha256 = _make_file_key(path), REAL.hash_file(path)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        network = Predictor(path)
        if (shape := network.input_shape) is not None:
            network.compute_scores(np.zeros((1, *shape), np.float32))
        if _make_file_key(path) != key:
            raise ModelError(f"model {path} was changed while it was read: replace the file instead of writing to it")
        return ServedModel(network, sha256, key)


def _make_file_key(path: Path) -> FileKey:
    status = path.stat()
    return str(path), status.st_ino, status.st_size, status.st_mtime_ns


log = logging.getLogger("fedquilt.runner")

STATUS_FILE: Final = "served.json"  # statistics, which the board's agent sends to the coordinator
REFERENCE_FILE: Final = "reference.json"  # reference distributions, for restarts
BUSY_WRITE_S: Final = 5.0  # interval of status files while requests arrive
IDLE_WRITE_S: Final = 20.0  # interval of status files without requests
MAX_REFERENCES: Final = 4
MAX_UNLABELLED: Final = 10_000  # classifications that can still get a label
LATENCY_WINDOW: Final = 512
ACCURACY_WINDOW: Final = LATENCY_WINDOW
MIN_LABELS: Final = 20  # fewer labels give no accuracy
MAX_EXAMPLES: Final = 1024  # in one request
MAX_BODY_BYTES: Final = 16 << 20  # limit of a file, and of the arrays in the file
NPY, ZIP = b"\x93NUMPY", b"PK\x03\x04"  # magic numbers of file formats


class ServedAnswer(NamedTuple):
    id: str  # id for the request with the true label
    answer: Answer
    model: str  # sha256 of the model that answered

    def to_dict(self) -> dict[str, Any]:
        prediction, score = self.answer
        scores = {} if score is None else {"score": score}
        return {"id": self.id, "prediction": prediction, **scores, "model": self.model}


class UnlabelledAnswer(NamedTuple):
    model: str  # sha256
    output: OutputSpec
    values: np.ndarray  # (names,)


class UnknownAnswerError(DataError): ...


class ModelService:
    """Predictions of the current model. Thread-safe: requests run one at a time."""

    def __init__(
        self,
        models: ModelSwitcher,
        home: Path | None = None,
        *,
        size: int = drift.REFERENCE_SIZE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._models, self._home, self._reference_size, self._clock = models, home, size, clock
        self._lock = threading.Lock()  # protects network and counters
        self._id_prefix, self._count = secrets.token_hex(3), 0
        self._latencies_s: deque[float] = deque(maxlen=LATENCY_WINDOW)
        # of each labelled example: the squared error of each number, or else whether each name is right
        self._qualities: deque[np.ndarray] = deque(maxlen=ACCURACY_WINDOW)
        self._unlabelled: OrderedDict[str, UnlabelledAnswer] = OrderedDict()
        self.served = self.failed = self.refused = self.labelled = self.swaps = 0
        self._references = self._read_references()
        self._drift, self._counted_model = self._make_drift(models.current), models.current.sha256
        self._last_write: tuple[float, int] = (-1e18, -1)  # time, and number of requests
        self._write_problem = ""

    # -- requests --

    def predict_bytes(self, data: bytes) -> dict[str, Any]:
        """Return the prediction for the example in a file's bytes. Raise DataError for unreadable bytes.

        Tables and .npz files have several examples. Their result has the model, and all predictions under "answers".
        Their labels are recorded.
        """
        with self._count_refusals():
            network = self._models.current.network
            if data.startswith(ZIP):
                arrays = predictor.read_arrays(data, MAX_BODY_BYTES)
                return self._predict_and_record_labels(network, network.examples_from_arrays(arrays))
            if data.startswith(NPY):
                example = predictor.read_array(data)[None]
                return self._predict_and_count(lambda loaded: example)[0].to_dict()
            if network.takes_table_rows:
                return self._predict_and_record_labels(network, network.read_uploaded_rows(data))
            return self._predict_and_count(lambda loaded: loaded.network.read_example(data)[None])[0].to_dict()

    def _predict_and_record_labels(self, network: Predictor, examples: predictor.StoredExamples) -> dict[str, Any]:
        results = self._predict_and_count(lambda loaded: examples.x)
        if examples.y is not None:
            for result, target in zip(results, examples.y, strict=True):
                self.record_label(result.id, network.output.decode_target(target))
        return {"model": results[0].model, "answers": [result.to_dict() for result in results]}

    @contextmanager
    def _count_refusals(self) -> Iterator[None]:
        try:
            yield
        except DataError:
            with self._lock:
                self.refused += 1
            raise

    def _predict_and_count(self, read: Callable[[ServedModel], np.ndarray]) -> list[ServedAnswer]:
        started_s = time.perf_counter()
        with self._lock:
            loaded = self._models.current  # a request uses one model from start to end
            self._reset_statistics_if_new(loaded)
            network = loaded.network
            x = read(loaded)
            if not 0 < len(x) <= MAX_EXAMPLES:
                raise DataError(f"request has {len(x)} examples: send 1 to {MAX_EXAMPLES}")
            prepared = network.prepare_inputs(x)
            try:
                outputs = network.compute_scores(prepared)
            except Exception:
                self.failed += 1  # devices roll back a model with too many failures
                raise
            self._count_drift(network, prepared, outputs)
            results = [self._store_answer(loaded, row) for row in outputs]
            while len(self._unlabelled) > MAX_UNLABELLED:
                self._unlabelled.popitem(last=False)
            self.served += len(results)
            self._latencies_s.append((time.perf_counter() - started_s) / len(results))
        return results

    def _count_drift(self, network: Predictor, prepared: np.ndarray, outputs: np.ndarray) -> None:
        task = network.output.task
        classes = outputs.argmax(axis=1).tolist() if task == "classes" else [0] * len(outputs)
        self._drift.add_examples(*drift.compute_features(network.standardise(prepared), outputs, task), classes)

    def _store_answer(self, loaded: ServedModel, values: np.ndarray) -> ServedAnswer:
        self._count += 1
        id, output = f"{self._id_prefix}-{self._count}", loaded.network.output
        self._unlabelled[id] = UnlabelledAnswer(loaded.sha256, output, values)
        return ServedAnswer(id, output.decode_outputs(values), loaded.sha256)

    def record_label(self, id: str, label: Any) -> dict[str, Any]:
        """Record the true value of a prediction, and return whether the prediction was right.

        The label has the form of the prediction. A class may be its number, and a single number needs no name. For
        numbers the result is the difference of each prediction to its true value.

        Raise UnknownAnswerError if the id has a label or is too old, and DataError if the label does not fit.
        """
        with self._lock:
            if id not in self._unlabelled:
                raise UnknownAnswerError(
                    f"result {id[:100]!r} is unknown: it has a label already, or more than {MAX_UNLABELLED} newer "
                    "results exist"
                )
            model, output, values = self._unlabelled[id]
            differences = output.compare(values, output.encode_target(label))
            del self._unlabelled[id]
            if model == self._counted_model:
                is_regression = output.task == "regression"
                self._qualities.append(np.square(differences) if is_regression else differences == 0)
                self.labelled += 1
        if output.task == "regression":
            return {"difference": dict(zip(output.names, differences.tolist(), strict=True))}
        return {"right": not differences.any()}

    # -- status --

    def _make_drift(self, loaded: ServedModel) -> DriftCounts:
        return DriftCounts(self._references.get(loaded.sha256), self._reference_size)

    def _reset_statistics_if_new(self, loaded: ServedModel) -> None:
        if loaded.sha256 != self._counted_model:
            self._drift, self._counted_model = self._make_drift(loaded), loaded.sha256
            self._qualities.clear()
            self.labelled = 0
            self.swaps += 1

    def compute_accuracy(self) -> float | None:
        """Return the share of right names on the latest labelled examples. None for a regression or too few labels."""
        if self._counts_numbers() or len(self._qualities) < MIN_LABELS:
            return None
        return float(np.mean(self._qualities))

    def _compute_rmse(self) -> dict[str, float]:
        if not self._counts_numbers() or len(self._qualities) < MIN_LABELS:
            return {}
        rmse = np.sqrt(np.mean(self._qualities, axis=0))
        return dict(zip(self._models.current.network.output.names, rmse.tolist(), strict=True))

    def _counts_numbers(self) -> bool:
        return self._models.current.network.output.task == "regression"

    def make_status(self) -> dict[str, Any]:
        """Return model, counts, median latency, drift and accuracy. A new model resets drift and accuracy."""
        with self._lock:
            loaded = self._models.current
            self._reset_statistics_if_new(loaded)
            score = self._drift.compute_score()
            return {
                "at": self._clock(),
                "model": loaded.sha256,
                "served": self.served,
                "failed": self.failed,
                "latency_s": statistics.median(self._latencies_s) if self._latencies_s else None,
                "drift": None if score is None else round(score, 4),
                "accuracy": self.compute_accuracy(),
                "labelled": self.labelled,
            }

    def make_health(self) -> dict[str, Any]:
        """Return the status, features with drift, RMSE by number, refused requests, and a problem under "trouble"."""
        status = self.make_status()
        with self._lock:
            distances = {name: round(value, 4) for name, value in self._drift.compute_distances().items() if value}
            rmse = self._compute_rmse()
        counts = {"refused": self.refused, "swaps": self.swaps}
        return {
            **status,
            "moved": distances,
            "rmse": rmse,
            **counts,
            "trouble": self._models.trouble or self._write_problem,
        }

    # -- files --

    def write_status_if_due(self) -> None:
        """Write the status file if due. Disk errors are logged once and reported by `make_health`."""
        if self._home is None:
            return
        written_s, written_requests = self._last_write
        now_s, request_count = self._clock(), self.served + self.failed
        if abs(now_s - written_s) >= (BUSY_WRITE_S if request_count != written_requests else IDLE_WRITE_S):
            self.write_status()

    def write_status(self) -> None:
        if self._home is None:
            return
        self._last_write = (self._clock(), self.served + self.failed)
        with self._lock:
            reference, model = self._drift.reference, self._counted_model  # `make_status` may switch to another model
        try:
            REAL.write_atomically(self._home / STATUS_FILE, msgspec.json.encode(self.make_status()), durable=False)
            if reference is not None and self._references.get(model) is not reference:
                self._references = {**{k: v for k, v in self._references.items() if k != model}, model: reference}
                while len(self._references) > MAX_REFERENCES:
                    del self._references[next(iter(self._references))]
                PRIVATE.write_atomically(
                    self._home / REFERENCE_FILE, msgspec.json.encode(self._references), durable=False
                )
            self._write_problem = ""
        except OSError as error:
            problem = f"cannot write {self._home / STATUS_FILE} ({error.strerror}): the agent gets no drift or accuracy"
            if problem != self._write_problem:
                log.warning("%s", problem)
            self._write_problem = problem

    def _read_references(self) -> dict[str, ReferenceDistribution]:
        if self._home is None:
            return {}
        try:
            references = msgspec.json.decode(
                REAL.read(self._home / REFERENCE_FILE), type=dict[str, ReferenceDistribution]
            )
            return {sha256: reference for sha256, reference in references.items() if reference.is_consistent}
        except FileNotFoundError:
            return {}
        except (OSError, *DECODE_ERRORS) as error:
            log.warning(
                "%s is damaged (%s): new reference distributions start with the next results",
                self._home / REFERENCE_FILE,
                error,
            )
            return {}
