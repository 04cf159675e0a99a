"""Bundles of an upgrade that are damaged or were made to harm: one sentence says so, and nothing is read for ever."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import upgrades

from fedquilt.core import ModelError
from fedquilt.edge_agent.upgrade import archive


def rewritten(path: Path, change: str, **headers: str) -> None:
    """The bundle with extended headers at one of its members."""
    made = io.BytesIO()
    with tarfile.open(path) as given, tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as packed:
        for member in given.getmembers():
            if member.name.startswith(change):
                member.pax_headers = headers
            packed.addfile(member, given.extractfile(member))
    path.write_bytes(made.getvalue())


def read(path: Path) -> None:
    with archive.opened(path) as bundle:
        bundle.check_wheels()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of one wheel."""
    return upgrades.pack(tmp_path / "b.tar", [upgrades.toy(tmp_path / "house")])


def test_extended_headers_of_posix_are_read(bundle: Path) -> None:
    rewritten(bundle, "wheels/", comment="a wheel")
    read(bundle)


def test_an_extended_header_of_a_length_that_no_machine_has_is_refused(bundle: Path) -> None:
    rewritten(bundle, "wheels/", comment="a" * 30)
    content = bundle.read_bytes()
    line = b"42 comment=" + b"a" * 30 + b"\n"  # its length comes first
    assert line in content
    bundle.write_bytes(content.replace(line, b"9" * 30 + b" comment=aa\n"))
    with pytest.raises(ModelError, match="is no bundle of an upgrade"):
        read(bundle)


def test_a_map_of_holes_that_is_none_is_refused(bundle: Path) -> None:
    rewritten(bundle, "wheels/", **{"GNU.sparse.map": "0,x"})
    with pytest.raises(ModelError, match="is no bundle of an upgrade"):
        read(bundle)


def test_a_wheel_that_is_all_hole_is_not_read(bundle: Path) -> None:
    """It has a petabyte of zeros, which would take years to hash."""
    rewritten(bundle, "wheels/", **{"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 50)})
    with pytest.raises(ModelError, match="is missing"):
        read(bundle)
