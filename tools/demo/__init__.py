"""Data of `fedquilt demo`."""
