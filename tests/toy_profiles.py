"""What board profiles of tests begin with: a toy of a kilobyte, whose sources are made up."""

from __future__ import annotations

HEAD = """
board = "toy"
title = "for these tests"
memory_bytes = { value = 1000, source = "sheet" }

[sources.sheet]
provenance = "datasheet"
text = "Read in a data sheet that does not exist."

[sources.guess]
provenance = "assumed"
text = "Assumed for the sake of this test."
"""
