"""Classification with the current model, and statistics on latency, drift and accuracy."""

from __future__ import annotations

import logging
import secrets
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from fedquilt.core import DECODE_ERRORS, DataError, FedquiltError, ModelError
from fedquilt.edge_agent.runner_status import LATEST
from fedquilt.host.disk import PRIVATE, REAL
from fedquilt.tools.artefacts import classifier
from fedquilt.tools.artefacts.classifier import Classifier
from fedquilt.tools.operations.runner import drift
from fedquilt.tools.operations.runner.drift import DriftCounts, ReferenceDistribution

AGAIN_S: Final = 30.0  # until a model that could not be loaded is tried again

Key = tuple[str, int, int, int]


class ServedModel(NamedTuple):
    network: Classifier
    sha256: str
    key: Key


def resolve_model_file(models: Path) -> Path:
    """Return the ONNX file of a place, with links resolved."""
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


log = logging.getLogger("fedquilt.runner")

SERVED: Final = "served.json"  # statistics, which the board's agent sends to the coordinator
REFERENCES: Final = (
    "reference.json"  # references of the latest models, so that a restarted runner continues the comparison
)
OFTEN_S: Final = 5.0  # between two writings of SERVED while requests come
SELDOM_S: Final = 20.0  # likewise while none come
REFERENCES_MOST: Final = 4
AWAITED_MOST: Final = 10_000  # answers whose truth may arrive later
LATENCIES: Final = 512  # latest answers for the median latency
LABELLED: Final = LATEST  # latest labels that count in the accuracy
LABELLED_LEAST: Final = 20  # labels before an accuracy is told
EXAMPLES_MOST: Final = 1024  # in one request
BODY_MOST: Final = 16 << 20  # bytes of a file, and of the arrays in it
NPY, ZIP = b"\x93NUMPY", b"PK\x03\x04"  # with which such files begin


class Classification(NamedTuple):
    id: str  # under which its label may be told
    number: int  # of the class
    name: str
    score: float  # the largest of the network's outputs; no probability: it may be above 1
    model: str  # sha256 of the model that answered

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "class": self.number, "name": self.name, "score": self.score, "model": self.model}


class UnknownClassificationError(DataError): ...


class ModelService:
    """Classification with the current model. Thread-safe, with one request at a time."""

    def __init__(
        self,
        models: ModelSwitcher,
        home: Path | None = None,
        *,
        size: int = drift.SIZE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._models, self._home, self._size, self._clock = models, home, size, clock
        self._work = threading.Lock()  # of the network and of the counts
        self._begun, self._count = secrets.token_hex(3), 0
        self._latencies_s: deque[float] = deque(maxlen=LATENCIES)
        self._right: deque[bool] = deque(maxlen=LABELLED)
        # id -> model, its labels, class
        self._awaited: OrderedDict[str, tuple[str, Sequence[str], int]] = OrderedDict()
        self.served = self.failed = self.refused = self.labelled = self.swaps = 0
        self._references = self._read_references()
        self._drift, self._of = self._make_drift(models.now), models.now.sha256
        self._written: tuple[float, int] = (-1e18, -1)  # when, and after how many requests
        self._unwritable = ""

    # -- requests --

    def classify_bytes(self, data: bytes) -> dict[str, Any]:
        """Return the classification of the example in a file's bytes, or of all examples under "answers"."""
        with self._count_refusals():
            if data.startswith(ZIP):
                held = classifier.read_arrays(data, BODY_MOST)
                return self._classify_and_record_labels(self._models.now.network.examples_from_arrays(held))
            if data.startswith(NPY):
                one = classifier.read_array(data)[None]
                return self._classify_and_count(lambda loaded: one)[0].to_dict()
            if self._models.now.network.takes_table_rows:
                return self._classify_and_record_labels(self._models.now.network.read_uploaded_rows(data))
            return self._classify_and_count(lambda loaded: loaded.network.read_example(data)[None])[0].to_dict()

    def _classify_and_record_labels(self, held: classifier.StoredExamples) -> dict[str, Any]:
        found = self._classify_and_count(lambda loaded: held.x)
        for answer, truth in zip(found, () if held.y is None else held.y.tolist(), strict=held.y is not None):
            self.record_label(answer.id, truth)
        return {"model": found[0].model, "answers": [answer.to_dict() for answer in found]}

    @contextmanager
    def _count_refusals(self) -> Iterator[None]:
        try:
            yield
        except DataError:
            with self._work:
                self.refused += 1
            raise

    def _classify_and_count(self, read: Callable[[ServedModel], np.ndarray]) -> list[Classification]:
        begun_s = time.perf_counter()
        with self._work:
            loaded = self._follow_current_model()  # once: what begins with it ends with it
            x = read(loaded)
            if not 0 < len(x) <= EXAMPLES_MOST:
                raise DataError(f"{len(x)} examples in one request: 1 to {EXAMPLES_MOST} are answered")
            prepared = loaded.network.prepare_inputs(x)
            try:
                scores = loaded.network.compute_scores(prepared)
            except Exception:
                self.failed += 1  # of the network alone: a board returns from a model that fails too often
                raise
            best = scores.argmax(axis=1).tolist()
            self._drift.add_examples(*drift.compute_features(prepared, scores), best)
            found = []
            for row, number in zip(scores, best, strict=True):
                self._count += 1
                id = f"{self._begun}-{self._count}"
                self._awaited[id] = (loaded.sha256, loaded.network.labels, number)
                found.append(
                    Classification(id, number, loaded.network.labels[number], float(row[number]), loaded.sha256)
                )
            while len(self._awaited) > AWAITED_MOST:
                self._awaited.popitem(last=False)
            self.served += len(found)
            self._latencies_s.append((time.perf_counter() - begun_s) / len(found))
        return found

    def record_label(self, id: str, label: str | int) -> bool:
        """Record the true label of a classification, a name or a number. Return whether they agree."""
        with self._work:
            if id not in self._awaited:
                raise UnknownClassificationError(
                    f"no answer {id[:100]!r} waits for its label: it has one, or more than {AWAITED_MOST} came after it"
                )
            model, labels, told = self._awaited[id]
            number = labels.index(label) if isinstance(label, str) and label in labels else label
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(labels):
                raise DataError(f"there is no label {str(label)[:100]!r}; there are {', '.join(labels[:50])}")
            del self._awaited[id]
            right = told == number
            if model == self._of:
                self._right.append(right)
                self.labelled += 1
        return right

    # -- what is known --

    def _make_drift(self, loaded: ServedModel) -> DriftCounts:
        return DriftCounts(self._references.get(loaded.sha256), self._size)

    def _follow_current_model(self) -> ServedModel:
        # statistics of the previous model are reset when the model has changed
        loaded = self._models.now
        if loaded.sha256 != self._of:
            self._drift, self._of = self._make_drift(loaded), loaded.sha256
            self._right.clear()
            self.labelled = 0
            self.swaps += 1
        return loaded

    def compute_accuracy(self) -> float | None:
        return sum(self._right) / len(self._right) if len(self._right) >= LABELLED_LEAST else None

    def make_status(self) -> dict[str, Any]:
        """Return the model, counts, median latency, drift and accuracy, after loading a newer model."""
        with self._work:
            loaded = self._follow_current_model()
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
        """Return the status, the features with drift, refused requests, and the current problem in "trouble"."""
        told = self.make_status()
        with self._work:
            moved = {name: round(value, 4) for name, value in self._drift.compute_distances().items() if value}
        counts = {"refused": self.refused, "swaps": self.swaps}
        return {**told, "moved": moved, **counts, "trouble": self._models.trouble or self._unwritable}

    # -- files --

    def write_status_if_due(self) -> None:
        """Write the status file if due. Disk errors are logged once and reported by `make_health`."""
        if self._home is None:
            return
        at, count = self._written
        now, done = self._clock(), self.served + self.failed
        if abs(now - at) >= (OFTEN_S if done != count else SELDOM_S):
            self.write_status()

    def write_status(self) -> None:
        """Write SERVED, and REFERENCES if there is a new reference."""
        if self._home is None:
            return
        self._written = (self._clock(), self.served + self.failed)
        with self._work:
            found, of = self._drift.reference, self._of  # before `make_status` follows to another model
        try:
            REAL.write_atomically(self._home / SERVED, msgspec.json.encode(self.make_status()), durable=False)
            if found is not None and self._references.get(of) is not found:
                self._references = {**{k: v for k, v in self._references.items() if k != of}, of: found}
                while len(self._references) > REFERENCES_MOST:
                    del self._references[next(iter(self._references))]
                PRIVATE.write_atomically(self._home / REFERENCES, msgspec.json.encode(self._references), durable=False)
            self._unwritable = ""
        except OSError as error:
            said = f"cannot write {self._home / SERVED}: {error.strerror}; nothing is told of drift meanwhile"
            if said != self._unwritable:
                log.warning("%s", said)
            self._unwritable = said

    def _read_references(self) -> dict[str, ReferenceDistribution]:
        if self._home is None:
            return {}
        try:
            found = msgspec.json.decode(REAL.read(self._home / REFERENCES), type=dict[str, ReferenceDistribution])
            return {sha256: each for sha256, each in found.items() if each.is_consistent}
        except FileNotFoundError:
            return {}
        except (OSError, *DECODE_ERRORS) as error:
            log.warning("%s cannot be used (%s): the next answers make new ones", self._home / REFERENCES, error)
            return {}
