"""Set-up of tests that read examples."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# found, not imported: whether it imports is not the test's affair
needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")


def rows_of(examples) -> list[int]:
    return [int(image.flat[0]) for image in examples.x]
