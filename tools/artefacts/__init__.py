"""Artefacts: what `fedquilt prepare` makes for a job, and what is made of its result."""
