"""Bits that a disk flips: ten of them; `make nightly` has a thousand."""

from collections.abc import Iterator

import pytest
from flips import Ground, ground


@pytest.fixture(scope="module")
def homes() -> Iterator[Ground]:
    with ground() as made:
        yield made


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_is_mended_or_named_and_never_another_result(homes, seed):
    found = homes.play(seed)
    assert found.verdict != "SILENT", f"{found.file}: {found.said}"
