"""Predictions for the examples of a file or folder, as text, CSV or JSON, with metrics if labels are known."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fedquilt import metrics
from fedquilt.console import table
from fedquilt.core import DataError, EvaluationSums, evaluation
from fedquilt.data.readers import table as table_reader
from fedquilt.data.spec import TABLES
from fedquilt.edge_agent.engines import evaluation_sums
from fedquilt.formats import table_file
from fedquilt.tools.artefacts.predictor import Answer, Predictor, StoredExamples

BATCH: Final = 64
MAX_NAMES: Final = 30  # of columns in an error
DIGITS: Final = 4  # of a number in text
LARGE_NUMBER: Final = 10.0**DIGITS  # larger numbers have no digits after the point
DETAILED_METRICS: Final = tuple(  # only in JSON
    name for name in metrics.METRICS if name.startswith(("macro_", "micro_", "auc", "loss"))
)
SCORE: Final = "score: the network's output for the predicted class"
RESERVED_COLUMNS: Final = frozenset({"example", "prediction", "score", "probability", "label"})


class ExampleBatch(NamedTuple):
    names: Sequence[str]  # file, or row from 0
    targets: Sequence[np.ndarray | None]  # None for unlabelled examples
    prepared: np.ndarray


@dataclass(frozen=True)
class PredictedExamples:
    network: Predictor
    names: Sequence[str]  # file, or row from 0
    targets: Sequence[np.ndarray | None]  # None for unlabelled examples
    outputs: np.ndarray  # (n, names of the network)
    kept: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # columns of the source

    @property
    def is_labelled(self) -> bool:
        return any(target is not None for target in self.targets)

    @property
    def answers(self) -> list[Answer]:
        return [self.network.output.decode_outputs(row) for row in self.outputs]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row per example in the source's order.

        A row has "example", kept columns, "prediction", "score", "probability", and "label" if any example has one.
        """
        rows = []
        for index, (name, answer, target) in enumerate(zip(self.names, self.answers, self.targets, strict=True)):
            kept = {column: values[index] for column, values in self.kept.items()}
            row: dict[str, Any] = {"example": name, **kept, "prediction": answer.prediction}
            if answer.score is not None:
                row["score"] = answer.score
            if self.network.has_probabilities:
                row["probability"] = _largest_probability(self.outputs[index])
            if self.is_labelled:
                row["label"] = None if target is None else self.network.output.decode_target(target)
            rows.append(row)
        return rows

    def evaluate(self) -> dict[str, EvaluationSums]:
        """Return the evaluation of the labelled examples, for a regression by target, otherwise under ""."""
        rows = [index for index, target in enumerate(self.targets) if target is not None]
        if not rows:
            return {}
        outputs, targets = self.outputs[rows], np.stack([target for target in self.targets if target is not None])
        task = self.network.output.task
        if task != "regression":
            return {"": evaluation_sums.evaluate_scores(task, [(outputs, targets)]).sums()}
        columns = ((name, slice(index, index + 1)) for index, name in enumerate(self.network.output.names))
        return {
            name: evaluation_sums.evaluate_scores(task, [(outputs[:, part], targets[:, part])]).sums()
            for name, part in columns
        }


def _largest_probability(outputs: np.ndarray) -> float:
    return float(1 / np.exp(outputs.astype(np.float64) - outputs.max()).sum())


def predict_examples(model: Path, source: Path, keep: Sequence[str] = ()) -> PredictedExamples:
    """Return the predictions for the examples in a file or folder, which are read as in training.

    Columns of a table that `keep` names are copied into the rows. Raise DataError if they do not fit.
    """
    network = Predictor(model)
    kept = _read_kept_columns(source, keep, RESERVED_COLUMNS | set(network.output.names)) if keep else {}
    names: list[str] = []
    targets: list[np.ndarray | None] = []
    outputs = []
    for batch in _read_batches(network, source):
        names += batch.names
        targets += batch.targets
        outputs.append(network.compute_scores(batch.prepared))
    odd = next((column for column, values in kept.items() if len(values) != len(names)), None)
    if odd is not None:
        raise DataError(f"{source}: column {odd!r} has no value for each example, of several rows: leave --keep out")
    return PredictedExamples(network, names, targets, np.concatenate(outputs), kept)


def _read_kept_columns(source: Path, keep: Sequence[str], reserved: Set[str]) -> dict[str, list[Any]]:
    if source.suffix.lower() not in TABLES:
        raise DataError(f"{source} is not a table: --keep copies columns of a table, leave it out")
    columns = table_reader.read_column_names(source)
    for name in keep:
        if name not in columns:
            raise DataError(f"{source} has no column {name!r} to keep: choose from {', '.join(columns[:MAX_NAMES])}")
        if name in reserved:
            raise DataError(f"{source}: column {name!r} has the name of a column of the predictions: rename it")
    chunks = list(table_reader.read_chunks(source))
    return {name: [value for chunk in chunks for value in chunk.columns[name]] for name in keep}


def _read_batches(network: Predictor, source: Path) -> Iterator[ExampleBatch]:
    if source.suffix == ".npz":
        return _batches_of_examples(_read_npz(network, source), network)
    if source.suffix.lower() in TABLES:
        return _batches_of_examples(network.read_rows(source), network)
    return _batches_from_files(source, network)


def _read_npz(network: Predictor, source: Path) -> StoredExamples:
    try:
        with np.load(source, allow_pickle=False) as file:
            arrays = {key: file[key] for names in network.array_names for key in names if key in file}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {source} ({error}): write it with numpy.savez, without objects") from None
    return network.examples_from_arrays(arrays, str(source))


def _batches_of_examples(stored: StoredExamples, network: Predictor) -> Iterator[ExampleBatch]:
    for start in range(0, len(stored.x), BATCH):
        batch = stored.x[start : start + BATCH]
        names = [str(start + index) for index in range(len(batch))]
        targets = [None] * len(batch) if stored.y is None else list(stored.y[start : start + BATCH])
        yield ExampleBatch(names, targets, network.prepare_inputs(batch))


def _batches_from_files(source: Path, network: Predictor) -> Iterator[ExampleBatch]:
    paths = _find_files(source, network.file_suffixes)
    root = source if source.is_dir() else source.parent
    for start in range(0, len(paths), BATCH):
        batch = paths[start : start + BATCH]
        prepared = [network.prepare_inputs(network.read_example(path)[None]) for path in batch]
        targets = [_target_from_folder(path, network) for path in batch]
        yield ExampleBatch([str(path.relative_to(root)) for path in batch], targets, np.concatenate(prepared))


def _find_files(source: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if not suffixes:
        raise DataError(f"{source} is no file of numbers: use an .npz with an array 'x', or a table as in training")
    if not source.exists():
        raise DataError(f"{source} does not exist: name a folder or a file of {', '.join(suffixes)}")
    paths = [source]
    if source.is_dir():
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in suffixes)
    if not paths:
        raise DataError(f"{source} has no files that the network reads: add {', '.join(suffixes)} files")
    return paths


def _target_from_folder(path: Path, network: Predictor) -> np.ndarray | None:
    is_class = network.output.task == "classes" and path.parent.name in network.output.names
    return network.output.encode_target(path.parent.name) if is_class else None


# -- output ---------------------------------------------------------------------------------------


def print_predictions(model: Path, source: Path, format: str, out: Path | None = None, keep: Sequence[str] = ()) -> int:
    predictions = predict_examples(model, source, keep)
    if out is not None:
        _write_predictions(predictions, out)
    if format == "json":
        print(json.dumps(_to_document(predictions), indent=1))
        return 0
    lines = [f"{out}: {len(predictions.names)} predictions"] if out is not None else _format_table(predictions)
    print("\n".join([*lines, *_format_metrics(predictions)]))
    return 0


def _write_predictions(predictions: PredictedExamples, out: Path) -> None:
    rows = predictions.to_rows()
    flat_rows = [_flatten_row(row) for row in rows]
    table_file.write_table(out, tuple(flat_rows[0]), flat_rows if out.suffix == ".csv" else rows)


def _to_document(predictions: PredictedExamples) -> dict[str, Any]:
    values = {name: evaluation.compute_metrics(sums) for name, sums in predictions.evaluate().items()}
    return {"examples": predictions.to_rows(), "metrics": values.get("", values)}


def _flatten_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with a column for each number: "price", "true price", "score broken"."""
    cells: dict[str, Any] = {}
    prefixes = {"prediction": "", "score": "score ", "label": "true "}
    for name, value in row.items():
        if isinstance(value, dict):
            cells |= {f"{prefixes[name]}{key}": number for key, number in value.items()}
        else:
            cells[name] = value
    return cells


def _format_table(predictions: PredictedExamples) -> list[str]:
    has_many_scores = predictions.network.output.task == "labels"
    rows = [
        _flatten_row({name: value for name, value in row.items() if name != "score" or not has_many_scores})
        for row in predictions.to_rows()
    ]
    words = {"example", "prediction", "label", *predictions.kept}
    align = "".join("<" if name in words else ">" for name in rows[0])
    cells = [[_format_cell(value) for value in row.values()] for row in rows]
    softmax = ", probability: its softmax" if "probability" in rows[0] else ", not a probability"
    notes = [f"{SCORE}{softmax}"] if "score" in rows[0] else []
    return [*table.format_table([list(rows[0]), *cells], align), *notes]


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ";".join(value) or "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= LARGE_NUMBER else f"{value:.{DIGITS}g}"
    return str(value)


def _format_metrics(predictions: PredictedExamples) -> list[str]:
    lines = []
    for name, sums in predictions.evaluate().items():
        lines += table.fold_line(f"{f'{name}: ' if name else ''}{metrics.describe_evaluation(sums, DETAILED_METRICS)}")
    return lines
