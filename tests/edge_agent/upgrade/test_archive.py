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
    with archive.open_bundle(path) as bundle:
        bundle.verify_wheels()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of one wheel."""
    return upgrades.pack(tmp_path / "b.tar", [upgrades.toy(tmp_path / "house")])


@pytest.mark.parametrize(
    "headers",
    [{"comment": "a wheel"}, {"GNU.sparse.map": "0,x"}, {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 50)}],
    ids=["extended", "no map", "hole"],
)
def test_extended_headers_are_refused(bundle: Path, headers: dict[str, str]) -> None:
    rewritten(bundle, "wheels/", **headers)
    with pytest.raises(ModelError, match=r"is not an upgrade bundle .*is not a regular file or is too large"):
        read(bundle)


@pytest.mark.parametrize("size", [-1024, -(1 << 62), 1 << 62, 1 << 80])
def test_a_size_that_leads_back_or_nowhere_is_refused(bundle: Path, size: int) -> None:
    """-1024 would lead to the header before, for ever."""
    content = bytearray(bundle.read_bytes())
    at = content.index(b"wheels/")
    content[at + 124 : at + 136] = bytes([0o377 if size < 0 else 0o200]) + (size % 256**11).to_bytes(11, "big")
    content[at + 148 : at + 156] = b" " * 8
    content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])
    bundle.write_bytes(content)
    with pytest.raises(ModelError, match="is not an upgrade bundle"):
        read(bundle)


def test_a_whole_bundle_is_read(bundle: Path) -> None:
    read(bundle)
