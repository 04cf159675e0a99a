"""Confidence intervals of means over few seeds, by Student's t."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

T_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # of 1 to 10 degrees of freedom


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of two or more values."""
    mean, half = statistics.fmean(values), t_quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t. From 11 degrees of freedom on, 4 digits are correct."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
