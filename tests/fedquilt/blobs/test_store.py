import os
from pathlib import Path

import pytest
from depot_blobs import BLOB, KIB, REF, cut, names, ref_of

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.chunks import DamagedBlobError
from fedquilt.blobs.store import BlobStore
from fedquilt.core import StoreError

DAY_S = 24 * 3600.0


def write_chunk(depot: BlobStore, manifest: wire.BlobManifest, index: int) -> None:
    offset, size = chunks.chunk_extent(manifest, index)
    depot.write_part(manifest.sha256, offset, BLOB[offset : offset + size])


def test_a_blob_is_found_by_the_sha256_of_its_bytes(tmp_path):
    depot = BlobStore(tmp_path / "blobs")
    assert depot.store_bytes(BLOB) == REF
    assert depot.has_blob(REF)
    assert depot.find_ref(REF.sha256) == REF
    assert depot.blob_path(REF.sha256) == tmp_path / "blobs" / REF.sha256
    assert (tmp_path / "blobs" / REF.sha256).read_bytes() == BLOB
    assert names(tmp_path / "blobs") == {REF.sha256}


def test_storing_the_same_bytes_again_writes_nothing(tmp_path):
    depot = BlobStore(tmp_path)
    depot.store_bytes(BLOB)
    before = (tmp_path / REF.sha256).stat().st_ino
    depot.store_bytes(BLOB)
    assert (tmp_path / REF.sha256).stat().st_ino == before


def test_a_file_cut_short_is_not_taken_for_the_blob(tmp_path):
    depot = BlobStore(tmp_path)
    (tmp_path / REF.sha256).write_bytes(BLOB[:-1])
    assert not depot.has_blob(REF)
    depot.store_bytes(BLOB)
    assert (tmp_path / REF.sha256).read_bytes() == BLOB


def test_a_blob_is_read_piece_by_piece(tmp_path):
    depot = BlobStore(tmp_path)
    depot.store_bytes(b"hello")
    assert depot.read_range(ref_of(b"hello").sha256, 1, 3) == b"ell"
    assert depot.read_range(ref_of(b"hello").sha256, 3, 10) == b"lo"


def test_what_is_not_here_is_said_so(tmp_path):
    depot = BlobStore(tmp_path)
    assert depot.blob_path(REF.sha256) is None
    assert depot.find_ref(REF.sha256) is None
    assert not depot.has_blob(REF)
    with pytest.raises(StoreError, match="cannot read blob"):
        depot.read_range(REF.sha256, 0, 1)


@pytest.mark.parametrize("name", ["../secret", "", "a" * 63, "A" * 64, "a" * 64 + "\n", "/etc/passwd"])
def test_only_a_sha256_names_a_blob(tmp_path, name):
    with pytest.raises(StoreError, match="is not a sha256 in hex"):
        BlobStore(tmp_path).blob_path(name)


def test_a_file_is_linked_where_the_file_system_can(tmp_path):
    source = tmp_path / "donor"
    source.write_bytes(BLOB)
    depot = BlobStore(tmp_path / "blobs")
    assert depot.store_file(source) == REF
    assert (tmp_path / "blobs" / REF.sha256).samefile(source)
    assert depot.store_file(source, REF) == REF
    assert names(tmp_path / "blobs") == {REF.sha256}


def test_a_link_is_followed_to_its_file(tmp_path):
    (tmp_path / "donor").write_bytes(BLOB)
    (tmp_path / "alias").symlink_to(tmp_path / "donor")
    depot = BlobStore(tmp_path / "blobs")
    depot.store_file(tmp_path / "alias")
    assert not (tmp_path / "blobs" / REF.sha256).is_symlink()


def test_a_file_on_another_file_system_is_copied(tmp_path):
    places = [Path(place) for place in ("/dev/shm", "/var/tmp", "/tmp") if Path(place).is_dir()]
    others = [place for place in places if place.stat().st_dev != tmp_path.stat().st_dev]
    if not others:
        pytest.skip("needs a second file system")
    source = others[0] / f"fedquilt-test-{os.getpid()}"
    try:
        source.write_bytes(BLOB)
        assert BlobStore(tmp_path / "blobs").store_file(source) == REF
    finally:
        source.unlink()
    assert (tmp_path / "blobs" / REF.sha256).read_bytes() == BLOB


def test_a_file_that_is_not_what_was_expected_is_refused(tmp_path):
    source = tmp_path / "donor"
    source.write_bytes(BLOB[:-1])
    depot = BlobStore(tmp_path / "blobs")
    with pytest.raises(StoreError, match=r"donor is damaged: its sha256 is .*, create the file again"):
        depot.store_file(source, REF)
    assert names(tmp_path / "blobs") == set()
    with pytest.raises(StoreError, match=r"cannot store .*absent"):
        depot.store_file(tmp_path / "absent")


def test_dropping_forgets_a_blob_whole_or_in_part(tmp_path):
    depot = BlobStore(tmp_path)
    depot.store_bytes(b"whole")
    depot.open_part(cut())
    depot.remove_blob(ref_of(b"whole").sha256)
    depot.remove_blob(REF.sha256)
    depot.remove_blob(REF.sha256)
    assert names(tmp_path) == set()


def test_garbage_is_what_nobody_names(tmp_path):
    depot = BlobStore(tmp_path)
    kept, lost = depot.store_bytes(b"kept"), depot.store_bytes(b"lost")
    (tmp_path / "README").write_text("mine")
    depot.remove_all_but({kept.sha256})
    assert depot.has_blob(kept)
    assert not depot.has_blob(lost)
    assert (tmp_path / "README").exists()


def test_parts_are_kept_for_a_day_and_no_longer(tmp_path):
    depot = BlobStore(tmp_path)
    depot.open_part(cut())
    (tmp_path / "0123.tmp").write_bytes(b"left by a crash")
    written_s = (tmp_path / f"{REF.sha256}.part").stat().st_mtime
    BlobStore(tmp_path, wall_clock=lambda: written_s + DAY_S - 60).remove_all_but(set())
    assert names(tmp_path) == {f"{REF.sha256}.part", "0123.tmp"}
    BlobStore(tmp_path, wall_clock=lambda: written_s + DAY_S + 60).remove_all_but(set())
    assert names(tmp_path) == set()


def test_a_file_that_a_killed_owner_was_writing_goes_at_the_next_start_and_another_processs_stays(tmp_path):
    owner, other = BlobStore(tmp_path), BlobStore(tmp_path)
    owner.open_as_owner()
    for depot in (owner, other):
        with depot._temporary_path() as path:
            Path(path).write_bytes(b"half")
            os.link(path, f"{path[:-8]}{path[-4:]}")  # as it stays where the process is killed
    assert sorted(name[-4:] for name in names(tmp_path)) == [".own", ".tmp"]
    again = BlobStore(tmp_path)
    again.open_as_owner()
    again.open_as_owner()
    assert [name[-4:] for name in names(tmp_path)] == [".tmp"]
    with again._temporary_path() as path:
        Path(path).write_bytes(b"being written")
        again.open_as_owner()
        again.remove_all_but(set())
        assert Path(path).exists()


def test_what_a_work_item_has_stored_or_found_is_not_removed_before_its_result_is_used(tmp_path):
    depot, seen = BlobStore(tmp_path), list[set[str]]()
    found, other = depot.store_bytes(b"found"), depot.store_bytes(b"other")
    item, then = depot.pin_during(
        lambda: (depot.load(found.sha256), depot.store_bytes(b"stored")),
        lambda result, now_s: seen.append(names(tmp_path)),
    )
    _, stored = item()
    for _ in range(2):
        depot.remove_blob(found.sha256)
        depot.remove_all_but(set())
        assert names(tmp_path) == {found.sha256, stored.sha256}
    assert not depot.has_blob(other)
    then(lambda: (b"", stored), 0.0)
    assert seen == [{found.sha256, stored.sha256}]
    depot.remove_all_but(set())
    assert names(tmp_path) == set()


def test_a_part_of_what_is_here_whole_is_garbage(tmp_path):
    depot = BlobStore(tmp_path)
    depot.open_part(cut())
    depot.store_bytes(BLOB)
    depot.remove_all_but({REF.sha256})
    assert names(tmp_path) == {REF.sha256}


def test_a_complete_part_becomes_the_blob(tmp_path):
    depot = BlobStore(tmp_path)
    manifest = cut()
    assert bytes(depot.open_part(manifest)) == bytes(5)
    for index in (4, 0, 2, 1, 3):
        write_chunk(depot, manifest, index)
    depot.finish_part(REF)
    assert (tmp_path / REF.sha256).read_bytes() == BLOB
    assert names(tmp_path) == {REF.sha256}


def test_a_part_goes_on_from_the_chunks_that_are_right(tmp_path):
    BlobStore(tmp_path).open_part(cut())
    for index in (0, 3, 4):
        write_chunk(BlobStore(tmp_path), cut(), index)
    with open(tmp_path / f"{REF.sha256}.part", "r+b") as file:
        file.seek(3 * 8 * KIB + 4 * KIB)
        file.write(bytes(4 * KIB))
    assert list(BlobStore(tmp_path).open_part(cut())) == [1, 0, 0, 0, 1]


def test_a_part_whose_size_was_lost_starts_again(tmp_path):
    (tmp_path / f"{REF.sha256}.part").write_bytes(b"")
    assert list(BlobStore(tmp_path).open_part(cut())) == [0] * 5


def test_a_part_with_other_content_than_its_name_is_thrown_away(tmp_path):
    """A manifest may lie about the chunks; the whole's sha256 decides."""
    depot = BlobStore(tmp_path)
    depot.open_part(cut())
    with pytest.raises(DamagedBlobError, match="arrived with another sha256"):
        depot.finish_part(REF)
    assert names(tmp_path) == set()


def test_an_empty_blob_is_a_blob(tmp_path):
    depot = BlobStore(tmp_path)
    ref = ref_of(b"")
    assert list(depot.open_part(wire.BlobManifest(sha256=ref.sha256, size=0, chunk=KIB, digests=""))) == []
    depot.finish_part(ref)
    assert depot.has_blob(ref)
