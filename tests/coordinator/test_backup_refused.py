"""Backups that are damaged, incomplete or none are refused, and leave no home."""

import hashlib
import os
import tarfile
from pathlib import Path

import pytest
from saved_homes import contents, saved

from fedquilt.cli import main
from fedquilt.coordinator.storage import backup
from fedquilt.core import StoreError


def refusal(file: Path, home: Path) -> str | None:
    """Why a backup is not restored; None: it is."""
    try:
        backup.restore_backup(file, home)
    except StoreError as error:
        return str(error)
    return None


def test_every_flipped_bit_and_every_cut_is_named_and_leaves_no_home(home, tmp_path):
    whole = saved(home, tmp_path / "backup.tar").read_bytes()
    backup.restore_backup(tmp_path / "backup.tar", tmp_path / "sound")
    sound = contents(tmp_path / "sound")
    damaged = tmp_path / "damaged.tar"
    refused = 0
    cuts = [whole[:length] for length in range(0, len(whole) - 10_240, len(whole) // 40)]
    step = len(whole) // 150
    flips = [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in range(0, len(whole), step)]
    for payload in cuts + flips:
        damaged.write_bytes(payload)
        if (said := refusal(damaged, tmp_path / "again")) is not None:
            refused += 1
            assert str(damaged) in said
            assert not (tmp_path / "again").exists()
        else:
            assert payload not in cuts
            assert contents(tmp_path / "again") == sound
            os.rename(tmp_path / "again", tmp_path / f"fine-{refused}-{len(list(tmp_path.iterdir()))}")
    assert refused > len(cuts + flips) * 0.7


def test_what_is_no_backup_is_refused(tmp_path, home):
    """Another archive, one that would write elsewhere, one of a later format."""
    file = tmp_path / "some.tar"
    (tmp_path / "passwd").write_text("x")
    for name in ("passwd", "agents/../../passwd", "/etc/passwd"):
        with tarfile.open(file, "w") as archive:
            archive.add(tmp_path / "passwd", name)
        with pytest.raises(StoreError, match=r"no backup of fedquilt|cut short"):
            backup.restore_backup(file, tmp_path / "again")
    text = b'{"format": 2}'
    with tarfile.open(file, "w") as archive:
        (tmp_path / "passwd").write_bytes(text)
        archive.add(tmp_path / "passwd", f"manifest-{hashlib.sha256(text).hexdigest()}.json")
    with pytest.raises(StoreError, match="this fedquilt reads"):
        backup.restore_backup(file, tmp_path / "again")
    for headers in ({"GNU.sparse.map": "0,x"}, {"comment": "a" * 30}):
        with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
            entry = tarfile.TarInfo("manifest")
            entry.pax_headers = headers
            archive.addfile(entry)
        content = file.read_bytes().replace(b"42 comment=" + b"a" * 30, b"9" * 30 + b" comment=aa")
        file.write_bytes(content)
        with pytest.raises(StoreError, match="is no whole backup"):
            backup.restore_backup(file, tmp_path / "again")
    assert main(["backup", "restore", str(tmp_path / "none.tar"), str(tmp_path / "again")]) == 6
    assert main(["backup", "save", str(tmp_path / "nowhere"), str(tmp_path / "b.tar")]) == 6


def test_a_backup_that_lacks_a_file_of_its_manifest_is_refused(home, tmp_path):
    """Though what it holds is whole: a tool for archives left one out."""
    file = saved(home, tmp_path / "backup.tar")
    with tarfile.open(file) as whole, tarfile.open(tmp_path / "less.tar", "w") as less:
        blob, *_ = [member for member in whole if member.name.startswith("blobs/")]
        for member in whole:
            if member is not blob:
                less.addfile(member, whole.extractfile(member))
    with pytest.raises(StoreError, match=f"{blob.name} is not what was saved"):
        backup.restore_backup(tmp_path / "less.tar", tmp_path / "again")
    assert not (tmp_path / "again").exists()
