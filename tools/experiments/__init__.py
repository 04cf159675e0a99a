"""Experiments: runs, comparisons, evaluations and the papers' tables."""
