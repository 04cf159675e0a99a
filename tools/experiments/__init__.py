"""Runs, comparisons and evaluations of methods, and the tables of papers."""
