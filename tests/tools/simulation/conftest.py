"""Fixtures of tests/tools/simulation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulated_fleets import Fleet

from fedquilt.arrays import tensors
from fedquilt.formats import job_bundle
from fedquilt.testing.toy_networks import toy_bundle


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path, stack)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = toy_bundle()
    job_bundle.write_bundle(tmp_path / "bundle", made.meta, {"model": tensors.encode_tensors(made.load("model"))})
    return tmp_path / "bundle"
