"""Classification of files with an exported network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fedquilt.console import table
from fedquilt.core import DataError
from fedquilt.data.spec import TABLES
from fedquilt.tools.artefacts.classifier import Classifier, StoredExamples

BATCH = 64
SCORE = "score: the network's output for the predicted label, not a probability"


@dataclass(frozen=True)
class Prediction:
    image: str  # its file, or its place in the .npz
    label: str
    score: float  # the network's output for that label, the largest of all; no probability: it may be above 1
    truth: str | None  # the label it is known to have


def run_model(model: Path, source: Path) -> list[Prediction]:
    """Return the predicted label of each example in a file or folder, read as in training."""
    network = Classifier(model)
    labels = network.labels
    if source.suffix == ".npz":
        batches = _batches_from_npz(source, network)
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
    """Return the share of correct predictions, or None if no true label is known."""
    known = [row.label == row.truth for row in rows if row.truth is not None]
    return sum(known) / len(known) if known else None


def print_predictions(model: Path, source: Path, format: str) -> int:
    """Print each example's predicted label, and the share of correct labels if any is known. Return 0."""
    rows = run_model(model, source)
    share, known = compute_accuracy(rows), sum(row.truth is not None for row in rows)
    if format == "json":
        print(json.dumps({"images": [asdict(row) for row in rows], "accuracy": share}, indent=1))
        return 0
    cells = [[row.image, row.label, f"{row.score:.3f}", *([row.truth or "-"] if known else [])] for row in rows]
    right = [] if share is None else [f"{share:.1%} of {known} examples are classified correctly"]
    head = ["example", "prediction", "score", *(["label"] if known else [])]
    print("\n".join([*table.format_table([head, *cells], "<<><"), SCORE, *right]))
    return 0


Batch = tuple[list[str], list[str | None], np.ndarray]


def _batches_from_npz(path: Path, network: Classifier) -> Iterator[Batch]:
    try:
        with np.load(path, allow_pickle=False) as file:
            held = {key: file[key] for names in network.array_names for key in names if key in file}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    yield from _batches_of_examples(network.examples_from_arrays(held, str(path)), network)


def _batches_of_examples(held: StoredExamples, network: Classifier) -> Iterator[Batch]:
    x, y, labels = held.x, held.y, network.labels
    for first in range(0, len(x), BATCH):
        part = x[first : first + BATCH]
        names = [str(first + i) for i in range(len(part))]
        truths = [None if y is None else labels[int(y[first + i])] for i in range(len(part))]
        yield names, truths, network.prepare_inputs(part)


def _batches_from_files(source: Path, network: Classifier) -> Iterator[Batch]:
    labels, suffixes = network.labels, network.file_suffixes
    if not suffixes:
        raise DataError(
            f"{source}: the network takes numbers: give an .npz file with them under 'x', or a table as in training"
        )
    if not source.exists():
        raise DataError(f"{source} does not exist: name a folder or a file of {', '.join(suffixes)}")
    paths = [source]
    if source.is_dir():
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in suffixes)
    if not paths:
        raise DataError(f"{source} holds none of the files that the network takes: {', '.join(suffixes)}")
    root = source if source.is_dir() else source.parent
    for first in range(0, len(paths), BATCH):
        part = paths[first : first + BATCH]
        names = [str(path.relative_to(root)) for path in part]
        truths = [path.parent.name if path.parent.name in labels else None for path in part]
        yield names, truths, np.concatenate([network.prepare_inputs(network.read_example(path)[None]) for path in part])
