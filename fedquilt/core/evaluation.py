"""Sums of evaluations, which devices send, and the metrics computed from their total.

Counts are integers and sums of floats are exact, so the total does not depend on the grouping of examples into devices
and sites. This module needs no numpy, because views of the event log compute metrics without numpy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from fedquilt.core import MAX_DETAILED_OUTPUTS, EvaluationSums, TaskKind, UpdateError
from fedquilt.core.messages import MAX_CLASS_SHARES

MAX_LOGIT: Final = 10.0  # logits beyond this count in the first or the last bin of a histogram
MAX_SUM: Final = 1e90  # limit of a sum: squares of 10^12 float32 numbers
SQUARES_TOLERANCE: Final = Fraction(1.000001)  # tolerance for sums of rounded squares
ROUNDING_TOLERANCE: Final = 1.01  # tolerance for values rounded to METRIC_DIGITS
METRIC_DIGITS: Final = 3  # of a device's main metric in the total of several devices


class MetricOverDevices(NamedTuple):
    devices: int
    mean: float
    worst_decile: float  # mean of the worst tenth of the devices, at least one
    best_decile: float  # mean of the best tenth of the devices, at least one
    deviation: float  # standard deviation

    @property
    def gap(self) -> float:
        return abs(self.best_decile - self.worst_decile)


# -- exact sums and packed counts -----------------------------------------------------------------


def exact_summands(numbers: Iterable[float]) -> tuple[float, ...]:
    """Return the shortest list of floats with the same exact sum as `numbers`, whatever their order."""
    remaining, summands = [float(number) for number in numbers], list[float]()
    while rounded := math.fsum(remaining):
        summands.append(rounded)
        remaining.append(-rounded)
    return tuple(summands)


def pack_counts(counts: Iterable[int]) -> bytes:
    """Return counts as varints. A run of zeros is 0 and its length, and trailing zeros are left out."""
    packed, zeros = bytearray(), 0
    for count in counts:
        if not count:
            zeros += 1
            continue
        if zeros:
            _append_varint(packed, 0)
            _append_varint(packed, zeros)
            zeros = 0
        _append_varint(packed, count)
    return bytes(packed)


def unpack_counts(packed: bytes, size: int) -> list[int]:
    """Return the `size` counts that `pack_counts` packed.

    Args:
        packed: Packed counts.
        size: Number of counts.

    Raises:
        UpdateError: If there are more than `size` counts, or the bytes end within a number.
    """
    counts = [0] * size
    for index, count in _unpack_nonzero(packed, size):
        counts[index] = count
    return counts


def _append_varint(packed: bytearray, number: int) -> None:
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    packed.append(number)


def _unpack_nonzero(packed: bytes, size: int) -> Iterator[tuple[int, int]]:
    """Yield index and value of each packed count above 0, or raise UpdateError for an invalid packing."""
    index = number = shift = 0
    after_zero = False
    for byte in packed:
        number |= (byte & 127) << shift
        if byte > 127:
            shift += 7
            if shift > 56:
                raise UpdateError("packed counts contain a number beyond 2^56")
            continue
        if after_zero:
            index, after_zero = index + number, False
        elif number:
            if index >= size:
                raise UpdateError(f"more than {size} counts are packed")
            yield index, number
            index += 1
        else:
            after_zero = True
        number = shift = 0
    if shift or after_zero:
        raise UpdateError("packed counts end in the middle of a number")


def _split_rows(numbers: Sequence[int], width: int) -> list[list[int]]:
    return [list(numbers[start : start + width]) for start in range(0, len(numbers), width)]


def histogram_bins(outputs: int) -> int:
    """Return the bins of a probability histogram, or 0 for more than MAX_DETAILED_OUTPUTS outputs."""
    return min(3000 // outputs, 400) if outputs <= MAX_DETAILED_OUTPUTS else 0


def counts_length(task: TaskKind, outputs: int) -> int:
    """Return the number of counts in `EvaluationSums.counts` when unpacked."""
    if task == "regression":
        return 0
    return outputs**2 if task == "classes" and outputs <= MAX_DETAILED_OUTPUTS else 3 * outputs


def scores_length(task: TaskKind, outputs: int) -> int:
    return 0 if task == "regression" else 2 * outputs * histogram_bins(outputs)


# -- totals ---------------------------------------------------------------------------------------


def add_evaluations(evaluations: Iterable[EvaluationSums]) -> EvaluationSums | None:
    """Return the total of evaluations of different devices or sites, or None without examples.

    Raises:
        UpdateError: If tasks or numbers of outputs differ.
    """
    parts = [evaluation for evaluation in evaluations if evaluation.examples]
    if not parts:
        return None
    task, outputs = parts[0].task, parts[0].outputs
    if other := next(
        (evaluation for evaluation in parts if (evaluation.task, evaluation.outputs) != (task, outputs)), None
    ):
        raise UpdateError(
            f"evaluations with {other.outputs} outputs ({other.task}) and {outputs} outputs ({task}) cannot be added: "
            "the devices' networks differ"
        )
    devices = Counter[float]()
    for part in parts:
        devices.update(dict(part.device_values) or {_round_digits(main_metric_value(part)): 1})
    return EvaluationSums(
        examples=sum(part.examples for part in parts),
        task=task,
        outputs=outputs,
        loss=_combine_sums(part.loss for part in parts),
        counts=_add_counts([part.counts for part in parts], counts_length(task, outputs)),
        exact_matches=sum(part.exact_matches for part in parts),
        scores=_add_counts([part.scores for part in parts], scores_length(task, outputs)),
        absolute_errors=_combine_sums(part.absolute_errors for part in parts),
        squared_errors=tuple(map(_combine_sums, zip(*(part.squared_errors for part in parts), strict=True))),
        targets=tuple(map(_combine_sums, zip(*(part.targets for part in parts), strict=True))),
        target_squares=tuple(map(_combine_sums, zip(*(part.target_squares for part in parts), strict=True))),
        device_values=tuple(sorted(devices.items())),
        correct_with_priors=_add_correct_with_priors(parts),
    )


def _add_correct_with_priors(parts: Sequence[EvaluationSums]) -> int | None:
    """Return the total of correct predictions with priors, or None if no part has them.

    A part whose engine does not support priors contributes its correct predictions without priors.
    """
    if all(part.correct_with_priors is None for part in parts):
        return None
    return sum(
        _sum_outcomes(count_outcomes(part))[0] if part.correct_with_priors is None else part.correct_with_priors
        for part in parts
    )


def _combine_sums(sums: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return exact_summands(number for summands in sums for number in summands)


def _add_counts(packed: Sequence[bytes], size: int) -> bytes:
    if len(packed) == 1:
        return packed[0]
    counts = [0] * size
    for packed_counts in packed:
        for index, count in _unpack_nonzero(packed_counts, size):
            counts[index] += count
    return pack_counts(counts)


def _round_digits(value: float) -> float:
    return float(f"{value:.{METRIC_DIGITS}g}")


def confusion_matrix(sums: EvaluationSums) -> list[list[int]] | None:
    """Return the confusion matrix (true class, predicted class), or None without one."""
    if sums.task != "classes" or sums.outputs > MAX_DETAILED_OUTPUTS:
        return None
    return _split_rows(unpack_counts(sums.counts, sums.outputs**2), sums.outputs)


def find_inconsistency(sums: EvaluationSums) -> str:
    """Return the contradiction in the sums, worded to follow "the evaluation has", or "" if there is none."""
    if not sums.examples:
        return "" if sums == EvaluationSums(examples=0, task=sums.task, outputs=sums.outputs) else "sums but no example"
    all_sums = [sums.loss, sums.absolute_errors, *sums.squared_errors, *sums.targets, *sums.target_squares]
    if not all(abs(each) <= MAX_SUM for part in all_sums for each in part):
        return f"a sum that is infinite, not a number or above {MAX_SUM:g}"
    if sums.correct_with_priors is not None and (sums.task != "classes" or sums.correct_with_priors > sums.examples):
        return (
            f"{sums.correct_with_priors} correct predictions with class priors for {sums.examples} examples "
            f"(task {sums.task!r})"
        )
    if sums.task == "regression":
        return _find_error_inconsistency(sums)
    if sums.absolute_errors or sums.squared_errors or sums.targets or sums.target_squares:
        return f"sums of a regression, but the task {sums.task!r}"
    outcomes, matrix = count_outcomes(sums), confusion_matrix(sums)
    right, wrong, missed_count = _sum_outcomes(outcomes)
    classes = sums.task == "classes"
    if classes and (right + missed_count != sums.examples or wrong != missed_count or sums.exact_matches):
        return f"counts of {right + missed_count} examples instead of {sums.examples}"
    if not classes and any(sum(each) > sums.examples for each in outcomes):
        return f"more outcomes of a label than the {sums.examples} examples"
    if not classes and sums.exact_matches > sums.examples - max(
        wrong + missed_count for _, wrong, missed_count in outcomes
    ):
        return f"{sums.exact_matches} of {sums.examples} examples without a wrong label, but too many wrong labels"
    bins = histogram_bins(sums.outputs)
    rows = _split_rows(unpack_counts(sums.scores, scores_length(sums.task, sums.outputs)), bins) if bins else []
    true = [sum(row) for row in matrix] if matrix else [right + missed_count for right, _, missed_count in outcomes]
    if any(
        sum(rows[2 * index]) != n or sum(rows[2 * index + 1]) != sums.examples - n
        for index, n in enumerate(true)
        if rows
    ):
        return "histograms of another number of examples than the counts"
    return ""


def _find_error_inconsistency(sums: EvaluationSums) -> str:
    detailed = sums.outputs if sums.outputs <= MAX_DETAILED_OUTPUTS else 0
    if sums.counts or sums.scores or sums.exact_matches:
        return "counts of classes, but the task 'regression'"
    if (len(sums.squared_errors), len(sums.targets), len(sums.target_squares)) != (detailed or 1, detailed, detailed):
        return f"sums of another number of outputs than {sums.outputs}"
    squares, absolute = [sum_as_fraction(each) for each in sums.squared_errors], sum_as_fraction(sums.absolute_errors)
    max_squared_sum = sums.examples * sums.outputs * sum(squares) * SQUARES_TOLERANCE
    if min(squares) < 0 or absolute < 0 or absolute**2 > max_squared_sum:
        return "errors whose sum and sum of squares contradict each other"
    if any(
        sum_as_fraction(each) ** 2 > sums.examples * sum_as_fraction(square) * SQUARES_TOLERANCE
        for each, square in zip(sums.targets, sums.target_squares, strict=True)
    ):
        return "targets whose sum and sum of squares contradict each other"
    return ""


def find_device_inconsistency(sums: EvaluationSums, max_devices: int, max_metric: float) -> str:
    """Return the contradiction in the device values, worded to follow "the evaluation has", or "" if none.

    Args:
        sums: Evaluation of a device or a site, checked by `find_inconsistency`.
        max_devices: Maximum number of devices of a site, or 0 for a single device.
        max_metric: Largest possible value of the main metric.
    """
    values = [value for value, _ in sums.device_values]
    if not max_devices or not sums.examples:
        return "values of several devices, but comes from a single device" if values else ""
    if not values or values != sorted(set(values)) or not 0 <= values[0] <= values[-1] <= max_metric:
        return f"device values that are missing, not in ascending order or not from 0 to {max_metric:g}"
    count = sum(number for _, number in sums.device_values)
    if count > max_devices or any(not number for _, number in sums.device_values):
        return f"values of {count} devices, but the site may submit for at most {max_devices}"
    main = main_metric_value(sums)
    if not values[0] / ROUNDING_TOLERANCE <= main <= values[-1] * ROUNDING_TOLERANCE:
        return f"a main metric of {main:g}, outside the devices' {values[0]:g} to {values[-1]:g}"
    return ""


# -- metrics --------------------------------------------------------------------------------------


def main_metric_value(sums: EvaluationSums) -> float:
    """Return the main metric: accuracy, RMSE or label accuracy. Requires at least one example."""
    if sums.task == "regression":
        return math.sqrt(
            math.fsum(each for part in sums.squared_errors for each in part) / (sums.examples * sums.outputs)
        )
    right, wrong, missed_count = _sum_outcomes(count_outcomes(sums))
    if sums.task == "classes":
        return right / sums.examples
    return 1 - (wrong + missed_count) / (sums.examples * sums.outputs)


def compute_metrics(sums: EvaluationSums) -> dict[str, float]:
    """Return the metrics of an evaluation by name, the main one first, or {} without examples.

    Macro averages are over classes or labels that occur in targets or predictions. Metrics without a value, such as R²
    of equal targets, are left out. "auc" is computed from histograms and differs from the exact AUC by at most
    "auc_error".
    """
    if not sums.examples:
        return {}
    main = main_metric_value(sums)
    if sums.task == "regression":
        mean_absolute = math.fsum(sums.absolute_errors) / (sums.examples * sums.outputs)
        r2 = _compute_r2(sums)
        found = {"rmse": main, "mae": mean_absolute, **({} if r2 is None else {"r2": r2})}
    else:
        outcomes = count_outcomes(sums)
        found = {"accuracy" if sums.task == "classes" else "label_accuracy": main}
        if sums.task == "labels":
            found["exact_match"] = sums.exact_matches / sums.examples
        found |= {**_compute_precision_and_recall(outcomes, balanced=sums.task == "classes"), **_compute_auc(sums)}
    return {**found, "loss": math.fsum(sums.loss) / sums.examples}


def rescale_errors(sums: EvaluationSums, std: float) -> EvaluationSums:
    """Return the evaluation of a regression with errors multiplied by `std`, which all targets share."""

    def scale(parts: tuple[float, ...], factor: float) -> tuple[float, ...]:
        return tuple(part * factor for part in parts)

    def scale_all(columns: Iterable[tuple[float, ...]], factor: float) -> tuple[tuple[float, ...], ...]:
        return tuple(scale(parts, factor) for parts in columns)

    return msgspec.structs.replace(
        sums,
        loss=scale(sums.loss, std**2),
        absolute_errors=scale(sums.absolute_errors, std),
        squared_errors=scale_all(sums.squared_errors, std**2),
        targets=scale_all(sums.targets, std),
        target_squares=scale_all(sums.target_squares, std**2),
        device_values=tuple((value * std, count) for value, count in sums.device_values),
    )


def summarise_over_devices(sums: EvaluationSums, *, higher: bool) -> MetricOverDevices | None:
    """Return statistics of the main metric over the devices in a total, or None for a single device.

    Args:
        sums: Total of the devices.
        higher: Whether larger values of the main metric are better.
    """
    if not sums.device_values:
        return None
    count = sum(number for _, number in sums.device_values)
    mean = math.fsum(value * number for value, number in sums.device_values) / count
    squares = math.fsum((value - mean) ** 2 * number for value, number in sums.device_values)
    lowest, highest = (
        _mean_of_first_tenth(sums.device_values, count),
        _mean_of_first_tenth(sums.device_values[::-1], count),
    )
    worst, best = (lowest, highest) if higher else (highest, lowest)
    return MetricOverDevices(count, mean, worst, best, math.sqrt(squares / count))


def _mean_of_first_tenth(values: Sequence[tuple[float, int]], count: int) -> float:
    """Return the mean over the first tenth of `count` devices. Pairs are a value and a number of devices."""
    remaining = tenth = math.ceil(count / 10)
    values_of_tenth = list[float]()
    for value, number in values:
        values_of_tenth.append(value * min(number, remaining))
        remaining -= min(number, remaining)
    return math.fsum(values_of_tenth) / tenth


def count_outcomes(sums: EvaluationSums) -> list[tuple[int, int, int]]:
    """Return true positives, false positives and false negatives of each class or label."""
    rows = confusion_matrix(sums)
    if rows is None:
        counts = unpack_counts(sums.counts, 3 * sums.outputs)
        return [(right, wrong, missed) for right, wrong, missed in _split_rows(counts, 3)]
    predicted = [sum(column) for column in zip(*rows, strict=True)]
    return [(row[index], predicted[index] - row[index], sum(row) - row[index]) for index, row in enumerate(rows)]


def count_classes(sums: EvaluationSums) -> tuple[int, ...]:
    """Return the number of examples of each class."""
    return tuple(right + missed for right, _, missed in count_outcomes(sums))


def class_shares(counts: Sequence[int]) -> tuple[float, ...]:
    """Return the share of each class with add-one smoothing, or () for more than MAX_CLASS_SHARES classes."""
    total = sum(counts) + len(counts)
    return tuple(_round_digits((count + 1) / total) for count in counts) if len(counts) <= MAX_CLASS_SHARES else ()


def _sum_outcomes(outcomes: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    right, wrong, missed = (sum(column) for column in zip(*outcomes, strict=True))
    return right, wrong, missed


def _compute_precision_and_recall(outcomes: Sequence[tuple[int, int, int]], *, balanced: bool) -> dict[str, float]:
    present = [each for each in outcomes if any(each)]
    if not present:
        return {}
    precisions = [_ratio(right, right + wrong) for right, wrong, _ in present]
    recalls = [_ratio(right, right + missed) for right, _, missed in present]
    f1s = [_ratio(2 * right, 2 * right + wrong + missed) for right, wrong, missed in present]
    right, wrong, missed = _sum_outcomes(present)
    found = {}
    if balanced:
        true = [right / (right + missed) for right, _, missed in present if right + missed]
        found["balanced_accuracy"] = _mean(true)
    return {
        **found,
        "macro_precision": _mean(precisions),
        "macro_recall": _mean(recalls),
        "macro_f1": _mean(f1s),
        "micro_precision": _ratio(right, right + wrong),
        "micro_recall": _ratio(right, right + missed),
        "micro_f1": _ratio(2 * right, 2 * right + wrong + missed),
    }


def _ratio(part: int, total: int) -> float:
    return part / total if total else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _compute_auc(sums: EvaluationSums) -> dict[str, float]:
    bins = histogram_bins(sums.outputs)
    if not bins:
        return {}
    rows, areas, errors = (
        _split_rows(unpack_counts(sums.scores, 2 * sums.outputs * bins), bins),
        list[float](),
        list[float](),
    )
    for positive, negative in zip(rows[::2], rows[1::2], strict=True):
        pairs = sum(positive) * sum(negative)
        if pairs:
            negatives_below = accumulate(negative, initial=0)
            ties = sum(map(int.__mul__, positive, negative))
            ordered_pairs = sum(map(int.__mul__, positive, negatives_below))
            areas.append((2 * ordered_pairs + ties) / (2 * pairs))
            errors.append(ties / (2 * pairs))
    return {"auc": _mean(areas), "auc_error": _mean(errors)} if areas else {}


def _compute_r2(sums: EvaluationSums) -> float | None:
    ratios = []
    for errors, targets, squares in zip(sums.squared_errors, sums.targets, sums.target_squares, strict=False):
        # Fractions avoid cancellation, however large the mean.
        target_spread = sums.examples * sum_as_fraction(squares) - sum_as_fraction(targets) ** 2
        if target_spread > 0:
            ratios.append(sums.examples * sum_as_fraction(errors) / target_spread)
    try:
        return 1 - _mean([float(ratio) for ratio in ratios]) if ratios else None
    except OverflowError:
        return None


def sum_as_fraction(numbers: tuple[float, ...]) -> Fraction:
    return sum(map(Fraction, numbers), Fraction())
