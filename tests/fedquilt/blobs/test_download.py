import hashlib
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from two_sides import KIB, cut, ref_of

from fedquilt import wire
from fedquilt.blobs import chunks
from fedquilt.blobs.download import Download
from fedquilt.core import BlobRef

FUZZ = settings(max_examples=60, deadline=None, derandomize=True, database=None)
CHUNK = 2 * KIB
BLOB = b"".join(hashlib.sha256(bytes([number])).digest() * 64 for number in range(20))  # 20 chunks, no two alike
MANIFEST = cut(BLOB, CHUNK)


def chunk_of(index: int) -> bytes:
    offset, size = chunks.chunk_extent(MANIFEST, index)
    return BLOB[offset : offset + size]


def begun(now_s: float = 0.0) -> Download:
    pull = Download(ref_of(BLOB), CHUNK, now_s)
    pull.next_requests(now_s)
    assert pull.handle_manifest(MANIFEST, now_s)
    return pull


def indices(requests: list[wire.ChunkRequest]) -> list[int]:
    return [index for request in requests for index in request.indices]


def test_an_empty_blob_is_complete_with_its_manifest():
    manifest = cut(b"", KIB)
    pull = Download(ref_of(b""), KIB, 0.0)
    assert (chunks.chunk_count(manifest), manifest.digests) == (0, "")
    assert not pull.is_complete
    assert pull.handle_manifest(manifest, 0.0)
    assert pull.is_complete


def test_the_window_opens_by_one_for_each_chunk_up_to_eight():
    pull = begun()
    assert indices(pull.next_requests(0.0)) == [0, 1]
    most, got = 0, [0, 1]
    while got:
        assert pull.handle_chunk(got[0], chunk_of(got[0]), 0.01)
        requests = pull.next_requests(0.01)
        assert all(len(request.indices) <= 4 for request in requests)
        got = got[1:] + indices(requests)
        most = max(most, len(got))
    assert most == 8
    assert pull.is_complete


def test_no_more_is_asked_for_than_there_is_room():
    pull = begun()
    assert pull.next_requests(0.0, available_bytes=2047) == []
    assert indices(pull.next_requests(0.0, available_bytes=3000)) == [0]
    assert pull.outstanding_bytes == CHUNK


def test_a_chunk_that_came_twice_is_written_once():
    pull = begun()
    pull.next_requests(0.0)
    assert pull.handle_chunk(0, chunk_of(0), 0.1)
    assert not pull.handle_chunk(0, chunk_of(0), 0.1)


def test_a_damaged_chunk_is_counted_and_asked_for_again():
    pull = begun()
    assert indices(pull.next_requests(0.0)) == [0, 1]
    assert not pull.handle_chunk(0, chunk_of(1), 0.1)
    assert not pull.handle_chunk(1, chunk_of(1)[:-1], 0.1)
    assert pull.bad_messages == 2
    assert indices(pull.next_requests(0.1)) == [0, 1]
    assert pull.handle_chunk(0, chunk_of(0), 0.2)


def test_nothing_but_damage_ends_the_pull_with_its_reason():
    pull = begun()
    for _ in range(19):
        pull.handle_chunk(0, b"bad", 0.0)
    pull.handle_chunk(0, chunk_of(0), 0.0)
    for _ in range(19):
        pull.handle_chunk(1, b"bad", 0.0)
    assert pull.failure is None
    pull.handle_chunk(1, b"bad", 0.0)
    assert pull.failure == "the peer sent 20 chunks that are damaged in a row"
    assert pull.next_requests(0.0) == []


def test_silence_doubles_the_time_out_up_to_half_a_minute():
    pull = begun()
    pull.next_requests(0.0)
    now_s, waits = 0.0, []
    for _ in range(6):
        waits.append(pull.due_s - now_s)
        now_s = pull.due_s
        assert indices(pull.next_requests(now_s)) == [0]
    assert waits == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert pull.handle_chunk(0, chunk_of(0), now_s)
    assert pull.backoff == 0


def test_one_lost_chunk_among_others_is_asked_for_again_without_backing_off():
    pull = begun()
    assert indices(pull.next_requests(0.0)) == [0, 1]
    for tick in range(1, 25):
        now_s = tick / 10
        if tick < 20:
            pull.handle_chunk(tick, chunk_of(tick), now_s)
        asked_again = indices(pull.next_requests(now_s))
        if 0 in asked_again:
            break
    assert now_s == 0.3
    assert asked_again == [0]
    assert pull.backoff == 0


def test_a_lost_last_chunk_is_asked_for_again_after_half_a_second_on_a_fast_line():
    pull = begun()
    now_s = 0.0
    while not pull.stored_chunks[18]:
        for index in indices(pull.next_requests(now_s)):
            if index != 19:
                pull.handle_chunk(index, chunk_of(index), now_s + 0.01)
        now_s += 0.01
    assert pull.next_requests(now_s + 0.4) == []
    assert pull.due_s <= now_s + 0.5
    assert indices(pull.next_requests(pull.due_s)) == [19]
    pull.handle_reconnect(CHUNK, 5.0)
    assert indices(pull.next_requests(5.0)) == [19]
    assert pull.due_s == 5.5


def test_the_time_out_follows_the_line():
    """A first answer after 3 s: 4 * 3 = 12 s; the next after 1 s: srtt = 3 + (1 - 3) / 8 = 2.75, so 11 s."""
    pull = begun()
    pull.next_requests(0.0)
    pull.next_requests(2.0)
    assert pull.handle_chunk(0, chunk_of(0), 3.0)
    assert pull.timeout_s == 12.0
    assert indices(pull.next_requests(3.0)) == [1, 2]
    assert pull.handle_chunk(2, chunk_of(2), 4.0)
    assert pull.timeout_s == 11.0


def test_patience_ends_after_no_progress_and_not_before():
    pull = begun()
    now_s = 0.0
    while pull.failure is None:
        pull.next_requests(now_s)
        assert pull.failure is None or now_s >= 300.0
        now_s = pull.due_s
    assert pull.failure == "nothing arrived for 300 s"


def test_time_does_not_pass_for_a_parked_pull():
    pull = begun()
    pull.suspend(10.0)
    pull.resume(1000.0)
    assert indices(pull.next_requests(1000.0)) == [0, 1]
    assert pull.failure is None


def test_a_new_session_asks_again_at_once_for_what_was_on_its_way():
    pull = begun()
    pull.next_requests(0.0)
    pull.handle_chunk(0, chunk_of(0), 0.1)
    assert indices(pull.next_requests(0.1)) == [2, 3]
    pull.handle_reconnect(CHUNK, 60.0)
    assert indices(pull.next_requests(60.0)) == [1, 2]


def test_a_broker_with_smaller_packets_has_the_blob_cut_anew():
    payload = BLOB[: 6 * CHUNK]
    coarse, fine = cut(payload, 2 * CHUNK), cut(payload, CHUNK)
    pull = Download(ref_of(payload), 2 * CHUNK, 0.0)
    assert pull.handle_manifest(coarse, 0.0)
    assert pull.handle_manifest(fine, 0.0)
    assert not pull.handle_manifest(coarse, 0.0)
    assert len(pull.stored_chunks) == 6
    other = Download(ref_of(payload), 2 * CHUNK, 0.0)
    other.handle_manifest(coarse, 0.0)
    other.handle_reconnect(CHUNK, 1.0)
    assert other.next_requests(1.0) == [wire.ChunkRequest(sha256=ref_of(payload).sha256, chunk=CHUNK)]


def test_a_manifest_of_another_blob_or_cut_too_coarsely_is_not_taken():
    pull = Download(ref_of(BLOB), CHUNK, 0.0)
    good = {"sha256": MANIFEST.sha256, "size": MANIFEST.size, "chunk": CHUNK, "digests": MANIFEST.digests}
    for change in ({"sha256": "0" * 64}, {"size": 7}, {"chunk": 4 * KIB}, {"digests": ""}):
        assert not pull.handle_manifest(wire.BlobManifest(**(good | change)), 0.0)
    assert pull.bad_messages == 4
    assert pull.handle_manifest(MANIFEST, 0.0)


def test_missing_is_believed_when_it_is_said_again():
    pull = Download(ref_of(BLOB), CHUNK, 0.0)
    pull.next_requests(0.0)
    pull.handle_missing("not offered", 0.1)
    pull.handle_missing("not offered", 0.2)
    assert pull.failure is None
    assert pull.next_requests(0.2) == []
    assert pull.due_s == 1.1
    assert len(pull.next_requests(1.1)) == 1
    pull.handle_missing("not offered", 1.2)
    assert pull.failure == "the peer cannot send the blob: not offered"


@FUZZ
@given(
    st.lists(
        st.tuples(st.just("manifest"), st.integers(0, 30_000), st.integers(1024, 4096), st.integers(0, 30))
        | st.tuples(st.just("chunk"), st.integers(-1, 30), st.sampled_from(["good", "short", "noise"]))
        | st.tuples(st.just("missing"), st.text(max_size=3))
        | st.tuples(st.just("reconnected"), st.integers(1024, 4096))
        | st.tuples(st.just("requests"), st.floats(0, 5000)),
        max_size=40,
    )
)
def test_no_order_of_messages_makes_a_pull_raise_or_write_what_is_wrong(events):
    pull, now_s = Download(ref_of(BLOB), CHUNK, 0.0), 0.0
    for event in events:
        now_s += 0.7
        match event:
            case ("manifest", size, chunk, digests):
                odd = wire.BlobManifest(sha256=MANIFEST.sha256, size=size, chunk=chunk, digests="0" * 64 * digests)
                pull.handle_manifest(MANIFEST if digests > 20 else odd, now_s)
            case ("chunk", index, how):
                payload = {"good": chunk_of(min(max(index, 0), 19)), "short": b"", "noise": b"x" * CHUNK}[how]
                if pull.handle_chunk(index, payload, now_s):
                    assert payload == chunk_of(index)
            case ("missing", reason):
                pull.handle_missing(reason, now_s)
            case ("reconnected", chunk):
                pull.handle_reconnect(chunk, now_s)
            case ("requests", room_bytes):
                before = pull.outstanding_bytes
                pull.next_requests(now_s, room_bytes)
                assert pull.outstanding_bytes <= before + room_bytes
        assert not math.isnan(pull.due_s)


def test_a_peer_that_cuts_a_blob_anew_again_and_again_is_given_up():
    size = 1_000_000
    ref = BlobRef(sha256="a" * 64, size=size)
    pull = Download(ref, 200_000, 0.0)
    taken = 0
    for chunk in range(200_000, 100_000, -1000):
        pull.next_requests(0.0)
        digests = "0" * 64 * -(-size // chunk)
        taken += pull.handle_manifest(
            wire.BlobManifest(sha256=ref.sha256, size=size, chunk=chunk, digests=digests), 0.0
        )
    assert taken == 8
    assert pull.failure is not None
    assert "changed the chunk size more than 8 times" in pull.failure


def test_a_blob_of_one_chunk_is_asked_for_without_its_manifest():
    payload = BLOB[:CHUNK]
    pull = Download(ref_of(payload), CHUNK, 0.0)
    assert pull.next_requests(0.0) == [wire.ChunkRequest(sha256=ref_of(payload).sha256, chunk=CHUNK, indices=(0,))]
    assert not pull.handle_chunk(0, b"x" * CHUNK, 0.1)
    assert pull.handle_chunk(0, payload, 0.2)
    assert pull.is_complete


def test_a_blob_of_one_chunk_for_this_side_may_be_several_for_the_other():
    payload = BLOB[:CHUNK]
    pull = Download(ref_of(payload), CHUNK, 0.0)
    pull.next_requests(0.0)
    assert pull.handle_manifest(cut(payload, KIB), 0.1)
    assert indices(pull.next_requests(0.1)) == [0, 1]
    assert pull.handle_chunk(0, payload[:KIB], 0.2)
    assert pull.handle_chunk(1, payload[KIB:], 0.2)
    assert pull.is_complete
