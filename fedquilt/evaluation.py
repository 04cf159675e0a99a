"""Sums of an evaluation: devices send them, coordinators add them up, and metrics follow from the total.

Counts are whole numbers and sums of floats are exact, so the total does not depend on how examples are grouped into
devices and sites. Light (no numpy): views of a log compute metrics from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Final, NamedTuple

from fedquilt.core import DETAILED, EvaluationSums, TaskKind, UpdateError

LOGIT_MOST: Final = 10.0  # the first and the last bin of a histogram hold everything beyond
SUM_MOST: Final = 1e90  # largest float of a sum: squares of float32 numbers, added up 10^12 times
SLACK: Final = Fraction(1.000001)  # by which rounded squares may be less than they are
ROUNDING: Final = 1.01  # by which a value rounded to three digits may differ
DIGITS: Final = 3  # to which a device's own main metric is rounded among those of other devices


class OverDevices(NamedTuple):
    """The main metric over devices, each of which counts once."""

    devices: int
    mean: float
    worst_decile: float  # mean of the worst tenth of the devices, at least one
    deviation: float  # standard deviation


# -- exact sums and packed counts -----------------------------------------------------------------


def exact_sum(numbers: Iterable[float]) -> tuple[float, ...]:
    """Return the floats whose sum is exactly that of the numbers: always the same ones, whatever the order."""
    left, found = [float(each) for each in numbers], list[float]()
    while rounded := math.fsum(left):
        found.append(rounded)
        left.append(-rounded)
    return tuple(found)


def pack_counts(counts: Iterable[int]) -> bytes:
    """Pack counts as variable-length integers of seven bits a byte. A 0 is followed by the length of its run."""
    packed, zeros = bytearray(), 0
    for count in counts:
        if not count:
            zeros += 1
            continue
        if zeros:
            _put(packed, 0)
            _put(packed, zeros)
            zeros = 0
        _put(packed, count)
    return bytes(packed)  # zeros at the end are left out


def unpack_counts(packed: bytes, size: int) -> list[int]:
    """Return the counts that were packed.

    Args:
        packed: Result of `pack_counts`.
        size: Number of counts.

    Raises:
        UpdateError: If there are more of them, or the bytes end within a number.
    """
    found = [0] * size
    for place, count in _nonzero(packed, size):
        found[place] = count
    return found


def _put(packed: bytearray, number: int) -> None:
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    packed.append(number)


def _nonzero(packed: bytes, size: int) -> Iterator[tuple[int, int]]:
    """Yield place and count of each count that is not 0."""
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
        raise UpdateError("packed counts end within a number")


def _rows(numbers: Sequence[int], width: int) -> list[list[int]]:
    return [list(numbers[start : start + width]) for start in range(0, len(numbers), width)]


def bins_of(outputs: int) -> int:
    """Return the number of bins of each histogram of probabilities, or 0 if there are none."""
    return min(3000 // outputs, 400) if outputs <= DETAILED else 0


def counts_of(task: TaskKind, outputs: int) -> int:
    """Return how many numbers `EvaluationSums.counts` holds."""
    if task == "regression":
        return 0
    return outputs**2 if task == "classes" and outputs <= DETAILED else 3 * outputs


def scores_of(task: TaskKind, outputs: int) -> int:
    """Return how many numbers `EvaluationSums.scores` holds."""
    return 0 if task == "regression" else 2 * outputs * bins_of(outputs)


# -- totals ---------------------------------------------------------------------------------------


def add_evaluations(given: Iterable[EvaluationSums]) -> EvaluationSums | None:
    """Add evaluations of different devices, or totals of sites. Return None if none of them has an example.

    Raises:
        UpdateError: If they differ in their task or the number of outputs.
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
        devices.update(dict(part.devices) or {_rounded(main_value(part)): 1})
    return EvaluationSums(
        examples=sum(part.examples for part in parts),
        task=task,
        outputs=outputs,
        loss=_sum_of(part.loss for part in parts),
        counts=_add_counts([part.counts for part in parts], counts_of(task, outputs)),
        whole=sum(part.whole for part in parts),
        scores=_add_counts([part.scores for part in parts], scores_of(task, outputs)),
        absolute=_sum_of(part.absolute for part in parts),
        squares=tuple(map(_sum_of, zip(*(part.squares for part in parts), strict=True))),
        targets=tuple(map(_sum_of, zip(*(part.targets for part in parts), strict=True))),
        target_squares=tuple(map(_sum_of, zip(*(part.target_squares for part in parts), strict=True))),
        devices=tuple(sorted(devices.items())),
    )


def _sum_of(sums: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return exact_sum(number for each in sums for number in each)


def _add_counts(packed: Sequence[bytes], size: int) -> bytes:
    if len(packed) == 1:
        return packed[0]
    found = [0] * size
    for each in packed:
        for place, count in _nonzero(each, size):
            found[place] += count
    return pack_counts(found)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def confusion(sums: EvaluationSums) -> list[list[int]] | None:
    """Return the rows of the confusion matrix (true class, predicted class), or None if there is none."""
    if sums.task != "classes" or sums.outputs > DETAILED:
        return None
    return _rows(unpack_counts(sums.counts, sums.outputs**2), sums.outputs)


def inconsistency(sums: EvaluationSums) -> str:
    """Return which sums contradict each other, or "" if an evaluation can have these sums."""
    if not sums.examples:
        return "" if sums == EvaluationSums(examples=0, task=sums.task, outputs=sums.outputs) else "sums of no example"
    every = [sums.loss, sums.absolute, *sums.squares, *sums.targets, *sums.target_squares]
    if not all(abs(each) <= SUM_MOST for part in every for each in part):
        return f"a sum that is not a number up to {SUM_MOST:g}"
    if sums.task == "regression":
        return _odd_errors(sums)
    if sums.absolute or sums.squares or sums.targets or sums.target_squares:
        return f"sums of a regression, and its task is {sums.task!r}"
    outcomes, matrix = outcomes_of(sums), confusion(sums)
    right, wrong, missed = _totals(outcomes)
    classes = sums.task == "classes"
    if classes and (right + missed != sums.examples or wrong != missed or sums.whole):
        return f"counts of {right + missed} examples, and it has {sums.examples}"
    if not classes and any(sum(each) > sums.examples for each in outcomes):
        return f"more outcomes of a label than its {sums.examples} examples"
    if not classes and sums.whole > sums.examples - max(wrong + missed for _, wrong, missed in outcomes):
        return f"{sums.whole} examples without a wrong label, and more wrong ones than are left"
    bins = bins_of(sums.outputs)
    rows = _rows(unpack_counts(sums.scores, scores_of(sums.task, sums.outputs)), bins) if bins else []
    true = [sum(row) for row in matrix] if matrix else [right + missed for right, _, missed in outcomes]
    if any(sum(rows[2 * at]) != n or sum(rows[2 * at + 1]) != sums.examples - n for at, n in enumerate(true) if rows):
        return "histograms of another number of examples than its counts"
    return ""


def _odd_errors(sums: EvaluationSums) -> str:
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


def odd_devices(sums: EvaluationSums, boards: int, metric_most: float) -> str:
    """Return what is wrong with the devices of an evaluation, or "".

    Args:
        sums: Evaluation of one device or of a site, without other inconsistencies.
        boards: The most devices that it may speak for, or 0 if it may speak for itself alone.
        metric_most: Largest value of the main metric.
    """
    values = [value for value, _ in sums.devices]
    if not boards or not sums.examples:
        return "values of devices, and it speaks for itself" if values else ""
    if not values or values != sorted(set(values)) or not 0 <= values[0] <= values[-1] <= metric_most:
        return "no ascending values of its devices"
    count = sum(number for _, number in sums.devices)
    if count > boards or any(not number for _, number in sums.devices):
        return f"values of {count} devices, and it may speak for {boards}"
    main = main_value(sums)
    if not values[0] / ROUNDING <= main <= values[-1] * ROUNDING:
        return f"a main metric of {main:g} beyond that of each of its devices"
    return ""


# -- metrics --------------------------------------------------------------------------------------


def main_value(sums: EvaluationSums) -> float:
    """Return the main metric of the task: accuracy, RMSE or label accuracy. There is one example at least."""
    if sums.task == "regression":
        return math.sqrt(math.fsum(each for part in sums.squares for each in part) / (sums.examples * sums.outputs))
    right, wrong, missed = _totals(outcomes_of(sums))
    if sums.task == "classes":
        return right / sums.examples
    return 1 - (wrong + missed) / (sums.examples * sums.outputs)


def metrics_of(sums: EvaluationSums) -> dict[str, float]:
    """Return the metrics of an evaluation by name, the main one first. Without an example there are none.

    Macro averages are over the classes or labels that occur in targets or predictions. Metrics that are not defined,
    as R² where no target varies, are left out. "auc" is that of the histograms, from which that of the probabilities
    themselves differs by up to "auc_error".
    """
    if not sums.examples:
        return {}
    main = main_value(sums)
    if sums.task == "regression":
        mean_absolute = math.fsum(sums.absolute) / (sums.examples * sums.outputs)
        r2 = _r2(sums)
        found = {"rmse": main, "mae": mean_absolute, **({} if r2 is None else {"r2": r2})}
    else:
        outcomes = outcomes_of(sums)
        found = {"accuracy" if sums.task == "classes" else "label_accuracy": main}
        if sums.task == "labels":
            found["exact_match"] = sums.whole / sums.examples
        found |= {**_rates(outcomes, balanced=sums.task == "classes"), **_auc(sums)}
    return {**found, "loss": math.fsum(sums.loss) / sums.examples}


def over_devices(sums: EvaluationSums, *, higher: bool) -> OverDevices | None:
    """Summarise the main metric over the devices of a total, or return None for a single device's evaluation.

    Args:
        sums: Total of devices.
        higher: Whether a larger value of the main metric is better.
    """
    if not sums.devices:
        return None
    count = sum(number for _, number in sums.devices)
    mean = math.fsum(value * number for value, number in sums.devices) / count
    squares = math.fsum((value - mean) ** 2 * number for value, number in sums.devices)
    left = tenth = math.ceil(count / 10)
    worst = list[float]()
    for value, number in sums.devices if higher else reversed(sums.devices):
        worst.append(value * min(number, left))
        left -= min(number, left)
    return OverDevices(count, mean, math.fsum(worst) / tenth, math.sqrt(squares / count))


def outcomes_of(sums: EvaluationSums) -> list[tuple[int, int, int]]:
    """Return true positives, false positives and false negatives of each output."""
    rows = confusion(sums)
    if rows is None:
        counts = unpack_counts(sums.counts, 3 * sums.outputs)
        return [(right, wrong, missed) for right, wrong, missed in _rows(counts, 3)]
    predicted = [sum(column) for column in zip(*rows, strict=True)]
    return [(row[at], predicted[at] - row[at], sum(row) - row[at]) for at, row in enumerate(rows)]


def _totals(outcomes: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    right, wrong, missed = (sum(column) for column in zip(*outcomes, strict=True))
    return right, wrong, missed


def _rates(outcomes: Sequence[tuple[int, int, int]], *, balanced: bool) -> dict[str, float]:
    """Return precision, recall and F1 of outputs, macro and micro. A rate of nothing is 0."""
    present = [each for each in outcomes if any(each)]
    if not present:
        return {}
    precisions = [_share(right, right + wrong) for right, wrong, _ in present]
    recalls = [_share(right, right + missed) for right, _, missed in present]
    f1s = [_share(2 * right, 2 * right + wrong + missed) for right, wrong, missed in present]
    right, wrong, missed = _totals(present)
    found = {}
    if balanced:
        true = [right / (right + missed) for right, _, missed in present if right + missed]
        found["balanced_accuracy"] = _mean(true)
    return {
        **found,
        "macro_precision": _mean(precisions),
        "macro_recall": _mean(recalls),
        "macro_f1": _mean(f1s),
        "micro_precision": _share(right, right + wrong),
        "micro_recall": _share(right, right + missed),
        "micro_f1": _share(2 * right, 2 * right + wrong + missed),
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _auc(sums: EvaluationSums) -> dict[str, float]:
    """Return the mean AUC over outputs that have positive and negative examples, and its largest error."""
    bins = bins_of(sums.outputs)
    if not bins:
        return {}
    rows, areas, errors = _rows(unpack_counts(sums.scores, 2 * sums.outputs * bins), bins), list[float](), list[float]()
    for positive, negative in zip(rows[::2], rows[1::2], strict=True):
        pairs = sum(positive) * sum(negative)
        if pairs:
            below = accumulate(negative, initial=0)
            ties = sum(map(int.__mul__, positive, negative))
            ordered = sum(map(int.__mul__, positive, below))
            areas.append((2 * ordered + ties) / (2 * pairs))
            errors.append(ties / (2 * pairs))
    return {"auc": _mean(areas), "auc_error": _mean(errors)} if areas else {}


def _r2(sums: EvaluationSums) -> float | None:
    """Return the mean R² over outputs whose targets vary, or None if none does."""
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
    """Return the sum of the numbers without rounding."""
    return sum(map(Fraction, numbers), Fraction())
