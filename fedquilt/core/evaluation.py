"""Sums of evaluations, which devices send, and the metrics computed from their total.

Counts are integers and sums of floats are exact, so the total does not depend on the grouping of examples into devices
and sites. This module needs no numpy, because views of the event log compute metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Final, NamedTuple

from fedquilt.core import DETAILED, EvaluationSums, TaskKind, UpdateError
from fedquilt.core.messages import SHARES_MOST

LOGIT_MOST: Final = 10.0  # the first and the last bin of a histogram hold everything beyond
SUM_MOST: Final = 1e90  # largest float of a sum: squares of float32 numbers, added up 10^12 times
SLACK: Final = Fraction(1.000001)  # by which rounded squares may be less than they are
ROUNDING: Final = 1.01  # by which a value rounded to three digits may differ
DIGITS: Final = 3  # to which a device's own main metric is rounded among those of other devices


class MetricOverDevices(NamedTuple):
    devices: int
    mean: float
    worst_decile: float  # mean of the worst tenth of the devices, at least one
    best_decile: float  # mean of the best tenth, likewise
    deviation: float  # standard deviation

    @property
    def gap(self) -> float:
        return abs(self.best_decile - self.worst_decile)


# -- exact sums and packed counts -----------------------------------------------------------------


def exact_sum(numbers: Iterable[float]) -> tuple[float, ...]:
    """Return the canonical floats whose exact sum is that of the numbers, in any order."""
    left, found = [float(each) for each in numbers], list[float]()
    while rounded := math.fsum(left):
        found.append(rounded)
        left.append(-rounded)
    return tuple(found)


def pack_counts(counts: Iterable[int]) -> bytes:
    """Pack counts as variable-length integers of 7 bits per byte.

    A run of zeros is packed as 0 and its length. Zeros at the end are omitted.
    """
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
    return bytes(packed)  # zeros at the end are left out


def unpack_counts(packed: bytes, size: int) -> list[int]:
    """Unpack counts from `pack_counts`.

    Args:
        packed: Packed counts.
        size: Number of counts.

    Raises:
        UpdateError: If there are more than `size` counts, or the bytes end within a number.
    """
    found = [0] * size
    for place, count in _unpack_nonzero(packed, size):
        found[place] = count
    return found


def _append_varint(packed: bytearray, number: int) -> None:
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    packed.append(number)


def _unpack_nonzero(packed: bytes, size: int) -> Iterator[tuple[int, int]]:
    place = number = shift = 0
    after_zero = False
    for byte in packed:
        number |= (byte & 127) << shift
        if byte > 127:
            shift += 7
            if shift > 56:
                raise UpdateError("packed counts hold a number beyond 2^56")
            continue
        if after_zero:
            place, after_zero = place + number, False
        elif number:
            if place >= size:
                raise UpdateError(f"packed counts are more than {size}")
            yield place, number
            place += 1
        else:
            after_zero = True
        number = shift = 0
    if shift or after_zero:
        raise UpdateError("packed counts are cut off in the middle of a number")


def _split_rows(numbers: Sequence[int], width: int) -> list[list[int]]:
    return [list(numbers[start : start + width]) for start in range(0, len(numbers), width)]


def histogram_bins(outputs: int) -> int:
    """Return the number of bins per probability histogram, or 0 for many outputs."""
    return min(3000 // outputs, 400) if outputs <= DETAILED else 0


def counts_length(task: TaskKind, outputs: int) -> int:
    if task == "regression":
        return 0
    return outputs**2 if task == "classes" and outputs <= DETAILED else 3 * outputs


def scores_length(task: TaskKind, outputs: int) -> int:
    return 0 if task == "regression" else 2 * outputs * histogram_bins(outputs)


# -- totals ---------------------------------------------------------------------------------------


def add_evaluations(given: Iterable[EvaluationSums]) -> EvaluationSums | None:
    """Add evaluations of different devices or sites, or return None without examples.

    Raises:
        UpdateError: If tasks or numbers of outputs differ.
    """
    parts = [each for each in given if each.examples]
    if not parts:
        return None
    task, outputs = parts[0].task, parts[0].outputs
    if odd := next((each for each in parts if (each.task, each.outputs) != (task, outputs)), None):
        raise UpdateError(
            f"evaluations of {odd.outputs} outputs ({odd.task}) and of {outputs} ({task}) have no sum: the devices' "
            "networks differ"
        )
    devices = Counter[float]()
    for part in parts:
        devices.update(dict(part.devices) or {_round_digits(main_metric_value(part)): 1})
    return EvaluationSums(
        examples=sum(part.examples for part in parts),
        task=task,
        outputs=outputs,
        loss=_combine_sums(part.loss for part in parts),
        counts=_add_counts([part.counts for part in parts], counts_length(task, outputs)),
        whole=sum(part.whole for part in parts),
        scores=_add_counts([part.scores for part in parts], scores_length(task, outputs)),
        absolute=_combine_sums(part.absolute for part in parts),
        squares=tuple(map(_combine_sums, zip(*(part.squares for part in parts), strict=True))),
        targets=tuple(map(_combine_sums, zip(*(part.targets for part in parts), strict=True))),
        target_squares=tuple(map(_combine_sums, zip(*(part.target_squares for part in parts), strict=True))),
        devices=tuple(sorted(devices.items())),
        right_with_priors=_add_right_with_priors(parts),
    )


def _add_right_with_priors(parts: Sequence[EvaluationSums]) -> int | None:
    # Devices whose engines count without priors have none that helps.
    known = [part.right_with_priors for part in parts]
    plain = (_sum_outcomes(count_outcomes(part))[0] for part in parts)
    return (
        sum(b if a is None else a for a, b in zip(known, plain, strict=True))
        if any(a is not None for a in known)
        else None
    )


def _combine_sums(sums: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return exact_sum(number for each in sums for number in each)


def _add_counts(packed: Sequence[bytes], size: int) -> bytes:
    if len(packed) == 1:
        return packed[0]
    found = [0] * size
    for each in packed:
        for place, count in _unpack_nonzero(each, size):
            found[place] += count
    return pack_counts(found)


def _round_digits(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def confusion_matrix(sums: EvaluationSums) -> list[list[int]] | None:
    """Return the confusion matrix (true class, predicted class), or None without one."""
    if sums.task != "classes" or sums.outputs > DETAILED:
        return None
    return _split_rows(unpack_counts(sums.counts, sums.outputs**2), sums.outputs)


def find_inconsistency(sums: EvaluationSums) -> str:
    """Return a contradiction between the sums of an evaluation, or "" if there is none."""
    if not sums.examples:
        return "" if sums == EvaluationSums(examples=0, task=sums.task, outputs=sums.outputs) else "sums of no example"
    every = [sums.loss, sums.absolute, *sums.squares, *sums.targets, *sums.target_squares]
    if not all(abs(each) <= SUM_MOST for part in every for each in part):
        return f"a sum that is not a number up to {SUM_MOST:g}"
    if sums.right_with_priors is not None and (sums.task != "classes" or sums.right_with_priors > sums.examples):
        return f"{sums.right_with_priors} correct predictions with class priors of {sums.examples} examples"
    if sums.task == "regression":
        return _find_error_inconsistency(sums)
    if sums.absolute or sums.squares or sums.targets or sums.target_squares:
        return f"sums of a regression, and its task is {sums.task!r}"
    outcomes, matrix = count_outcomes(sums), confusion_matrix(sums)
    right, wrong, missed = _sum_outcomes(outcomes)
    classes = sums.task == "classes"
    if classes and (right + missed != sums.examples or wrong != missed or sums.whole):
        return f"counts of {right + missed} examples, and it has {sums.examples}"
    if not classes and any(sum(each) > sums.examples for each in outcomes):
        return f"more outcomes of a label than its {sums.examples} examples"
    if not classes and sums.whole > sums.examples - max(wrong + missed for _, wrong, missed in outcomes):
        return f"{sums.whole} examples without a wrong label, and more wrong ones than are left"
    bins = histogram_bins(sums.outputs)
    rows = _split_rows(unpack_counts(sums.scores, scores_length(sums.task, sums.outputs)), bins) if bins else []
    true = [sum(row) for row in matrix] if matrix else [right + missed for right, _, missed in outcomes]
    if any(sum(rows[2 * at]) != n or sum(rows[2 * at + 1]) != sums.examples - n for at, n in enumerate(true) if rows):
        return "histograms of another number of examples than its counts"
    return ""


def _find_error_inconsistency(sums: EvaluationSums) -> str:
    detailed = sums.outputs if sums.outputs <= DETAILED else 0
    if sums.counts or sums.scores or sums.whole:
        return "counts of classes, and its task is 'regression'"
    if (len(sums.squares), len(sums.targets), len(sums.target_squares)) != (detailed or 1, detailed, detailed):
        return f"sums of another number of outputs than {sums.outputs}"
    squares, absolute = [exact_fraction(each) for each in sums.squares], exact_fraction(sums.absolute)
    most = sums.examples * sums.outputs * sum(squares) * SLACK
    if min(squares) < 0 or absolute < 0 or absolute**2 > most:
        return "errors whose sum and sum of squares contradict each other"
    if any(
        exact_fraction(each) ** 2 > sums.examples * exact_fraction(square) * SLACK
        for each, square in zip(sums.targets, sums.target_squares, strict=True)
    ):
        return "targets whose sum and sum of squares contradict each other"
    return ""


def find_device_inconsistency(sums: EvaluationSums, boards: int, metric_most: float) -> str:
    """Return a contradiction in the device values of an evaluation, or "" if there is none.

    Args:
        sums: Evaluation of a device or a site, consistent otherwise.
        boards: Maximum number of devices of a site, or 0 for a single device.
        metric_most: Largest possible value of the main metric.
    """
    values = [value for value, _ in sums.devices]
    if not boards or not sums.examples:
        return "values of devices, and it speaks for itself" if values else ""
    if not values or values != sorted(set(values)) or not 0 <= values[0] <= values[-1] <= metric_most:
        return "no ascending values of its devices"
    count = sum(number for _, number in sums.devices)
    if count > boards or any(not number for _, number in sums.devices):
        return f"values of {count} devices, and it may speak for {boards}"
    main = main_metric_value(sums)
    if not values[0] / ROUNDING <= main <= values[-1] * ROUNDING:
        return f"a main metric of {main:g} beyond that of each of its devices"
    return ""


# -- metrics --------------------------------------------------------------------------------------


def main_metric_value(sums: EvaluationSums) -> float:
    """Return the main metric: accuracy, RMSE or label accuracy. Requires at least one example."""
    if sums.task == "regression":
        return math.sqrt(math.fsum(each for part in sums.squares for each in part) / (sums.examples * sums.outputs))
    right, wrong, missed = _sum_outcomes(count_outcomes(sums))
    if sums.task == "classes":
        return right / sums.examples
    return 1 - (wrong + missed) / (sums.examples * sums.outputs)


def compute_metrics(sums: EvaluationSums) -> dict[str, float]:
    """Return the metrics of an evaluation by name, the main one first, or {} without examples.

    Macro averages are over classes or labels that occur in targets or predictions. Undefined metrics are left out, such
    as R² without varying targets. "auc" is computed from histograms and differs from the exact AUC by at most
    "auc_error".
    """
    if not sums.examples:
        return {}
    main = main_metric_value(sums)
    if sums.task == "regression":
        mean_absolute = math.fsum(sums.absolute) / (sums.examples * sums.outputs)
        r2 = _compute_r2(sums)
        found = {"rmse": main, "mae": mean_absolute, **({} if r2 is None else {"r2": r2})}
    else:
        outcomes = count_outcomes(sums)
        found = {"accuracy" if sums.task == "classes" else "label_accuracy": main}
        if sums.task == "labels":
            found["exact_match"] = sums.whole / sums.examples
        found |= {**_compute_precision_and_recall(outcomes, balanced=sums.task == "classes"), **_compute_auc(sums)}
    return {**found, "loss": math.fsum(sums.loss) / sums.examples}


def summarise_over_devices(sums: EvaluationSums, *, higher: bool) -> MetricOverDevices | None:
    """Summarise the main metric over the devices of a total, or return None for a single device.

    Args:
        sums: Total of the devices.
        higher: Whether larger values of the main metric are better.
    """
    if not sums.devices:
        return None
    count = sum(number for _, number in sums.devices)
    mean = math.fsum(value * number for value, number in sums.devices) / count
    squares = math.fsum((value - mean) ** 2 * number for value, number in sums.devices)
    lowest, highest = _tenth_mean(sums.devices, count), _tenth_mean(sums.devices[::-1], count)
    worst, best = (lowest, highest) if higher else (highest, lowest)
    return MetricOverDevices(count, mean, worst, best, math.sqrt(squares / count))


def _tenth_mean(values: Sequence[tuple[float, int]], count: int) -> float:
    """Return the mean of the first tenth, at least one, of `count` devices with these values and numbers."""
    left = tenth = math.ceil(count / 10)
    first = list[float]()
    for value, number in values:
        first.append(value * min(number, left))
        left -= min(number, left)
    return math.fsum(first) / tenth


def count_outcomes(sums: EvaluationSums) -> list[tuple[int, int, int]]:
    """Return the numbers of true positives, false positives and false negatives per output."""
    rows = confusion_matrix(sums)
    if rows is None:
        counts = unpack_counts(sums.counts, 3 * sums.outputs)
        return [(right, wrong, missed) for right, wrong, missed in _split_rows(counts, 3)]
    predicted = [sum(column) for column in zip(*rows, strict=True)]
    return [(row[at], predicted[at] - row[at], sum(row) - row[at]) for at, row in enumerate(rows)]


def count_classes(sums: EvaluationSums) -> tuple[int, ...]:
    """Return the number of examples of each class."""
    return tuple(right + missed for right, _, missed in count_outcomes(sums))


def class_shares(counts: Sequence[int]) -> tuple[float, ...]:
    """Return the share of each class for a task, each counted once more, or () for unknown or too many classes."""
    total = sum(counts) + len(counts)
    return tuple(_round_digits((count + 1) / total) for count in counts) if len(counts) <= SHARES_MOST else ()


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


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


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
            below = accumulate(negative, initial=0)
            ties = sum(map(int.__mul__, positive, negative))
            ordered = sum(map(int.__mul__, positive, below))
            areas.append((2 * ordered + ties) / (2 * pairs))
            errors.append(ties / (2 * pairs))
    return {"auc": _mean(areas), "auc_error": _mean(errors)} if areas else {}


def _compute_r2(sums: EvaluationSums) -> float | None:
    left = []
    for errors, targets, squares in zip(sums.squares, sums.targets, sums.target_squares, strict=False):
        spread = (
            sums.examples * exact_fraction(squares) - exact_fraction(targets) ** 2
        )  # exact: no cancellation, however large the mean
        if spread > 0:
            left.append(sums.examples * exact_fraction(errors) / spread)
    try:
        return 1 - _mean([float(each) for each in left]) if left else None
    except OverflowError:
        return None


def exact_fraction(numbers: tuple[float, ...]) -> Fraction:
    return sum(map(Fraction, numbers), Fraction())
