import hashlib

import pytest
from two_sides import KIB, cut, ref_of

from fedquilt import blobs, wire
from fedquilt.blobs.chunks import DamagedBlobError
from fedquilt.blobs.upload import OutgoingChunk, OutgoingChunkQueue
from fedquilt.core import BlobRef, LinkError

BLOB = b"".join(hashlib.sha256(bytes([number])).digest() * 64 for number in range(20))  # 40 KiB


def test_the_chunk_size_leaves_room_for_the_rest_of_a_packet():
    assert blobs.chunks.chunk_size_for(2_000_000) == 256 * KIB
    assert blobs.chunks.chunk_size_for(128 * KIB) == 127 * KIB
    assert blobs.chunks.chunk_size_for(2 * KIB) == KIB
    with pytest.raises(LinkError, match="accepts only 2047 bytes a message: raise its packet limit to 2048"):
        blobs.chunks.chunk_size_for(2 * KIB - 1)


def test_a_blob_is_cut_into_chunks_the_last_of_them_shorter():
    manifest = cut(bytes(20500), 2 * KIB)
    assert blobs.chunks.chunk_count(manifest) == 11
    assert blobs.chunks.chunk_extent(manifest, 0) == (0, 2048)
    assert blobs.chunks.chunk_extent(manifest, 10) == (20480, 20)
    assert manifest.digests[640:] == hashlib.sha256(bytes(20)).hexdigest()
    assert manifest.digests[:64] == hashlib.sha256(bytes(2048)).hexdigest()


def test_a_blob_whose_manifest_does_not_fit_a_message_is_refused_with_the_mend():
    with pytest.raises(LinkError, match="raise the broker's packet limit"):
        blobs.chunks.ManifestBuilder(
            BlobRef(sha256="0" * 64, size=13 * KIB), KIB, lambda offset, size: bytes(size)
        ).hash_chunks()
    with pytest.raises(
        LinkError, match=r"2000 MB is above the limit of 1073 MB in chunks of 262144 bytes: .* several smaller files"
    ):
        blobs.chunks.ManifestBuilder(
            BlobRef(sha256="0" * 64, size=2_000_000_000), 256 * KIB, lambda offset, size: bytes(size)
        ).hash_chunks()


@pytest.mark.parametrize("chunk", [KIB, 2 * KIB, 127 * KIB, 256 * KIB])
def test_the_largest_manifest_that_is_cut_fits_one_message(chunk):
    chunks = (chunk - 256) // 64
    manifest = wire.BlobManifest(sha256="f" * 64, size=chunks * chunk, chunk=chunk, digests="0" * 64 * chunks)
    assert len(wire.encode(manifest)) <= chunk


def test_bytes_that_are_not_the_blob_any_more_are_seen_while_cutting():
    with pytest.raises(DamagedBlobError, match="damaged on the disk"):
        blobs.chunks.ManifestBuilder(ref_of(BLOB), 2 * KIB, lambda offset, size: bytes(size)).hash_chunks()


def taken(serve: OutgoingChunkQueue, backlog_bytes: int = 0) -> list[tuple[str, int]]:
    found = []
    while (item := serve.take_next(backlog_bytes)) is not None:
        found.append((item.device, item.index))
    return found


def test_each_device_is_served_in_its_turn():
    serve = OutgoingChunkQueue()
    for index in range(3):
        serve.add(OutgoingChunk("a", "s", KIB, index))
    serve.add(OutgoingChunk("b", "s", KIB, 0))
    serve.add(OutgoingChunk("c", "s", KIB, 0))
    assert taken(serve) == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("a", 2)]
    assert len(serve) == 0


def test_asking_twice_before_it_was_sent_sends_it_once():
    serve = OutgoingChunkQueue()
    for _ in range(5):
        serve.add(OutgoingChunk("a", "s", KIB, 7))
    assert taken(serve) == [("a", 7)]
    serve.add(OutgoingChunk("a", "s", KIB, 7))
    assert taken(serve) == [("a", 7)]


def test_nothing_is_sent_beyond_the_budget(monkeypatch):
    monkeypatch.setattr(blobs.chunks, "BUDGET_BYTES", 4 * KIB)
    serve = OutgoingChunkQueue()
    for index in range(3):
        serve.add(OutgoingChunk("a", "s", KIB, index))
    assert serve.take_next(3 * KIB + 1) is None
    assert serve.take_next(3 * KIB) == OutgoingChunk("a", "s", KIB, 0)
    monkeypatch.setattr(blobs.chunks, "BUDGET_BYTES", 1)
    narrow = OutgoingChunkQueue()
    narrow.add(OutgoingChunk("a", "s", KIB, 0))
    assert narrow.take_next(1) is None
    assert narrow.take_next(0) == OutgoingChunk("a", "s", KIB, 0)


def test_a_device_that_asks_for_everything_at_once_is_heard_in_part():
    serve = OutgoingChunkQueue()
    for index in range(10_000):
        serve.add(OutgoingChunk("a", "s", KIB, index))
    assert len(serve) == 256
