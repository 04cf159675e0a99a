"""Sums of evaluations with a given main metric."""

from __future__ import annotations

from fedquilt.core import EvaluationSums, evaluation


def of_classes(accuracy: float, examples: int = 10, loss: float = 0.5) -> EvaluationSums:
    """Evaluation of two classes, on examples of the first one."""
    right, none = round(accuracy * examples), [0] * (evaluation.histogram_bins(2) - 1)
    return EvaluationSums(
        examples=examples,
        outputs=2,
        loss=(loss * examples,),
        counts=evaluation.pack_counts([right, examples - right, 0, 0]),
        scores=evaluation.pack_counts([examples, *none, 0, *none, 0, *none, examples]),
    )


def of_numbers(rmse: float, mae: float, examples: int, target: float = 0.0) -> EvaluationSums:
    """Evaluation of a regression with one output, whose targets are alike."""
    return EvaluationSums(
        examples=examples,
        task="regression",
        loss=(rmse**2 * examples,),
        absolute_errors=(mae * examples,),
        squared_errors=((rmse**2 * examples,),),
        targets=((target * examples,),),
        target_squares=((target**2 * examples,),),
    )


def total(*given: EvaluationSums) -> EvaluationSums:
    """Sum of devices' evaluations."""
    found = evaluation.add_evaluations(given)
    assert found is not None
    return found
