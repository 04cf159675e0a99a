"""Answers of a runner: examples in, classes out, and what is counted of them."""

from __future__ import annotations

import logging
import secrets
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from fedquilt.core import UNDECODABLE, DataError, FedquiltError
from fedquilt.disk import PRIVATE, REAL
from fedquilt.edge_agent.served import LATEST
from fedquilt.tools.artefacts import classifier
from fedquilt.tools.runner import drift
from fedquilt.tools.runner.drift import Drift, Reference
from fedquilt.tools.runner.models import Loaded, Models

log = logging.getLogger("fedquilt.runner")

SERVED: Final = "served.json"  # what the board's agent tells the coordinator
REFERENCES: Final = "reference.json"  # of the latest models: a runner that is started anew goes on comparing
OFTEN_S: Final = 5.0  # between two writings of SERVED while requests come
SELDOM_S: Final = 20.0  # likewise while none come
REFERENCES_MOST: Final = 4
AWAITED_MOST: Final = 10_000  # answers whose truth may arrive later
LATENCIES: Final = 512  # latest answers whose median is told
LABELLED: Final = LATEST  # latest labels that count in the accuracy
LABELLED_LEAST: Final = 20  # labels before an accuracy is told
EXAMPLES_MOST: Final = 1024  # in one request
BODY_MOST: Final = 16 << 20  # bytes of a file, and of the arrays in it
NPY, ZIP = b"\x93NUMPY", b"PK\x03\x04"  # with which such files begin


class Answer(NamedTuple):
    """Answer to one example."""

    id: str  # under which its label may be told
    number: int  # of the class
    name: str
    score: float  # the largest of the network's outputs; no probability: it may be above 1
    model: str  # sha256 of the model that answered

    def told(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        return {"id": self.id, "class": self.number, "name": self.name, "score": self.score, "model": self.model}


class UnknownAnswerError(DataError):
    """A label for an answer that is not, or no longer, known."""


class Service:
    """Classifies with the model of the moment. Any number of threads may ask; one at a time is answered.

    Args:
        models: has the model.
        home: folder for SERVED and REFERENCES; None: they are not written.
        size: examples of a reference (`fedquilt.tools.runner.drift`).
        clock: seconds since 1970.
    """

    def __init__(
        self,
        models: Models,
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
        self.served = self.failed = self.labelled = self.swaps = 0
        self._references = self._read()
        self._drift, self._of = self._fresh(models.now), models.now.sha256
        self._written: tuple[float, int] = (-1e18, -1)  # when, and after how many requests
        self._unwritable = ""

    # -- requests --

    def classify_bytes(self, data: bytes) -> dict[str, Any]:
        """Return the answer to the example in a file's bytes or, for an .npz or a table, "answers".

        Raises:
            DataError: it cannot be read, holds more than EXAMPLES_MOST examples, or is not what the network takes.
            ModelError, MemoryBudgetError: the network cannot answer.
        """
        with self._counting():
            if data.startswith(ZIP):
                labels = len(self._models.now.network.labels)
                return self._classify_examples(classifier.examples(classifier.read_arrays(data, BODY_MOST), labels))
            if data.startswith(NPY):
                one = classifier.read_array(data)[None]
                return self._answers(lambda loaded: one)[0].told()
            if self._models.now.network.takes_table_rows:
                return self._classify_examples(self._models.now.network.read_uploaded_rows(data))
            return self._answers(lambda loaded: loaded.network.read_example(data)[None])[0].told()

    def _classify_examples(self, held: classifier.Examples) -> dict[str, Any]:
        found = self._answers(lambda loaded: held.x)
        for answer, truth in zip(found, () if held.y is None else held.y.tolist(), strict=held.y is not None):
            self.label(answer.id, truth)
        return {"model": found[0].model, "answers": [answer.told() for answer in found]}

    def stored(self, x: np.ndarray) -> list[Answer]:
        """Answers to stored examples (n, ...).

        Raises:
            DataError, ModelError, MemoryBudgetError: as `classify_bytes`.
        """
        with self._counting():
            return self._answers(lambda loaded: x)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except FedquiltError:
            with self._work:
                self.failed += 1
            raise

    def _answers(self, read: Callable[[Loaded], np.ndarray]) -> list[Answer]:
        begun_s = time.perf_counter()
        with self._work:
            loaded = self._follow()  # once: what begins with it ends with it
            x = read(loaded)
            if not 0 < len(x) <= EXAMPLES_MOST:
                raise DataError(f"{len(x)} examples in one request: 1 to {EXAMPLES_MOST} are answered")
            prepared = loaded.network.prepared(x)
            scores = loaded.network.scores(prepared)
            best = scores.argmax(axis=1).tolist()
            self._drift.add(*drift.numbers(prepared, scores), best)
            found = []
            for row, number in zip(scores, best, strict=True):
                self._count += 1
                id = f"{self._begun}-{self._count}"
                self._awaited[id] = (loaded.sha256, loaded.network.labels, number)
                found.append(Answer(id, number, loaded.network.labels[number], float(row[number]), loaded.sha256))
            while len(self._awaited) > AWAITED_MOST:
                self._awaited.popitem(last=False)
            self.served += len(found)
            self._latencies_s.append((time.perf_counter() - begun_s) / len(found))
        return found

    def label(self, id: str, label: str | int) -> bool:
        """Note the true label of an answer, a name or a number; returns whether the answer was right.

        Raises:
            UnknownAnswerError: there is no such answer, or it has its label already.
            DataError: there is no such label.
        """
        with self._work:
            if id not in self._awaited:
                raise UnknownAnswerError(
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

    @property
    def image(self) -> Mapping[str, Any] | None:
        """The table of the model's inputs if they are images."""
        return self._models.now.network.image

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the files that `classify_bytes` reads."""
        network = self._models.now.network
        return (".npy", ".npz", *((".csv", ".tsv") if network.takes_table_rows else network.suffixes))

    def _fresh(self, loaded: Loaded) -> Drift:
        return Drift(self._references.get(loaded.sha256), self._size)

    def _follow(self) -> Loaded:
        """The model of the moment; where it is another than before, what is known of that one's answers is let go."""
        loaded = self._models.now
        if loaded.sha256 != self._of:
            self._drift, self._of = self._fresh(loaded), loaded.sha256
            self._right.clear()
            self.labelled = 0
            self.swaps += 1
        return loaded

    def accuracy(self) -> float | None:
        """Share of right answers among the latest labels of this model; None: too few have arrived."""
        return sum(self._right) / len(self._right) if len(self._right) >= LABELLED_LEAST else None

    def standing(self) -> dict[str, Any]:
        """What SERVED holds."""
        with self._work:
            loaded = self._follow()
            score = self._drift.score()
            return {
                "at": self._clock(),
                "model": loaded.sha256,
                "served": self.served,
                "failed": self.failed,
                "latency_s": statistics.median(self._latencies_s) if self._latencies_s else None,
                "drift": None if score is None else round(score, 4),
                "accuracy": self.accuracy(),
                "labelled": self.labelled,
            }

    def health(self) -> dict[str, Any]:
        """What SERVED holds, what has moved how far, and what is wrong; "trouble" is "" where nothing is."""
        told = self.standing()
        with self._work:
            moved = {name: round(value, 4) for name, value in self._drift.distances().items() if value}
        return {**told, "moved": moved, "swaps": self.swaps, "trouble": self._models.trouble or self._unwritable}

    # -- files --

    def step(self) -> None:
        """Write what is due. An error of the disk is logged once, and told by `health`; answers go on."""
        if self._home is None:
            return
        at, count = self._written
        now, done = self._clock(), self.served + self.failed
        if abs(now - at) >= (OFTEN_S if done != count else SELDOM_S):
            self.write()

    def write(self) -> None:
        """Write SERVED, and REFERENCES where there is a new one."""
        if self._home is None:
            return
        self._written = (self._clock(), self.served + self.failed)
        with self._work:
            found, of = self._drift.reference, self._of  # before `standing` follows to another model
        try:
            REAL.put(self._home / SERVED, msgspec.json.encode(self.standing()), durable=False)
            if found is not None and self._references.get(of) is not found:
                self._references = {**{k: v for k, v in self._references.items() if k != of}, of: found}
                while len(self._references) > REFERENCES_MOST:
                    del self._references[next(iter(self._references))]
                PRIVATE.put(self._home / REFERENCES, msgspec.json.encode(self._references), durable=False)
            self._unwritable = ""
        except OSError as error:
            said = f"cannot write {self._home / SERVED}: {error.strerror}; nothing is told of drift meanwhile"
            if said != self._unwritable:
                log.warning("%s", said)
            self._unwritable = said

    def _read(self) -> dict[str, Reference]:
        if self._home is None:
            return {}
        try:
            found = msgspec.json.decode(REAL.read(self._home / REFERENCES), type=dict[str, Reference])
            return {sha256: each for sha256, each in found.items() if each.whole}
        except FileNotFoundError:
            return {}
        except (OSError, *UNDECODABLE) as error:
            log.warning("%s cannot be used (%s): the next answers make new ones", self._home / REFERENCES, error)
            return {}
