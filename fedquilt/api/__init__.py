"""Modules of the public names, which `fedquilt` loads on first use."""
