"""Mosquitto as a process of a benchmark: what is said if it does not start."""

from __future__ import annotations

from pathlib import Path

import pytest
from mosquittos import MOSQUITTO

from fedquilt.core import LinkError
from fedquilt.tools.lab import bench


@pytest.mark.skipif(MOSQUITTO is None, reason="Mosquitto is not installed")
def test_a_broker_that_does_not_start_is_named_with_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"accepts no connections on port \d+ \(.*nonsense"):
        bench.start_mosquitto(tmp_path, bench.find_free_port(), "nonsense 1\n")
