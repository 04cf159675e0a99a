"""Checks of `fedquilt doctor`."""
