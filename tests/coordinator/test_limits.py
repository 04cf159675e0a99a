"""limits.toml: limits that are common to a coordinator's jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.coordinator import limits
from fedquilt.coordinator.limits import Limits, Retention, Submitter
from fedquilt.core import JobError


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    """A coordinator without limits.toml deletes no run."""
    assert limits.load(tmp_path) == Limits()
    assert Retention().older_s is None


def test_what_the_file_says_holds(tmp_path: Path) -> None:
    """An age such as "2d" is read as seconds."""
    text = 'running = 3\n[submitter]\nrunning = 2\nshare = 0.5\n[retention]\nkeep = 10\nolder_than = "2d"\n'
    (tmp_path / limits.FILE).write_text(text)
    found = limits.load(tmp_path)
    assert found == Limits(3, Submitter(2, 0.5), Retention(10, "2d"))
    assert found.retention.older_s == 2 * 86400.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("running = 0", "running"),
        ("places = 2", "places"),
        ("[submitter]\nshare = 1.5", "share"),
        ('[retention]\nolder_than = "soon"', "'soon' is no age"),
        ("running =", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, said: str) -> None:
    """Limits are refused as they are read, before a coordinator serves anything."""
    (tmp_path / limits.FILE).write_text(text)
    with pytest.raises(JobError, match=said) as raised:
        limits.load(tmp_path)
    assert limits.FILE in str(raised.value)
